"""`Channel` alone, between two roles of a CTA, and the tile order, in the emulator."""

import pytest
import torch

from tests.tiles.kernels import ring
from tests.tiles.mutants import mutant
from tileweave.emulator import DeadlockError, EmulatorError, RaceError, World
from tileweave.ops.descriptors import describe

TILES, ROWS, COLS = 7, 16, 64


def copy(seed, stages, by_tma, kernel=ring.copy_kernel):
    """One schedule: what came out, and what should have."""
    source = torch.randn(TILES * ROWS, COLS, generator=torch.Generator().manual_seed(seed)).bfloat16()
    out = torch.full_like(source, float("nan"))
    world = World(1, seed)
    args = describe(source, (ROWS, COLS)), describe(out, (ROWS, COLS)), TILES, stages, by_tma
    world.run(lambda rank: world.launch(kernel, (1,), *args, num_warps=4))
    numbers = torch.arange(TILES).repeat_interleave(ROWS)[:, None].expand(-1, COLS).bfloat16()
    return out, source if by_tma else numbers


@pytest.mark.parametrize("by_tma", [True, False])
@pytest.mark.parametrize("stages", [1, 2, 3, 7, 8])
def test_a_ring_hands_over_every_tile_once_and_in_order(stages, by_tma):
    for seed in range(6):
        out, expected = copy(seed, stages, by_tma)
        assert torch.equal(out, expected), f"seed {seed}"


FAULTS = {
    "        work.ring.producer_wait(n)\n": EmulatorError,
    "        work.ring.consumer_wait(n)\n": EmulatorError,
    "            gl.fence_async_shared()\n": RaceError,
    "        gl.store_read_wait(0)\n": RaceError,
    "        work.ring.release(n)\n": DeadlockError,
    "            work.ring.publish(n)\n": DeadlockError,
}


@pytest.mark.parametrize("line", FAULTS)
def test_a_side_that_forgets_its_part_is_noticed(line, tmp_path):
    kernel = mutant(ring, line, "", tmp_path).copy_kernel
    with pytest.raises(FAULTS[line]):
        for seed in range(8):
            copy(seed, 2, by_tma=False, kernel=kernel)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 9), (9, 1), (4, 5), (8, 3), (11, 4)])
def test_grouped_order_visits_every_tile_once_and_a_group_of_rows_at_a_time(rows, cols, group):
    out = torch.full((rows * cols,), -1, dtype=torch.int32)
    world = World(1, 0)
    world.run(lambda rank: world.launch(ring.order_kernel, (1,), out, rows, cols, group, num_warps=4))
    assert sorted(out.tolist()) == list(range(rows * cols))
    bands = [tile // cols // group for tile in out.tolist()]
    assert bands == sorted(bands)
