"""Queries, keys and values as TMA sees them, and slots for them in parallel memory."""

import torch

from tileweave.ops.descriptors import ALIGN


def in_pieces(x: torch.Tensor, pieces: int) -> torch.Tensor:
    """[B, H, S, D] as [B, H, pieces, S / pieces, D], a view."""
    batch, heads, rows, dim = x.shape
    b, h, s, d = x.stride()
    return x.as_strided((batch, heads, pieces, rows // pieces, dim), (b, h, s * (rows // pieces), s, d))


def slots(arena: torch.Tensor, kinds: int, places: int, shape: tuple[int, int, int], dtype: torch.dtype):
    """`kinds` views [world, places, *shape] of an arena [world, bytes], place by place beside each other.

    Where a place lies depends on the arena, not on the shape alone: a call of another shape, with the other half of the
    places, leaves these alone.
    """
    elements = arena.view(dtype)
    _, rows, dim = shape
    step = elements.shape[1] // (places * kinds) * dtype.itemsize // ALIGN * ALIGN // dtype.itemsize
    strides = (elements.stride(0), kinds * step, rows * dim, dim, 1)
    return [elements.as_strided((arena.shape[0], places, *shape), strides, kind * step) for kind in range(kinds)]
