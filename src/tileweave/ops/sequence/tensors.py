"""Queries, keys and values as TMA sees them, and slots for them in parallel memory."""

import math
from collections.abc import Sequence

import torch

from tileweave.ops.descriptors import ALIGN

Shape = tuple[int, int, int]  # heads of all batches, rows, D


def in_pieces(x: torch.Tensor, pieces: int) -> torch.Tensor:
    """[B, H, S, D] as [B, H, pieces, S / pieces, D], a view."""
    batch, heads, rows, dim = x.shape
    b, h, s, d = x.stride()
    return x.as_strided((batch, heads, pieces, rows // pieces, dim), (b, h, s * (rows // pieces), s, d))


def place_bytes(shapes: Sequence[Shape], dtype: torch.dtype) -> int:
    """Bytes of a place for a tensor of each shape."""
    return sum(math.prod(shape) * dtype.itemsize + ALIGN for shape in shapes)


def slots(arena: torch.Tensor, places: int, shapes: Sequence[Shape], dtype: torch.dtype) -> list[torch.Tensor]:
    """Views [world, places, *shape] of an arena [world, bytes], whose places have a tensor of each shape.

    Where a place begins depends on the arena alone: a call of other shapes, with the other half of the places, leaves
    these alone.
    """
    elements, line = arena.view(dtype), ALIGN // dtype.itemsize
    step, first, views = elements.shape[1] // places // line * line, 0, []
    for heads, rows, dim in shapes:
        strides = (elements.stride(0), step, rows * dim, dim, 1)
        views.append(elements.as_strided((arena.shape[0], places, heads, rows, dim), strides, first))
        first += math.ceil(heads * rows * dim / line) * line
    return views
