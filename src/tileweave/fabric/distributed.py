"""Groups of torch.distributed, and a process that is alone: no fused kernels, the group's own collectives."""

from collections.abc import Hashable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tileweave.fabric.agreement import check_facts, facts_of
from tileweave.fabric.base import Channel, Copies, Fabric, Variant, debug_mode
from tileweave.fabric.capability import cuda_refusal
from tileweave.fabric.gathering import ALL_GATHER, gather_values
from tileweave.fabric.nodes import Nodes, Spread, spread_of

# Newer releases of PyTorch call it by the first name, and warn of the other.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class DistributedFabric(Fabric):
    """This process's side of a process group; `group` None stands for a process alone, which needs no group.

    ValueError if this process is no member of the group.
    """

    backend = "fallback"
    sms = 0

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device):
        self.group, self.device = group, device
        self.rank, self.world_size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        if self.rank < 0:
            raise ValueError("group: this process is not a member of the group")
        self.debug = debug_mode()

    @property
    def nodes(self) -> Nodes | None:
        spread = self._spread()
        if spread.inside is None or spread.across is None:
            return None
        return Nodes(DistributedFabric(spread.inside, self.device), spread.across)

    @property
    def uneven(self) -> str | None:
        return self._spread().uneven

    def _spread(self) -> Spread:
        return Spread() if self.group is None else spread_of(self.group, self.gather_values)

    @property
    def compares(self) -> bool:
        """In debug mode, and always where the host need not wait for a GPU."""
        return self.debug or (self.device.type == "cpu" and self.world_size > 1)

    def agree(self, call: Hashable) -> None:
        """A meeting of all ranks before they make `call`, where they compare calls; else see `Fabric.agree`."""
        if self.compares:
            check_facts(self.gather_values(facts_of(call)))

    def refusal(self) -> str | None:
        if self.device.type == "cpu":
            return "CPU tensors outside an emulated world (tileweave.virtual_world)"
        return f"{cuda_refusal(self.device)}"

    def channel(self, op: str, adding_bytes: int, staging_bytes: int) -> Channel:
        """Raises RuntimeError: there is no peer memory."""
        self._refuse(op)

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
        """Raises RuntimeError: there are no kernels."""
        self._refuse(kernel.__name__)

    def gather_values(self, value: Any) -> list[Any]:
        return [value] if self.group is None else gather_values(self.group, value)

    def _reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """The group's reduce-scatter."""
        if self.group is None:
            return x.clone()
        out = x.new_empty(x.shape[0] // self.world_size, *x.shape[1:])
        if out.numel():
            REDUCE_SCATTER(out, x.contiguous(), group=self.group)
        return out

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The group's all-gather."""
        out = x.new_empty(x.shape[0] * self.world_size, *x.shape[1:])
        if self.group is None:
            return out.copy_(x)
        if out.numel():
            ALL_GATHER(out, x.contiguous(), group=self.group)
        return out

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """The group's all-to-all."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if self.group is None:
            return out.copy_(x)
        if out.numel():
            dist.all_to_all_single(out, x.contiguous(), group=self.group)
        return out

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The group's all-reduce."""
        out = x.clone(memory_format=torch.contiguous_format)
        if self.group is not None and out.numel():
            dist.all_reduce(out, group=self.group)
        return out

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(f"{what}: no fused kernels here: {self.refusal()}")
