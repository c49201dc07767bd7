"""Emulated ranks: the kernels' source runs on the CPU, under schedules drawn from a seed."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from tileweave.fabric.base import Copies, Outcome, Variant
from tileweave.fabric.world import VirtualGroup, World, WorldFabric

T = TypeVar("T")


class EmulatedWorld(World):
    """Ranks in the emulator, with `sms` CTAs of a rank resident at a time.

    Each `run` has a schedule of its own, drawn from `seed` plus the number of runs before it, so that a program
    replays exactly.
    """

    backend, cores = "emulated", ("wgmma", "tcgen05")

    def __init__(self, size: int, seed: int, sms: int, delayed: Sequence[int], timeout: float):
        super().__init__(size, torch.device("cpu"), sms, timeout)
        unknown = sorted(set(delayed) - set(range(size)))
        if unknown:
            raise ValueError(f"delayed: expected ranks from 0 to {size - 1}, got {unknown}")
        from tileweave.emulator import Multicast

        self.workspace.multicast = Multicast
        self.seed, self.delayed = seed, tuple(delayed)
        self._machine: Any = None
        self.parts: list[EmulatedPart] = []
        self.deposits: list[Any] = [None] * size

    def _make_fabric(self, rank: int) -> "EmulatedFabric":
        return EmulatedFabric(self, rank)

    def part(self, ranks: Sequence[int]) -> "EmulatedPart":
        """A new group of some ranks, numbered as they are listed, with memory of its own; made outside of `run`.

        ValueError unless they are ranks of this world, each once."""
        if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size)) or not ranks:
            raise ValueError(f"ranks: expected some of 0 to {self.size - 1}, each once, got {list(ranks)}")
        self.parts.append(EmulatedPart(self, tuple(ranks)))
        return self.parts[-1]

    @property
    def machine(self) -> Any:
        """The emulator's world of the current run."""
        return self._machine

    def capture(self) -> Any:
        """Inside `run`: `with world.capture() as graph:` notes what the calling rank does; `graph.replay()` does it
        again, as a CUDA graph would."""
        return self.machine.capture()

    def touch(self, tensor: torch.Tensor, kind: str) -> None:
        """Inside `run`: declare that the calling rank's stream reads or writes ("write") a tensor here, between its
        kernels, so that races with it are seen."""
        self.machine.touch(tensor, kind)

    def _run(self, body: Callable[[int], T]) -> list[T]:
        from tileweave import emulator

        self._machine = emulator.World(
            self.size, seed=self.seed, sms=self.sms, delayed=self.delayed, host_timeout=self.timeout,
            parallel=self.workspace.holds,
        )  # fmt: skip
        self.seed += 1
        try:
            return self._machine.run(body)
        except BaseException:
            for world in (self, *self.parts):
                world.workspace.clear()  # a call was cut short: flags and slots are in no known state
            raise
        finally:
            self._machine = None

    def _begin(self) -> None:
        super()._begin()
        for part in self.parts:
            part._begin()

    def _end(self) -> None:
        super()._end()
        for part in self.parts:
            part._end()

    def meet(self, action: Callable[[], T]) -> T:
        """All ranks meet; one runs `action`, and all return its result."""
        return self.machine.rendezvous(action)

    def close(self) -> None:
        super().close()
        for part in self.parts:
            part.close()


class EmulatedPart(EmulatedWorld):
    """Some ranks of an emulated world, `whole`, as a group of their own: `of(rank)` is what ops take in a run of it."""

    def __init__(self, whole: EmulatedWorld, ranks: tuple[int, ...]):
        super().__init__(len(ranks), whole.seed, whole.sms, (), whole.timeout)
        self.whole, self.ranks = whole, ranks

    @property
    def machine(self) -> Any:
        return self.whole.machine

    def of(self, rank: int) -> VirtualGroup:
        """The group as a rank of the whole has it; ValueError if it is not in it."""
        if rank not in self.ranks:
            raise ValueError(f"rank: expected one of {list(self.ranks)}, got {rank}")
        return VirtualGroup(self, self.ranks.index(rank))

    def seen_by(self, mine: VirtualGroup | None) -> VirtualGroup | None:
        return self.of(mine.rank) if mine and mine.world is self.whole and mine.rank in self.ranks else None

    def meet(self, action: Callable[[], T]) -> T:
        return self.machine.rendezvous(action, self.ranks, self.name)


class EmulatedFabric(WorldFabric):
    """One rank of an emulated world."""

    world: EmulatedWorld

    def multicast_refusal(self) -> str | None:
        return None

    def launch(
        self,
        kernel: Any,
        grid: int,
        args: Sequence[Any],
        *,
        num_warps: int,
        variant: Variant | None = None,
        copies: Copies = (),
    ) -> None:
        """Run the kernel; returns when its CTAs and their asynchronous operations have ended."""
        self.check_grid(kernel, grid)
        self.world.machine.launch(kernel, (grid,), *args, num_warps=num_warps, copies=copies)

    def _reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.exchange(f"reduce_scatter({tuple(x.shape)})", x, list)
        total = reduce_rows(parts, self.rank)
        self.rendezvous()  # the peers may change their x only when all have read it
        return total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        whole = torch.cat(self.exchange(f"all_gather({tuple(x.shape)}, {x.dtype})", x, list))
        self.rendezvous()  # the peers may change their x only when all have read it
        return whole

    def _meet(self, deposit: Any, act: Callable[[list[Any]], Outcome]) -> Outcome:
        self.world.deposits[self.rank] = deposit
        return self.world.meet(lambda: act(list(self.world.deposits)))


def reduce_rows(parts: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """Sum of all ranks' tensors, of which only `rank`'s share of the rows; rounded once."""
    rows = torch.stack([part.chunk(len(parts))[rank] if part.shape[0] else part for part in parts])
    return rows.sum(0, dtype=rows.dtype)
