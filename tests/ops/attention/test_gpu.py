"""attention on a real GPU, against the float32 truth."""

import pytest
import torch

import tileweave as tw
from tests.fabric.test_virtual import capture
from tests.ops.attention.problems import assert_right, operands, run
from tileweave.bench.attention import SWEEP
from tileweave.fabric import fabric_of
from tileweave.ops.attention import Tiling, attention

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def world():
    with tw.virtual_world(1, device="cuda", timeout=5.0) as w:
        yield w


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, 16, 100, 1000, 4096])
def test_two_batches_elementwise(world, rows, dim, dtype, layout, causal):
    calls = [operands(2, 3, 3, rows, rows, dim, seed, dtype, layout, device="cuda") for seed in range(2)]
    for result, call in zip(run(world, *calls, layout=layout, causal=causal), calls, strict=True):
        assert_right(result, *call, layout=layout, causal=causal)


@pytest.mark.parametrize("heads, kv_heads", [(32, 8), (8, 1), (6, 2)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows, cols", [(1000, 1000), (300, 777), (777, 300), (5, 2000)])
def test_grouped_heads_and_sequences_of_two_lengths(world, rows, cols, causal, heads, kv_heads):
    call = operands(2, heads, kv_heads, rows, cols, 128, 3, device="cuda")
    for offset in (0, cols - rows):
        assert_right(run(world, call, causal=causal, offset=offset)[0], *call, causal=causal, offset=offset)


@pytest.mark.parametrize("offset", [-2000, -513, -128, -1, 1, 64, 1500])
def test_rows_that_see_nothing_are_zero(world, offset):
    call = operands(1, 4, 2, 1000, 900, 128, 4, device="cuda")
    assert_right(run(world, call, causal=True, offset=offset)[0], *call, causal=True, offset=offset)


@pytest.mark.parametrize("dim", [8, 72, 96, 192])
@pytest.mark.parametrize("causal", [False, True])
def test_large_logits_and_odd_dimensions(world, dim, causal):
    call = operands(2, 2, 2, 500, 500, dim, 5, times=50, device="cuda")
    assert_right(run(world, call, causal=causal)[0], *call, causal=causal)


@pytest.mark.parametrize("dim", SWEEP)
@pytest.mark.parametrize("causal", [False, True])
def test_tilings(world, dim, causal):
    call = operands(2, 8, 4, 1500, 1500, dim, 6, device="cuda")
    stages = {64: 8, 128: 5, 256: 3}[dim]
    for tiling in (*SWEEP[dim], Tiling(1, bn=64, stages=stages, q_bufs=1), Tiling(1, bn=16, stages=3, q_bufs=1)):
        assert_right(run(world, call, causal=causal, tiling=tiling)[0], *call, causal=causal)


def test_equal_bits_call_after_call(world):
    """Tiles are drawn in another order each time, and the counter is back at 0 each time."""
    call = operands(4, 16, 16, 2048, 2048, 128, 7, device="cuda")
    results = run(world, *[call] * 200, causal=True)
    assert_right(results[0], *call, causal=True)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def test_strided_operands(world):
    q, k, v = operands(2, 8, 8, 300, 300, 128, 8, device="cuda")
    packed = torch.stack((q, k, v), 3).transpose(1, 2).contiguous()  # [B, S, H, 3, D]
    views = [packed[..., i, :].transpose(1, 2) for i in range(3)]
    assert all(view.data_ptr() == packed[..., i, :].data_ptr() for i, view in enumerate(views))
    plain, strided = run(world, (q, k, v))[0], run(world, views)[0]
    assert torch.equal(plain[0], strided[0]) and torch.equal(plain[1], strided[1])


def test_more_tiles_than_fit_and_long_sequences(world):
    call = operands(1, 2, 1, 20000, 20000, 128, 9, device="cuda")
    assert_right(run(world, call, causal=True)[0], *call, causal=True)


def test_replays_of_a_graph_with_new_data(world):
    def rank_program(rank, group):
        fabric = fabric_of(group)
        static = operands(2, 4, 2, 520, 520, 128, 0, device="cuda")
        attention(fabric, *static, causal=True, return_lse=True)
        torch.cuda.synchronize()
        graph, outs = capture(lambda: attention(fabric, *static, causal=True, return_lse=True))
        for seed in range(20):
            fresh = operands(2, 4, 2, 520, 520, 128, seed, device="cuda")
            for to, new in zip(static, fresh, strict=True):
                to.copy_(new)
            graph.replay()
            assert_right(outs, *fresh, causal=True)
            assert_right(attention(fabric, *fresh, return_lse=True), *fresh)

    world.run(rank_program)
