"""mbarriers, TMA and wgmma: what they do, and that their misuse is reported."""

import pytest
import torch

from tests.emulator.kernels import primitives as k
from tests.emulator.problems import D, layout, poisoned, randn
from tileweave.emulator import DeadlockError, ProtocolError, RaceError, World

SEEDS = range(6)


def launch(seed, kernel, *args, grid=1, **options):
    """One rank, one launch."""
    world = World(1, seed)
    world.run(lambda rank: world.launch(kernel, (grid,), *args, **options))
    return world


def two_ranks(seed, kernel, *args, W=2, **options):
    """Every rank launches the kernel with its rank first."""
    world = World(W, seed, **options)
    world.run(lambda rank: world.launch(kernel, (1,), rank, *args))
    return world


# ---------------------------------------------------------------- mbarriers


def test_one_phase_one_wait():
    for seed in SEEDS:
        launch(seed, k.phases, 1, 1)
        launch(seed, k.phases, 2, 2)


def test_a_waiter_may_miss_a_phase():
    found = 0
    for seed in range(20):
        try:
            launch(seed, k.phases, 2, 1)
        except DeadlockError as error:
            found += 1
            assert "parity 0 of mbarrier bar (phase 2" in str(error)
            assert "partition 0 (waits_once)" in str(error)
    assert found


def test_an_arrival_too_few_is_a_deadlock():
    with pytest.raises(DeadlockError, match="pending arrivals 1 of 3"):
        launch(0, k.phases, 2, 3)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("before init", "used before mbarrier_init"),
        ("after invalidate", "used after mbarrier_invalidate"),
        ("too many", "more arrivals than the 1"),
        ("bytes", "transaction count out of range"),
        ("index", "index 2 of bar: 0 to 1 are legal"),
    ],
)
def test_mbarrier_misuse(what, text):
    with pytest.raises(ProtocolError, match=text):
        launch(0, k.barrier_misuse, what)


@pytest.mark.parametrize("what", ["late init", "late invalidate"])
def test_a_barrier_whose_life_is_not_ordered_with_its_use(what):
    kinds = set()
    for seed in range(20):
        with pytest.raises((RaceError, ProtocolError)) as found:
            launch(seed, k.barrier_lives, torch.zeros(1), what)
        kinds.add(found.type)
        assert "bar" in str(found.value)
    assert RaceError in kinds


def test_a_barrier_may_be_invalidated_when_all_uses_are_over():
    for seed in SEEDS:
        launch(seed, k.barrier_lives, torch.zeros(1), "ordered")


# ---------------------------------------------------------------- TMA


@pytest.mark.parametrize("padding", ["zero", "nan"])
@pytest.mark.parametrize(("row", "col"), [(0, 0), (32, 64), (40, 72), (-8, -16), (200, 0), (0, -300)])
def test_tma_load_pads(padding, row, col):
    src, dst = randn(64, 128, seed=0), poisoned(32, 64)
    launch(0, k.copies, D(src, [32, 64], layout(), padding), D(dst, [32, 64], layout()), row, col, [32, 64], 1)
    expected = torch.full((32, 64), float("nan") if padding == "nan" else 0.0, dtype=torch.bfloat16)
    for i in range(32):
        for j in range(64):
            if 0 <= row + i < 64 and 0 <= col + j < 128:
                expected[i, j] = src[row + i, col + j]
    assert torch.equal(dst.nan_to_num(-7.0), expected.nan_to_num(-7.0))


def test_tma_store_clips():
    src, dst = randn(32, 64, seed=0), torch.zeros(20, 48, dtype=torch.bfloat16)
    launch(0, k.copies, D(src, [32, 64], layout()), D(dst, [32, 64], layout()), 0, 0, [32, 64], 1)
    assert torch.equal(dst, src[:20, :48])


def test_a_tma_store_may_not_begin_before_its_tensor():
    """On an H200 it is an illegal instruction."""
    dst = D(torch.ones(20, 64, dtype=torch.bfloat16), [32, 64], layout())
    launch(0, k.stores_at, dst, 8, [32, 64])
    with pytest.raises(ProtocolError, match=r"TMA store to \[-8, 0\], before the tensor"):
        launch(0, k.stores_at, dst, -8, [32, 64])


def test_a_buffer_used_before_its_load_has_landed_is_a_race():
    src, dst = randn(32, 64, seed=0), poisoned(32, 64)
    for seed in SEEDS:
        with pytest.raises(RaceError, match="mbarrier_wait"):
            launch(seed, k.copies, D(src, [32, 64], layout()), D(dst, [32, 64], layout()), 0, 0, [32, 64], 0)


def test_a_block_and_a_buffer_of_other_sizes():
    src, dst = randn(32, 64, seed=0), poisoned(32, 64)
    with pytest.raises(ProtocolError, match=r"a block \[32, 64\].*with a buffer \[16, 64\]"):
        launch(0, k.copies, D(src, [32, 64], layout()), D(dst, [32, 64], layout()), 0, 0, [16, 64], 1)


def test_the_launch_refuses_what_tma_cannot_address():
    base = randn(32, 72, seed=0)
    with pytest.raises((ProtocolError, AssertionError), match="16"):
        launch(0, k.copies, D(base[:, :68].clone(), [32, 64], layout()), D(base, [32, 64], layout()), 0, 0, [32, 64], 1)


@pytest.mark.parametrize(
    ("how", "finding"),
    [
        ("right", None),
        ("read wait", "store_wait for the TMA store"),
        ("no barrier", "and then barrier(), by the partition that issued it"),
        ("no wait", "store_wait for the TMA store"),
        ("no proxy fence", "fence_proxy_async between the two, in rank 1 CTA 0"),
    ],
)
def test_publishing_a_bulk_store(how, finding):
    src, out = randn(32, 64, seed=0), poisoned(32, 64)
    for seed in SEEDS:
        pt, flags = poisoned(2, 32, 64), torch.zeros(2, 24, dtype=torch.int32)
        args = D(src, [32, 64], layout()), D(pt, [1, 32, 64], layout(3)), flags, 24, D(out, [32, 64], layout()), how
        if finding:
            with pytest.raises(RaceError) as found:
                two_ranks(seed, k.publishes, *args)
            assert finding in str(found.value)
        else:
            two_ranks(seed, k.publishes, *args)
            assert torch.equal(out, src)


def test_broadcast_and_reduce_add():
    for seed in SEEDS:
        src, pt = randn(32, 64, seed=0), poisoned(3, 32, 64)
        launch_args = 3, D(src, [32, 64], layout()), D(pt, [1, 32, 64], layout(3))
        world = World(1, seed)
        world.run(lambda rank, w=world, a=launch_args: w.launch(k.broadcasts, (1,), rank, *a, 0, 0))
        assert all(torch.equal(pt[peer], src) for peer in range(3))
        pt.zero_()
        two_ranks(seed, k.broadcasts, *launch_args, 1, 0, W=3)
        assert all(torch.allclose(pt[peer].float(), 3 * src.float(), rtol=2e-2) for peer in range(3))


def test_stores_of_several_ranks_to_one_place_are_a_race():
    src, pt = randn(32, 64, seed=0), poisoned(2, 32, 64)
    with pytest.raises(RaceError, match="write: TMA store"):
        two_ranks(0, k.broadcasts, 2, D(src, [32, 64], layout()), D(pt, [1, 32, 64], layout(3)), 0, 0)


def test_a_cta_that_ends_while_its_store_reads():
    src, pt = randn(32, 64, seed=0), poisoned(2, 32, 64)
    args = 0, 2, D(src, [32, 64], layout()), D(pt, [1, 32, 64], layout(3)), 0, 1
    with pytest.raises(RaceError, match="release of shared memory at the end of the CTA"):
        launch(0, k.broadcasts, *args)


@pytest.mark.parametrize(("fence", "fill", "wait", "finding"), [(1, 1, 1, None), (0, 1, 1, "fence_async_shared")])
def test_registers_to_shared_memory_to_tma(fence, fill, wait, finding):
    for seed in SEEDS:
        dst = poisoned(32, 64)
        if finding:
            with pytest.raises(RaceError, match=finding):
                launch(seed, k.fills, D(dst, [32, 64], layout()), fence, fill, wait)
        else:
            launch(seed, k.fills, D(dst, [32, 64], layout()), fence, fill, wait)
            assert (dst == 2).all()


def test_shared_memory_that_nobody_wrote_is_nan():
    dst = torch.zeros(32, 64, dtype=torch.bfloat16)
    launch(0, k.fills, D(dst, [32, 64], layout()), 1, 0, 1)
    assert dst.isnan().all()


def test_a_buffer_is_reused_after_the_read_wait_only():
    for seed in SEEDS:
        dst = poisoned(128, 64)
        launch(seed, k.reuses, D(dst, [32, 64], layout()), 1)
        assert torch.equal(dst[:, 0].reshape(4, 32).float(), torch.arange(4.0)[:, None].expand(4, 32))
        with pytest.raises(RaceError, match="store_read_wait for the TMA store"):
            launch(seed, k.reuses, D(dst, [32, 64], layout()), 2)


# ---------------------------------------------------------------- wgmma


def test_wgmma_and_its_wait():
    a, b = randn(64, 64, seed=1), randn(64, 64, seed=2)
    for seed in SEEDS:
        c = torch.full((64, 64), float("nan"))
        launch(seed, k.multiplies, a, b, c, 1, 1)
        torch.testing.assert_close(c, a.float() @ b.float())
        with pytest.raises(RaceError, match=r"registers.*\n.*write: wgmma"):
            launch(seed, k.multiplies, a, b, c, 0, 1)
        with pytest.raises(RaceError, match="fence_async_shared"):
            launch(seed, k.multiplies, a, b, c, 1, 0)
