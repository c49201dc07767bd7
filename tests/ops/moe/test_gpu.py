"""Expert parallelism on virtual ranks of a real GPU."""

import pytest
import torch

import tileweave as tw
from tests.ops.moe.problems import assert_right, problem, run, truth
from tests.ops.moe.test_moe import gradients, true_gradients

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("routing", ["random", "skewed", "one", "empty", "same"])
@pytest.mark.parametrize(
    "tokens, experts, k", [([90], 8, 2), ([70, 0], 8, 1), ([40, 99, 1, 300], 129, 8), ([16] * 8, 64, 4)]
)
def test_worlds_and_routings(tokens, experts, k, routing):
    p = problem(tokens, experts, k, 136, 72, routing=routing, device="cuda")
    with tw.virtual_world(len(tokens), device="cuda", timeout=5.0) as world:
        for options in ({}, dict(capacity=4096, max_tokens=300)):
            assert_right([out for out, *_ in run(world, p, **options)], truth(p))


def test_gradients():
    p = problem([70, 0, 40], 7, 2, 136, 72, device="cuda")
    seeds = [torch.randn(x.shape, device="cuda") for x in p.x]
    with tw.virtual_world(3, device="cuda", timeout=5.0) as world:
        got = world.run(lambda rank, group: gradients(p, rank, group, seeds))
    for mine, goal in zip(got, true_gradients(p, seeds), strict=True):
        for g, true in zip(mine, goal, strict=True):
            assert (g.float() - true).norm() <= 0.03 * true.norm() + 1e-6
