"""The host side of a kernel of an attention op, as far as it is the same for all of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tileweave.fabric import Fabric, Variant
from tileweave.ops.attention.launch import as_heads
from tileweave.ops.descriptors import Box
from tileweave.ops.sequence.contract import Call, lse_dtype
from tileweave.ops.sequence.packed import row_bounds
from tileweave.planner import Plan

LOG2_E = math.log2(math.e)
WARPS = 4  # of a consumer
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Prepared:
    """A fused call but for its tensors' data: what depends on shapes, strides and options alone, made once.
    channel: the name of the one that its slots are in."""

    kernel: Any
    channel: str
    call: Call
    q: Box
    k: Box
    v: Box
    out: Box
    positions: torch.Tensor | None  # of a packed call: of the rows, in whole tiles, in the sequence
    slots: tuple
    grid: int
    tail: tuple
    variant: Variant = field(default_factory=Variant)

    def launch(
        self, fabric: Fabric, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch on the current stream; returns (out, lse). What TMA cannot address is copied."""
        call, out = self.call, torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(call.lse_shape, dtype=torch.float32, device=q.device)
        q_desc, k_desc, v_desc = (
            box.at(as_heads(x, call.layout)) for box, x in ((self.q, q), (self.k, k), (self.v, v))
        )
        bounds = lse  # any pointer
        if cu_seqlens is not None and self.positions is not None:
            bounds = row_bounds(cu_seqlens, self.positions, call.causal)
        args = (fabric.rank, q_desc, k_desc, v_desc, self.out.at(out), lse, bounds, *self.slots, *self.tail)
        fabric.launch(self.kernel, self.grid, args, num_warps=WARPS, variant=self.variant)
        return out, lse


def fused(
    prepare: Callable[..., Prepared],
    fabric: Fabric,
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[tuple[torch.Tensor, torch.Tensor], Prepared]:
    """Launch the kernel that `prepare` prepares. Returns (out, lse), and what to use for later calls of the kind."""
    prepared = prepare(fabric, call, *(as_heads(x, call.layout) for x in (q, k, v)), plan)
    return prepared.launch(fabric, q, k, v, cu_seqlens), prepared


def nothing(call: Call, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of queries that see nothing, or of none."""
    return q.new_zeros(q.shape), torch.full(call.lse_shape, -math.inf, dtype=lse_dtype(q.dtype), device=q.device)
