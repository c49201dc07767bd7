"""Where slots lie, by arithmetic alone: tensors without memory, so that they may be as large as those on a GPU."""

import pytest
import torch

from tileweave.ops.descriptors import ALIGN, parallel_view

GRANULE = 2 << 20
SHAPES = [  # rows, columns of a slot: those of other libraries' reports, and beyond 2**31 elements
    (1, 8),
    (512, 12288),  # flux #154
    (1024, 53248),  # Triton-distributed #40
    (2048, 1 << 17),  # iris #532: half a GiB and more per rank
    ((1 << 16) + 8, 1 << 15),
    (1 << 17, 57344),
]


def arena(world, count, nbytes):
    """Parallel memory for `count` slots of `nbytes`, as worlds make it: whole granules for each of the two calls."""
    share = -(-nbytes * count // 2 // GRANULE) * GRANULE
    return torch.empty(world, 2 * share, dtype=torch.uint8, device="meta")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("world", "count"), [(2, 4), (3, 2), (8, 2), (8, 16)])
@pytest.mark.parametrize("shape", SHAPES)
def test_slots_lie_apart_within_the_arena_of_their_rank(shape, world, count, dtype):
    rows, columns = shape
    memory = arena(world, count, rows * columns * dtype.itemsize)
    slots, step = parallel_view(memory, count, shape, dtype)
    assert slots.shape == (world, count, rows, columns)
    assert slots.stride(1) == step >= rows * columns and step * dtype.itemsize % ALIGN == 0
    assert slots[0, -1, -1, -1].storage_offset() < slots.stride(0) == memory.shape[1] // dtype.itemsize
    last = slots[-1, -1, -1, -1].storage_offset()
    assert last == (world - 1) * slots.stride(0) + (count - 1) * step + rows * columns - 1


def test_the_distance_of_slots_does_not_depend_on_the_shape():
    """A slow peer may still be in a call of another shape."""
    memory = arena(4, 8, 100 * 1000 * 2)
    steps = {parallel_view(memory, 8, shape, torch.bfloat16)[1] for shape in ((100, 1000), (3, 8), (64, 136))}
    assert len(steps) == 1
