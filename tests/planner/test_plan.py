"""The planner: choices, refusals and predictions."""

import dataclasses

import pytest

from tileweave.planner import Plan, Problem, plan_for, unsupported
from tileweave.planner.hardware import H200
from tileweave.planner.plan import TILINGS, predict_us, shared_bytes

BIG = Problem(m=8192, n=8192, k=4096, world=4, message_bytes=2, sms=132)


def test_a_large_problem_gets_the_largest_tile_and_a_small_one_a_smaller():
    assert plan_for(BIG).tile == (128, 256, 64)
    small = plan_for(dataclasses.replace(BIG, m=1024, n=1024, k=4096))
    assert small.tile[0] * small.tile[1] < 128 * 256


@pytest.mark.parametrize("message_bytes", [2, 4])
@pytest.mark.parametrize("m, n, k", [(8, 8, 8), (8, 8192, 8), (8192, 8, 0), (128 * 1024, 57344, 8192)])
def test_every_problem_has_a_plan_that_fits_a_cta(m, n, k, message_bytes):
    problem = dataclasses.replace(BIG, m=m, n=n, k=k, message_bytes=message_bytes)
    plan = plan_for(problem)
    assert unsupported(problem, plan) is None
    assert shared_bytes(plan.tile, plan.stages, message_bytes) <= H200.shared_bytes
    assert plan.predicted_us > 0 and plan.reason


def test_one_rank_sends_nothing():
    assert "sends" in plan_for(BIG).reason
    alone = plan_for(dataclasses.replace(BIG, world=1)).reason
    assert "one rank" in alone and "send" not in alone


def test_the_prediction_is_no_better_than_each_limit():
    tiling = TILINGS[0]
    flop = 2 * BIG.m * BIG.n * BIG.k
    assert predict_us(BIG, tiling, H200) >= flop / (H200.matmul_tflops * 1e6)
    thin = dataclasses.replace(BIG, k=8)
    sent = BIG.m * BIG.n * 2 * 3 / 4
    assert predict_us(thin, tiling, H200) >= sent / (H200.link_gbs * 1e3)
    assert predict_us(dataclasses.replace(thin, linked=False), tiling, H200) < predict_us(thin, tiling, H200)


@pytest.mark.parametrize(
    "change, legal",
    [
        (dict(mechanism="copy_engine"), "'tma'"),
        (dict(schedule="none"), "'intra_sm'"),
        (dict(comm_sms=4), "has 0"),
        (dict(tile=(64, 256, 64)), "128 or 256"),
        (dict(tile=(128, 256, 32)), "K step 64"),
        (dict(tile=(128, 256)), "rows are"),
        (dict(tile=(256, 256, 64)), "at most 32768"),
        (dict(stages=1), "at least 2"),
        (dict(stages=4), "a CTA has 232448"),
    ],
)
def test_a_plan_that_cannot_run_is_refused_with_what_would_be_legal(change, legal):
    assert legal in unsupported(BIG, Plan(**change))


def test_a_float32_message_needs_more_shared_memory():
    wide = dataclasses.replace(BIG, message_bytes=4)
    assert "shared memory" in unsupported(wide, Plan(tile=(128, 256, 64), stages=3))
    assert unsupported(BIG, Plan(tile=(128, 256, 64), stages=3)) is None
