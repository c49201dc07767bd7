"""The memory of worlds whose ranks share one address space: channels by op, and the rule by which they grow.

A parallel tensor is here a plain tensor [world, n]. A slot's size is the largest that was ever asked for, rounded up
to a granule: it depends on the sequence of calls alone, so all ranks grow at the same call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tileweave.fabric.base import BLOCK_WORDS, HEADER_WORDS, RECORD, STATE_WORDS, Channel, FabricTimeout
from tileweave.fabric.bound import check_bound

CUDA_GRANULE = 2 << 20
EMULATED_GRANULE = 256


@dataclass
class Shared:
    """The memory of one op's channels, of all ranks, and the channels."""

    flags: torch.Tensor
    state: torch.Tensor
    adding: torch.Tensor
    staging: torch.Tensor
    channels: list[Channel]

    @property
    def adding_bytes(self) -> int:
        """Bytes of one adding slot."""
        return self.adding.shape[1] // 2

    @property
    def staging_bytes(self) -> int:
        """Bytes of one staging slot."""
        return self.staging.shape[1] // 2


class Workspace:
    """The channels of all ranks of a world."""

    def __init__(self, world: int, device: torch.device, timeout_us: int, bound: int | None = None):
        self.world, self.device, self.timeout_us = world, device, timeout_us
        self.bound = bound  # bytes of a rank
        self.granule = CUDA_GRANULE if device.type == "cuda" else EMULATED_GRANULE
        self.ops: dict[str, Shared] = {}
        self.multicast: Callable[[torch.Tensor], Any] | None = None  # of its channels
        self._captured: list[tuple[str, Shared]] = []  # forgotten, but some CUDA graph may still be replayed on it

    def find(self, op: str, rank: int, adding_bytes: int, staging_bytes: int) -> Channel | None:
        """A rank's channel, or None where it has to grow first."""
        shared = self.ops.get(op)
        if shared is None or adding_bytes > shared.adding_bytes or staging_bytes > shared.staging_bytes:
            return None
        return shared.channels[rank]

    def grow(self, op: str, adding_bytes: int, staging_bytes: int) -> None:
        """Make room for slots of these sizes. One caller, while no rank has work in flight; flags and state persist.

        RuntimeError, with nothing changed, where the bound does not allow it.
        """
        old = self.ops.get(op)
        sizes = self._arena_bytes(adding_bytes), self._arena_bytes(staging_bytes)
        arenas = (old.adding, old.staging) if old else (None, None)
        grown = [size for size, arena in zip(sizes, arenas, strict=True) if arena is None or size > arena.shape[1]]
        check_bound(op, sum(self.held().values()), sum(grown) + (0 if old else 4 * BLOCK_WORDS), self.bound)
        adding, staging = (self._arena(size, arena) for size, arena in zip(sizes, arenas, strict=True))
        flags, state = (old.flags, old.state) if old else (self._zeros(BLOCK_WORDS), self._zeros(STATE_WORDS))
        if old:
            self._let_go(op, old)
        channels = [Channel(op, flags, words, adding, staging, self.timeout_us, self.multicast) for words in state]
        self.ops[op] = Shared(flags, state, adding, staging, channels)

    def held(self) -> dict[str, int]:
        """Bytes of a rank by op, of what is kept for graphs too."""
        blocks: dict[str, dict[int, int]] = {}
        for op, shared in [*self.ops.items(), *self._captured]:  # which may have some in common
            of_op = blocks.setdefault(op, {})
            of_op |= {x.data_ptr(): x.nbytes // self.world for x in (shared.flags, shared.adding, shared.staging)}
        return {op: sum(of_op.values()) for op, of_op in blocks.items()}

    def holds(self, address: int) -> bool:
        """Whether the storage at an address is memory of a channel, with a slice for each rank."""
        parts = (t for _, s in [*self.ops.items(), *self._captured] for t in (s.flags, s.adding, s.staging))
        return any(t.data_ptr() == address for t in parts)

    def timed_out(self) -> FabricTimeout | None:
        """What the kernels of some channel have recorded, if a wait has timed out. Synchronizes with the device."""
        for op, shared in [*self.ops.items(), *self._captured]:
            for header in shared.flags[:, :HEADER_WORDS].tolist():
                if header[RECORD]:
                    index, expected, seen, rank = header[RECORD + 1 : RECORD + 5]
                    return FabricTimeout(op, rank, index, expected, seen)
        return None

    def clear(self) -> None:
        """Forget all channels: the next call of an op makes new ones. No rank has work in flight."""
        for op, shared in self.ops.items():
            self._let_go(op, shared)
        self.ops.clear()
        for _, shared in self._captured:  # still aborted: whoever replays a graph there is told again
            shared.flags[:, RECORD] = 0

    def release(self) -> None:
        """Let go of all memory, captured or not. No graph that uses it will be replayed."""
        self.ops.clear()
        self._captured.clear()

    def _let_go(self, op: str, shared: Shared) -> None:
        """Keep what a graph may be replayed on; the rest goes when nobody refers to it any more."""
        if any(channel.captured for channel in shared.channels):
            self._captured.append((op, shared))

    def _arena_bytes(self, nbytes: int) -> int:
        """A rank's bytes of two slots of `nbytes` each, at least one granule each."""
        return 2 * max(-(-nbytes // self.granule), 1) * self.granule

    def _arena(self, size: int, old: torch.Tensor | None) -> torch.Tensor:
        """`size` zeroed bytes for each rank; the old ones if they are as many."""
        if old is not None and size <= old.shape[1]:
            return old
        with torch.inference_mode(False):  # it outlives the mode of the call that makes it
            return torch.zeros(self.world, size, dtype=torch.uint8, device=self.device)

    def _zeros(self, words: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.zeros(self.world, words, dtype=torch.int32, device=self.device)
