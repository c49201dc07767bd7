"""The experts' ops on virtual ranks of a Blackwell GPU, against the float32 truth: what has never run."""

import pytest
import torch

import tileweave as tw
from tests.ops.grouped_matmul import test_grouped_matmul as grouped
from tests.ops.moe.problems import assert_right, problem, run, truth
from tests.ops.moe.test_combine import back
from tests.ops.test_gpu_tcgen05 import pytestmark as blackwell
from tileweave import Plan

pytestmark = blackwell
TILES = [((128, 64, 64), 6), ((128, 128, 64), 4), ((128, 256, 64), 3)]


def plan(tile, stages, mechanism="tma", schedule="intra_sm", comm_sms=0):
    """A plan made by hand."""
    return Plan(mechanism, schedule, tile, stages, 1, comm_sms, core="tcgen05")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", grouped.SIZES)
def test_grouped_matmul_of_ragged_experts(name, dtype, transposed):
    given = grouped.problem(grouped.SIZES[name], 200, 520, 7, transposed, dtype, device="cuda")
    assert tw.explain("grouped_matmul", *given).plan.core == "tcgen05"
    for _ in range(2):
        grouped.assert_right(tw.grouped_matmul(*given), *given)


@pytest.mark.parametrize("tile, stages", TILES)
def test_grouped_matmul_of_every_tile(tile, stages):
    given = grouped.problem([1000, 1, 0, 333, 64, 129, *([700] * 20)], 1032, 776, device="cuda")
    grouped.assert_right(tw.grouped_matmul(*given, plan=plan(tile, stages)), *given)


@pytest.mark.parametrize("routing", ["random", "skewed", "one", "empty", "same"])
@pytest.mark.parametrize("tokens, experts, k", [([70, 0], 8, 1), ([40, 99, 1, 300], 129, 8), ([16] * 8, 64, 4)])
def test_there_and_back_as_planned(tokens, experts, k, routing):
    p = problem(tokens, experts, k, 136, 72, routing=routing, device="cuda")
    with tw.virtual_world(len(tokens), device="cuda", timeout=5.0) as world:
        for options in ({}, dict(capacity=4096, max_tokens=300)):
            assert_right([out for out, *_ in run(world, p, **options)], truth(p))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tile, stages", TILES)
def test_moe_dispatch_matmul_of_every_tile(tile, stages, transposed):
    p = problem([600, 933], 6, 4, 520, 264, device="cuda")
    if transposed:
        p.w, p.gate = (w.mT.contiguous().mT for w in (p.w, p.gate))
    chosen = plan(tile, stages, "tma", "inter_sm", 8)
    with tw.virtual_world(2, device="cuda", timeout=5.0) as world:
        for options in (dict(gated=False), dict(gated=False, activation="silu"), dict(gated=True)):
            if options["gated"] and tile[1] == 64:  # a gate takes half of the columns, 64 at least
                continue
            for _ in range(3):
                results = run(world, p, second=False, plan=chosen, **options)
                assert_right([out for out, *_ in results], truth(p, second=False, **options))


@pytest.mark.parametrize("schedule, comm_sms", [("intra_sm", 0), ("inter_sm", 8)])
@pytest.mark.parametrize("tile, stages", TILES)
def test_moe_matmul_combine_of_every_tile(tile, stages, schedule, comm_sms):
    p = problem([600, 933], 6, 4, 2056, 264, device="cuda")
    chosen, goal, first = plan(tile, stages, "register", schedule, comm_sms), truth(p, gated=False), None
    with tw.virtual_world(2, device="cuda", timeout=5.0) as world:
        for _ in range(3):
            outs = world.run(lambda rank, group: back(p, rank, group, chosen))
            assert_right(outs, goal)
            first = first or outs
            assert all(torch.equal(*pair) for pair in zip(outs, first, strict=True))
