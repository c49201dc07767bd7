"""Tensors as TMA sees them: operands, results, and slots in parallel memory."""

import torch

from tileweave.lang import NVMMASharedLayout, TensorDescriptor

ALIGN = 16  # bytes: base and strides of whatever TMA addresses


def as_operand(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """`x` as a row-major matrix that TMA can address, and whether that matrix is the transpose of `x`.

    Either stride order costs nothing; anything else (a step in both dimensions, a base or row that is not 16-byte
    aligned, overlapping rows) is copied once.
    """
    for matrix, transposed in ((x, False), (x.t(), True)):
        row, column = matrix.stride()
        aligned = matrix.data_ptr() % ALIGN == 0 and row * x.element_size() % ALIGN == 0
        if column == 1 and row >= matrix.shape[1] and aligned:
            return matrix, transposed
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x), False


def describe(x: torch.Tensor, block: list[int], padding: str = "zero") -> TensorDescriptor:
    """TMA descriptor of `x` in boxes of `block`, with 128-byte swizzling."""
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * x.element_size(), rank=len(block))
    return TensorDescriptor.from_tensor(x, block, layout, padding)


def parallel_view(arena: torch.Tensor, count: int, shape: tuple[int, int], dtype: torch.dtype):
    """`count` matrices of `shape` per rank in an arena `[world, nbytes]`: a `[world, count, *shape]` view, and the
    distance of two of them in elements, which is a share of the arena."""
    elements = arena.view(dtype)
    step = elements.shape[1] // count * dtype.itemsize // ALIGN * ALIGN // dtype.itemsize
    return elements.as_strided((arena.shape[0], count, *shape), (elements.stride(0), step, shape[1], 1)), step
