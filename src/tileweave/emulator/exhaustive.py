"""Every order that differs, for small programs: depth-first search with dynamic partial-order reduction.

Two steps of different agents are *dependent* if they touch the same bytes or barrier and do not commute, or if one lets
the other run. Orders that differ only in independent steps come to the same, so one of each kind is run: where two
dependent steps met that nothing orders, the other order is run as well (Flanagan and Godefroid, POPL 2005), and sleep
sets keep from running an order again.

A wait that could not have passed before a step is no alternative to it, and a look that ends in sleep changes nothing.
What the ranks' host programs do between their calls of the world is taken to commute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tileweave.emulator.search import _Queue, name_of
from tileweave.emulator.touches import Touch, meets

if TYPE_CHECKING:
    from tileweave.emulator.world import World


class Redundant(Exception):
    """This order is one that has been run already; the run ends here."""


def _dependent(earlier: list[Touch], later: list[Touch]) -> tuple[bool, bool]:
    """Whether two steps of one execution are dependent, and whether the later one could have been first."""
    found = reversible = False
    for b in later:
        for a in earlier:
            if a.thing is b.thing and meets(a, b):
                found = True
                reversible = reversible or b.passes is None or a.state is None or b.passes(a.state)
    return found, reversible


def _may_depend(one: list[Touch], other: list[Touch]) -> bool:
    """The same across executions, where things are known by name."""
    return any(a.where == b.where and meets(a, b) for a in one for b in other)


class _Step:
    """One step of the current order, and what is to be tried in its place."""

    __slots__ = ("agent", "clock", "done", "draws", "enabled", "number", "sleep", "todo", "touches")

    def __init__(self, enabled: list[str], sleep: dict[str, list[Touch]]):
        self.enabled, self.sleep = enabled, sleep
        self.todo: set[str] = set()
        self.done: dict[str, list[Touch]] = {}
        self.draws: list[tuple[int, int]] = []  # chosen, of how many
        self.agent, self.number = "", 0
        self.touches: list[Touch] = []
        self.clock: dict[str, int] = {}


class Exploration:
    """The orders of a program, as strategies for one world each: iterate, and run each in a world of its own.

    After the loop `complete` says whether all were run: `limit` bounds their number. `runs` counts those run to their
    end, `cut` those that turned out to be redundant. Raises RuntimeError if the program does not do the same again.
    """

    def __init__(self, limit: int = 10_000):
        self.limit = limit
        self.runs = self.cut = 0
        self.complete = False
        self._steps: list[_Step] = []

    def __iter__(self) -> Iterator[Order]:
        while self.runs + self.cut < self.limit:
            order = Order(self._steps)
            yield order
            order.end()
            if order.redundant:
                self.cut += 1
            else:
                self.runs += 1
            if not self._turn_back():
                self.complete = True
                return

    def _turn_back(self) -> bool:
        """Choose the next order; False if there is none."""
        steps = self._steps
        while steps:
            step = steps[-1]
            while step.draws:
                value, n = step.draws.pop()
                if value + 1 < n:
                    step.draws.append((value + 1, n))
                    return True
            if step.agent:
                step.done[step.agent] = step.touches
            left = [name for name in step.enabled if name in step.todo and name not in step.done]
            left = [name for name in left if name not in step.sleep]
            if left:
                step.agent = left[0]
                return True
            steps.pop()
        return False


class Order(_Queue):
    """One order of an Exploration."""

    def __init__(self, steps: list[_Step]):
        super().__init__()
        self._steps, self._given = steps, len(steps)
        self._taken = 0
        self._clocks: dict[str, dict[str, int]] = {}  # of agents: how many steps of each are known to come before
        self._current: _Step | None = None
        self._draws = 0
        self.redundant = False
        self._world: World | None = None

    def begin(self, world: World) -> None:
        """A run begins."""
        super().begin(world)
        self._world = world
        world.footprint = []

    def add(self, agent: Any) -> None:
        """An agent can run, by what the current step does."""
        name = name_of(agent)
        self.queue[name] = agent
        if self._current is not None and name != self._current.agent:
            clock = self._clocks.setdefault(name, {})
            _join(clock, self._clocks[self._current.agent])

    def draw(self, n: int) -> int:
        """Each number below n, one after the other."""
        step = self._current
        assert step is not None
        if self._draws == len(step.draws):
            step.draws.append((0, n))
        self._draws += 1
        return step.draws[self._draws - 1][0]

    def take(self) -> Any:
        """The next step of the order: as before, then anybody whose step has not been run here."""
        self.end()
        if not self.queue:
            return None
        if self._taken < self._given:
            step = self._steps[self._taken]
            if step.agent not in self.queue:
                raise RuntimeError(
                    "an exhaustive search needs a program that does the same again, but this one did not"
                )
        else:
            step = self._new_step()
        self._taken += 1
        self._draws = 0
        clock = self._clocks.setdefault(step.agent, {})
        clock[step.agent] = step.number = clock.get(step.agent, 0) + 1
        self._current, self._last = step, step.agent
        assert self._world is not None
        self._world.footprint = step.touches = []
        return self.queue.pop(step.agent)

    def _new_step(self) -> _Step:
        sleep: dict[str, list[Touch]] = {}
        if self._taken:
            before = self._steps[self._taken - 1]
            asleep = {**before.sleep, **before.done}
            asleep.pop(before.agent, None)
            sleep = {name: touches for name, touches in asleep.items() if not _may_depend(touches, before.touches)}
        step = _Step(list(self.queue), sleep)
        awake = [name for name in step.enabled if name not in sleep]
        if not awake:
            self.redundant = True
            raise Redundant
        last = self._steps[self._taken - 1].agent if self._taken else ""
        step.agent = last if last in awake else awake[0]
        step.todo.add(step.agent)
        self._steps.append(step)
        return step

    def end(self) -> None:
        """The step that was taken has ended: see which earlier ones it might have come before."""
        step, self._current = self._current, None
        if step is None:
            return
        clock = self._clocks[step.agent]
        for i in range(self._taken - 2, -1, -1):
            earlier = self._steps[i]
            if clock.get(earlier.agent, 0) >= earlier.number:
                continue  # known to come before
            dependent, reversible = _dependent(earlier.touches, step.touches)
            if not dependent:
                continue
            if reversible:
                self._try_before(i, step)
            _join(clock, earlier.clock)
        step.clock = dict(clock)

    def _try_before(self, i: int, step: _Step) -> None:
        """Let `step` be run in place of the i-th one: its agent, or one whose step there leads to it."""
        earlier = self._steps[i]
        clock = self._clocks[step.agent]
        first: dict[str, None] = {step.agent: None}
        for between in self._steps[i + 1 : self._taken - 1]:
            if clock.get(between.agent, 0) >= between.number:
                first.setdefault(between.agent)
        able = [name for name in first if name in earlier.enabled]
        if not able:
            earlier.todo.update(earlier.enabled)
        elif not earlier.todo & set(able):
            earlier.todo.add(able[0])


def _join(clock: dict[str, int], other: dict[str, int]) -> None:
    for name, number in other.items():
        if clock.get(name, 0) < number:
            clock[name] = number
