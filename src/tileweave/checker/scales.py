"""Operands of 8 and 4 bits with their scales, made of wider ones, and what they stand for.

| scaled | operands | scales |
|---|---|---|
| rows | float8_e4m3fn | float32, of each row of a and column of b |
| mxfp8 | float8_e4m3fn | float8_e8m0fnu, of blocks of 32 along K |
| nvfp4 | float4_e2m1fn_x2 | float8_e4m3fn, of blocks of 16 along K |

Scales of blocks are bytes of the operand, in any order, so that other operands have others: no look at a value, which a
graph that is captured would not allow.
"""

import math

import torch

from tileweave.ops.block_scales import KINDS, ROWS, WIDE, blocks_along, dequantized
from tileweave.ops.contract import FP4, FP8

BLOCKS = {"mxfp8": FP8, "nvfp4": FP4}

Operand = tuple[torch.Tensor, torch.Tensor]  # and its scales


def narrowed(a: torch.Tensor, b: torch.Tensor, scaled: str) -> tuple[Operand, Operand]:
    """a [M, K] and b [K, N] of few bits, K innermost, each with its scales. ValueError for an odd K of nvfp4."""
    (a, scale_a), (b, scale_b) = (_rows_of(x.contiguous(), scaled) for x in (a, b.t()))
    return (a, scale_a), (b.t(), scale_b if scaled in BLOCKS else scale_b.t())


def widened(a: Operand, b: Operand, scaled: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of such operands in float32."""
    if scaled not in BLOCKS:
        return a[0].float() * a[1], b[0].float() * b[1]
    return dequantized(*a), dequantized(b[0].t(), b[1]).t()


def _rows_of(x: torch.Tensor, scaled: str) -> Operand:
    """Rows of few bits, and their scales."""
    if scaled not in BLOCKS:
        return x.to(FP8), torch.linspace(0.5, 1.5, len(x)).unsqueeze(1)
    bits = x.to(FP8) if BLOCKS[scaled] == FP8 else _four_bits(x)
    count = math.ceil(len(x) / ROWS) * ROWS * blocks_along(bits.shape[1], bits.dtype) * WIDE
    pool = bits.view(torch.uint8).flatten()
    drawn = pool[torch.arange(count) * 37 % max(len(pool), 1)]
    if BLOCKS[scaled] == FP4:
        return bits, (0.5 + drawn / 256).to(FP8)
    return bits, (120 + drawn % 11).view(KINDS[FP8].scale)


def _four_bits(x: torch.Tensor) -> torch.Tensor:
    """Two numbers in a byte: a sign and which of eight sizes, near twice the number's."""
    if x.shape[1] % 2:
        raise ValueError(f"K = {x.shape[1]} is odd, and nvfp4 has two values in an element")
    codes = (2 * x.float().abs()).round().clamp(max=7).to(torch.uint8) | (x < 0).to(torch.uint8) << 3
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(FP4)
