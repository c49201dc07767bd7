"""The op on virtual ranks of a real GPU, against the float32 truth."""

import threading

import pytest
import torch

import tileweave as tw
from tests.ops.problems import SHARED_TILES, assert_right, calls_of_changing_plans, operands, run_calls
from tileweave import FabricTimeout, Plan
from tileweave.ops.matmul_reduce_scatter import reference, relative_error, tolerance
from tileweave.planner.tiling import TILINGS, tiles_of

pytestmark = pytest.mark.gpu
MODES = [False, True]


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "world, m, n, k",
    [
        (1, 1000, 776, 520),
        (2, 2048, 1024, 512),
        (3, 3 * 104, 328, 200),
        (4, 4 * 520, 1032, 72),
        (5, 5 * 8, 72, 264),
        (8, 8 * 264, 520, 128),
    ],
)
def test_world_sizes_ragged_shapes_two_calls(world, m, n, k, dtype, deterministic):
    calls = []
    for i in range(2):
        a, b, bias = operands(world, m, n, k, seed=i, dtype=dtype, bias=True, device="cuda")
        calls.append((a, b, dict(bias=bias, deterministic=deterministic)))
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        for outs, (a, b, kw) in zip(run_calls(w, calls), calls, strict=True):
            assert_right(outs, a, b, **kw)


@pytest.mark.parametrize("deterministic", MODES)
def test_a_large_float16_product_is_not_zero(deterministic):
    """4096 x 12288 x 49152 among eight ranks (flux #154): no part of any shard is left out, twice."""
    world, m, n, k = 8, 4096, 12288, 49152
    a, b, _ = operands(world, m, n, k // world, seed=0, dtype=torch.float16, device="cuda")
    calls = [(a, b, {}), ([-x for x in a], b, {})]
    with tw.virtual_world(world, device="cuda", timeout=20.0) as w:
        for outs, (a, b, _) in zip(run_calls(w, calls, deterministic=deterministic), calls, strict=True):
            assert_right(outs, a, b, deterministic=deterministic)
            for part in (part for out in outs for row in out.split(128) for part in row.split(256, 1)):
                assert part.count_nonzero() > 0.99 * part.numel()


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize("dtype, out", [(torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("world, m, n, k, sms, tile, split", SHARED_TILES)
def test_tiles_of_the_last_wave_that_several_ctas_share(
    world, m, n, k, sms, tile, split, dtype, out, deterministic
):  # fmt: skip
    plan = Plan(tile=tile, stages=2, split=split)
    calls = []
    for i in range(4):
        a, b, bias = operands(world, m, n, k, seed=i, dtype=dtype, bias=True, device="cuda")
        calls.append((a, b, dict(bias=bias, op=("sum", "avg")[i % 2])))
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        results = run_calls(w, calls, deterministic=deterministic, out_dtype=out, plan=plan, max_sms=sms)
    for outs, (a, b, kw) in zip(results, calls, strict=True):
        assert outs[0].dtype == (out or dtype)
        assert_right(outs, a, b, deterministic=deterministic, **kw)


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_shared_tiles_between_calls_of_other_plans_and_shapes(world, deterministic):
    calls = calls_of_changing_plans(world, device="cuda") * 10
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        results = run_calls(w, calls, deterministic=deterministic, max_sms=4 * world)
    for outs, (a, b, kw) in zip(results, calls, strict=True):
        assert_right(outs, a, b, bias=kw["bias"], deterministic=deterministic)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_deterministic_results_of_shared_tiles_have_equal_bits(world):
    a, b, _ = operands(world, world * 136, 72, 1032, seed=7, device="cuda")
    kw = dict(deterministic=True, plan=Plan(tile=(128, 128, 64), stages=3, split=4))
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        results = run_calls(w, [(a, b, kw)] * 10)
    assert_right(results[0], a, b, deterministic=True)
    for outs in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], outs, strict=True))


def ragged_columns(world, rows, tile, sms):
    """Columns of which the tiles fill a wave of `sms` CTAs and not more than half of another one."""
    for n in range(tile[1] + 8, 1 << 15, tile[1]):
        tiles = tiles_of(rows, n, world, tile)
        if tiles > sms and 0 < tiles % sms <= sms // 2:
            return n
    raise AssertionError(f"no columns for {world} ranks, {rows} rows, {tile}, {sms} SMs")


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("tiling", TILINGS, ids=lambda tiling: f"{tiling.tile} {tiling.stages}")
@pytest.mark.parametrize("world", [1, 3])
def test_every_tile_configuration_of_the_planner(world, tiling, split):
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        m, n = world * 264, ragged_columns(world, 264, tiling.tile, w.sms)
        calls = []
        for i, deterministic in enumerate([False, True] * 2):
            a, b, bias = operands(world, m, n, 520, seed=i, bias=True, device="cuda")
            calls.append((a, b, dict(bias=bias, deterministic=deterministic)))
        results = run_calls(w, calls, plan=Plan(tile=tiling.tile, stages=tiling.stages, split=split))
    for outs, (a, b, kw) in zip(results, calls, strict=True):
        assert_right(outs, a, b, **kw)


@pytest.mark.parametrize("a_t, b_t", [(False, False), (True, True), (True, False)])
def test_stride_orders_avg_and_float32(a_t, b_t):
    a, b, bias = operands(4, 1024, 520, 256, seed=3, a_t=a_t, b_t=b_t, bias=True, device="cuda")
    kw = dict(op="avg", bias=bias, out_dtype=torch.float32)
    with tw.virtual_world(4, device="cuda", timeout=5.0) as w:
        (outs,) = run_calls(w, [(a, b, kw)])
    assert outs[0].dtype == torch.float32
    assert_right(outs, a, b, op="avg", bias=bias)


@pytest.mark.parametrize("m, n, k", [(0, 64, 64), (4, 0, 64), (4, 64, 0), (2, 1, 1), (2, 8, 8), (256, 100, 64)])
def test_empty_single_and_unaddressable_sizes(m, n, k):
    a, b, bias = operands(2, m, n, k, seed=2, bias=True, device="cuda")
    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        for outs in run_calls(w, [(a, b, dict(bias=bias))] * 2):
            assert_right(outs, a, b, bias=bias)


def test_fifty_calls_with_changing_shapes_plans_and_modes():
    world = 4
    shapes = [
        (512, 512, 256, {}),
        (1024, 264, 64, dict(deterministic=True)),
        (4, 1032, 512, dict(plan=Plan(tile=(128, 64, 64), stages=6))),
        (2048, 2048, 256, dict(deterministic=True, plan=Plan(tile=(128, 256, 64), stages=3))),
        (512, 128, 8, dict(op="avg", plan=Plan(tile=(256, 128, 64), stages=3))),
    ]
    calls = [
        (*operands(world, m, n, k, seed=10 * i + j, device="cuda")[:2], kw)
        for i in range(10)
        for j, (m, n, k, kw) in enumerate(shapes)
    ]
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        for outs, (a, b, kw) in zip(run_calls(w, calls), calls, strict=True):
            assert_right(outs, a, b, op=kw.get("op", "sum"), deterministic=kw.get("deterministic", False))


def test_deterministic_results_have_equal_bits_and_adding_slots_are_left_zero():
    a, b, _ = operands(4, 2048, 2048, 512, seed=1, device="cuda")
    with tw.virtual_world(4, device="cuda", timeout=5.0) as w:
        results = run_calls(w, [(a, b, dict(deterministic=True))] * 5 + [(a, b, {})] * 3)
        for outs in results[1:5]:
            assert all(torch.equal(x, y) for x, y in zip(results[0], outs, strict=True))
        assert not w.workspace.ops["matmul_reduce_scatter"].adding.any()


def test_an_absent_rank_gives_a_timeout_and_the_world_works_again():
    """Rank 1 launches a kernel that never sends: the others' waits end, the result is NaN, the host says who."""
    a, b, _ = operands(3, 3 * 256, 256, 128, seed=1, device="cuda")
    with tw.virtual_world(3, device="cuda", timeout=1.0) as w:
        run_calls(w, [(a, b, {})])
        kept, lock = {}, threading.Lock()

        def rank_program(rank, group):
            out = tw.matmul_reduce_scatter(a[rank], b[rank], group)
            with lock:
                kept[rank] = out

        # Rank 1 has fallen a call behind for good: its epoch says so, and its peers wait for one that never comes.
        w.workspace.ops["matmul_reduce_scatter"].state[1, 0] -= 1
        with pytest.raises(FabricTimeout, match=r"matmul_reduce_scatter: rank [02] waited") as caught:
            w.run(rank_program)
        assert caught.value.index == 1 and caught.value.expected - caught.value.seen == 1
        assert kept[0].isnan().any() and kept[2].isnan().any()
        (outs,) = run_calls(w, [(a, b, {})])
    assert_right(outs, a, b)


@pytest.mark.parametrize("world, deterministic", [(2, True), (3, False)])
def test_slots_beyond_two_to_the_31_elements(world, deterministic):
    """A slot of more than 4 GiB: all offsets take 64 bits (iris #532). The third call reuses the first one's slot."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < 60:
        pytest.skip(f"needs 60 GiB of GPU memory, {free} are free")
    rows, n, k = (1 << 16) + 264, 1 << 15, 64
    assert rows * n > 1 << 31
    # The ends, what lies at 2**30 and 2**31 elements, and some between.
    sample = [0, 1, 127, 128, (1 << 15) - 1, 1 << 15, 50001, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, rows - 1]
    calls = [operands(world, world * rows, n, k, seed=i, device="cuda")[:2] for i in range(3)]

    def sampled(a, b, group):
        out = tw.matmul_reduce_scatter(a, b, group, deterministic=deterministic)
        return out[sample], out.sum(dtype=torch.float32).isfinite()

    def rank_program(rank, group):
        return [sampled(a[rank], b[rank], group) for a, b in calls]

    with tw.virtual_world(world, device="cuda", timeout=20.0) as w:
        results = list(zip(*w.run(rank_program), strict=True))
    torch.cuda.empty_cache()
    for by_rank, (a, b) in zip(results, calls, strict=True):
        assert all(finite for _, finite in by_rank)
        picked = torch.cat([torch.tensor(sample) + rank * rows for rank in range(world)])
        truth = reference([x[picked] for x in a], b)
        error = relative_error(torch.cat([got for got, _ in by_rank]), truth)
        assert error <= tolerance(torch.bfloat16, world, deterministic), error
