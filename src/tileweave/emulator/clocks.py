"""What happens before what: vector clocks, dense inside a CTA and sparse outside of it.

Every agent (the first thread of a warp partition, its other threads, an asynchronous operation) counts its events on
a *lane* of its CTA. A clock says, for every lane, how many of its events happen before now, in four views:

    GENERIC   ordinary accesses
    SHARED    what a proxy fence of this CTA has ordered for its async proxy (TMA, wgmma), shared memory
    GLOBAL    the same for global memory
    ALIAS     what an alias fence has ordered between multicast and unicast addresses

Lanes of the clock's own CTA are a small array; the rest of the world is a `Past`, which is immutable and hence shared
by all who know the same. A CTA that is known to have ended is not listed lane by lane: its rank's count of ended
launches says it all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tileweave.emulator.agents import CTA

GENERIC, SHARED, GLOBAL, ALIAS = range(4)
ROWS = 4


class Past:
    """What is known of other CTAs: ended launches per rank, and the lanes of CTAs that may still run.

    `ended[r]` launches of rank r happen before now with all they did; `live` maps a CTA to the counts of its lanes.
    """

    __slots__ = ("ended", "live")

    def __init__(self, ended: tuple[int, ...], live: dict[CTA, np.ndarray]):
        self.ended, self.live = ended, live

    def count(self, cta: CTA, lane: int) -> int | float:
        """How many events of that lane are known to happen before now."""
        if self.ended[cta.rank] >= cta.launch:
            return float("inf")
        row = self.live.get(cta)
        return int(row[lane]) if row is not None and lane < len(row) else 0


def merged(a: Past, b: Past) -> Past:
    """The least Past that knows what either knows."""
    if a is b:
        return a
    ended = a.ended if a.ended == b.ended else tuple(map(max, a.ended, b.ended))
    live = {cta: row for cta, row in a.live.items() if cta.launch > ended[cta.rank]}
    for cta, row in b.live.items():
        mine = live.get(cta)
        if mine is None:
            if cta.launch > ended[cta.rank]:
                live[cta] = row
        elif mine is not row:
            live[cta] = _row_max(mine, row)
    return Past(ended, live)


def _row_max(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if len(a) < len(b):
        a, b = b, a
    out = a.copy()
    np.maximum(out[: len(b)], b, out=out[: len(b)])
    return out


class Clock:
    """The four views of one agent, barrier or operation. `past` is a tuple of one Past per view."""

    __slots__ = ("local", "past")

    def __init__(self, local: np.ndarray, past: tuple[Past, Past, Past, Past]):
        self.local, self.past = local, past

    @classmethod
    def starting(cls, past: Past) -> Clock:
        """The clock of a CTA that begins: a kernel boundary is a fence of every kind."""
        return cls(np.zeros((ROWS, 32), np.int32), (past,) * ROWS)

    def copy(self) -> Clock:
        """A clock of its own with the same knowledge."""
        return Clock(self.local.copy(), self.past)

    def reserve(self, lanes: int) -> None:
        """Make room for so many lanes of the CTA."""
        size = self.local.shape[1]
        if size < lanes:
            self.local = np.pad(self.local, ((0, 0), (0, max(lanes, 2 * size) - size)))

    def join(self, other: Clock) -> None:
        """Learn what another clock of the same CTA knows."""
        mine, theirs = self.local, other.local
        if mine.shape == theirs.shape:
            np.maximum(mine, theirs, out=mine)
        else:
            self.reserve(theirs.shape[1])
            part = self.local[:, : theirs.shape[1]]
            np.maximum(part, theirs, out=part)
        if self.past is not other.past:
            self._join_past(other.past)

    def _join_past(self, past) -> None:
        old = self.past
        if old[0] is old[1] is old[2] is old[3] and past[0] is past[1] is past[2] is past[3]:
            self.past = (merged(old[0], past[0]),) * ROWS
        else:
            self.past = tuple(map(merged, old, past))

    def see(self, lane: int, count: int) -> None:
        """Learn of an asynchronous completion, which carries an implicit proxy fence for its own accesses."""
        self.reserve(lane + 1)
        column = self.local[:, lane]
        np.maximum(column, count, out=column)

    def tick(self, lane: int) -> None:
        """Begin the next event of a lane."""
        self.local[GENERIC, lane] += 1

    def fence(self, row: int) -> None:
        """Let a view know what the generic one does."""
        self.local[row] = self.local[GENERIC]
        past = list(self.past)
        past[row] = past[GENERIC]
        self.past = tuple(past)

    def published(self, cta: CTA, row: int = GENERIC) -> Past:
        """What a release of this clock, which is of `cta`, tells other CTAs in a view."""
        past = self.past[row]
        return Past(past.ended, {**past.live, cta: self.local[row].copy()})

    def acquire(self, mine: CTA, generic: Past, alias: Past) -> None:
        """Learn, as an agent of CTA `mine`, what another CTA published: its alias fences count, its proxy fences not."""
        past = self.past
        self.past = (
            merged(past[GENERIC], self._own(mine, generic, GENERIC)),
            past[SHARED],
            past[GLOBAL],
            merged(past[ALIAS], self._own(mine, alias, ALIAS)),
        )

    def _own(self, mine: CTA, told: Past, row: int) -> Past:
        """Take in what others tell about this CTA itself, and leave it out of the rest."""
        known = told.live.get(mine)
        if known is None:
            return told
        self.reserve(len(known))
        part = self.local[row, : len(known)]
        np.maximum(part, known, out=part)
        return Past(told.ended, {cta: counts for cta, counts in told.live.items() if cta is not mine})

    def knows(self, row: int, mine: CTA, cta: CTA, lane: int) -> int | float:
        """How many events of a lane of `cta` this clock, which is of CTA `mine`, has seen in a view."""
        if cta is mine:
            local = self.local
            return local[row, lane] if lane < local.shape[1] else 0
        return self.past[row].count(cta, lane)
