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


class Row:
    """Counts of a CTA's lanes as agent `source` knew them at its event `stamp` (source 0: a mixture of agents)."""

    __slots__ = ("counts", "source", "stamp")

    def __init__(self, counts: np.ndarray, source: int = 0, stamp: int = 0):
        self.counts, self.source, self.stamp = counts, source, stamp

    def max(self, other: Row) -> Row:
        """The least row that knows what either knows: one of the two where it knows all. An agent never forgets."""
        if self.source == other.source != 0:
            return self if self.stamp >= other.stamp else other
        a, b = self.counts, other.counts
        if len(a) < len(b):
            return other.max(self)
        more = b > a[: len(b)]
        if not more.any():
            return self
        if len(a) == len(b) and (b >= a).all():
            return other
        out = a.copy()
        np.maximum(out[: len(b)], b, out=out[: len(b)])
        return Row(out)


class Past:
    """What is known of other CTAs: ended launches per rank, and the lanes of CTAs that may still run.

    `ended[r]` launches of rank r happen before now with all they did; `live` maps a CTA to the counts of its lanes.
    """

    __slots__ = ("ended", "live")

    def __init__(self, ended: tuple[int, ...], live: dict[CTA, Row]):
        self.ended, self.live = ended, live

    def count(self, cta: CTA, lane: int) -> int | float:
        """How many events of that lane are known to happen before now."""
        if self.ended[cta.rank] >= cta.launch:
            return float("inf")
        row = self.live.get(cta)
        return int(row.counts[lane]) if row is not None and lane < len(row.counts) else 0


def merged(a: Past, b: Past) -> Past:
    """The least Past that knows what either knows. One of the two itself where possible: then later merges are free."""
    if a is b:
        return a
    a_ended, b_ended = a.ended, b.ended
    ended, a_more, b_more = a_ended, False, False
    if a_ended != b_ended:
        ended = tuple(map(max, a_ended, b_ended))
        a_more, b_more = ended != b_ended, ended != a_ended
    new: dict[CTA, Row] = {}
    a_live, met = a.live, 0
    for cta, row in b.live.items():
        mine = a_live.get(cta)
        if mine is row:
            met += 1
        elif mine is not None:
            met += 1
            best = mine.max(row)
            a_more = a_more or best is not row
            if best is not mine:
                b_more = True
                new[cta] = best
        elif cta.launch > a_ended[cta.rank]:
            b_more = True
            new[cta] = row
    if not b_more:
        return a
    if not a_more and met == len(a_live):
        return b
    live = a_live.copy() if ended == a_ended else {c: row for c, row in a_live.items() if c.launch > ended[c.rank]}
    for cta, row in new.items():
        if cta.launch > ended[cta.rank]:
            live[cta] = row
    return Past(ended, live)


class Clock:
    """The four views of one agent, barrier or operation. `past` is a tuple of one Past per view."""

    __slots__ = ("local", "past")

    def __init__(self, local: np.ndarray, past: tuple[Past, ...]):
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

    def _join_past(self, theirs) -> None:
        mine = self.past
        first = merged(mine[0], theirs[0])
        self.past = (
            first,
            *(
                first if a is mine[0] and b is theirs[0] else merged(a, b)
                for a, b in zip(mine[1:], theirs[1:], strict=True)
            ),
        )

    def see(self, lane: int, count: int) -> None:
        """Learn of an asynchronous completion, which carries an implicit proxy fence for its own accesses, but none
        between aliases."""
        self.reserve(lane + 1)
        local = self.local
        for row in range(ALIAS):
            if local[row, lane] < count:
                local[row, lane] = count

    def follow(self, lane: int, count: int) -> None:
        """Learn of an access to shared memory that an asynchronous one, whose completion is learnt of, came after."""
        self.reserve(lane + 1)
        known = self.local[: SHARED + 1, lane]
        np.maximum(known, count, out=known)

    def tick(self, lane: int) -> None:
        """Begin the next event of a lane."""
        self.local[GENERIC, lane] += 1

    def fence(self, row: int) -> None:
        """Let a view know what the generic one does."""
        self.local[row] = self.local[GENERIC]
        past = list(self.past)
        past[row] = past[GENERIC]
        self.past = tuple(past)

    def published(self, cta: CTA, source: int, stamp: int, row: int = GENERIC) -> Past:
        """What a release of this clock, which is of `cta`, tells other CTAs in a view.

        `source` is the serial number of the agent and `stamp` grows with each of its releases.
        """
        past = self.past[row]
        return Past(past.ended, {**past.live, cta: Row(self.local[row].copy(), source, stamp)})

    def acquire(self, mine: CTA, generic: Past, alias: Past) -> None:
        """Learn, in CTA `mine`, what another one published: its alias fences count, its proxy fences do not."""
        past = self.past
        new = merged(past[GENERIC], self._own(mine, generic, GENERIC))
        if alias is generic and past[ALIAS] is past[GENERIC]:
            self.past = (new, past[SHARED], past[GLOBAL], new)
        else:
            self.past = (new, past[SHARED], past[GLOBAL], merged(past[ALIAS], self._own(mine, alias, ALIAS)))

    def _own(self, mine: CTA, told: Past, row: int) -> Past:
        """Take in what others tell about this CTA itself, and leave it out of the rest."""
        known = told.live.get(mine)
        if known is None:
            return told
        counts = known.counts
        self.reserve(len(counts))
        part = self.local[row, : len(counts)]
        np.maximum(part, counts, out=part)
        return Past(told.ended, {cta: row for cta, row in told.live.items() if cta is not mine})

    def knows(self, row: int, mine: CTA, cta: CTA, lane: int) -> int | float:
        """How many events of a lane of `cta` this clock, which is of CTA `mine`, has seen in a view."""
        if cta is mine:
            local = self.local
            return local[row, lane] if lane < local.shape[1] else 0
        return self.past[row].count(cta, lane)
