"""Operands with a scale for each row and block along K: what they are, the contract of the scales, and their values.

As torch's scaled_mm has them: float8_e4m3fn with float8_e8m0fnu for 32 (mxfp8), float4_e2m1fn_x2 with float8_e4m3fn
for 16 (nvfp4). Scales lie in blocks of 128 rows, of a or columns of b, and 4 along K, in the order of rows: row
32 j + i of a block is scales 4 j to 4 j + 3 of the i-th 16. What is beyond the last row or scale may be anything.
"""

import math
from typing import NamedTuple

import torch

from tileweave.ops.contract import FP4, FP8, Like

ROWS, WIDE = 128, 4  # scales in a block


class Kind(NamedTuple):
    """Operands of one dtype: what their scales are, and how many values share one; values in an element."""

    scale: torch.dtype
    block: int
    packed: int


KINDS = {FP8: Kind(torch.float8_e8m0fnu, 32, 1), FP4: Kind(torch.float8_e4m3fn, 16, 2)}


def has_blocks(a: Like, scale: Like | None) -> bool:
    """Whether scales of operands like `a` are of blocks along K."""
    return a.dtype == FP4 or (a.dtype == FP8 and scale is not None and scale.dtype == KINDS[FP8].scale)


def check_block_scales(op: str, a: Like, b: Like, scale_a: Like | None, scale_b: Like | None) -> None:
    """ValueError unless both are scales of blocks along K of a [M, K] and b [K, N], in a's elements, beside a."""
    kind, (m, k), n = KINDS[a.dtype], a.shape, b.shape[1]
    values = k * kind.packed
    if values % kind.block:
        below = values - values % kind.block
        raise ValueError(
            f"{op}: K = {values} values are no whole blocks of {kind.block} that share a scale; {below} or "
            f"{below + kind.block} would be"
        )
    for name, scale, rows in (("scale_a", scale_a, m), ("scale_b", scale_b, n)):
        wide = math.ceil(values / kind.block / WIDE)
        count = math.ceil(rows / ROWS) * wide * ROWS * WIDE
        if scale is None or scale.dtype != kind.scale or scale.device != a.device:
            got = "None" if scale is None else f"{scale.dtype} on {scale.device}"
            raise ValueError(f"{op}: {name} of {a.dtype} in blocks must be {kind.scale} on {a.device}, got {got}")
        if scale.shape.numel() != count:
            raise ValueError(
                f"{op}: {name} must have {count} values, those of {rows} x {values // kind.block} in blocks "
                f"of {ROWS} x {WIDE} as torch's scaled_mm takes them, got {scale.shape.numel()}"
            )


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Operands or scales as TMA, which lacks some types, sees them."""
    return x.view(torch.uint8) if x.dtype in (FP4, torch.float8_e8m0fnu) else x


def as_blocks(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Scales of so many rows as TMA sees them: [blocks of rows, blocks along K, 2, 256]."""
    return as_bytes(scale).view(math.ceil(rows / ROWS), -1, 2, 256)


def dequantized(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows of an operand, K innermost, times their scales, in float32."""
    kind, rows = KINDS[x.dtype], x.shape[0]
    if x.dtype == FP4:
        sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=x.device)
        codes = as_bytes(x).int()
        values = torch.cat((sizes, -sizes))[torch.stack((codes & 15, codes >> 4), -1).flatten(1)]
    else:
        values = x.float()
    blocks = scale.reshape(math.ceil(rows / ROWS), -1, 32, ROWS // 32, WIDE).permute(0, 3, 2, 1, 4)
    each = blocks.float().reshape(math.ceil(rows / ROWS) * ROWS, -1)[:rows, : values.shape[1] // kind.block]
    return (values.unflatten(1, (-1, kind.block)) * each.unsqueeze(-1)).flatten(1)
