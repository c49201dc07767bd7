"""A discrete-event simulation of a fused matmul: tiles in waves on the SMs, messages on the links, flags between ranks.

It refines the cost model where that only compares totals: in what order tiles come, when the link is idle, and what it
costs if all ranks send to the same one. A link carries one message at a time out of a rank and one into it. Waves are
grouped to MOST_SLICES at most, each with the messages of its tiles.
"""

import heapq
from collections import deque
from dataclasses import dataclass

MOST_SLICES = 96
SENT = -1  # instead of a slice: a message has left


@dataclass(frozen=True)
class Event:
    """What rank 0 does from `start_us` to `end_us`. lane: "SMs", "link" or "waits"."""

    lane: str
    start_us: float
    end_us: float
    what: str


@dataclass(frozen=True)
class Schedule:
    """What every rank does alike. Its tiles come in `slices` slices of `slice_us` each, those of each owner or source
    together; a slice that is another's has a message that takes `message_us` of the link.

    kind: "scatter", tiles are made, then sent to their owners, own ones last, behind all that arrives for them;
    "gather", rows are sent at once, and tiles start when their source's are there; "reduce", as scatter, and sums go
    back to all.
    rotated: whether ranks begin with different peers; otherwise all begin with rank 0.
    """

    kind: str
    ranks: int
    slices: int
    slice_us: float
    message_us: float
    launch_us: float
    sync_us: float
    rotated: bool = True


class _Run:
    """The state of a simulation: a heap of what comes next, when links are free, what has arrived where."""

    def __init__(self, schedule: Schedule):
        self.of = schedule
        self.per = schedule.slices // schedule.ranks  # slices of an owner
        self.queues: list[deque[int]] = [deque() for _ in range(schedule.ranks)]  # of peers to send to
        self.sending = [False] * schedule.ranks
        self.into = [0.0] * schedule.ranks  # when the way into a rank is free
        self.arrived: list[dict[int, list[float]]] = [{} for _ in range(schedule.ranks)]  # by source, at their ends
        self.parked: dict[int, tuple[float, int]] = {}  # by rank: since when, and which slice waits
        self.heap: list[tuple[float, int, int]] = []  # time, rank, slice that is done then, or SENT
        self.events: list[Event] = []
        self.end = 0.0

    def order(self, rank: int, index: int) -> int:
        """Whose the slice is that `rank` computes as its `index`-th."""
        ranks, turn = self.of.ranks, index // self.per
        if self.of.kind == "gather":  # own rows first, then those of who sends to this rank first
            return (rank - turn) % ranks if self.of.rotated else ([rank] + [p for p in range(ranks) if p != rank])[turn]
        return (rank + 1 + turn) % ranks if self.of.rotated else ([p for p in range(ranks) if p != rank] + [rank])[turn]

    def send(self, rank: int, peer: int, now: float) -> None:
        """A message of one slice, behind those that the rank has to send before."""
        self.queues[rank].append(peer)
        if not self.sending[rank]:
            self.sending[rank] = True
            heapq.heappush(self.heap, (now, rank, SENT))

    def sent(self, rank: int, now: float) -> None:
        """The way out of a rank is free: the next message, once the way into its peer is free too."""
        self.sending[rank] = bool(self.queues[rank])
        if not self.queues[rank]:
            return
        peer = self.queues[rank].popleft()
        start = max(now, self.into[peer])
        self.into[peer] = end = start + self.of.message_us
        heapq.heappush(self.heap, (end, rank, SENT))
        self.arrived[peer].setdefault(rank, []).append(end)
        self.end = max(self.end, end)
        if rank == 0:
            self.events.append(Event("link", start, end, f"to {peer}"))
        if peer in self.parked and self.ready(peer, self.parked[peer][1]) is not None:
            self.begin(peer, self.parked[peer][1], self.parked.pop(peer)[0])

    def ready(self, rank: int, index: int) -> float | None:
        """When a slice may start for what has arrived; None if that is not known yet."""
        owner, got = self.order(rank, index), self.arrived[rank]
        if self.of.kind == "gather":
            if owner == rank:
                return 0.0
            ends = got.get(owner, [])
            return ends[index % self.per] + self.of.sync_us if len(ends) > index % self.per else None
        if owner != rank:
            return 0.0
        expected = self.per * (self.of.ranks - 1)
        ends = [end for source, each in got.items() for end in each[: self.per] if source != rank]
        return (max(ends, default=0.0) + self.of.sync_us if len(ends) >= expected else None) if expected else 0.0

    def begin(self, rank: int, index: int, now: float) -> None:
        """Start a slice, or park the rank until what it waits for is known."""
        ready = self.ready(rank, index)
        if ready is None:
            self.parked[rank] = now, index
            return
        start = max(now, ready)
        if rank == 0 and start > now:
            self.events.append(Event("waits", now, start, f"for rank {self.order(rank, index)}"))
        done = start + self.of.slice_us
        if rank == 0:
            self.events.append(Event("SMs", start, done, f"tiles of {self.order(rank, index)}"))
        heapq.heappush(self.heap, (done, rank, index))

    def finish(self, rank: int, index: int, now: float) -> None:
        """A slice is done: send what is another's, or the sum; go on with the next one."""
        self.end = max(self.end, now)
        owner = self.order(rank, index)
        if self.of.kind != "gather" and owner != rank:
            self.send(rank, owner, now)
        elif self.of.kind == "reduce":
            for turn in range(1, self.of.ranks):
                self.send(rank, (rank + turn) % self.of.ranks, now)
        if index + 1 < self.of.slices:
            self.begin(rank, index + 1, now)


def simulate(schedule: Schedule) -> tuple[float, tuple[Event, ...]]:
    """Microseconds until all ranks are done, and what rank 0 does meanwhile."""
    run = _Run(schedule)
    if schedule.kind == "gather":
        for turn in range(1, schedule.ranks):
            for _ in range(run.per):
                for rank in range(schedule.ranks):
                    others = [peer for peer in range(schedule.ranks) if peer != rank]
                    peer = (rank + turn) % schedule.ranks if schedule.rotated else others[turn - 1]
                    run.send(rank, peer, schedule.launch_us)
    for rank in range(schedule.ranks):
        run.begin(rank, 0, schedule.launch_us)
    while run.heap:
        now, rank, index = heapq.heappop(run.heap)
        if index == SENT:
            run.sent(rank, now)
        else:
            run.finish(rank, index, now)
    return run.end, tuple(sorted(run.events, key=lambda each: (each.start_us, each.lane)))


def slices_of(waves: int, ranks: int) -> int:
    """Slices for so many waves: as many for each owner, MOST_SLICES about, two waves' worth of owners at least."""
    per = max(1, min(waves, MOST_SLICES) // ranks)
    return per * ranks
