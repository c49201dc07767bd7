"""Epochs and flags that wrap in the middle of calls, as after 2**31 and 2**32 of them."""

import pytest
import torch

import tileweave as tw
from tileweave import Plan
from tileweave.fabric.base import HEADER_WORDS
from tileweave.ops import matmul_all_reduce as all_reduce
from tileweave.ops import matmul_reduce_scatter as scatter

RANKS, M, N, K = 3, 3 * 40, 72, 3 * 64
TRUTH = {
    "matmul_reduce_scatter": lambda a, b: scatter.reference(a, b).chunk(RANKS),
    "matmul_all_reduce": lambda a, b: [all_reduce.reference(a, b)] * RANKS,
}


@pytest.mark.parametrize("start", [2**31 - 3, -3])
@pytest.mark.parametrize(
    ("op", "schedule"),
    [("matmul_reduce_scatter", "intra_sm"), ("matmul_reduce_scatter", "inter_sm"), ("matmul_all_reduce", "intra_sm")],
)
def test_epochs_wrap(op, schedule, start):
    plan = Plan(schedule=schedule, tile=(64, 64, 64), stages=2, comm_sms=int(schedule == "inter_sm"))
    draw = torch.Generator().manual_seed(start % 7)
    calls = [
        [[torch.randn(*size, generator=draw).bfloat16() for _ in range(RANKS)] for size in ((M, K // 3), (K // 3, N))]
        for _ in range(5)
    ]

    def fn(rank, group, some):
        return [getattr(tw, op)(a[rank], b[rank], group, plan=plan) for a, b in some]

    with tw.virtual_world(RANKS, device="cpu", sms=2) as world:
        world.run(lambda rank, group: fn(rank, group, calls[:1]))  # so that there are flags
        (shared,) = world.workspace.ops.values()
        shared.state[:, 0] = start
        shared.flags[:, HEADER_WORDS:] = start
        results = world.run(lambda rank, group: fn(rank, group, calls))
        assert (shared.state[:, 0] == (start + 5 + 2**31) % 2**32 - 2**31).all()
    for call, (a, b) in enumerate(calls):
        for rank, truth in enumerate(TRUTH[op](a, b)):
            assert scatter.relative_error(results[rank][call], truth) < 1e-2
