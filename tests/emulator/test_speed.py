"""How long a schedule of the fused kernel may take on one core. Bounds leave a factor of three for slow machines."""

import time

import pytest
import torch

import tileweave as tw


@pytest.mark.parametrize(
    ("ranks", "sms", "m", "n", "k", "seconds"),
    [(4, 4, 512, 512, 2048, 1.5), (8, 16, 1024, 1024, 1024, 9.0)],
)
def test_two_calls_of_matmul_reduce_scatter(ranks, sms, m, n, k, seconds):
    a = [torch.randn(m, k // ranks).bfloat16() for _ in range(ranks)]
    b = [torch.randn(k // ranks, n).bfloat16() for _ in range(ranks)]
    with tw.virtual_world(ranks, device="cpu", sms=sms) as world:

        def fn(rank, group):
            return [tw.matmul_reduce_scatter(a[rank], b[rank], group) for _ in range(2)][-1]

        world.run(fn)  # kernels are rebuilt, and the workspace allocated, once
        start = time.process_time()
        got = torch.cat(world.run(fn)).float()
        taken = time.process_time() - start
    expected = sum(x.float() @ y.float() for x, y in zip(a, b, strict=True))
    assert (got - expected).norm() < 1e-2 * expected.norm()
    assert taken < seconds
