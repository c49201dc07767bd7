"""Expert parallelism in groups of real processes (gloo)."""

import torch

from tests.nn.test_processes import start
from tests.ops.moe.problems import assert_right, problem, there_and_back, truth
from tests.ops.moe.test_moe import gradients, true_gradients


def body(rank):
    for routing in ("random", "one"):
        p = problem([5, 0, 9], 7, 3, routing=routing)
        goal = truth(p)
        for options in ({}, dict(capacity=64), dict(capacity=64, max_tokens=9)):
            assert_right([there_and_back(p, rank, None, **options)[0]], [goal[rank]])
        seeds = [torch.ones(x.shape) for x in p.x]
        for g, true in zip(gradients(p, rank, None, seeds), true_gradients(p, seeds)[rank], strict=True):
            assert (g.float() - true).norm() <= 0.03 * true.norm() + 1e-6


def test_three_processes(tmp_path):
    start(tmp_path, 3, body)
