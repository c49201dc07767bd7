"""grouped_matmul: how it is computed, by a table of tiles and one kernel, or by a matmul for each expert."""

from dataclasses import dataclass, field
from functools import lru_cache

import torch

from tileweave.fabric import Fabric, Variant
from tileweave.ops.descriptors import ALIGN, Box, in_one_piece
from tileweave.ops.grouped_matmul.check import Call
from tileweave.ops.grouped_matmul.kernel import grouped_matmul_kernel, grouped_tiles_kernel
from tileweave.planner import Plan
from tileweave.planner.moe import most_row_tiles
from tileweave.planner.tiling import GROUP_ROWS, PART_BYTES, WARPS, Tile, part_buffers, part_rows
from tileweave.tiles.grouped import ENTRY


def unfused(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The fallback: a matmul for each expert. Waits for the offsets."""
    out, start = x.new_zeros(x.shape[0], w.shape[2]), 0
    for expert, end in enumerate(offsets.clamp(0, x.shape[0]).tolist()):
        if end > start:
            torch.matmul(x[start:end], w[expert], out=out[start:end])
            start = end
    return out


def unfused_outer(x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """For each expert its rows of x [T, H], transposed, times those of y [T, I]: [E, H, I]."""
    out, start = x.new_zeros(offsets.shape[0], x.shape[1], y.shape[1]), 0
    for expert, end in enumerate(offsets.clamp(0, x.shape[0]).tolist()):
        if end > start:
            torch.matmul(x[start:end].t(), y[start:end], out=out[expert])
            start = end
    return out


def as_matrices(w: torch.Tensor) -> torch.Tensor:
    """`w` [E, H, I] as TMA can address it: one of the last two strides is 1, the others and the base are 16-byte
    aligned and nothing overlaps. Either order of the last two costs nothing; anything else is copied."""
    (_, rows, columns), (expert, row, column) = w.shape, w.stride()
    line = ALIGN // w.element_size()
    by_rows = column == 1 and row >= columns and row % line == 0 and expert >= rows * row
    by_columns = row == 1 and column >= rows and column % line == 0 and expert >= columns * column
    aligned = expert % line == 0 and w.data_ptr() % ALIGN == 0
    return w if (by_rows or by_columns) and aligned else in_one_piece(w.contiguous())


@dataclass(slots=True)
class Prepared:
    """Of fused calls what their tensors' data and numbers of rows leave as it is; tail: what follows the numbers that
    a call has of its own in the kernel's arguments."""

    x: Box
    w: Box
    like_w: Box
    out: Box
    tail: tuple
    tiles_variant: Variant = field(default_factory=Variant)
    variant: Variant = field(default_factory=Variant)


def like_matrices(dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> tuple[torch.Tensor, bool]:
    """Matrices [E, K, N] without data as a kernel reads them, transposed where K is contiguous, and whether it is."""
    like = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    b_t = strides[2] != 1 or strides[1] < shape[2]
    return like.transpose(1, 2) if b_t else like, b_t


@lru_cache(maxsize=256)
def prepare(
    dtype: torch.dtype,
    shape: torch.Size,
    strides: tuple[int, ...],
    tile: Tile,
    stages: int,
    core: str,
    device: torch.device,
) -> Prepared:
    """What calls have in common whose w is of this shape and these strides; remembered."""
    (bm, bn, bk), (_, k, n) = tile, shape
    like, b_t = like_matrices(dtype, shape, strides)
    box = (bn, bk) if b_t else (bk, bn)
    x, out = (torch.empty(1, size, dtype=dtype, device="meta") for size in (k, n))
    part = part_rows(tile, core), PART_BYTES // dtype.itemsize
    buffers = part_buffers(tile, stages, dtype.itemsize, core=core)
    return Prepared(
        Box(x, (bm, bk)), Box(like, (1, *box)), Box(like[0], box), Box(out, part),
        (n, k, bm, bn, bk, stages, buffers, GROUP_ROWS, b_t),
    )  # fmt: skip


def fused(
    fabric: Fabric, call: Call, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, plan: Plan
) -> torch.Tensor:
    """Launch both kernels on the current stream."""
    own_x, own_w, own_offsets = in_one_piece(x), as_matrices(w), in_one_piece(offsets)
    made = prepare(call.dtype, own_w.shape, own_w.stride(), plan.tile, plan.stages, plan.core, x.device)
    out = torch.empty(call.rows, call.n, dtype=call.dtype, device=x.device)
    target = out
    if call.rows == 0:  # there is no descriptor of an empty tensor
        own_x, target = x.new_zeros(1, call.k), x.new_empty(1, call.n)
    limit = most_row_tiles(call.rows, call.experts, plan.tile)
    table = torch.empty(1 + limit, ENTRY.value, dtype=torch.int32, device=x.device)
    tiling = own_offsets, table, target, call.rows, call.n, limit, call.experts, plan.tile[0]
    fabric.launch(grouped_tiles_kernel, fabric.sms, tiling, num_warps=WARPS, variant=made.tiles_variant)
    b, rows = own_w.transpose(1, 2) if made.tail[-1] else own_w, target.shape[0]
    descriptors = made.x.at(own_x, rows), made.w.at(b), made.like_w.at(b), made.out.at(target, rows)
    args = *descriptors, target, own_offsets, table, call.rows, *made.tail
    fabric.launch(grouped_matmul_kernel, fabric.sms, args, num_warps=WARPS, variant=made.variant)
    return out
