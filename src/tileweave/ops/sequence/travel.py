"""How keys and values come to every rank, and their gradients home, where no fused kernel does it.

`Ring`: blocks travel from rank to rank by torch.distributed while the current one is in use; at most two are held
beyond the own one. `Gather`: tileweave's own all-gather and reduce-scatter, for ranks without a process group that can
send. Both have the same two methods, and all ranks use them equally often and in the same order. `Move` is for heads.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tileweave.fabric import Fabric
from tileweave.fabric.distributed import DistributedFabric
from tileweave.ops.collectives.operator import run as collective

BLOCKS, GRADIENTS = 0, 1  # tags of messages


def traveller(fabric: Fabric) -> "Ring | Gather":
    """What carries blocks between the ranks of a fabric."""
    group = _sending(fabric)
    return Gather(fabric) if group is None else Ring(fabric, group)


def mover(fabric: Fabric) -> "Move":
    """What carries heads between the ranks of a fabric."""
    return Move(fabric, _sending(fabric))


def _sending(fabric: Fabric) -> dist.ProcessGroup | None:
    """The process group of a fabric, if it can send from its device."""
    group = fabric.group if isinstance(fabric, DistributedFabric) else None
    sends = group is not None and (fabric.device.type == "cpu" or "cuda:nccl" in str(dist.get_backend_config(group)))
    return group if sends else None


class Move:
    """All-to-alls: by the process group, which `overlaps` them with what follows, else by tileweave's own."""

    def __init__(self, fabric: Fabric, group: dist.ProcessGroup | None):
        self.fabric, self.group, self.overlaps = fabric, group, group is not None

    def __call__(self, x: torch.Tensor, split: int, join: int) -> Callable[[], torch.Tensor]:
        """Start to send each rank its part of x along dimension `split`; what is returned waits, and returns what has
        come from all, put together along `join`. Collective."""
        if self.group is None:
            come = collective(self.fabric, "all_to_all", x, split, join)
            return lambda: come
        parts = torch.stack(x.chunk(self.fabric.world_size, split))
        arriving = torch.empty_like(parts)
        work = dist.all_to_all_single(arriving, parts, group=self.group, async_op=True)

        def finish(kept: Any = parts) -> torch.Tensor:
            work.wait()
            return torch.cat(arriving.unbind(), join)

        return finish


class Ring:
    """Each rank sends to the next one and receives from the one before it."""

    def __init__(self, fabric: Fabric, group: dist.ProcessGroup):
        self.rank, self.world, self.group = fabric.rank, fabric.world_size, group

    def blocks(self, own: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(source, block) of every rank, the own one first. `own` is contiguous and is not written to meanwhile."""
        block = own
        for step in range(self.world):
            more = step + 1 < self.world
            arriving = self._shift(block, BLOCKS) if more else None
            yield (self.rank - step) % self.world, block
            block = arriving() if arriving else block

    def sum_home(self, parts: Iterator[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """The sum of all ranks' parts for this one's block; `parts` (source, part) come in the order of `blocks`, and
        are given away: they are added to and sent on while the next one is made."""
        arriving: Callable[[], torch.Tensor] | None = None
        for _, part in parts:
            if arriving is not None:
                part += arriving()
            arriving = self._shift(part, GRADIENTS) if self.world > 1 else lambda part=part: part
        assert arriving is not None
        return arriving()

    def _shift(self, x: torch.Tensor, tag: int) -> Callable[[], torch.Tensor]:
        """Start to send `x` on; what is returned waits, and returns what has come in its place."""
        arriving = torch.empty_like(x)
        after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=self.group, tag=tag, group_peer=after),
                dist.P2POp(dist.irecv, arriving, group=self.group, tag=tag, group_peer=before),
            ]
        )

        def finish(kept: Any = x) -> torch.Tensor:
            for work in works:
                work.wait()
            return arriving

        return finish


class Gather:
    """All blocks are gathered at once, and parts of all ranks are summed at the end."""

    def __init__(self, fabric: Fabric):
        self.fabric = fabric

    def blocks(self, own: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """As that of `Ring`."""
        rank, world = self.fabric.rank, self.fabric.world_size
        whole = own[None] if world == 1 else collective(self.fabric, "all_gather", own[None], 0)
        for step in range(world):
            source = (rank - step) % world
            yield source, whole[source]

    def sum_home(self, parts: Iterator[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """As that of `Ring`."""
        by_source = dict(parts)
        if len(by_source) == 1:
            return next(iter(by_source.values()))
        whole = torch.stack([by_source[source] for source in range(len(by_source))])
        return collective(self.fabric, "reduce_scatter", whole, 0, "sum", True)[0]
