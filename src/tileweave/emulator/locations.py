"""What strong operations have written to one word, in coherence order, and what a strong read may still return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tileweave.emulator.clocks import GENERIC

if TYPE_CHECKING:
    from tileweave.emulator.agents import CTA

_KEPT = 64  # writes that are remembered


class Written(NamedTuple):
    """A write: its value, what releases up to it have told, and who wrote it at which event (None: nobody now)."""

    value: Any
    told: dict
    writer: tuple[CTA, int, int] | None


class Location:
    """The writes to a word since the last plain one. They are numbered; `first` is the number of the oldest kept.

    A strong read may return any write but one that is older than another which happens before it, or which was read by
    a read that happens before it (causality and coherence): the newest one need not have arrived.
    """

    __slots__ = ("_reads", "first", "writes")

    def __init__(self, value: Any, told: dict):
        self.first, self.writes = 0, [Written(value, told, None)]
        self._reads: dict[tuple[CTA, int], list[tuple[int, int]]] = {}  # of a lane: at which event, which write

    @property
    def newest(self) -> int:
        """The number of the latest write."""
        return self.first + len(self.writes) - 1

    def write(self, value: Any, told: dict, writer: tuple[CTA, int, int]) -> None:
        """Enter a write: its writer is a lane of a CTA at one of its events."""
        self.writes.append(Written(value, told, writer))
        if len(self.writes) > _KEPT:
            del self.writes[0]
            self.first += 1

    def oldest_readable(self, who) -> int:
        """The number of the oldest write that agent `who` may read."""
        clock, mine = who.clock, who.cta
        least = self.first
        for number in range(self.newest, least, -1):
            writer = self.writes[number - self.first].writer
            if writer is not None:
                cta, lane, count = writer
                if clock.knows(GENERIC, mine, cta, lane) >= count:
                    least = number
                    break
        for (cta, lane), reads in self._reads.items():
            known = clock.knows(GENERIC, mine, cta, lane)
            for count, number in reversed(reads):
                if count <= known:
                    least = max(least, number)
                    break
        return least

    def read(self, number: int, who) -> Written:
        """Note that agent `who` reads a write, and return it."""
        reads = self._reads.setdefault((who.cta, who.lane), [])
        if not reads or reads[-1][1] < number:
            reads.append((who.count, number))
        return self.writes[number - self.first]
