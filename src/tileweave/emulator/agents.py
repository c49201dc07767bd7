"""Who acts: warp partitions, which are greenlets, and asynchronous operations, which are steps run at any moment.

A partition is not one thread. Its first thread performs scalar atomics and arrivals, its elected thread issues TMA
transfers and waits for them, and the *crowd*, the others, takes part in what the whole partition does to global
memory. `Partition.sync` is the barrier that joins them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from greenlet import getcurrent, greenlet

from tileweave.emulator.clocks import GENERIC, ROWS, Clock, Past, merged
from tileweave.emulator.places import Place
from tileweave.emulator.touches import Touch

if TYPE_CHECKING:
    from tileweave.emulator.world import World

HOST_LAUNCH = 1 << 60  # "launch" of a host's pseudo-CTA, which never ends


class CTA:
    """One thread block of one launch of one rank, or (id None) the host thread of a rank.

    It begins with `past`; `stream` is what its stream has done before, which it knows at once or behind a
    `grid_dependency_wait`.
    """

    __slots__ = (
        "ended", "final", "grid", "id", "index", "lanes", "launch", "num_warps", "ops", "rank", "shared", "stream",
        "waiters", "world",
    )  # fmt: skip

    def __init__(
        self, world: World, rank: int, id: int | None, launch: int, past: Past, stream: Past, index=(), grid=(),
        num_warps=0,
    ):  # fmt: skip
        self.world, self.rank, self.id, self.launch = world, rank, id, launch
        self.index, self.grid, self.num_warps = index, grid, num_warps
        self.lanes: list[int] = []  # per lane, the last event handed out (asynchronous lanes)
        self.shared: list = []  # memories of the CTA alone, also those in tensor memory
        self.ops, self.ended = 0, False
        self.final, self.stream = Clock.starting(past), stream
        self.waiters: list = []

    def new_lane(self) -> int:
        """The number of a new lane."""
        self.lanes.append(0)
        return len(self.lanes) - 1

    @property
    def title(self) -> str:
        """Rank and CTA, in words."""
        return f"rank {self.rank} host" if self.id is None else f"rank {self.rank} CTA {self.id}"


class Crowd:
    """The threads of a partition other than its first. They share its clock but for acquires not yet told to them."""

    __slots__ = ("apart", "count", "cta", "fenced", "lane", "part")
    is_async = False

    def __init__(self, part: Partition):
        self.part, self.cta, self.lane = part, part.cta, part.cta.new_lane()
        self.count = 1
        self.fenced = [0] * ROWS  # events that their own fences cover, known to the others after a barrier
        self.apart: Clock | None = None

    @property
    def clock(self) -> Clock:
        """What these threads know."""
        return self.apart or self.part.clock


class Partition(greenlet):
    """One warp partition of one CTA. Its clock is that of its first thread."""

    is_async = False

    def __init__(self, cta: CTA, name: str, clock: Clock, fn, args=(), warps: int | None = None):
        world = cta.world
        super().__init__(self._main, world.hub)
        self.cta, self.world, self.rank, self.name, self.fn, self.args = cta, world, cta.rank, name, fn, args
        self.count = 0  # the event that the first thread is at
        self.clock, self.lane, self.crowd = clock, cta.new_lane(), Crowd(self)
        clock.reserve(self.crowd.lane + 1)
        self.lanes: list[int] = []  # lanes of the asynchronous operations that it issues
        self.stores: list = []  # bulk stores that no full wait has covered
        self.mmas: list = []  # wgmma in flight
        self.product: Any = None  # the latest tcgen05.mma or copy to tensor memory,
        self.copied: Any = None  # the latest of such copies,
        self.products: dict[Any, Any] = {}  # that of each accumulator,
        self.issued: dict[int, int] = {}  # and of each of their lanes the last event
        self.elected: list[tuple[int, int]] = []  # completions that only the elected thread knows of
        self.barriers = 0  # among its threads, so far
        self.dirty: dict[Any, str] = {}  # shared memory touched since the last barrier
        self.waiting: tuple | None = None
        self.waiters: list = []
        self.done, self.polled, self.patience = False, None, 3
        self.warps = warps or cta.num_warps
        self.serial = world.register(self)
        self.slow = world.is_slow(("rank", cta.rank), ("cta", cta.rank, cta.id), ("part", name))
        self.tick()
        world.enqueue(self)

    def tick(self) -> None:
        """What the first thread does from here on is a new event."""
        self.count += 1
        self.clock.local[GENERIC, self.lane] = self.count

    def sync(self) -> None:
        """A barrier among the threads of the partition."""
        crowd, clock = self.crowd, self.clock
        self.barriers += 1
        if crowd.apart is not None:
            crowd.apart = None
        local = clock.local
        lane = crowd.lane
        local[GENERIC, lane] = crowd.count
        for row in range(1, ROWS):
            if crowd.fenced[row] > local[row, lane]:
                local[row, lane] = crowd.fenced[row]
        crowd.count += 1
        while self.elected:
            clock.see(*self.elected.pop())
        self.count += 1
        clock.local[GENERIC, self.lane] = self.count
        if self.dirty:
            self.dirty.clear()

    def fence(self, *rows: int) -> None:
        """A proxy fence by every thread: what each did so far is ordered for these views."""
        crowd = self.crowd
        for row in rows:
            self.clock.fence(row)
            if crowd.apart is not None:
                crowd.apart.fence(row)
            crowd.fenced[row] = crowd.count
        crowd.count += 1
        self.tick()

    def touch(self, memory, kind: str) -> None:
        """The compiler puts a barrier before an access to shared memory that depends on an earlier one."""
        before = self.dirty.get(memory)
        if before is not None and (kind == "write" or before == "write"):
            self.sync()
            before = None
        if before != "write":
            self.dirty[memory] = kind

    def join(self, clock: Clock) -> None:
        """All threads learn what a clock of this CTA knows."""
        self.clock.join(clock)
        if self.crowd.apart is not None:
            self.crowd.apart.join(clock)

    def see(self, lane: int, count: int) -> None:
        """All threads see an asynchronous completion."""
        self.clock.see(lane, count)
        if self.crowd.apart is not None:
            self.crowd.apart.see(lane, count)

    def told(self) -> Past:
        """What somebody who comes after all that it has done so far knows."""
        past = self.clock.published(self.cta, self.serial, self.count)
        self.tick()
        return past

    def learn(self, past: Past) -> None:
        """All threads learn, for every view, of what came before on their stream: a kernel boundary in a kernel."""
        for clock in (self.clock, self.crowd.apart):
            if clock is not None:
                clock.past = tuple(merged(known, past) for known in clock.past)

    def part_ways(self) -> None:
        """The first thread is about to learn something that the crowd does not."""
        if self.crowd.apart is None:
            self.crowd.apart = self.clock.copy()

    def _main(self):
        self.fn(*self.args)
        self.sync()
        self.done = True
        self.world.wake(self.waiters)

    def pause(self) -> None:
        """Let anybody else run first."""
        world = self.world
        if world.idle:
            return
        world.enqueue(self)
        world.hub.switch()

    def block(self, waiters: list, describe, *args) -> None:
        """Sleep until `waiters` is woken; `describe(*args)` says in a report what is waited for."""
        self.waiting = Place(self, "waits"), describe, args
        waiters.append(self)
        self.world.hub.switch()
        self.waiting = None

    def async_lane(self) -> int:
        """A lane whose last event this partition has seen (so that a lane stays totally ordered), else a new one."""
        local, handed_out = self.clock.local, self.cta.lanes
        for lane in self.lanes:
            if local[GENERIC, lane] >= handed_out[lane]:
                return lane
        lane = self.cta.new_lane()
        self.lanes.append(lane)
        self.clock.reserve(lane + 1)
        return lane


class AsyncOp:
    """An asynchronous operation of `part`: `steps` steps, each run by `run(n)` whenever the scheduler likes."""

    is_async = True
    steps = 1
    kind = ""

    __slots__ = (
        "base", "clock", "count", "cta", "done", "lane", "n", "next", "observed", "part", "place", "serial", "slow",
        "waiters", "world",
    )  # fmt: skip

    def __init__(self, part: Partition, after: AsyncOp | None = None):
        cta, world = part.cta, part.world
        self.part, self.cta, self.world, self.n, self.done = part, cta, world, 0, False
        self.place = Place(part, self.kind)
        self.lane = lane = part.async_lane()
        self.clock = part.clock.copy()
        self.base = cta.lanes[lane]
        self.count = self.base + 1
        cta.lanes[lane] += self.steps
        part.tick()
        self.waiters: list = []
        self.next: list = []
        self.observed = 0
        self.serial = world.next_serial()
        self.slow = world.is_slow(("rank", cta.rank), ("op", self.kind), ("op", self.kind, cta.rank)) or world.starve()
        cta.ops += 1
        if after is not None and not after.done:
            after.next.append(self)
        else:
            world.enqueue(self)

    def run(self, n: int) -> None:
        """Do step n."""
        raise NotImplementedError

    def step(self) -> None:
        """Do the next step and let those who waited for it go on."""
        world, cta = self.world, self.cta
        if world.footprint is not None:
            self._touch("write")
        self.run(self.n)
        self.n += 1
        self.count += 1
        if self.waiters:
            world.wake(self.waiters)
        if self.n < self.steps:
            world.enqueue(self)
            return
        self.done = True
        for op in self.next:
            world.enqueue(op)
        cta.ops -= 1
        cta.final.see(self.lane, self.base + self.n)
        if not cta.ops:
            world.wake(cta.waiters)

    def wait(self, step: int, all_threads: bool = True) -> None:
        """Let the current partition, or only its elected thread, wait for a step, and see it."""
        part = getcurrent()
        while self.n < step:
            part.block(self.waiters, self._describe, step)
        if self.world.footprint is not None:
            self._touch("read", lambda done: done >= step)
        count = self.base + step
        if all_threads:
            part.see(self.lane, count)
        else:
            part.elected.append((self.lane, count))
        self.observed = max(self.observed, step)

    def _touch(self, kind: str, passes=None) -> None:
        where = self.kind, self.place.event, self.part.name, self.cta.rank, self.cta.launch, self.cta.id
        footprint = self.world.footprint
        assert footprint is not None
        footprint.append(Touch(self, where, kind, state=self.n, passes=passes))

    def _describe(self, step: int) -> str:
        return f"step {step} of {self.steps} of the {self.place}"
