"""What bench/scopes.py would measure: all schedules of all ops, by plans that their planners take. No GPU is needed."""

import pytest
import torch

from tileweave.bench.scopes import OPS, plans_of, told
from tileweave.planner import matmul_all_reduce
from tileweave.planner.all_gather_matmul import SCHEDULES as OF_ALL_GATHER
from tileweave.planner.plan import SCHEDULES as OF_REDUCE_SCATTER

SCHEDULES = {
    "matmul_reduce_scatter": OF_REDUCE_SCATTER,
    "all_gather_matmul": OF_ALL_GATHER,
    "matmul_all_reduce": tuple(matmul_all_reduce.SHOTS),
}


def like(op, world, size=4096):
    """Operands without memory."""
    rows = size // world if op == "all_gather_matmul" else size
    return torch.empty(rows, size, device="meta"), torch.empty(size, size, device="meta")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world, sms, linked", [(2, 66, False), (8, 16, False), (2, 132, True), (8, 132, True)])
def test_every_schedule_of_an_op_is_measured(op, world, sms, linked):
    a, b = like(op, world)
    plans = plans_of(op, a, b, world, sms, linked, False, ())
    assert {plan.schedule for plan in plans.values()} >= set(SCHEDULES[op])
    problem = OPS[op].problem(a, b, world, sms, linked)
    assert not any(OPS[op].planner.unsupported(problem, plan) for plan in plans.values())
    assert {plan.comm_sms for plan in plans.values() if plan.schedule == "inter_sm"} != {0}


def test_plans_by_name_and_those_of_the_fabric_where_it_has_multicast():
    a, b = like("all_gather_matmul", 2)
    everywhere = plans_of("all_gather_matmul", a, b, 2, 132, True, True, ())
    assert {name.split()[0] for name in everywhere} == {"tma", "register", "copy_engine", "multimem"}
    few = plans_of("all_gather_matmul", a, b, 2, 132, True, False, ("copy", "tma inter_sm 4", "multimem"))
    assert {name.split()[0] for name in few} == {"copy_engine", "tma"} and "tma inter_sm 4" in few


def test_a_truth_is_that_of_each_rank():
    a, b = [torch.randn(6, 4) for _ in range(2)], [torch.randn(4, 8) for _ in range(2)]
    total = a[0] @ b[0] + a[1] @ b[1]
    for op, truth in (
        ("matmul_reduce_scatter", [total[:3], total[3:]]),
        ("matmul_all_reduce", [total, total]),
        ("all_gather_matmul", [torch.cat(a) @ y for y in b]),
    ):
        for got, expected in zip(OPS[op].truth(a, b), truth, strict=True):
            torch.testing.assert_close(got, expected)


def test_a_line_has_the_fastest_first():
    us = {"tma inter_sm 4": [3.0, 2.0, 4.0], "tma inter_sm 8": [2.0, 2.0, 2.0], "tma intra_sm 0": [1.0, 1.0, 1.0]}
    line = told({"op": "x", "world": 2, "size": 64, "share": 32, "us": us})
    assert line.endswith("us (communicators) tma intra_sm 1.0 (0); tma inter_sm 2.0 (8) 3.0 (4)")
