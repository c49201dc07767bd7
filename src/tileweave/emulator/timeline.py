"""A run in time order: every step at a modelled time, and what each agent did when.

    order = TimeOrder(rates)
    World(ranks, sms=4, strategy=order).run(fn)
    order.spans, order.flows

Times are modelled from rates, in microseconds. A span is a wait of a partition or an asynchronous operation from its
start to its end; a flow leads from what ended a wait to its end. Arithmetic in registers takes no time.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tileweave.emulator.mbarrier import MBarrier
from tileweave.emulator.touches import Touch

if TYPE_CHECKING:
    from tileweave.emulator.world import World

_TURN_US = 0.01  # of a turn that waits for nothing, so that a loop that polls lets time go on


@dataclass(frozen=True)
class Rates:
    """What steps take. Bytes and flops are per microsecond; us: latencies. sm_bytes: TMA of one SM; register_bytes:
    registers of one SM; copy_bytes: of a rank's copy engine; sm_flops: products of one SM."""

    sm_bytes: float
    register_bytes: float
    copy_bytes: float
    sm_flops: float
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
    """What the step that runs touches: accesses to global memory take their time at once."""

    def __init__(self, order: TimeOrder):
        super().__init__()
        self._order = order

    def append(self, touch: Touch) -> None:
        again = self and self[-1].thing is touch.thing and self[-1].region is touch.region  # by the other threads
        super().append(touch)
        if not again:
            self._order.touched(touch)


class TimeOrder:
    """The strategy by which the agent whose time has come first is the one that runs."""

    def __init__(self, rates: Rates):
        self.rates = rates
        self.now = 0.0
        self.spans: list[Span] = []
        self.flows: list[Flow] = []
        self._heap: list[tuple[float, int, Any]] = []
        self._count = 0
        self._current: Any = None
        self._started: dict[int, float] = {}  # by serial number: blocked partitions and operations in flight
        self._seen: set[int] = set()
        self._free: dict[tuple, float] = {}  # when each engine has nothing left to do
        self._touches = _Touches(self)

    def begin(self, world: World) -> None:
        """A run of `world` begins."""
        self._heap.clear()
        self._current = None
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

    def drags(self, tag: tuple) -> bool:
        """Nobody is starved."""
        return False

    def starves(self) -> bool:
        """Nor is an operation."""
        return False

    def draw(self, n: int) -> int:
        """The usual one."""
        return 0

    def touched(self, touch: Touch) -> None:
        """A partition's access to global memory through registers."""
        part = self._current
        if part is None or part.is_async or touch.region is None or getattr(touch.thing, "space", "") != "global":
            return
        self.now += touch.region.nbytes / self.rates.register_bytes

    def _end_turn(self) -> None:
        agent = self._current
        if agent is None:
            return
        if agent.is_async:
            if agent.done:
                start = self._started.pop(agent.serial)
                self._span(agent, f"{agent.kind}s" if not agent.kind.startswith("wgmma") else "wgmma", start, self.now)
        elif agent.waiting:
            self._started[agent.serial] = self.now

    def _span(self, agent: Any, role: str, start: float, end: float, name: str = "", kind: str = "") -> None:
        cta, place = agent.cta, agent.place if agent.is_async else agent.waiting[0]
        where = f"{place.code.co_name}:{place.line}" if place.code else ""
        kind = kind or agent.kind
        self.spans.append(Span(cta.rank, cta.id, cta.launch, role, name or kind, kind, start, end, where))

    def _partition(self, part: Any) -> float:
        rates, by = self.rates, self._current
        if part.serial not in self._seen:
            self._seen.add(part.serial)
            return self.now + (rates.launch_us if part.name == "main" else 0.0)
        if not part.waiting or part.serial not in self._started:
            return self.now + _TURN_US
        describe, args = part.waiting[1:]
        owner: Any = getattr(describe, "__self__", None)
        late, name, kind = 0.0, "wait", "wait"
        if isinstance(owner, MBarrier):
            late, name, kind = rates.cta_us, f"wait for {owner.name}", "wait for an mbarrier"
        elif getattr(owner, "is_async", False):
            name, kind = f"wait for {owner.kind}", f"wait for {owner.kind}"
        elif args and hasattr(args[0], "timeout_us"):
            far = by is not None and by.cta.rank != part.cta.rank
            late, name, kind = rates.peer_us if far else rates.gpu_us, f"wait for flag {args[1]}", "wait for a flag"
        at = self.now + late
        self._span(part, part.name, self._started.pop(part.serial), at, name, kind)
        if kind == "wait for a flag" and by is not None:
            role = by.kind if by.is_async else by.name
            source = by.cta.rank, by.cta.id, role, self.now
            self.flows.append(Flow(source, (part.cta.rank, part.cta.id, part.name, at)))
        return at

    def _operation(self, op: Any) -> float:
        if op.n:  # it has read its buffer, and lands
            return self.now + self.rates.gpu_us
        self._started[op.serial] = self.now
        engine, cost = self._cost(op)
        free = max(self._free.get(engine, 0.0), self.now) + cost
        self._free[engine] = free
        return free + (self.rates.gpu_us if op.kind == "TMA load" else 0.0)

    def _cost(self, op: Any) -> tuple[tuple, float]:
        """The engine of an operation, and how long it is busy with it."""
        rates, cta = self.rates, op.cta
        if op.kind.startswith("TMA"):
            return ("tma", cta.rank, cta.id, op.kind == "TMA load"), op.desc.nbytes / rates.sm_bytes
        if op.kind == "copy-engine copy":
            return ("copy", cta.rank), rates.copy_start_us + op.target.nbytes / rates.copy_bytes
        if op.kind in ("wgmma", "tcgen05.mma"):
            flops = 2 * math.prod(op.a.shape) * op.b.shape[-1]
            return ("product", cta.rank, cta.id), flops / rates.sm_flops
        return ("none", op.serial), 0.0


def chrome_trace(order: TimeOrder, title: str) -> dict[str, Any]:
    """The timeline as Chrome's trace events, which Perfetto reads: a process for each rank, a thread for each CTA and
    role (operations that overlap have lanes), a flow from each signal to the wait that it ended."""
    lanes: dict[tuple, list[float]] = {}
    threads: dict[tuple, int] = {}
    events: list[dict[str, Any]] = []

    def thread(rank: int, cta: int | None, role: str) -> int:
        return threads.setdefault((rank, cta, role), len(threads) + 1)

    for span in sorted(order.spans, key=lambda span: (span.start, -span.end)):
        ends = lanes.setdefault((span.rank, span.cta, span.role), [])
        lane = next((i for i, end in enumerate(ends) if end <= span.start), len(ends))
        ends[lane : lane + 1] = [span.end]
        tid = thread(span.rank, span.cta, f"{span.role} {lane + 1}" if lane else span.role)
        events.append(
            {"ph": "X", "name": span.name, "cat": span.kind, "pid": span.rank, "tid": tid, "ts": span.start,
             "dur": span.end - span.start, "args": {"launch": span.launch, "place": span.place}}
        )  # fmt: skip
    for number, flow in enumerate(order.flows):
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
    return {"traceEvents": events, "otherData": {"title": title, "times": "modelled, not measured"}}
