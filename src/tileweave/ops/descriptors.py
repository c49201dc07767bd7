"""Tensors as TMA sees them: operands, results, and slots in parallel memory."""

from collections.abc import Hashable, Sequence

import torch

from tileweave.lang import NVMMASharedLayout, TensorDescriptor

ALIGN = 16  # bytes: base and strides of whatever TMA addresses
MODELS = 4096
_models: dict[Hashable, dict] = {}


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


def describe(x: torch.Tensor, block: Sequence[int], padding: str = "zero") -> TensorDescriptor:
    """TMA descriptor of `x`, whose base is 16-byte aligned, in boxes of `block`, with 128-byte swizzling.

    Triton checks a descriptor when it is made, which takes longer than all else that a warm call does for one. So the
    checks are made once per shape, strides and dtype, and later descriptors are copies with another base.
    """
    key = (x.shape, x.stride(), x.dtype, tuple(block), padding)
    model = _models.get(key)
    if model is None:
        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * x.element_size(), rank=len(block))
        model = dict(vars(TensorDescriptor.from_tensor(x, list(block), layout, padding)), base=None)
        if len(_models) == MODELS:
            _models.clear()
        _models[key] = model
    made = object.__new__(TensorDescriptor)
    vars(made).update(model, base=x)
    return made


def parallel_view(arena: torch.Tensor, count: int, shape: tuple[int, int], dtype: torch.dtype):
    """`count` matrices of `shape` per rank in an arena `[world, nbytes]`: a `[world, count, *shape]` view, and the
    distance of two of them in elements, which is a share of the arena."""
    elements = arena.view(dtype)
    step = elements.shape[1] // count * dtype.itemsize // ALIGN * ALIGN // dtype.itemsize
    return elements.as_strided((arena.shape[0], count, *shape), (elements.stride(0), step, shape[1], 1)), step
