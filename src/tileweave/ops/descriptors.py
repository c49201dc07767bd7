"""Tensors as TMA sees them: operands, results, and slots in parallel memory."""

from collections.abc import Sequence
from typing import overload

import torch

from tileweave.lang import NVMMASharedLayout, TensorDescriptor

ALIGN = 16  # bytes: base and strides of whatever TMA addresses


def is_addressable(x: torch.Tensor) -> bool:
    """Whether TMA can address a matrix as it lies: one stride is 1, the other and the base are 16-byte aligned."""
    (rows, columns), (row, column) = x.shape, x.stride()
    per_line = ALIGN // x.element_size()
    by_rows = column == 1 and row >= columns and row % per_line == 0
    by_columns = row == 1 and column >= rows and column % per_line == 0
    return (by_rows or by_columns) and x.data_ptr() % ALIGN == 0


def as_operand(x: torch.Tensor, by_rows: bool = False) -> torch.Tensor:
    """`x` as TMA can address it. Either stride order costs nothing, unless its rows must be in one piece (`by_rows`);
    anything else (a step in both dimensions, a base or row that is not 16-byte aligned, overlapping rows) is copied."""
    if is_addressable(x) and (x.stride(1) == 1 or not by_rows):
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def as_operands(a: torch.Tensor, b: torch.Tensor, inner_last: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """a [M, K] and b [K, N] as TMA can address them; `inner_last`: with K in one piece, as the tensor cores take
    operands of 8 and of 4 bits."""
    return as_operand(a, inner_last), as_operand(b.t(), inner_last).t() if inner_last else as_operand(b)


@overload
def in_one_piece(x: torch.Tensor) -> torch.Tensor: ...
@overload
def in_one_piece(x: None) -> None: ...


def in_one_piece(x: torch.Tensor | None) -> torch.Tensor | None:
    """`x` contiguous and 16-byte aligned, copied if need be; None of None."""
    if x is None or (x.is_contiguous() and x.data_ptr() % ALIGN == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def by_rows(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """An addressable matrix with its rows in one piece, and whether that is the transpose of `x`."""
    flipped = x.stride(1) != 1 or x.stride(0) < x.shape[1]
    return (x.t() if flipped else x), flipped


class Box:
    """TMA descriptors of tensors that differ in their data only, in boxes of `block`, as those of `describe`.

    Triton checks a descriptor when it is made, which takes longer than all else that a warm call does for one. So the
    checks are made once, with `like`, and a call's descriptors are copies with another base.
    """

    __slots__ = ("_fields",)

    def __init__(self, like: torch.Tensor, block: Sequence[int], padding: str = "zero", swizzle: int = 128):
        self._fields = dict(vars(describe(like, block, padding, swizzle)), base=None)

    def at(self, base: torch.Tensor, rows: int | None = None, behind: int = 1) -> TensorDescriptor:
        """The descriptor of a tensor like that of the constructor, 16-byte aligned, but of `rows`, a dimension with so
        many behind it, if they are given."""
        made = object.__new__(TensorDescriptor)
        vars(made).update(self._fields, base=base)
        if rows is not None:
            made.shape = [*made.shape]
            made.shape[-1 - behind] = rows
        return made


def describe(x: torch.Tensor, block: Sequence[int], padding: str = "zero", swizzle: int = 128) -> TensorDescriptor:
    """TMA descriptor of `x` in boxes of `block`, swizzled by so many bytes."""
    layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * x.element_size(), rank=len(block))
    return TensorDescriptor.from_tensor(x, list(block), layout, padding)


def parallel_view(arena: torch.Tensor, count: int, shape: tuple[int, int], dtype: torch.dtype):
    """`count` matrices of `shape` per rank in an arena `[world, nbytes]`: a `[world, count, *shape]` view, and the
    distance of two of them in elements, which is a share of the arena."""
    elements = arena.view(dtype)
    step = elements.shape[1] // count * dtype.itemsize // ALIGN * ALIGN // dtype.itemsize
    return elements.as_strided((arena.shape[0], count, *shape), (elements.stride(0), step, shape[1], 1)), step


def slots_box(slots: torch.Tensor, block: tuple[int, int]) -> Box:
    """For descriptors of slots `[world, slots, rows, n]`. Out of bounds they read NaN: what an aborted wait makes a
    result of."""
    return Box(slots, (1, 1, *block), padding="nan")
