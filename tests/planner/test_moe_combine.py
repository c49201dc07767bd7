"""The way back of experts: what it is predicted to take, and which plans there are."""

from dataclasses import replace

import pytest
import torch

from tileweave import plan
from tileweave.ops.contract import Like, Site
from tileweave.ops.moe.check import choose_combine, combine_problem_of
from tileweave.planner import H200, Plan
from tileweave.planner.cost import push_rate
from tileweave.planner.moe_combine import Problem, cost_of, unsupported
from tileweave.planner.tiling import tiling_of

PROBLEM = Problem(8, 32, 7168, 128, 4096, 16, 132)
TILING = tiling_of((128, 128, 64), 6)


def test_what_crosses_the_link_is_a_row_for_each_choice():
    sent = cost_of(PROBLEM, TILING).communicate_us - H200.launch_us
    assert sent == pytest.approx(4096 * 16 * 7 / 8 * 2 * 7168 / push_rate("register", 132, H200))


def test_behind_the_tiles_all_that_has_come_is_summed():
    once, twice = (cost_of(replace(PROBLEM, tokens=tokens), TILING).exposed_us for tokens in (4096, 8192))
    assert twice - once == pytest.approx(once - H200.launch_us)


@pytest.mark.parametrize(
    "change", [dict(mechanism="tma"), dict(schedule="inter_sm", comm_sms=8), dict(comm_sms=1), dict(split=2)]
)
def test_other_ways_are_refused(change):
    fine = Plan("register", "intra_sm", (128, 128, 64), 6)
    assert unsupported(PROBLEM, fine) is None and "moe_matmul_combine has" in unsupported(
        PROBLEM, replace(fine, **change)
    )


def test_each_rank_has_the_tile_that_suits_its_rows():
    site = Site("processes", 8, 132, torch.device("cuda"), None, "it is off", linked=True, nccl=True)
    for own, rows in ((32, 0), (31, 65536), (32, 9_999_999)):  # of 255 experts
        w = Like(torch.Size((own, 2048, 7168)), torch.bfloat16, site.device)
        chosen = choose_combine(site, rows, w, combine_problem_of(site, w, 255, 4096 * 16, 16), None).plan
        assert (chosen.mechanism, chosen.schedule, chosen.comm_sms) == ("register", "intra_sm", 0)


def test_plan_shows_other_tiles_with_reasons():
    decision = plan("moe_matmul_combine", {"tokens": 32768}, gpu="h200", ranks=8)
    others = [decision.runner_up, *decision.rejected]
    assert "row by row" in decision.plan.reason and len({each.tile for each in others}) >= 2
    assert decision.workspace_bytes == 2 * 2 * 4096 * 8 * 7168
