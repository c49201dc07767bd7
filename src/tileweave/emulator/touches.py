"""What a step touches, where a search asks: which steps may change places without a difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Touch(NamedTuple):
    """What a step does to one thing that others may touch.

    `thing` is that thing, `where` its name in every schedule (of two global memories of one size the same), `kind` as
    in `Memory.access`, or "arrive" for arrivals at an mbarrier. `state`: what a wait on it saw before this step;
    `passes`: whether a wait passes in a state.
    """

    thing: Any
    where: tuple
    kind: str
    region: Any = None
    state: Any = None
    passes: Callable[[Any], bool] | None = None


_COMMUTING = ({"read", "volatile read"}, {"add"})  # kinds that may come in any order among themselves


def meets(a: Touch, b: Touch) -> bool:
    """Whether two touches of the same thing do not commute."""
    if any(a.kind in kinds and b.kind in kinds for kinds in _COMMUTING):
        return False
    if a.kind == b.kind == "arrive":  # within a phase it does not matter who comes first
        return a.state != b.state
    return a.region is None or b.region is None or a.region.overlaps(b.region)
