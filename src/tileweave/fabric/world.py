"""Worlds whose ranks are threads of one process: running them, and what their fabrics have in common."""

import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from tileweave.fabric.agreement import ALIKE, check_labels, difference, facts_of
from tileweave.fabric.arguments import check_function
from tileweave.fabric.base import Channel, Fabric, Outcome, debug_mode
from tileweave.fabric.bound import workspace_bound
from tileweave.fabric.workspace import Workspace

T = TypeVar("T")
CALLS = 1024  # how many calls a run remembers before it forgets those that all ranks have made
_thread = threading.local()
_numbers = itertools.count()
_worlds: "weakref.WeakValueDictionary[str, World]" = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class VirtualGroup:
    """The group that `World.run` hands to a rank; stands wherever a process group may."""

    world: "World"
    rank: int

    @property
    def group_name(self) -> str:
        """Name of the world, the same for all its ranks; `find_world` knows it. torch.compile can read it."""
        return self.world.name

    def size(self) -> int:
        """Number of ranks."""
        return self.world.size


def current_group() -> VirtualGroup | None:
    """The group of the world that this thread is a rank of, if it is one."""
    return getattr(_thread, "group", None)


def find_world(name: str) -> "World | None":
    """The world of this name, unless there is none or it has been garbage collected."""
    return _worlds.get(name)


class World(ABC):
    """`size` ranks in this process, a thread each, on `device`; a context manager. One `run` at a time.

    The memory that kernels communicate through belongs to the world and persists from run to run.
    """

    backend: str
    cores: tuple[str, ...]
    memory_bytes = 0

    def __init__(self, size: int, device: torch.device, sms: int, timeout: float):
        self.size, self.device, self.sms, self.timeout = size, device, sms, timeout
        self.workspace = Workspace(size, device, int(timeout * 1e6), workspace_bound())
        self.name = f"{size}:tileweave:world:{next(_numbers)}"  # what names are: tileweave.fabric.names
        _worlds[self.name] = self
        self._running = threading.Lock()
        self._comparing = threading.Lock()
        self._calls: list[tuple[int, Hashable]] = []  # of the current run: who made each first, and what it was
        self._made, self._dropped = [0] * size, 0
        self._closed = False
        self._fabrics: list[Fabric] | None = None
        self.tuned: list[tuple[Any, ...]] = [()] * size  # by rank, from run to run

    def run(self, fn: Callable[[int, VirtualGroup], T]) -> list[T]:
        """Call `fn(rank, group)` once per rank, a thread each, and return the results in rank order.

        Inside, `group=None` means this world. The caller's grad mode holds in all ranks. If a rank raises, those that
        wait for it are released and its exception is raised here. TypeError if `fn` cannot be called so; RuntimeError
        if the world is closed or running.
        """
        check_function(fn)
        if self._closed:
            raise RuntimeError("this world is closed: call run inside its `with` block")
        if not self._running.acquire(blocking=False):
            raise RuntimeError("this world is running already: its ranks cannot start another run of it")
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def body(rank: int) -> T:
            group = VirtualGroup(self, rank)
            # A backward pass meets the other ranks, so each rank's must run on its own thread: the autograd engine's
            # one thread for a GPU would wait in the first rank's for all others. Last, as the other modes reset it.
            with (
                torch.inference_mode(inference),
                torch.set_grad_enabled(grad),
                torch.autograd.set_multithreading_enabled(False),
                _inside(group),
            ):
                return fn(rank, group)

        try:
            self._begin()
            return self._run(body)
        finally:
            self._end()
            self._running.release()

    def _begin(self) -> None:
        self._fabrics = [self._make_fabric(rank) for rank in range(self.size)]
        self._calls, self._made, self._dropped = [], [0] * self.size, 0

    def _end(self) -> None:
        self._fabrics = None

    def seen_by(self, mine: VirtualGroup | None) -> VirtualGroup | None:
        """This world's group for the thread whose default group is `mine`; None if that is no rank of it."""
        return mine if mine is not None and mine.world is self else None

    def fabric(self, rank: int) -> Fabric:
        """A rank's fabric. RuntimeError outside of `run`."""
        if self._fabrics is None:
            raise RuntimeError("group: this world is not running; use its groups inside world.run only")
        return self._fabrics[rank]

    def local_fabric(self, rank: int) -> Fabric:
        """A rank's fabric for kernels that wait for no peer, which it launches as it likes."""
        return self.fabric(rank)

    def compare(self, rank: int, call: Hashable) -> None:
        """Hold a rank's next call in this run to that of the rank which made it first; RuntimeError if they differ."""
        with self._comparing:
            number = self._made[rank]
            self._made[rank] += 1
            if number - self._dropped == len(self._calls):
                self._calls.append((rank, call))
            first, other = self._calls[number - self._dropped]
            if len(self._calls) >= CALLS:  # forget what all ranks have made
                everywhere = min(self._made) - self._dropped
                del self._calls[:everywhere]
                self._dropped += everywhere
        if other != call and facts_of(other) != facts_of(call):  # plans may have other reasons, say
            unlike = difference({first: facts_of(other), rank: facts_of(call)})
            raise RuntimeError(f"{ALIKE}, but in call {number} of this run {unlike}")

    def close(self) -> None:
        """Release the world's memory. It cannot run afterwards, nor may graphs that hold its calls be replayed."""
        self._closed = True
        self.workspace.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _make_fabric(self, rank: int) -> Fabric:
        """A rank's fabric for one run."""

    @abstractmethod
    def _run(self, body: Callable[[int], T]) -> list[T]:
        """Call `body(rank)` on a thread per rank, join all, raise the first failure."""


class WorldFabric(Fabric):
    """What the fabrics of such worlds share: growth and the exchange of values between threads."""

    def __init__(self, world: World, rank: int):
        self.world, self.rank = world, rank
        self.backend, self.world_size, self.device, self.sms = world.backend, world.size, world.device, world.sms
        self.cores, self.memory_bytes, self.debug = world.cores, world.memory_bytes, debug_mode()

    @property
    def tuned(self) -> tuple[Any, ...]:
        return self.world.tuned[self.rank]

    @tuned.setter
    def tuned(self, found: tuple[Any, ...]) -> None:
        self.world.tuned[self.rank] = found

    def refusal(self) -> str | None:
        return None

    def channel(self, op: str, adding_bytes: int, staging_bytes: int) -> Channel:
        found = self.world.workspace.find(op, self.rank, adding_bytes, staging_bytes)
        if found is not None:
            return found
        self._check_growth(op)

        def grow(_: Sequence[Any]) -> None:
            self._quiesce()
            self.world.workspace.grow(op, adding_bytes, staging_bytes)
            self._quiesce()

        label = f"channel({op!r}, adding_bytes={adding_bytes}, staging_bytes={staging_bytes})"
        self.exchange(label, None, grow)
        grown = self.world.workspace.find(op, self.rank, adding_bytes, staging_bytes)
        assert grown is not None
        return grown

    def channels(self) -> Sequence[Channel]:
        return [shared.channels[self.rank] for shared in self.world.workspace.ops.values()]

    def views(self, op: str) -> dict[Hashable, Any] | None:
        shared = self.world.workspace.ops.get(op)
        return shared.channels[self.rank].views if shared else None

    def memory(self) -> dict[str, dict[str, int]]:
        held = self.world.workspace.held().items()
        return {op: {"own": own, "mapped": own * self.world_size} for op, own in held}

    def gather_values(self, value: Any) -> list[Any]:
        return self.exchange("gather_values", value, list)

    @property
    def compares(self) -> bool:
        """Whenever there are ranks to compare: they share a process, so it costs next to nothing."""
        return self.world_size > 1

    def agree(self, call: Hashable) -> None:
        super().agree(call)
        self.world.compare(self.rank, call)

    def exchange(self, label: Hashable, value: Any, action: Callable[[list[Any]], T]) -> T:
        """All ranks meet with a value; `action(values)` runs once, values in rank order, and all return its result.

        RuntimeError on every rank if the labels differ. An error in the action is raised on every rank.
        """

        def act(deposits: list[tuple[Hashable, Any]]) -> Outcome:
            def checked() -> T:
                check_labels([label for label, _ in deposits])
                return action([value for _, value in deposits])

            return Outcome.of(checked)

        return self._meet((label, value), act).get()

    def _check_growth(self, op: str) -> None:
        """Raise RuntimeError where memory must not be allocated now."""

    def _quiesce(self) -> None:
        """Wait until no rank has work in flight; all ranks have met."""

    @abstractmethod
    def _meet(self, deposit: Any, act: Callable[[list[Any]], Outcome]) -> Outcome:
        """Wait for all ranks' deposits, let one thread call `act(deposits)`, return what it returned."""


@contextmanager
def _inside(group: VirtualGroup) -> Iterator[None]:
    """Make `group` this thread's default."""
    _thread.group = group
    try:
        yield
    finally:
        del _thread.group
