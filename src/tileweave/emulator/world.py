"""The world: ranks with their host threads, streams and memories, and the scheduler of one seeded run."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, reduce
from typing import Any

import numpy as np
import torch
from greenlet import getcurrent

from tileweave import lang
from tileweave.emulator.agents import CTA, HOST_LAUNCH, Partition
from tileweave.emulator.async_words import release_shared_memory
from tileweave.emulator.clocks import Clock, Past, merged
from tileweave.emulator.copies import finish, start
from tileweave.emulator.coverage import Coverage
from tileweave.emulator.errors import DeadlockError, EmulatorError, RaceError
from tileweave.emulator.explain import Race, deadlock, told_of
from tileweave.emulator.garbage import seldom_collected
from tileweave.emulator.graphs import Graph, capturing
from tileweave.emulator.hosts import Host
from tileweave.emulator.memory import Memory
from tileweave.emulator.rebuild import rebuilt, translate
from tileweave.emulator.search import RandomOrder, Strategy, chosen
from tileweave.emulator.views import Descriptor, Multicast, Pointer, region_of
from tileweave.lang.launches import launched_ahead

_COMPILE_OPTIONS = ("num_ctas", "num_stages", "maxnreg")  # launch options without a meaning here
_MEMORIES_KEPT = 256  # storages that keep their regions over a meeting, for the next launch
_LOOK = 256  # steps between two looks at how many there were


class World:
    """`ranks` emulated GPUs, each with a host thread, one stream and `sms` SMs (None: no limit).

        world = World(4, seed=0)
        results = world.run(fn)                      # fn(rank), on a thread of its own per rank
        # inside fn:
        world.launch(kernel, (grid,), *args, num_warps=8)
        value = world.rendezvous(action)

    One thread runs at a time, so that a seed replays exactly. Memory lives as long as the world, and what an earlier
    `run` did happens before a later one. With `halt=False` races are collected in `races` instead of raised.
    `reduce_scope` is the scope at which TMA reduce-adds are taken to be atomic; `delayed` ranks run only when nobody
    else can. `strategy` (search.py): who runs next, by default at random from `seed`; it serves this world only.
    `held`: tags of other agents that run when nobody else can: ("cta", rank, None) for a rank's host, ("op", kind,
    rank) for its operations of a kind, ("op", kind) for everybody's. `host_timeout`: seconds (None: no bound) for which
    fn may run without calling the world; a rank that waits for another one by other means would never end.
    `parallel(address)`: whether a storage has a slice for each rank, one behind the other; only the times of a
    TimeOrder (timeline.py) depend on it. Raises what fn raised, RaceError, DeadlockError, ProtocolError.
    """

    def __init__(
        self,
        ranks: int,
        seed: int = 0,
        sms: int | None = None,
        *,
        halt: bool = True,
        reduce_scope: str = "sys",
        delayed: Sequence[int] = (),
        host_timeout: float | None = 60.0,
        max_steps: int = 100_000_000,
        strategy: Strategy | None = None,
        held: Sequence[tuple] = (),
        parallel: Callable[[int], bool] | None = None,
    ):
        if ranks < 1:
            raise ValueError(f"ranks must be at least 1, got {ranks}")
        if sms is not None and sms < 1:
            raise ValueError(f"sms must be at least 1 (or None for no limit), got {sms}")
        if reduce_scope not in ("gpu", "sys"):
            raise ValueError(f"reduce_scope must be 'gpu' or 'sys', got {reduce_scope!r}")
        if host_timeout is not None and host_timeout <= 0:
            raise ValueError(f"host_timeout must be positive (or None for no bound), got {host_timeout}")
        unknown = sorted(set(delayed) - set(range(ranks)))
        if unknown:
            raise ValueError(f"delayed ranks {unknown}: only 0 to {ranks - 1} are legal")
        self.ranks, self.seed, self.sms, self.halt = ranks, seed, sms, halt
        self.reduce_scope, self.max_steps, self.parallel = reduce_scope, max_steps, parallel
        self._choice = choice = chosen() if strategy is None else None
        if choice is not None:
            strategy, held = choice.next(self), (*held, *choice.held)
            self.max_steps = choice.max_steps or max_steps
        self._held = {*held, *(("rank", rank) for rank in delayed)}
        self.coverage = Coverage()
        self.host_timeout = host_timeout
        self.races: list[str] = []
        self.steps = self.trace = self._look_at = 0
        self.strategy = strategy or RandomOrder(seed)
        self.enqueue = self.strategy.add  # an agent can run
        self.footprint: list | None = None  # of the step that is being taken, where the strategy asks for it
        self._serial = 0
        self.multicast = False  # whether a kernel has had a multicast address or used an alias fence
        self._launches = [0] * ranks
        self._ahead: list[Past] = []  # per rank, what its next launch knows of its stream if it is launched ahead
        self._memories: dict[int, Memory] = {}
        self._seat = threading.local()
        self.hub: Any = None
        self._reset()

    def _reset(self) -> None:
        self.strategy.begin(self)
        self.parts: list[Partition] = []
        self._parts_limit = 256
        self.hosts: list[Host] = []
        self._running: list[CTA] = []
        self._meetings: dict[tuple, list[Host]] = {}  # by whose they are, and the ranks that come
        self._short: list[tuple[Partition, list]] = []  # hosts whose next CTA has no room, and what wakes them
        self._roomy = False  # there is room for all: only to find out what a deadlock comes from

    # ------------------------------------------------------------ what a host program does

    def run(self, fn: Callable[[int], Any]) -> list:
        """Call `fn(rank)` on a thread per rank and return the results in rank order."""
        if self.hub is not None:
            raise RuntimeError("World.run: this world is already running; a world runs one program at a time")
        self.hub = getcurrent()
        self.forget()
        past = self._everything()
        self._ahead = [past] * self.ranks
        self.hosts = [Host(self, rank, fn, self._seat) for rank in range(self.ranks)]
        for host in self.hosts:
            cta = CTA(self, host.rank, None, HOST_LAUNCH, past, past)
            host.part = Partition(cta, "host", Clock.starting(past), host.drive)
        with seldom_collected():
            return self._run()

    def _run(self) -> list:
        """All that the hosts do; what they return."""
        try:
            # Ranks may run in inference mode: what they made there can be written only in it. Tiles are on the CPU;
            # to say so where the default device is the CPU anyway would slow them down.
            elsewhere = torch.get_default_device().type != "cpu"
            with torch.inference_mode(), torch.device("cpu") if elsewhere else nullcontext():
                self._schedule()
                self._conclude()
            return [host.result for host in self.hosts]
        except EmulatorError as error:
            error.seed = self.seed
            raise
        finally:
            for host in self.hosts:
                host.stop()
            for part in self.parts:
                if part:
                    part.throw()
            self._reset()
            self.hub = None

    def launch(
        self,
        kernel,
        grid: Sequence[int],
        *args,
        num_warps: int = 4,
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        **kwargs,
    ) -> None:
        """Inside fn: run a kernel on this rank's stream and return when all its CTAs and transfers have ended.

        Arguments are those of the kernel: tensors, TensorDescriptors, Multicast addresses, numbers, constexprs.
        `copies` (target, source) are made meanwhile by the copy engine, one behind the other.
        """
        host = self._host("launch")
        for option in _COMPILE_OPTIONS:
            kwargs.pop(option, None)
        grid = (*map(int, grid), 1, 1)[:3]

        def work() -> None:
            host.submit(lambda: self._launch(host.part, kernel, grid, args, kwargs, num_warps, copies), "launch")

        if host.graph is not None:
            host.graph.launched(work)
        work()

    def capture(self) -> AbstractContextManager[Graph]:
        """Inside fn: `with world.capture() as graph` notes what this rank launches and computes, for graph.replay()."""
        return capturing(self._host("capture"))

    def rendezvous(
        self, action: Callable[[], Any] | None = None, ranks: Sequence[int] | None = None, of: Hashable = None
    ) -> Any:
        """Inside fn, by every rank, or by those of `ranks`: all meet, one of them runs `action`, and all return its
        result. Groups that have ranks in common say `of` which of them they meet.

        What these ranks did before happens before what they do after.
        """
        host = self._host("rendezvous")
        key = of, tuple(range(self.ranks) if ranks is None else ranks)
        if host.submit(lambda: self._arrive(host, key), "rendezvous"):
            value = action() if action else None
            host.submit(lambda: self._go_on(key, value), "rendezvous")
            return value
        return host.met

    def touch(self, tensor: torch.Tensor, kind: str) -> None:
        """Inside fn: declare that this rank's host reads or writes a tensor now, so that races with it are seen."""
        if kind not in ("read", "write"):
            raise ValueError(f"kind must be 'read' or 'write', got {kind!r}")
        host = self._host("touch")
        host.submit(lambda: self._touch(host, tensor, kind), kind)

    def _host(self, name: str) -> Host:
        host = getattr(self._seat, "host", None)
        if host is None:
            raise RuntimeError(f"World.{name} is called inside of the function given to World.run, by a rank's thread")
        return host

    # ------------------------------------------------------------ jobs of hosts, run by their partitions

    def _touch(self, host: Host, tensor: torch.Tensor, kind: str) -> None:
        host.part.pause()
        self.memory(tensor, "tensor").access(kind, region_of(tensor), host.part, host.place(f"host {kind}"))

    def _arrive(self, host: Host, key: tuple) -> bool:
        meeting = self._meetings.setdefault(key, [])
        meeting.append(host)
        if len(meeting) == len(key[1]):
            return True
        host.part.block(host.waiters, self._describe_meeting, key)
        return False

    def _describe_meeting(self, key: tuple) -> str:
        come = [host.rank for host in self._meetings[key]]
        return f"ranks {[rank for rank in key[1] if rank not in come]} to come to the rendezvous"

    def _go_on(self, key: tuple, value) -> None:
        meeting = self._meetings.pop(key)
        if len(meeting) == self.ranks:
            # Nothing else runs: a host waits for its kernels and their transfers to end.
            self.forget()
            past = self._everything()
        else:
            past = reduce(merged, [host.part.told() for host in meeting])
        for host in meeting:
            host.met = value
            if len(meeting) == self.ranks:
                host.part.clock.past = (past,) * 4
            else:
                host.part.learn(past)
            self._ahead[host.rank] = past
            self.wake(host.waiters)

    def _everything(self) -> Past:
        """Knowledge of all launches so far."""
        return Past(tuple(self._launches), {})

    def forget(self) -> None:
        """All that happened so far happens before all to come: no history is needed, and no tensor need be kept."""
        if len(self._memories) > _MEMORIES_KEPT:
            self._memories.clear()
        for memory in self._memories.values():
            memory.forget()

    def _launch(self, host: Partition, kernel, grid, args, kwargs, num_warps: int, copies) -> None:
        fn, rank = rebuilt(kernel), host.rank
        bound = _signature(kernel.fn).bind(*args, **kwargs)
        bound.apply_defaults()
        values = [self._argument(rank, name, value) for name, value in bound.arguments.items()]
        self._launches[rank] += 1
        number = self._launches[rank]
        stream = host.told()
        # One that is launched ahead begins when its predecessor has begun to end: with what that one could count on.
        past = self._ahead[rank] if launched_ahead(kernel) else stream
        self._ahead[rank] = stream
        beside = start(host, copies)
        running: list[Partition] = []
        for id, (z, y, x) in enumerate(np.ndindex(grid[2], grid[1], grid[0])):
            while self.sms and len(running) >= self.sms and not self._roomy:
                self._make_room(host, running, id)
            cta = CTA(self, rank, id, number, past, stream, (x, y, z), grid, num_warps)
            self._running.append(cta)
            running.append(Partition(cta, "main", Clock.starting(past), self._body, (fn, values)))
        for part in running:
            self._finish(host, part)
        finish(beside)
        known = host.clock.past[0]
        ended = tuple(number if r == rank else n for r, n in enumerate(known.ended))
        live = {cta: row for cta, row in known.live.items() if cta.launch > ended[cta.rank]}
        host.clock.past = (Past(ended, live),) * 4

    def _make_room(self, host: Partition, running: list[Partition], id: int) -> None:
        """Wait for one of the CTAs that are resident to end, so that the CTA of this number can start."""
        over = next((part for part in running if part.done), None)
        if over is not None:
            self._finish(host, over)
            running.remove(over)
            return
        room: list = []
        for part in running:
            part.waiters = room
        self._short.append((host, room))
        host.block(room, lambda: f"one of the {self.sms} resident CTAs to end so that CTA {id} can start")
        self._short.remove((host, room))

    def _body(self, fn, values) -> None:
        me = getcurrent()
        fn(*values)
        me.sync()
        release_shared_memory(me)

    def _finish(self, host: Partition, part: Partition) -> None:
        cta = part.cta
        while not part.done:
            host.block(part.waiters, lambda: f"CTA {cta.id} to end")
        while cta.ops:
            host.block(cta.waiters, lambda: f"transfers of CTA {cta.id} to end")
        cta.ended = True
        self.coverage.ended(cta)
        self._running.remove(cta)
        clock = host.clock
        clock.past = (merged(clock.past[0], part.clock.past[0]), *clock.past[1:])

    def _argument(self, rank: int, name: str, value):
        title = f"{name} (first seen by rank {rank})"
        if isinstance(value, lang.TensorDescriptor):
            return Descriptor(self.memory(value.base, title), value)
        if isinstance(value, torch.Tensor):
            return Pointer(self.memory(value, title), value.dtype, value.storage_offset())
        if isinstance(value, Multicast):
            t = value.tensor
            self.multicast = True
            first = int(t.storage_offset())
            return Pointer(self.memory(t, title), t.dtype, first, (first, t.shape[0], t.stride(0)))
        if isinstance(value, bool):
            return value
        if isinstance(value, float):
            return float(np.float32(value))
        return translate(value)

    def memory(self, tensor: torch.Tensor, name: str) -> Memory:
        """The history of a tensor's storage; ValueError for one that is not in the CPU's memory."""
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}; the emulator takes CPU tensors")
        key = tensor.untyped_storage().data_ptr()
        memory = self._memories.get(key)
        if memory is None:
            memory = Memory(self, name, "global", tensor.detach())
            if key:  # storages without bytes have no address
                self._memories[key] = memory
        return memory

    # ------------------------------------------------------------ the scheduler

    def _schedule(self) -> None:
        """Run whoever can run, in the strategy's order, until nobody can."""
        take = self.strategy.take
        while True:
            agent = take()
            if agent is None:
                if self._let_pollers_on():
                    continue
                return
            self.steps += 1
            if self.steps >= self._look_at:
                self._look()
            self.trace = hash((self.trace, agent.serial))
            if agent.is_async:
                agent.step()
            else:
                agent.switch()

    def _look(self) -> None:
        """Once in a while: are these too many steps, and does who has chosen the order go on?"""
        if self.steps > self.max_steps:
            raise DeadlockError(f"no end after {self.max_steps} steps (max_steps)")
        self._look_at = min(self.steps + _LOOK, self.max_steps + 1)
        if self._choice is not None:
            self._choice.look()

    def _conclude(self) -> None:
        """Nothing can run: was that the end?"""
        for host in self.hosts:
            if host.error is not None:
                raise host.error
        blocked = [part for part in self.parts if part.waiting]
        if blocked:
            told = {"blocked": [told_of(part.waiting[0]) for part in blocked if part.waiting]}
            text = deadlock(blocked)
            raise DeadlockError(self._crowded() + text if self._short else text, told)

    def _crowded(self) -> str:
        """What a deadlock comes from in which CTAs have not started: whether all would go on if they could."""
        short, self._roomy = sorted(host.rank for host, _ in self._short), True
        for _, room in self._short:
            self.wake(room)
        try:
            self._schedule()
        except EmulatorError:
            return ""
        if any(part.waiting for part in self.parts):
            return ""
        return (
            f"a launch that is not co-resident: ranks {short} have room for {self.sms} CTAs at a time, and those\n"
            "that run wait for others that cannot start before they end. With room for all nobody waits for ever.\n"
            "Launch no more CTAs than can be resident, or let none wait for a later one.\n"
        )

    @property
    def idle(self) -> bool:
        """Whether nobody but the current agent can run."""
        return self.strategy.idle

    def wake(self, waiters: list) -> None:
        """Those who wait in a list can run."""
        for agent in waiters:
            self.enqueue(agent)
        waiters.clear()

    def _let_pollers_on(self) -> bool:
        """Nothing can run: a poll that is not a spin loop may go on, a few times."""
        for part in self.parts:
            if part.waiting and part.polled and part.patience:
                memory, byte = part.polled[:2]
                part.patience, part.polled = part.patience - 1, None
                self.wake(memory.watchers.pop(byte, []))
        return not self.idle

    def register(self, part: Partition) -> int:
        """Enter a partition; returns its serial number."""
        if len(self.parts) > self._parts_limit:
            self.parts = [p for p in self.parts if not p.dead]
            self._parts_limit = 2 * len(self.parts) + 256
        self.parts.append(part)
        return self.next_serial()

    def next_serial(self) -> int:
        """A number for an agent, by which a trace knows it."""
        self._serial += 1
        return self._serial

    def draw(self, n: int) -> int:
        """A number below n, chosen by the strategy: what an agent that may do one of n things does."""
        return self.strategy.draw(n)

    def starve(self) -> bool:
        """Whether an asynchronous operation is starved in this run."""
        return self.strategy.starves()

    def is_slow(self, *tags: tuple) -> bool:
        """Whether this run starves agents with one of these tags."""
        return any(tag in self._held or self.strategy.drags(tag) for tag in tags)

    def settled(self) -> list[int]:
        """Per rank, how many launches happen before anything that can still be done by anybody."""
        pasts = [host.part.clock.past[0].ended for host in self.hosts]
        pasts += [cta.final.past[0].ended for cta in self._running]
        return [min(ended) for ended in zip(*pasts, strict=True)]

    def found(self, race: Race | str) -> None:
        """A race, or the text of one that is not between accesses to memory."""
        if self.halt:
            raise RaceError(str(race), None if isinstance(race, str) else race.told())
        self.races.append(str(race))


@lru_cache(256)
def _signature(fn) -> inspect.Signature:
    return inspect.signature(fn)
