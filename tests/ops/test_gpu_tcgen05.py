"""The ops on virtual ranks of a Blackwell GPU, against the float32 truth: what has never run."""

import pytest
import torch

import tileweave as tw
from tests.ops import problems as scatter
from tests.ops import test_block_scales as blocks
from tests.ops import test_float8 as float8
from tests.ops.all_gather_matmul import problems as gather
from tests.ops.all_gather_matmul import test_block_scales as gather_blocks
from tests.ops.matmul_all_reduce import problems as reduce
from tests.ops.matmul_all_reduce import test_block_scales as reduce_blocks
from tileweave import Plan
from tileweave.fabric import cuda_refusal

BLACKWELL = torch.cuda.is_available() and torch.cuda.get_device_capability() == (10, 0) and not cuda_refusal("cuda")
pytestmark = pytest.mark.skipif(not BLACKWELL, reason="needs a Blackwell GPU and TILEWEAVE_EXPERIMENTAL=sm100")


def plan(**changes):
    return Plan(**{**dict(tile=(128, 128, 64), stages=4, core="tcgen05"), **changes})


@pytest.mark.parametrize("changes", [None, dict(), dict(split=2), dict(schedule="one_shot"), dict(schedule="none")])
@pytest.mark.parametrize("world, m, n, k", [(1, 1000, 776, 520), (2, 2 * 264, 520, 1032), (4, 4 * 72, 328, 200)])
def test_matmul_reduce_scatter(world, m, n, k, changes):
    if world == 1 and changes == dict(schedule="one_shot"):
        pytest.skip("nobody to send to")
    calls = []
    for i in range(3):
        a, b, bias = scatter.operands(world, m, n, k, i, a_t=i == 1, b_t=i != 1, bias=True, device="cuda")
        calls.append((a, b, dict(bias=bias, deterministic=i == 2)))
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        chosen = None if changes is None else plan(**changes)
        for outs, (a, b, kw) in zip(scatter.run_calls(w, calls, plan=chosen), calls, strict=True):
            scatter.assert_right(outs, a, b, **kw)


@pytest.mark.parametrize("tile, stages", [((128, 64, 64), 7), ((128, 256, 64), 3)])
def test_every_tile(tile, stages):
    a, b, _ = scatter.operands(2, 4096, 2048, 1024, 0, device="cuda")
    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        (outs,) = scatter.run_calls(w, [(a, b, {})], plan=plan(tile=tile, stages=stages))
    scatter.assert_right(outs, a, b, deterministic=True)


def test_float8_operands():
    a, b, scales = float8.operands(2, 2 * 264, 520, 1040, True, device="cuda")
    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        outs = float8.run(w, a, b, scales)
    float8.assert_scaled_right(outs, a, b, scales)


@pytest.mark.parametrize("changes", [None, dict(), dict(schedule="inter_sm", comm_sms=4), dict(schedule="none")])
@pytest.mark.parametrize("dtype", [blocks.FP8, blocks.FP4], ids=["mxfp8", "nvfp4"])
@pytest.mark.parametrize("world, m, n, k", [(1, 392, 264, 1152), (2, 2 * 256, 520, 2048), (4, 4 * 40, 136, 128)])
def test_scales_of_blocks(world, m, n, k, dtype, changes):
    if changes and (world == 1 or m // world % 128) and changes["schedule"] == "inter_sm":
        pytest.skip("nobody to send to, or rows that are no whole blocks")
    if changes == dict() and m // world % 128 and world > 1:
        pytest.skip("rows that are no whole blocks")
    a, b, scales, truth = blocks.operands(world, m, n, k, dtype, device="cuda")
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        chosen = None if changes is None else plan(tile=(128, 128, 128), **changes)
        outs = blocks.run(w, a, b, scales, calls=3, plan=chosen)
    blocks.assert_right(outs, truth, world)


@pytest.mark.parametrize("schedule", ["one_shot", "intra_sm", "inter_sm"])
@pytest.mark.parametrize("dtype", [blocks.FP8, blocks.FP4], ids=["mxfp8", "nvfp4"])
def test_matmul_all_reduce_with_scales_of_blocks(schedule, dtype):
    a, b, scales, truth = blocks.operands(2, 520, 1032, 1152, dtype, device="cuda")
    chosen = plan(schedule=schedule, tile=(128, 128, 128), comm_sms=4 * (schedule == "inter_sm"))
    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        reduce_blocks.assert_right(reduce_blocks.run(w, a, b, scales, calls=3, plan=chosen), truth)


@pytest.mark.parametrize("schedule", ["inter_sm", "intra_sm", "none"])
@pytest.mark.parametrize("dtype", [blocks.FP8, blocks.FP4], ids=["mxfp8", "nvfp4"])
def test_all_gather_matmul_with_scales_of_blocks(schedule, dtype):
    given = gather_blocks.operands(2, 264, [520, 264], 1152, dtype, device="cuda")
    chosen = gather_blocks.plan(schedule=schedule, comm_sms=4, stages=4)
    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        gather_blocks.assert_right(gather_blocks.run(w, given, calls=3, plan=chosen), given)


@pytest.mark.parametrize("schedule", ["one_shot", "intra_sm", "inter_sm"])
def test_matmul_all_reduce(schedule):
    a, b, extras = reduce.operands(2, 520, 1032, 520, 1, device="cuda")
    chosen = plan(schedule=schedule, comm_sms=4 * (schedule == "inter_sm"))
    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        for results in reduce.run_calls(w, [(a, b, extras)] * 2, plan=chosen):
            reduce.assert_right(results, a, b, extras)


@pytest.mark.parametrize("schedule", ["inter_sm", "intra_sm", "none", "one_shot"])
def test_all_gather_matmul(schedule):
    a, b, bias = gather.operands(2, 264, (520, 264), 520, 1, device="cuda")
    calls = [(a, b, bias, dict(return_gathered=True))] * 2
    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        for results in gather.run_calls(w, calls, plan=plan(schedule=schedule, comm_sms=4)):
            gather.assert_right(results, a, b, bias, True)
