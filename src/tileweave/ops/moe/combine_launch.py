"""moe_matmul_combine in one kernel: its host side."""

import torch

from tileweave.fabric import Fabric
from tileweave.ops.descriptors import describe, in_one_piece, parallel_view
from tileweave.ops.grouped_matmul.kernel import grouped_tiles_kernel
from tileweave.ops.grouped_matmul.launch import as_matrices
from tileweave.ops.moe.check import COMBINE
from tileweave.ops.moe.combine_kernel import moe_matmul_combine_kernel
from tileweave.ops.moe.launch import as_words, variant_of
from tileweave.planner import Plan
from tileweave.planner.moe import most_row_tiles
from tileweave.planner.tiling import GROUP_ROWS, PART_BYTES, WARPS, part_buffers, part_rows
from tileweave.tiles.grouped import ENTRY


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
    bm, bn, bk = plan.tile
    rows, (tokens, choices), (experts, k, n) = h.shape[0], home.shape, w.shape
    h = in_one_piece(h if rows else h.new_zeros(1, k))
    own = as_matrices(w)
    b_t = own.stride(2) != 1 or own.stride(1) < n
    b = own.transpose(1, 2) if b_t else own
    box, part = ((bn, bk) if b_t else (bk, bn)), (part_rows(plan.tile), PART_BYTES // h.element_size())
    channel = fabric.channel(COMBINE, 0, homes * n * h.element_size())
    inbox, slot_step = parallel_view(channel.staging, 2, (homes, n), h.dtype)
    out = torch.empty(tokens, n, dtype=h.dtype, device=h.device)
    target = out if tokens else h.new_empty(1, n)
    limit = most_row_tiles(rows, experts, plan.tile)
    table = torch.empty(1 + limit, ENTRY.value, dtype=torch.int32, device=h.device)
    tiling = offsets, table, target, rows, 0, limit, experts, bm  # 0: nothing to zero behind the last row
    variant = variant_of(fabric, COMBINE, h, tiling[-2:])
    fabric.launch(grouped_tiles_kernel, fabric.sms, tiling, num_warps=WARPS, variant=variant)
    no_weight = row_weight is None or not rows
    args = (
        fabric.rank, describe(h, (bm, bk)), describe(b, (1, *box)), describe(b[0], box), describe(target, part),
        offsets, table, channel.flags, channel.flags.stride(0), channel.state, channel.timeout_us, inbox,
        inbox.stride(0) // 8, slot_step // 8, as_words(row_slot), as_words(row_home),
        h.new_zeros(1, dtype=torch.float32) if no_weight else in_one_piece(row_weight), slots,
        as_words(home), target, tokens, rows, n, k, fabric.world_size, choices, row_weight is not None,
        bm, bn, bk, plan.stages, part_buffers(plan.tile, plan.stages, h.element_size()), GROUP_ROWS, b_t,
    )  # fmt: skip
    variant = variant_of(fabric, COMBINE, h, args[-10:])
    fabric.launch(moe_matmul_combine_kernel, fabric.sms, args, num_warps=WARPS, variant=variant)
    return out
