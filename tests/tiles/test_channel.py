"""`Channel` alone, between two roles of a CTA, and the tile order, in the emulator."""

import pytest
import torch

from tests.tiles.kernels import ring
from tests.tiles.mutants import mutant
from tileweave.emulator import DeadlockError, EmulatorError, RaceError, World
from tileweave.ops.descriptors import describe

TILES, ROWS, COLS = 7, 16, 64


def copy(seed, stages, by_tma, consumers=1, kernel=ring.copy_kernel):
    """One schedule: what came out, and what should have."""
    source = torch.randn(TILES * ROWS, COLS, generator=torch.Generator().manual_seed(seed)).bfloat16()
    out = torch.full((consumers, *source.shape), float("nan"), dtype=source.dtype)
    world = World(1, seed)
    descriptors = describe(source, (ROWS, COLS)), describe(out.flatten(0, 1), (ROWS, COLS))
    world.run(lambda rank: world.launch(kernel, (1,), *descriptors, TILES, stages, by_tma, consumers, num_warps=4))
    numbers = torch.arange(TILES).repeat_interleave(ROWS)[:, None].expand(-1, COLS).bfloat16()
    return out, (source if by_tma else numbers).expand(consumers, -1, -1)


@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("by_tma", [True, False])
@pytest.mark.parametrize("stages", [1, 2, 3, 7, 8])
def test_a_ring_hands_every_tile_to_each_consumer_once_and_in_order(stages, by_tma, consumers):
    for seed in range(6):
        out, expected = copy(seed, stages, by_tma, consumers)
        assert torch.equal(out, expected), f"seed {seed}"


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
def test_a_place_counts_slots_and_the_parities_of_rounds(stages):
    uses = 4 * stages + 1
    out = torch.full((uses, 2), -1, dtype=torch.int32)
    world = World(1, 0)
    world.run(lambda rank: world.launch(ring.places_kernel, (1,), out, uses, stages, num_warps=4))
    assert out.tolist() == [[n % stages, n // stages % 2] for n in range(uses)]


FAULTS = {
    "        work.ring.producer_wait(at)\n": ("", EmulatorError),
    "        work.ring.consumer_wait(at)\n": ("", EmulatorError),
    "            gl.fence_async_shared()\n": ("", RaceError),
    "        gl.store_read_wait(0)\n": ("", RaceError),
    "        work.ring.release(at)\n": ("", DeadlockError),
    "            work.ring.publish(at)\n": ("", DeadlockError),
    "        work.ring.release(at)\n        at = work.ring.next(at)\n": (
        "        work.ring.release(at)\n",
        EmulatorError,
    ),
    "        buf = work.bufs.index(at.slot)\n": ("        buf = work.bufs.index(0)\n", EmulatorError),
    "make_channel(STAGES, CONSUMERS)": ("make_channel(STAGES, 2 * CONSUMERS)", DeadlockError),
}


@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("line", FAULTS)
def test_a_side_that_forgets_its_part_is_noticed(line, consumers, tmp_path):
    text, error = FAULTS[line]
    kernel = mutant(ring, line, text, tmp_path).copy_kernel
    with pytest.raises(error):
        for seed in range(8):
            copy(seed, 2, by_tma=False, consumers=consumers, kernel=kernel)


def test_a_ring_that_does_not_wait_for_its_second_consumer_is_noticed(tmp_path):
    kernel = mutant(ring, "make_channel(STAGES, CONSUMERS)", "make_channel(STAGES, 1)", tmp_path).copy_kernel
    with pytest.raises(EmulatorError):
        for seed in range(8):
            copy(seed, 2, by_tma=False, consumers=2, kernel=kernel)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 9), (9, 1), (4, 5), (8, 3), (11, 4)])
def test_grouped_order_visits_every_tile_once_and_a_group_of_rows_at_a_time(rows, cols, group):
    out = torch.full((rows * cols,), -1, dtype=torch.int32)
    world = World(1, 0)
    world.run(lambda rank: world.launch(ring.order_kernel, (1,), out, rows, cols, group, num_warps=4))
    assert sorted(out.tolist()) == list(range(rows * cols))
    bands = [tile // cols // group for tile in out.tolist()]
    assert bands == sorted(bands)
