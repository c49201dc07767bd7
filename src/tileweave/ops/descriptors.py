"""Tensors as TMA sees them: operands, results, and slots in parallel memory."""

from functools import lru_cache

import torch

from tileweave.lang import NVMMASharedLayout, TensorDescriptor

ALIGN = 16  # bytes: base and strides of whatever TMA addresses


def as_operand(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """`x` as a row-major matrix that TMA can address, and whether that matrix is the transpose of `x`.

    Either stride order costs nothing; anything else (a step in both dimensions, a base or row that is not 16-byte
    aligned, overlapping rows) is copied once.
    """
    (rows, columns), (row, column) = x.shape, x.stride()
    per_line = ALIGN // x.element_size()
    if x.data_ptr() % ALIGN == 0:
        if column == 1 and row >= columns and row % per_line == 0:
            return x, False
        if row == 1 and column >= rows and column % per_line == 0:
            return x.t(), True
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x), False


def describe(x: torch.Tensor, block: list[int], padding: str = "zero") -> TensorDescriptor:
    """TMA descriptor of `x` in boxes of `block`, with 128-byte swizzling."""
    return TensorDescriptor.from_tensor(x, block, _swizzled(8 * x.element_size(), len(block)), padding)


@lru_cache
def _swizzled(bits: int, rank: int) -> NVMMASharedLayout:
    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=rank)


def parallel_view(arena: torch.Tensor, count: int, shape: tuple[int, int], dtype: torch.dtype):
    """`count` matrices of `shape` per rank in an arena `[world, nbytes]`: a `[world, count, *shape]` view, and the
    distance of two of them in elements, which is a share of the arena."""
    elements = arena.view(dtype)
    step = elements.shape[1] // count * dtype.itemsize // ALIGN * ALIGN // dtype.itemsize
    return elements.as_strided((arena.shape[0], count, *shape), (elements.stride(0), step, shape[1], 1)), step
