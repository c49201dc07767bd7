"""Who runs next: the orders in which a world's agents can be made to take their steps.

    World(ranks, strategy=RandomOrder(seed))          the default: agents drawn at random, some of them starved
    World(ranks, strategy=PriorityOrder(seed))        PCT: the one of highest priority, with a few changes of priority
    World(ranks, strategy=Replay(turns))              an order that was recorded or shortened
    for order in Exploration(): World(ranks, strategy=order)     every order that differs (exhaustive.py)

A strategy serves one world. It holds the agents that can run; the world adds them and takes the next one. The same
strategy made again gives the same schedule.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from tileweave.emulator.places import Place, kernel_frame

if TYPE_CHECKING:
    from tileweave.emulator.world import World

_STARVED_TURN = 0.002  # how often a starved agent runs although others could
_PATIENCE = 10_000  # turns in a row after which an agent of highest priority is taken to spin

Turns = list[tuple[str, int]]  # agents by name, and how many turns each has before the next one


class Strategy(Protocol):
    """What a world asks of an order."""

    def begin(self, world: World) -> None:
        """A run of `world` begins: nobody can run yet."""

    def add(self, agent: Any) -> None:
        """An agent can run."""

    def take(self) -> Any:
        """The agent that runs next, which is no longer held; None if nobody can run."""

    @property
    def idle(self) -> bool:
        """Whether nobody can run."""

    def drags(self, tag: tuple) -> bool:
        """Whether agents with this tag are starved: they run when nobody else can."""

    def starves(self) -> bool:
        """Whether the asynchronous operation that is being made is starved."""

    def draw(self, n: int) -> int:
        """A number below n: which of n things the agent that runs does; 0 is the usual one."""


def name_of(agent: Any) -> str:
    """The name of an agent, the same in every schedule: rank.launch.CTA.partition, @event for an operation."""
    if agent.is_async:
        return f"{name_of(agent.part)}@{agent.place.event}"
    cta, name = agent.cta, agent.name
    if cta.id is None:
        return f"{cta.rank}.host"
    return f"{cta.rank}.{cta.launch}.{cta.id}.{'0' if name == 'main' else name.split(' ')[0]}"


class Choice:
    """The orders of the worlds that are made within `choosing`: `make(seed, index)` is that of the index-th one. `held`
    and `max_steps` (None: the world's own) as a World takes them. `watch(steps)`, of all these worlds so far, is called
    every few hundred of them; what it raises ends the run."""

    def __init__(
        self,
        make: Callable[[int, int], Strategy],
        held: Iterable[tuple] = (),
        max_steps: int | None = None,
        watch: Callable[[int], None] | None = None,
    ):
        self.make, self.held, self.max_steps, self._watch = make, tuple(held), max_steps, watch
        self.worlds: list[World] = []

    @property
    def steps(self) -> int:
        """Steps that these worlds have taken."""
        return sum(world.steps for world in self.worlds)

    def look(self) -> None:
        """Let `watch` know how far these worlds are."""
        if self._watch is not None:
            self._watch(self.steps)

    def next(self, world: World) -> Strategy:
        """The strategy of one more world."""
        self.worlds.append(world)
        return self.make(world.seed, len(self.worlds) - 1)


_choice: ContextVar[Choice | None] = ContextVar("choice", default=None)


def chosen() -> Choice | None:
    """What the caller is within."""
    return _choice.get()


@contextmanager
def choosing(choice: Choice) -> Iterator[Choice]:
    """Within it, worlds that are not given a strategy take it from `choice`, whoever makes them."""
    token = _choice.set(choice)
    try:
        yield choice
    finally:
        _choice.reset(token)


class Fair:
    """What strategies answer that starve nobody."""

    def drags(self, tag: tuple) -> bool:
        """Nobody is starved."""
        return False

    def starves(self) -> bool:
        """Nor is an operation."""
        return False

    def draw(self, n: int) -> int:
        """The usual one."""
        return 0


class _Queue(Fair):
    """Agents that can run, by name, oldest first."""

    def __init__(self) -> None:
        self.queue: dict[str, Any] = {}

    def begin(self, world: World) -> None:
        """A run begins."""
        self.queue.clear()

    def add(self, agent: Any) -> None:
        """An agent can run."""
        self.queue[name_of(agent)] = agent

    @property
    def idle(self) -> bool:
        """Whether nobody can run."""
        return not self.queue


class RandomOrder:
    """Agents drawn at random. Each seed has its own eagerness of asynchronous operations, starves some of them, and all
    agents of one half of the ranks, CTAs, partitions or kinds of operation."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._hurry = self._random.choice((0.02, 0.3, 0.9))  # how eager asynchronous operations are
        self._lazy = self._random.choice((0, 0, 0.02, 0.2))  # how many of them are starved
        self._drag = self._random.choice((None, "rank", "cta", "part", "op"))  # and which kind of agent is
        self._dragged: dict[tuple, bool] = {}
        self._ready: list = []
        self._ops: list = []
        self._held: list = []

    def begin(self, world: World) -> None:
        """A run begins."""
        for agents in (self._ready, self._ops, self._held):
            agents.clear()

    def add(self, agent: Any) -> None:
        """An agent can run."""
        (self._held if agent.slow else self._ops if agent.is_async else self._ready).append(agent)

    def take(self) -> Any:
        """One of those that can run."""
        agents, held = self._ready, self._held
        rng = self._random.random
        if held and (not (agents or self._ops) or rng() < _STARVED_TURN):
            agents = held
        elif self._ops and (not agents or rng() < self._hurry):
            agents = self._ops
        if not agents:
            return None
        i = int(rng() * len(agents))
        agent = agents[i]
        agents[i] = agents[-1]
        agents.pop()
        return agent

    @property
    def idle(self) -> bool:
        """Whether nobody can run."""
        return not (self._ready or self._ops or self._held)

    def drags(self, tag: tuple) -> bool:
        """Whether this run starves agents with this tag (half of those of one kind)."""
        if tag[0] != self._drag:
            return False
        if tag not in self._dragged:
            self._dragged[tag] = self._random.random() < 0.5
        return self._dragged[tag]

    def starves(self) -> bool:
        """Whether an asynchronous operation is starved in this run."""
        return self._lazy > 0 and self._random.random() < self._lazy

    def draw(self, n: int) -> int:
        """Any number below n."""
        return int(self._random.random() * n)


class PriorityOrder:
    """PCT (Burckhardt et al., ASPLOS 2010): every agent has a random priority, the highest one that can run does, and
    at `depth` - 1 random steps the one that would have run falls behind all others.

    A fault that takes `depth` orderings to show is found with probability 1 / (agents * steps^(depth - 1)) at least,
    whatever the rest of the program does. `steps`: about how many a run has.
    """

    def __init__(self, seed: int, depth: int = 3, steps: int = 10_000):
        self._random = random.Random(seed)
        self._changes = {self._random.randrange(max(steps, 1)) for _ in range(depth - 1)}
        self._priorities: dict[int, float] = {}
        self._heap: list[tuple] = []
        self._taken = self._floor = self._in_a_row = 0
        self._last = -1

    def begin(self, world: World) -> None:
        """A run begins."""
        self._heap.clear()

    def add(self, agent: Any) -> None:
        """An agent can run."""
        serial = agent.serial
        priority = self._priorities.get(serial)
        if priority is None:
            priority = self._priorities[serial] = self._random.random()
        heapq.heappush(self._heap, (agent.slow, -priority, serial, agent))

    def take(self) -> Any:
        """The one of highest priority."""
        if not self._heap:
            return None
        serial, agent = self._heap[0][2:]
        self._in_a_row = self._in_a_row + 1 if serial == self._last else 0
        if self._taken in self._changes or self._in_a_row > _PATIENCE:
            self._floor -= 1
            self._priorities[serial], self._in_a_row = self._floor, 0
            heapq.heapreplace(self._heap, (agent.slow, -self._floor, serial, agent))
        self._taken += 1
        self._last, agent = heapq.heappop(self._heap)[2:]
        return agent

    @property
    def idle(self) -> bool:
        """Whether nobody can run."""
        return not self._heap

    def drags(self, tag: tuple) -> bool:
        """Priorities starve enough."""
        return False

    def starves(self) -> bool:
        """Priorities starve enough."""
        return False

    def draw(self, n: int) -> int:
        """Any number below n."""
        return int(self._random.random() * n)


class Replay(_Queue):
    """Turns in the order given, an agent that cannot run passed over; then each agent runs until it must wait, the one
    that has waited longest next. No turns at all: the plain schedule. `draws`: what `draw` returns, then 0."""

    def __init__(self, turns: Iterable[tuple[str, int]] = (), draws: Iterable[int] = ()):
        super().__init__()
        self._turns, self._next, self._used = list(turns), 0, 0
        self._draws = iter(draws)
        self._last = ""

    def draw(self, n: int) -> int:
        """What was drawn."""
        return min(next(self._draws, 0), n - 1)

    def take(self) -> Any:
        """Who is next in the list, or, at its end, who ran last if it still can."""
        while self._next < len(self._turns):
            name, count = self._turns[self._next]
            if self._used < count and name in self.queue:
                self._used += 1
                return self._run(name)
            self._next, self._used = self._next + 1, 0
        if not self.queue:
            return None
        return self._run(self._last if self._last in self.queue else next(iter(self.queue)))

    def _run(self, name: str) -> Any:
        self._last = name
        return self.queue.pop(name)


class Recorded:
    """Another strategy, and what it chose: `turns` and `draws` to replay, and `steps`, each the agent's name and the
    place in a kernel where it went on."""

    def __init__(self, inner: Strategy):
        self.inner = inner
        self.turns: Turns = []
        self.draws: list[int] = []
        self.steps: list[tuple[str, Place | None]] = []
        self.begin, self.add = inner.begin, inner.add
        self.drags, self.starves = inner.drags, inner.starves

    @property
    def idle(self) -> bool:
        """Whether nobody can run."""
        return self.inner.idle

    def draw(self, n: int) -> int:
        """What the other one draws."""
        self.draws.append(self.inner.draw(n))
        return self.draws[-1]

    def take(self) -> Any:
        """What the other one takes."""
        agent = self.inner.take()
        if agent is not None:
            name = name_of(agent)
            if self.turns and self.turns[-1][0] == name:
                self.turns[-1] = name, self.turns[-1][1] + 1
            else:
                self.turns.append((name, 1))
            self.steps.append((name, _where(agent)))
        return agent


def _where(agent: Any) -> Place | None:
    """Where an agent goes on: an operation's own place, or the line of the kernel at which a partition yielded."""
    if agent.is_async:
        return agent.place
    frame = kernel_frame(agent.gr_frame)
    return Place(agent, "", frame.f_code, frame.f_lasti) if frame else None
