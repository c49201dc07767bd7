"""moe_dispatch_matmul in one kernel: its host side."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from tileweave.fabric import Fabric
from tileweave.fabric.base import FLAGS
from tileweave.ops.descriptors import Box, in_one_piece, parallel_view, slots_box
from tileweave.ops.grouped_matmul.kernel import grouped_tiles_kernel
from tileweave.ops.grouped_matmul.launch import Prepared, as_matrices, like_matrices
from tileweave.ops.moe.check import NAME
from tileweave.ops.moe.kernel import BLOCK_ROWS, STEPS, moe_dispatch_matmul_kernel
from tileweave.ops.moe.routing import Experts, Lists
from tileweave.ops.moe.routing_launch import aligned
from tileweave.planner import Plan
from tileweave.planner.moe import most_row_tiles
from tileweave.planner.tiling import GROUP_ROWS, PART_BYTES, WARPS, part_buffers, part_rows
from tileweave.tiles.grouped import ENTRY

MOST_LINES = 128  # of a box: two such boxes have room in what a tile of 256 columns loads of B in a K step


class Travel(NamedTuple):
    """What travels, as the kernel reads it; fields as those of its Travel, of int32."""

    send_token: torch.Tensor
    send_place: torch.Tensor
    sent: torch.Tensor
    row_slot: torch.Tensor
    from_row: torch.Tensor


def travel_of(fabric: Fabric, row_slot: torch.Tensor, lists: Lists, align: int) -> Travel:
    """What travels on a route, to experts whose rows begin at multiples of `align`. Launches on the current stream."""
    places, from_row = aligned(fabric, lists, align)
    return Travel(as_words(lists.sends), places, as_words(lists.sent), as_words(row_slot), from_row)


def as_words(x: torch.Tensor) -> torch.Tensor:
    """`x` as contiguous int32, of which there is one element at least."""
    return x.to(torch.int32).contiguous() if x.numel() else x.new_zeros(1, dtype=torch.int32)


@lru_cache(maxsize=256)
def prepare(
    dtype: torch.dtype,
    shape: torch.Size,
    strides: tuple[int, ...],
    plan: Plan,
    world: int,
    gated: bool,
    silu: bool,
    device: torch.device,
) -> Prepared:
    """What calls have in common whose matrices are of this shape and these strides; remembered."""
    (bm, wide, bk), (_, k, n), itemsize = plan.tile, shape, dtype.itemsize
    bn = wide // 2 if gated else wide
    like, b_t = like_matrices(dtype, shape, strides)

    def box(columns: int) -> tuple[int, int]:
        return (columns, bk) if b_t else (bk, columns)

    x, out = (torch.empty(1, size, dtype=dtype, device="meta") for size in (k, n))
    buffers = part_buffers(plan.tile, plan.stages, itemsize, core=plan.core)
    return Prepared(
        Box(x, (bm, bk)), Box(like, (1, *box(bn))), Box(like[0], box(wide)),
        Box(out, (part_rows(plan.tile, plan.core), PART_BYTES // itemsize)),
        (n, k, world, bm, bn, bk, plan.stages, buffers, GROUP_ROWS, b_t, gated, silu, plan.comm_sms,
         FLAGS // (world + 1)),
    )  # fmt: skip


def fused(
    fabric: Fabric,
    x: torch.Tensor,
    w: torch.Tensor,
    w_gate: torch.Tensor | None,
    offsets: torch.Tensor,
    row_slot: torch.Tensor,
    token_slot: torch.Tensor,
    experts: Experts,
    lists: Lists,
    slots: int,
    most: int,
    silu: bool,
    plan: Plan,
) -> torch.Tensor:
    """Launch the kernel on the current stream: [R, I]. Matrices are [E_local, H, I], what follows as fields of a
    TokenRoute; experts: all; most: rows of the rank with most of them."""
    (tokens, world), (bm, wide, bk), gated = token_slot.shape, plan.tile, w_gate is not None
    rows, (own_experts, k, n) = row_slot.shape[0], w.shape
    own = alike([as_matrices(each) for each in (w, w_gate) if each is not None])
    made = prepare(x.dtype, own[0].shape, own[0].stride(), plan, world, gated, silu, x.device)
    b_t = made.tail[9]
    padded = -(-k // bk) * bk
    x = x if tokens else x.new_zeros(1, k)
    x = in_one_piece(x if k == padded else pad(x, (0, padded - k)))
    most = most_row_tiles(most, experts.most, plan.tile) * bm
    channel = fabric.channel(NAME, 0, -(-most // 2) * padded * x.element_size())  # both halves are one slot
    inbox, _ = parallel_view(channel.staging, 1, (most, padded), x.dtype)
    boxes = channel.views.get((x.dtype, plan.tile, padded))
    if boxes is None:
        lines, block = (padded // bk, bk), (1, 1, min(wide, MOST_LINES), bk)
        of_lines = (Box(each.unflatten(-1, lines), block) for each in (x[None], inbox[:, 0]))
        boxes = channel.views[x.dtype, plan.tile, padded] = slots_box(inbox, (bm, bk)), *of_lines
    slot_box, x_box, rows_box = boxes
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    target = out if rows else x.new_empty(1, n)
    limit = most_row_tiles(rows, own_experts, plan.tile)
    table = torch.empty(1 + limit, ENTRY.value, dtype=torch.int32, device=x.device)
    tiling = offsets, table, target, rows, n, limit, own_experts, bm
    fabric.launch(grouped_tiles_kernel, fabric.sms, tiling, num_warps=WARPS, variant=made.tiles_variant)
    descs = [made.w.at(each.transpose(1, 2) if b_t else each) for each in own]
    args = (
        fabric.rank, x_box.at(x, x.shape[0], behind=2), made.x.at(x, x.shape[0]), slot_box.at(inbox, most),
        rows_box.at(inbox, most, behind=2), descs[0], descs[-1], made.like_w.at(own[0]),
        made.out.at(target, target.shape[0]), target, offsets, table, channel.flags, channel.flags.stride(0),
        channel.state, channel.timeout_us, max(tokens, 1),
        *travel_of(fabric, row_slot, lists, bm), slots, block_of(slots, plan.comm_sms), rows, most,
        *made.tail,
    )  # fmt: skip
    fabric.launch(moe_dispatch_matmul_kernel, fabric.sms, args, num_warps=WARPS, variant=made.variant)
    return out


def alike(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The matrices in the stride order of the first; copied if need be."""
    flipped = matrices[0].stride(2) != 1

    def turned(w: torch.Tensor) -> torch.Tensor:
        if (w.stride(2) != 1) == flipped:
            return w
        return w.transpose(1, 2).contiguous().transpose(1, 2) if flipped else w.contiguous()

    return [turned(w) for w in matrices]


def block_of(slots: int, comm_sms: int) -> int:
    """Tokens in a block: so many that a source with all slots in use has fewer rounds than a flag can count."""
    rows = BLOCK_ROWS.value
    return max(1, -(-slots // (rows * comm_sms * (STEPS.value - 2)))) * rows
