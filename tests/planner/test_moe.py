"""Plans of grouped matmuls and of dispatches."""

import json
from pathlib import Path

import pytest

from tileweave.fabric import base
from tileweave.planner import moe
from tileweave.planner.hardware import H200
from tileweave.planner.moe import (
    UNEVEN,
    DispatchProblem,
    GroupedProblem,
    dispatch_plan_for,
    plan_for,
    unsupported,
    unsupported_dispatch,
)

FIGURES = Path(__file__).parents[2] / "docs/figures"


@pytest.mark.parametrize(
    "each, experts, sms, uneven",
    [
        (1024, 32, 132, True),
        (1025, 32, 132, False),
        (256, 64, 132, True),
        (255, 64, 132, False),
        (4096, 64, 132, False),
        (4096, 65, 132, True),
        (255, 65, 132, False),
        (1024, 32, 45, True),
        (1024, 32, 44, False),
    ],
)
def test_experts_of_few_rows_for_their_number_have_low_tiles(each, experts, sms, uneven):
    problem = GroupedProblem(each * experts, experts, 2048, 7168, sms)
    plan = plan_for(problem)
    assert (plan.tile == UNEVEN) == uneven and unsupported(problem, plan) is None
    assert ("read least from memory" in plan.reason) == uneven and ("are the cheapest" in plan.reason) != uneven


def test_the_planner_counts_with_the_flags_that_the_fabric_has():
    assert moe.FLAGS == base.FLAGS == base.BLOCK_WORDS - base.HEADER_WORDS


def test_tcgen05_has_no_low_tiles():
    plan = plan_for(GroupedProblem(32 << 10, 32, 2048, 7168, 132, ("tcgen05",)))
    assert plan.tile[0] == 128 and "are the cheapest" in plan.reason


def test_dispatches_are_planned_as_they_were_measured():
    rows = json.loads((FIGURES / "moe_virtual_1xH200.json").read_text())["rows"]
    measured = [row for row in rows if row["kind"] in ("dispatch", "gated")]
    for row in measured:
        world, products = row["world"], 2 if row["kind"] == "gated" else 1
        plan = dispatch_plan_for(DispatchProblem(world, 256 // world, 2048, 7168, H200.sms // world, products))
        told = row["plan"]
        assert [plan.schedule, plan.tile, plan.stages, plan.comm_sms] == [
            told["schedule"], tuple(told["tile"]), told["stages"], told["comm_sms"]
        ]  # fmt: skip
    assert {row["plan"]["comm_sms"] for row in measured} == {1, 3, 5}


@pytest.mark.parametrize(
    "world, n, sms, comm_sms",
    [
        (8, 16384, 132, 1),  # as many as place rows while they are multiplied,
        (8, 2048, 132, 11),
        (8, 512, 132, 44),  # a third of the SMs at most,
        (64, 512, 132, 6),  # and no more than have flags
        (8, 2048, 3, 1),
        (8, 8, 2, 1),
    ],
)
def test_so_many_communicators_as_rows_take(world, n, sms, comm_sms):
    problem = DispatchProblem(world, 32, n, 7168, sms)
    plan = dispatch_plan_for(problem)
    assert plan.comm_sms == comm_sms and unsupported_dispatch(problem, plan) is None
    assert f"{comm_sms} of {sms} SMs" in plan.reason
