"""The time that a schedule of the fused kernel may take, as a multiple of fixed work done beside it.

A limit in seconds would measure the machine and what else runs on it. The fixed work is what a schedule consists of:
switches between greenlets, Python around them, and small matrix products.
"""

import time

import greenlet
import pytest
import torch

import tileweave as tw
from tileweave import Plan

# The larger problem has smaller tiles, so that each of its CTAs has four of them in a call.
# Ratios to the fixed work, 1.8 times what they are at the time of writing.
CASES = {
    "4 ranks of 4 CTAs": ((4, 4, 512, 512, 2048), None, 4, 4.5),
    "8 ranks of 16 CTAs": ((8, 16, 1024, 512, 2048), Plan(tile=(128, 64, 64), stages=3), 1, 25.0),
}


def fixed_work() -> float:
    """CPU seconds of 400,000 switches and 10,000 products of tiles."""
    main = greenlet.getcurrent()

    def count():
        seen = {}
        for i in range(400_000):
            seen[i % 97] = seen.get(i % 97, 0) + 1
            main.switch(i)

    start = time.process_time()
    other = greenlet.greenlet(count)
    for _ in range(400_000):
        other.switch()
    tile = torch.ones(64, 64)
    for _ in range(10_000):
        tile = (tile @ tile.T) * 1e-3
    return time.process_time() - start


@pytest.mark.parametrize("name", CASES)
def test_two_calls_of_matmul_reduce_scatter(name):
    (ranks, sms, m, n, k), plan, runs, limit = CASES[name]
    a = [torch.randn(m, k // ranks).bfloat16() for _ in range(ranks)]
    b = [torch.randn(k // ranks, n).bfloat16() for _ in range(ranks)]
    with tw.virtual_world(ranks, device="cpu", sms=sms) as world:

        def fn(rank, group):
            return [tw.matmul_reduce_scatter(a[rank], b[rank], group, plan=plan) for _ in range(2)][-1]

        ratios, before = [], fixed_work()
        for _ in range(runs):
            start = time.process_time()
            got = torch.cat(world.run(fn)).float()
            taken = time.process_time() - start
            after = fixed_work()
            ratios.append(2 * taken / (before + after))
            before = after
    expected = sum(x.float() @ y.float() for x, y in zip(a, b, strict=True))
    assert (got - expected).norm() < 1e-2 * expected.norm()
    assert min(ratios) < limit, ratios
