"""Operands with a scale for each row and block along K: what they are, the contract of the scales, and their values.

As torch's scaled_mm has them: float8_e4m3fn with float8_e8m0fnu for 32 (mxfp8), float4_e2m1fn_x2 with float8_e4m3fn
for 16 (nvfp4). Scales lie in blocks of 128 rows, of a or columns of b, and 4 along K, in the order of rows: row
32 j + i of a block is scales 4 j to 4 j + 3 of the i-th 16. What is beyond the last row or scale may be anything.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from tileweave.ops.contract import FP4, FP8, Like
from tileweave.ops.descriptors import Box
from tileweave.planner.tiling import STEP_BYTES, Tile

ROWS, WIDE = 128, 4  # scales in a block
CORES = ("tcgen05",)  # that multiply with them
DEQUANTIZED = "operands times their scales in float32"  # what others multiply


class Kind(NamedTuple):
    """Operands of one dtype: what their scales are, and how many values share one; values in an element."""

    scale: torch.dtype
    block: int
    packed: int


KINDS = {FP8: Kind(torch.float8_e8m0fnu, 32, 1), FP4: Kind(torch.float8_e4m3fn, 16, 2)}


def has_blocks(a: Like, scale: Like | None) -> bool:
    """Whether scales of operands like `a` are of blocks along K, be they in bytes, as other libraries have them."""
    in_bytes = KINDS[FP8].scale, torch.uint8
    return a.dtype == FP4 or (a.dtype == FP8 and scale is not None and scale.dtype in in_bytes)


def scales_in_step(dtype: torch.dtype) -> int:
    """Of a row, in a K step of a tile."""
    return STEP_BYTES * KINDS[dtype].packed // KINDS[dtype].block


def blocks_along(k: int, dtype: torch.dtype) -> int:
    """Blocks of scales side by side, of K in elements."""
    return math.ceil(k * KINDS[dtype].packed / KINDS[dtype].block / WIDE)


def scales_of(rows: int, k: int, dtype: torch.dtype) -> int:
    """How many scales the operand of so many rows has, of K in elements, with those beyond its last row or scale."""
    return math.ceil(rows / ROWS) * blocks_along(k, dtype) * ROWS * WIDE


def check_block_scales(op: str, a: Like, named: Iterable[tuple[str, Like | None, int]]) -> None:
    """ValueError unless each is the scales of blocks along K of so many rows that are as long as a's, beside a."""
    kind, k = KINDS[a.dtype], a.shape[1]
    values = k * kind.packed
    if values % kind.block:
        below = values - values % kind.block
        raise ValueError(
            f"{op}: K = {values} values are no whole blocks of {kind.block} that share a scale; {below} or "
            f"{below + kind.block} would be"
        )
    for name, scale, rows in named:
        count = scales_of(rows, k, a.dtype)
        if scale is None or scale.dtype != kind.scale or scale.device != a.device:
            got = "None" if scale is None else f"{scale.dtype} on {scale.device}"
            if scale is not None and scale.dtype == torch.uint8:
                got += f"; {name}.view({kind.scale}) would be"
            raise ValueError(f"{op}: {name} of {a.dtype} in blocks must be {kind.scale} on {a.device}, got {got}")
        if scale.shape.numel() != count:
            raise ValueError(
                f"{op}: {name} must have {count} values, those of {rows} x {values // kind.block} in blocks "
                f"of {ROWS} x {WIDE} as torch's scaled_mm takes them, got {scale.shape.numel()}"
            )


def unaddressable(k: int, dtype: torch.dtype) -> str | None:
    """Why TMA cannot address scales of so many elements along K; None if it can."""
    kind = KINDS[dtype]
    values, together = k * kind.packed, WIDE * kind.block
    if values % together or not values:
        return f"K = {values} is no multiple of {together}, whose scales lie together"
    return None


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Operands or scales as TMA, which lacks some types, sees them."""
    return x.view(torch.uint8) if x.dtype in (FP4, torch.float8_e8m0fnu) else x


def as_blocks(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Scales of so many rows as TMA sees them: [blocks of rows, blocks along K, 2, 256]."""
    return as_bytes(scale).view(math.ceil(rows / ROWS), -1, 2, 256)


def step_box(scale: torch.Tensor, rows: int, dtype: torch.dtype, tile_rows: int) -> Box:
    """The box of a K step's scales, of tiles of `tile_rows`, in those of an operand of `rows` and `dtype`."""
    blocks = as_blocks(scale, rows)
    return Box(blocks, (tile_rows // ROWS, scales_in_step(dtype) // WIDE, *blocks.shape[2:]), swizzle=0)


def side_by_side(scales: Sequence[torch.Tensor]) -> torch.Tensor:
    """Scales of matrices whose columns stand side by side, those of each from a block on, as those of one; copied if
    there are several."""
    if len(scales) == 1:
        return scales[0]
    return torch.cat([x.reshape(-1).view(torch.uint8) for x in scales]).view(scales[0].dtype)


def step_boxes(
    dtype: torch.dtype, scales: tuple[torch.Tensor, torch.Tensor], sizes: tuple[int, int], tile: Tile
) -> tuple[Box, Box]:
    """The boxes of both operands: of a [M, K] and b [K, N], sizes M and N."""
    return step_box(scales[0], sizes[0], dtype, tile[0]), step_box(scales[1], sizes[1], dtype, tile[1])


def dequantized(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows of an operand, K innermost, times their scales, in float32."""
    kind, (rows, k) = KINDS[x.dtype], x.shape
    if x.dtype == FP4:
        sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=x.device)
        codes = as_bytes(x).int()
        values = torch.cat((sizes, -sizes))[torch.stack((codes & 15, codes >> 4), -1).flatten(1)]
    else:
        values = x.float()
    tall, wide = math.ceil(rows / ROWS), blocks_along(k, x.dtype)
    blocks = scale.reshape(tall, wide, 32, ROWS // 32, WIDE).permute(0, 3, 2, 1, 4)
    each = blocks.float().reshape(tall * ROWS, wide * WIDE)[:rows, : values.shape[1] // kind.block]
    return (values.unflatten(1, (each.shape[1], kind.block)) * each.unsqueeze(-1)).flatten(1)


def dequantized_product(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    """a [M, K] @ b [K, N] of operands times their scales, in float32."""
    return dequantized(a, scale_a) @ dequantized(b.t(), scale_b).t()
