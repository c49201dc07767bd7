"""A run in time order: every step at a modelled time, and what each agent did when.

    order = TimeOrder(rates)
    World(ranks, sms=4, strategy=order).run(fn)
    order.spans, order.flows

Times are modelled from rates, in microseconds. A span is a wait of a partition, its copying through registers, or an
asynchronous operation from its issue to its end; a flow leads from what ended a wait to its end. SMs share their rank's
memory and link, each of which serves who comes first. Arithmetic in registers takes no time.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tileweave.emulator.mbarrier import MBarrier
from tileweave.emulator.places import Place
from tileweave.emulator.search import Fair
from tileweave.emulator.touches import Touch
from tileweave.lang.stamps import FLAG, MBARRIER  # kinds of waits; others are for an agent or an operation

if TYPE_CHECKING:
    from tileweave.emulator.world import World

_TURN_US = 0.01  # of a turn that waits for nothing, so that a loop that polls lets time go on
REGISTERS = "register copy"


@dataclass(frozen=True)
class Rates:
    """What steps take. Bytes and flops are per microsecond. Of one SM: sm_bytes, by TMA to
    memory, or to or from a peer (loads of its rank's own memory have the whole memory_bytes, and are L2's when they
    come again); register_bytes; sm_flops. Of a rank with all its SMs: memory_bytes; link_bytes, each way; copy_bytes,
    of its copy engine after copy_start_us. Latencies: launch_us; gpu_us, of TMA and of a flag between SMs; peer_us, of
    a flag between ranks; cta_us, of an mbarrier."""

    sm_bytes: float
    register_bytes: float
    sm_flops: float
    memory_bytes: float
    link_bytes: float
    copy_bytes: float
    copy_start_us: float
    launch_us: float
    peer_us: float
    gpu_us: float
    cta_us: float


@dataclass
class Span:
    """What an agent did from `start` to `end`, in us. cta None: the rank's host."""

    rank: int
    cta: int | None
    launch: int
    role: str
    name: str
    kind: str
    start: float
    end: float
    place: str


@dataclass(frozen=True)
class Flow:
    """From a step of one agent, (rank, cta, role, us), to the end of the wait that it ended."""

    source: tuple[int, int | None, str, float]
    target: tuple[int, int | None, str, float]


class _Touches(list):
    """What the step that runs touches, of which the order hears at once."""

    def __init__(self, order: TimeOrder):
        super().__init__()
        self._order = order

    def append(self, touch: Touch) -> None:
        super().append(touch)
        self._order.touched(touch)

    def __setitem__(self, index, touch) -> None:
        super().__setitem__(index, touch)
        if touch.passes is not None:  # what looked like a signal is a wait that has passed
            self._order.passed_flag(touch)


class TimeOrder(Fair):
    """The strategy by which the agent whose time has come first is the one that runs."""

    def __init__(self, rates: Rates):
        self.rates = rates
        self.now = 0.0
        self.spans: list[Span] = []
        self.flows: list[Flow] = []
        self._heap: list[tuple[float, int, Any]] = []
        self._count = 0
        self._current: Any = None
        self._world: Any = None
        self._started: dict[int, float] = {}  # by serial number: blocked partitions and operations in flight
        self._woken: dict[int, tuple] = {}  # and the end of a wait, unless the partition finds that it has to go on
        self._until: dict[int, float] = {}  # partitions that go on later than now
        self._seen: set[int] = set()
        self._half: dict[int, tuple] = {}  # what all threads of a partition but the first have accessed
        self._raised: dict[tuple, list[tuple]] = {}  # of each flag: the value before a signal, when and by whom
        self._completed: dict[tuple, float] = {}  # when an mbarrier's phase had its last arrival
        self._slices: dict[Any, int] = {}  # of a memory, the bytes of a rank's slice (0: it is all a rank's own)
        self._loaded: set[tuple] = set()  # what TMA has loaded from a rank's own memory, which L2 has from then on
        self._free: dict[tuple, float] = {}  # when each engine has nothing left to do
        self._touches = _Touches(self)

    def begin(self, world: World) -> None:
        """A run of `world` begins."""
        for state in (self._heap, self._started, self._woken, self._until, self._half, self._raised, self._completed):
            state.clear()
        self._seen.clear()
        self._current, self._world = None, world
        world.footprint = self._touches

    def add(self, agent: Any) -> None:
        """An agent can run: at the time that its next step takes it to."""
        at = self._operation(agent) if agent.is_async else self._partition(agent)
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, agent))

    def take(self) -> Any:
        """The one whose time is first."""
        self._end_turn()
        if not self._heap:
            self._current = None
            return None
        self.now, _, self._current = heapq.heappop(self._heap)
        self._touches.clear()
        return self._current

    @property
    def idle(self) -> bool:
        """Whether nobody can run; during a turn that is not known, as the turn itself takes time."""
        return not self._heap and self._current is None

    # ------------------------------------------------------------ what the step that runs tells

    def touched(self, touch: Touch) -> None:
        """A touch by the agent that runs: a signal is noted, an access through registers takes the time of its bytes,
        and an mbarrier's phase is passed as late as its completion is known."""
        agent, thing = self._current, touch.thing
        if isinstance(thing, MBarrier):
            if touch.kind == "arrive":
                self._completed[thing, touch.state] = self.now
            else:
                done = self._completed.get((thing, touch.state - 1), self.now - self.rates.cta_us)
                self._delay(agent, done + self.rates.cta_us, f"wait for {thing.name}", MBARRIER)
        elif touch.region is None or thing.space != "global":
            return
        elif touch.kind == "atomic":
            if touch.region.nbytes == 4:
                word = thing.flat(torch.int32)[touch.region.lo // 4].item()
                self._raised.setdefault((thing, touch.region.lo), []).append((word, self.now, agent))
        elif not agent.is_async and agent.cta.id is not None:
            access = thing, touch.region
            if self._half.pop(agent.serial, None) != access:  # all its threads but the first; the first's comes next
                self._half[agent.serial] = access
                home = self._home(thing, touch.region.lo, agent.rank)
                source, target = (agent.rank, home) if touch.kind in ("write", "add") else (home, agent.rank)
                engine = ("registers", agent.rank, agent.cta.id), self.rates.register_bytes
                self._delay(agent, self._move(touch.region.nbytes, engine, source, target), REGISTERS, REGISTERS)

    def passed_flag(self, touch: Touch) -> None:
        """The partition that runs has found a flag as far as it waits for: it is so when the signal has come."""
        signals = self._raised[touch.thing, touch.region.lo]
        signals.pop()  # the wait itself
        after = [*(value for value, *_ in signals[1:]), None]
        assert touch.passes is not None
        found = next(
            (s for s, value in zip(signals, after, strict=False) if value is None or touch.passes(value)), None
        )
        if found is not None:
            _, when, by = found
            part = self._current
            self._delay(part, when + self._flag_us(by, part), f"wait for {touch.thing.name}", FLAG, (by, when))

    def _flag_us(self, by: Any, part: Any) -> float:
        return self.rates.peer_us if by.cta.rank != part.cta.rank else self.rates.gpu_us

    def _delay(self, part: Any, until: float, name: str, kind: str, source: tuple | None = None) -> None:
        """Let the partition that runs go on later."""
        if until <= self.now:
            return
        self._span(part, part.name, self.now, until, Place(part, kind), name, kind, source)
        self._until[part.serial] = until
        part.pause()

    def _end_turn(self) -> None:
        agent = self._current
        if agent is None:
            return
        if agent.is_async:
            if agent.done:
                kind = agent.kind
                self._span(agent, kind, self._started.pop(agent.serial), self.now, agent.place, kind, kind)
            return
        woken = self._woken.pop(agent.serial, None)
        if agent.waiting:
            self._started[agent.serial] = self.now
        if woken is not None:
            waited, start, *rest = woken
            if agent.waiting and agent.waiting[1:] == waited[1:]:
                self._started[agent.serial] = start
            else:
                self._span(agent, agent.name, start, self.now, waited[0], *rest)

    def _span(
        self, agent: Any, role: str, start: float, end: float, place: Place, name: str, kind: str,
        source: tuple | None = None,
    ) -> None:  # fmt: skip
        cta = agent.cta
        where = f"{place.code.co_name}:{place.line}" if place.code else ""
        self.spans.append(Span(cta.rank, cta.id, cta.launch, role, name, kind, start, end, where))
        if source is not None:
            by, when = source
            signaller = by.kind if by.is_async else by.name
            self.flows.append(Flow((by.cta.rank, by.cta.id, signaller, when), (cta.rank, cta.id, role, end)))

    # ------------------------------------------------------------ when a step is

    def _partition(self, part: Any) -> float:
        rates, by = self.rates, self._current
        if part.serial not in self._seen:
            self._seen.add(part.serial)
            return self.now + (rates.launch_us if part.name == "main" else 0.0)
        if not part.waiting:
            return self._until.pop(part.serial, self.now + _TURN_US)
        describe, args = part.waiting[1:]
        owner: Any = getattr(describe, "__self__", None)
        at, name, kind, source = self.now, "wait", "wait", None
        if isinstance(owner, MBarrier):
            at, name, kind = at + rates.cta_us, f"wait for {owner.name}", MBARRIER
        elif getattr(owner, "is_async", False):
            name = kind = f"wait for {owner.kind}"
        elif args and hasattr(args[0], "timeout_us"):
            at, name, kind = at + (self._flag_us(by, part) if by else 0.0), f"wait for flag {args[1]}", FLAG
            source = (by, self.now) if by else None
        self._woken[part.serial] = part.waiting, self._started.pop(part.serial, self.now), name, kind, source
        return at

    def _operation(self, op: Any) -> float:
        if op.n:  # it has read its buffer, and lands
            return self.now + self.rates.gpu_us
        self._started[op.serial] = self.now
        rates, cta = self.rates, op.cta
        if op.kind.startswith("TMA"):
            memory, box = op.desc.memory, op.box[3]
            home = self._home(memory, box.lo, cta.rank)
            engine = ("tma", cta.rank, cta.id), rates.sm_bytes
            if op.kind != "TMA load":
                return self._move(op.desc.nbytes, engine, cta.rank, home)
            if home != cta.rank:
                return self._move(op.desc.nbytes, engine, home, cta.rank) + rates.gpu_us
            known = memory, box.lo, box.hi
            at = self.now if known in self._loaded else self._move(op.desc.nbytes, None, home, home)
            self._loaded.add(known)
            return at + rates.gpu_us
        if op.kind == "copy-engine copy":
            source, target = (
                self._home(op.world.memory(x, f"{name} of a copy"), x.storage_offset() * x.element_size(), cta.rank)
                for x, name in ((op.source, "source"), (op.target, "target"))
            )
            self._book(("copy", cta.rank), rates.copy_start_us)
            return self._move(op.target.nbytes, (("copy", cta.rank), rates.copy_bytes), source, target)
        if op.kind in ("wgmma", "tcgen05.mma"):
            flops = 2 * math.prod(op.a.shape) * op.b.shape[-1]
            return self._book(("product", cta.rank, cta.id), flops / rates.sm_flops)
        return self.now

    def _move(self, nbytes: int, engine: tuple[tuple, float] | None, source: int, target: int) -> float:
        """When so many bytes of a rank are another's, or within its memory: all that they pass must have had time."""
        rates = self.rates
        passes = [(("memory", source), rates.memory_bytes)]
        if source != target:
            passes = [(("out of", source), rates.link_bytes), (("into", target), rates.link_bytes)]
        return max(self._book(what, nbytes / rate) for what, rate in ([engine] if engine else []) + passes)

    def _home(self, memory: Any, byte: int, rank: int) -> int:
        """The rank whose memory has a byte that `rank` accesses."""
        size = self._slices.get(memory)
        if size is None:
            storage, parallel = memory.tensor.untyped_storage(), self._world.parallel
            shared = parallel is not None and parallel(storage.data_ptr())
            size = self._slices[memory] = storage.nbytes() // self._world.ranks if shared else 0
        return byte // size if size else rank

    def _book(self, engine: tuple, cost: float) -> float:
        """When an engine, busy with what came before, has done this."""
        self._free[engine] = free = max(self._free.get(engine, 0.0), self.now) + cost
        return free


def chrome_trace(spans: Sequence[Span], flows: Sequence[Flow], title: str, times: str) -> dict[str, Any]:
    """The timeline as Chrome's trace events, which Perfetto reads: a process for each rank, a thread for each CTA and
    role (operations that overlap have lanes), a flow from each signal to the wait that it ended."""
    lanes: dict[tuple, list[float]] = {}
    threads: dict[tuple, int] = {}
    events: list[dict[str, Any]] = []

    def thread(rank: int, cta: int | None, role: str) -> int:
        return threads.setdefault((rank, cta, role), len(threads) + 1)

    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        ends = lanes.setdefault((span.rank, span.cta, span.role), [])
        lane = next((i for i, end in enumerate(ends) if end <= span.start), len(ends))
        ends[lane : lane + 1] = [span.end]
        tid = thread(span.rank, span.cta, f"{span.role} {lane + 1}" if lane else span.role)
        events.append(
            {"ph": "X", "name": span.name, "cat": span.kind, "pid": span.rank, "tid": tid, "ts": span.start,
             "dur": span.end - span.start, "args": {"launch": span.launch, "place": span.place}}
        )  # fmt: skip
    for number, flow in enumerate(flows):
        for phase, (rank, cta, role, us) in (("s", flow.source), ("f", flow.target)):
            end = {"bp": "e"} if phase == "f" else {}
            events.append(
                {"ph": phase, "id": number, "name": "signal", "cat": "signal", "pid": rank,
                 "tid": thread(rank, cta, role), "ts": us, **end}
            )  # fmt: skip
    for (rank, cta, role), tid in threads.items():
        name = f"CTA {cta}, {role}" if cta is not None else role
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}})
    for rank in {key[0] for key in threads}:
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
    return {"traceEvents": events, "otherData": {"title": title, "times": times}}


def roles_of(spans: Sequence[Span], now: float) -> list[dict[str, Any]]:
    """For each role or kind of operation, on how many CTAs it is, and the mean shares of the whole time `now` in which
    it is busy, waits for flags, and waits for something else."""
    agents: dict[str, dict[tuple, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        if span.role != "host":
            agents[span.role][span.rank, span.cta].append(span)
    return [
        {
            "role": role,
            "ctas": len(ctas),
            "busy": _share(now, ctas, lambda kind: not kind.startswith("wait")),
            "waits_for_flags": _share(now, ctas, lambda kind: kind == FLAG),
            "other_waits": _share(now, ctas, lambda kind: kind.startswith("wait") and kind != FLAG),
        }
        for role, ctas in sorted(agents.items())
    ]


def _share(now: float, ctas: dict[tuple, list[Span]], counts: Any) -> float:
    """The mean share of the whole time that the spans of the kinds which count cover; what overlaps counts once."""
    total = 0.0
    for spans in ctas.values():
        until = 0.0
        for start, end in sorted((span.start, span.end) for span in spans if counts(span.kind)):
            total += max(end - max(start, until), 0.0)
            until = max(until, end)
    return total / len(ctas) / now
