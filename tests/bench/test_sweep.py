"""The sweep of all plans, with emulated ranks and a clock that is told what to say."""

import math
from contextlib import contextmanager

import pytest
import torch

from tileweave import virtual_world
from tileweave.bench import sweep
from tileweave.ops.contract import Site
from tileweave.planner import plan_for
from tileweave.planner.plan import Problem

SITE = Site("virtual", 2, 66, torch.device("cuda"), None)


def test_the_choice_is_told_beside_the_best(monkeypatch):
    """The clock counts: the later a plan had its turn, the faster it seems."""
    turns = {0: iter(range(10000, 0, -1)), 1: iter(range(10000, 0, -1))}
    monkeypatch.setattr(sweep, "virtual_world", lambda ranks, device: virtual_world(ranks, device="cpu"))

    @contextmanager
    def clock(fabric):
        yield lambda call: lambda: float(next(turns[fabric.rank]))

    monkeypatch.setitem(sweep.CLOCKS, "cuda", clock)
    found = sweep.row(("matmul_all_reduce", {"m": 256, "n": 256, "k": 128}), math.inf)
    last = found["plans"][: sweep.FINALISTS]
    assert found["best"] in [{name: each[name] for name in found["best"]} for each in last]
    assert found["distance"] == pytest.approx(found["chosen_us"] / found["best_us"] - 1) and found["distance"] > 0
    assert len(found["plans"]) > 5 and str(len(found["plans"])) in sweep.told(found)
    assert f"{found['distance']:.1%} at worst" in sweep.summary([found])


@pytest.mark.parametrize("op", sweep.MATMULS)
def test_kernels_are_told_apart_and_the_choice_comes_first(op):
    kernels = list(sweep.variants(SITE, [op], math.inf))
    every = sum(len(sweep.plans_of(SITE, task, math.inf)) for task in sweep.tasks([op]))
    assert 10 < len(kernels) < every
    if op == "matmul_reduce_scatter":
        sizes = dict(m=8192, n=8192, k=8192)
        first = sweep.plans_of(SITE, (op, sizes), 1.0)[0]
        chosen = plan_for(Problem(8192, 8192, 4096, 2, 2, 66, True, linked=False))
        assert (first.schedule, first.tile, first.split) == (chosen.schedule, chosen.tile, chosen.split)


def test_no_shape_is_begun_when_the_time_is_up(capsys):
    assert sweep.all_rows(["matmul_all_reduce"], math.inf, 0.0, None, False, True) == []
    assert capsys.readouterr().out == "out of time: the other shapes are left out\n"
