"""The CPU time that a schedule of the fused kernel may take, which leaves a factor of two or more to usual machines."""

import time

import pytest
import torch

import tileweave as tw
from tileweave import Plan

# The larger problem has smaller tiles, so that each of its CTAs has four of them in a call.
CASES = {
    "4 ranks of 4 CTAs": ((4, 4, 512, 512, 2048), None, 4, 1.0),
    "8 ranks of 16 CTAs": ((8, 16, 1024, 512, 2048), Plan(tile=(128, 64, 64), stages=3), 1, 15.0),
}


@pytest.mark.parametrize("name", CASES)
def test_two_calls_of_matmul_reduce_scatter(name):
    (ranks, sms, m, n, k), plan, runs, seconds = CASES[name]
    a = [torch.randn(m, k // ranks).bfloat16() for _ in range(ranks)]
    b = [torch.randn(k // ranks, n).bfloat16() for _ in range(ranks)]
    with tw.virtual_world(ranks, device="cpu", sms=sms) as world:

        def fn(rank, group):
            return [tw.matmul_reduce_scatter(a[rank], b[rank], group, plan=plan) for _ in range(2)][-1]

        taken = []
        for _ in range(runs):
            start = time.process_time()
            got = torch.cat(world.run(fn)).float()
            taken.append(time.process_time() - start)
    expected = sum(x.float() @ y.float() for x, y in zip(a, b, strict=True))
    assert (got - expected).norm() < 1e-2 * expected.norm()
    assert min(taken) < seconds, taken
