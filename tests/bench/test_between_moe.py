"""Contenders of expert parallelism between processes: all right, by gloo on a CPU."""

import pytest
import torch

from tests.nn.test_processes import start
from tileweave.bench import between, between_moe


def body(rank):
    between.slowest = lambda value: value  # each rank looks at its own
    for op, skewed in (("moe_dispatch_matmul", True), ("moe_matmul_combine", True), ("moe_matmul_combine", False)):
        part = between_moe.prepare(between_moe.Sizes(48, 64, 32, 6, 2), skewed, torch.device("cpu"))
        runs, sample, truth, route = between_moe.CONTENDERS[op](part)
        assert not route.fused and part.capacity >= len(part.order) == part.offsets[-1] > 0
        if op == "moe_dispatch_matmul":  # what transfers nothing makes the same rows
            for name in ("matmul", "own matmul"):
                assert (runs[name]()[sample].float() - truth).norm() < 0.01 * truth.norm()
        samples = {name: lambda name=name, runs=runs, sample=sample: runs[name]()[sample] for name in runs}
        assert set(between.checked(samples, truth, 0.01)) == {"tileweave", "nccl"}
        wrong = 1.1 * runs["nccl"]()[sample]
        with pytest.raises(AssertionError):
            between.checked({"nccl": lambda wrong=wrong: wrong}, truth, 0.01)


def test_contenders_are_right(tmp_path):
    start(tmp_path, 2, body)
