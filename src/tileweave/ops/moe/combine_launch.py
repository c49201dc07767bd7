"""moe_matmul_combine in one kernel: its host side."""

from dataclasses import dataclass, field
from functools import lru_cache

import torch

from tileweave.fabric import Fabric, Variant
from tileweave.ops.descriptors import in_one_piece, parallel_view
from tileweave.ops.grouped_matmul import launch as grouped_launch
from tileweave.ops.grouped_matmul.kernel import grouped_tiles_kernel
from tileweave.ops.grouped_matmul.launch import as_matrices
from tileweave.ops.moe.check import COMBINE
from tileweave.ops.moe.combine_kernel import moe_matmul_combine_kernel
from tileweave.ops.moe.launch import as_words
from tileweave.planner import Plan
from tileweave.planner.moe import most_row_tiles
from tileweave.planner.tiling import WARPS
from tileweave.tiles.grouped import ENTRY


@dataclass(slots=True)
class Prepared:
    """Of fused calls what their tensors' data and numbers of rows, tokens, slots and homes leave as it is: what they
    share with grouped matmuls; what follows these numbers in the kernel's arguments; the compiled kernel."""

    grouped: grouped_launch.Prepared
    tail: tuple
    variant: Variant = field(default_factory=Variant)


@lru_cache(maxsize=256)
def prepare(
    dtype: torch.dtype,
    shape: torch.Size,
    strides: tuple[int, ...],
    plan: Plan,
    world: int,
    choices: int,
    weighted: bool,
    device: torch.device,
) -> Prepared:
    """What calls have in common whose w is of this shape and these strides; remembered."""
    grouped = grouped_launch.prepare(dtype, shape, strides, plan.tile, plan.stages, plan.core, device)
    n, k, *constants = grouped.tail
    return Prepared(grouped, (n, k, world, choices, weighted, *constants))


def fused(
    fabric: Fabric,
    h: torch.Tensor,
    w: torch.Tensor,
    row_weight: torch.Tensor | None,
    offsets: torch.Tensor,
    row_slot: torch.Tensor,
    row_home: torch.Tensor,
    home: torch.Tensor,
    slots: int,
    homes: int,
    plan: Plan,
) -> torch.Tensor:
    """Launch the kernel on the current stream: [T, H] of rows h [R, I] and matrices w [E_local, I, H]; what follows as
    fields of a TokenRoute."""
    rows, world, (experts, k, n) = h.shape[0], fabric.world_size, w.shape
    tokens, choices = home.shape
    h, own, weighted = in_one_piece(h if rows else h.new_zeros(1, k)), as_matrices(w), row_weight is not None
    made = prepare(h.dtype, own.shape, own.stride(), plan, world, choices, weighted, h.device)
    channel = fabric.channel(COMBINE, 0, homes * n * h.element_size())
    inbox, slot_step = parallel_view(channel.staging, 2, (homes, n), h.dtype)
    out = torch.empty(tokens, n, dtype=h.dtype, device=h.device)
    target = out if tokens else h.new_empty(1, n)
    limit = most_row_tiles(rows, experts, plan.tile)
    table = torch.empty(1 + limit, ENTRY.value, dtype=torch.int32, device=h.device)
    tiling = offsets, table, target, rows, 0, limit, experts, plan.tile[0]  # 0: nothing to zero behind the last row
    of = made.grouped
    fabric.launch(grouped_tiles_kernel, fabric.sms, tiling, num_warps=WARPS, variant=of.tiles_variant)
    b = own.transpose(1, 2) if of.tail[-1] else own
    args = (
        fabric.rank, of.x.at(h, h.shape[0]), of.w.at(b), of.like_w.at(b), of.out.at(target, target.shape[0]), offsets,
        table, channel.flags, channel.flags.stride(0), channel.state, channel.timeout_us, inbox,
        inbox.stride(0) // 8, slot_step // 8, as_words(row_slot), as_words(row_home),
        in_one_piece(row_weight) if rows and weighted else h.new_zeros(1, dtype=torch.float32), slots,
        as_words(home), target, tokens, rows, *made.tail,
    )  # fmt: skip
    fabric.launch(moe_matmul_combine_kernel, fabric.sms, args, num_warps=WARPS, variant=made.variant)
    return out
