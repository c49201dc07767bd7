"""Emulated ranks: the kernels' source runs on the CPU, under schedules drawn from a seed."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from tileweave.fabric.base import Copies, Outcome, Variant
from tileweave.fabric.world import World, WorldFabric

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
        self.deposits: list[Any] = [None] * size

    def _make_fabric(self, rank: int) -> "EmulatedFabric":
        return EmulatedFabric(self, rank)

    def capture(self) -> Any:
        """Inside `run`: `with world.capture() as graph:` notes what the calling rank does; `graph.replay()` does it
        again, as a CUDA graph would."""
        return self._machine.capture()

    def touch(self, tensor: torch.Tensor, kind: str) -> None:
        """Inside `run`: declare that the calling rank's stream reads or writes ("write") a tensor here, between its
        kernels, so that races with it are seen."""
        self._machine.touch(tensor, kind)

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
            self.workspace.clear()  # a call was cut short: flags and slots are in no known state
            raise
        finally:
            self._machine = None


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
        self.world._machine.launch(kernel, (grid,), *args, num_warps=num_warps, copies=copies)

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
        return self.world._machine.rendezvous(lambda: act(list(self.world.deposits)))


def reduce_rows(parts: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """Sum of all ranks' tensors, of which only `rank`'s share of the rows; rounded once."""
    rows = torch.stack([part.chunk(len(parts))[rank] if part.shape[0] else part for part in parts])
    return rows.sum(0, dtype=rows.dtype)
