"""Contenders between processes: ours, NCCL's and those that transfer nothing are all right, by gloo on a CPU."""

from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist

from tests.nn.test_processes import start
from tileweave.bench import between, between_moe, between_sequence, collectives, harness
from tileweave.bench.attention_case import Case
from tileweave.ops.attention import reference
from tileweave.ops.sequence.placement import place_sequence

ALONE = ("matmul", "own matmul")


def assert_right(out, truth):
    assert (out.float() - truth).norm() < 0.01 * truth.norm()


def check(runs, truth, route):
    """Ours and NCCL's find the truth; what is wrong would be found."""
    assert not route.fused and truth.abs().sum() > 0
    errors = between.checked(dict(runs), truth, 0.01)
    assert {name for name, error in errors.items() if isinstance(error, float)} == {"tileweave", "nccl"}
    wrong = 1.1 * runs["nccl"]()
    with pytest.raises(AssertionError):
        between.checked({"nccl": lambda: wrong}, truth, 0.01)


def products(rank):
    for op in ("matmul_reduce_scatter", "all_gather_matmul"):
        runs, truth, route = between.CONTENDERS[op](64, 32, 64)
        check(runs, truth, route)
    for name in ALONE:  # of the gather
        assert_right(runs[name](), truth)


def sequences(rank):
    for op, causal in (("ring_attention", False), ("ring_attention", True), ("ulysses_attention", True)):
        case = Case(op, 1, 4, 64, causal)
        q, k, v = torch.randn(3, 1, 4, 64, 128, generator=torch.Generator().manual_seed(7)).bfloat16()
        truth = place_sequence(reference(q, k, v, causal=causal)[0], 2, rank, 2, case.placement)
        with ExitStack() as ended:
            runs, route = between_sequence.CONTENDERS[op](case, q, k, v, ended)
            check(runs, truth, route)
        if op == "ring_attention":
            assert_right(runs["attention"](), truth)


def experts(rank):
    for op, skewed in (("moe_dispatch_matmul", True), ("moe_matmul_combine", True), ("moe_matmul_combine", False)):
        part = between_moe.prepare(between_moe.Sizes(48, 64, 32, 6, 2), skewed, torch.device("cpu"))
        assert part.capacity >= len(part.order) == part.offsets[-1] > 0
        runs, sample, truth, route = between_moe.CONTENDERS[op](part)
        samples = {name: lambda name=name, runs=runs, sample=sample: runs[name]()[sample] for name in runs}
        check(samples, truth, route)
        if op == "moe_dispatch_matmul":
            for name in ALONE:
                assert_right(samples[name](), truth)


def memory(rank):
    """All ranks know of that which has the least."""
    torch.cuda.mem_get_info = lambda: (7 + rank, 9)
    assert harness.free_bytes() == 7


def wrong(rank):
    """What is wrong on one rank is told on all; of what is right nobody hears."""

    def most(value):
        every = [None] * 2
        dist.all_gather_object(every, value)
        return max(every)

    collectives.slowest, right = most, torch.ones(4)
    collectives.check_all("all_gather", right, right)
    with pytest.raises(AssertionError, match="all_gather: " + ("Tensor-likes" if rank else "wrong on another rank")):
        collectives.check_all("all_gather", right * (1 + rank), right)


def failing(rank):
    """A rival that fails on one rank is left out on all, and ends the run on all where another rank waits in it."""

    def on_one():
        if rank:
            raise OSError("no such library\nand more")
        return torch.ones(4)

    def with_peers():
        dist.all_reduce(on_one())

    runs = {"flux": on_one}
    errors = between.checked(runs, torch.ones(4), 0.01)
    assert errors == {"flux": "does not run" + (": " if rank else " on rank 1: ") + "no such library"} and not runs
    between.ended = lambda seconds: False  # as on a GPU, where the host goes on
    with pytest.raises(
        RuntimeError, match=r"flux does not run on rank 1 \(no such library\), for which ranks \[0\] wait"
    ):
        between.checked({"flux": on_one}, torch.ones(4), 0.01)
    between.PATIENCE = 0.5
    between.hosts.cache_clear()
    with pytest.raises(RuntimeError, match="flux: no such .*do not meet behind it" if rank else "flux: runs here, but"):
        between.checked({"flux": with_peers}, torch.ones(4), 0.01)
    if rank:
        dist.all_reduce(torch.ones(4))  # for which the other one waits


def body(rank):
    between.slowest = lambda value: value  # each rank looks at its own
    between.normal = lambda *shape: torch.randn(*shape).bfloat16()
    for part in (products, sequences, experts, memory, wrong, failing):
        part(rank)


def test_contenders_are_right(tmp_path):
    start(tmp_path, 2, body)
