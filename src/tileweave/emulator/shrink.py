"""A failing schedule cut down to the turns that it takes: delta debugging over what a strategy chose."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tileweave.emulator.search import Replay, Turns


@dataclass
class Shrunk:
    """The shortest schedule found: `turns` and `draws` for a Replay, which then goes on in the plain way. `tried`: how
    many schedules were run for it; `was`: how many turns the first one had."""

    turns: Turns
    draws: list[int]
    tried: int
    was: int


class _Spent(Exception):
    """No more tries."""


def shrink(
    fails: Callable[[Replay], bool], turns: Turns, draws: Sequence[int] = (), *, tries: int = 60, seconds: float = 20.0
) -> Shrunk:
    """Leave out turns as long as `fails(strategy)` still holds: whether a run in that order ends as the first one did.

    The end is left out first, then parts of the rest, smaller and smaller (Zeller's ddmin). Stops after so many tries
    or seconds with what it has.
    """
    best = Shrunk(list(turns), list(draws), 0, len(turns))
    end = time.monotonic() + seconds

    def holds(turns: Turns, draws: list[int]) -> bool:
        if best.tried >= tries or time.monotonic() > end:
            raise _Spent
        best.tried += 1
        if not fails(Replay(turns, draws)):
            return False
        best.turns, best.draws = turns, draws
        return True

    try:
        if holds([], []):
            return best
        if best.draws:
            holds(best.turns, [])
        _shorten(best, holds)
        _thin(best, holds)
    except _Spent:
        pass
    best.turns = _joined(best.turns)
    return best


def _shorten(best: Shrunk, holds: Callable[[Turns, list[int]], bool]) -> None:
    """The fewest first turns after which the plain schedule fails, by bisection."""
    low, high = 0, len(best.turns)
    turns = best.turns
    while high - low > 1:
        middle = (low + high) // 2
        if holds(turns[:middle], best.draws):
            high = middle
        else:
            low = middle


def _thin(best: Shrunk, holds: Callable[[Turns, list[int]], bool]) -> None:
    size = max(len(best.turns) // 2, 1)
    while best.turns:
        start, shorter = 0, False
        while start < len(best.turns):
            if holds(best.turns[:start] + best.turns[start + size :], best.draws):
                shorter = True
            else:
                start += size
        if size == 1 and not shorter:
            return
        size = max(size // 2, 1)


def _joined(turns: Turns) -> Turns:
    joined: Turns = []
    for name, count in turns:
        if joined and joined[-1][0] == name:
            joined[-1] = name, joined[-1][1] + count
        else:
            joined.append((name, count))
    return joined
