"""The layers on a real GPU, between virtual ranks."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tileweave as tw
from tests.nn.models import PLAN, REPLICATED, assert_equal_to, data, make, step, truth
from tileweave.nn import full_state_dict, parallelize

pytestmark = pytest.mark.gpu
SIZES = dict(width=256, inner=768, gate_bias=True)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("plan, dim", [(PLAN, -2), (REPLICATED, None)])
def test_training_steps(world, plan, dim):
    model = make(device="cuda", **SIZES)
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        for seed in range(2):
            x, target = data(2, 96, 256, seed=seed, device="cuda")
            results = w.run(lambda rank, group, x=x, t=target: step(model, x, t, rank, group, plan, dim))
            assert_equal_to(truth(model, x, target), results, dim)


@pytest.mark.parametrize("how", ["autocast", "checkpointed", "compiled"])
@pytest.mark.parametrize("plan, dim", [(PLAN, -2), (REPLICATED, None)])
def test_beside_others(how, plan, dim):
    dtype = torch.float32 if how == "autocast" else torch.bfloat16
    model, (x, target) = make(device="cuda", dtype=dtype, **SIZES), data(2, 96, 256, dtype=dtype, device="cuda")

    def call(model, x):
        if how == "autocast":
            with torch.autocast("cuda", torch.bfloat16):
                return model(x)
        if how == "compiled":
            return torch.compile(model, fullgraph=True, backend="aot_eager")(x)
        return checkpoint(model, x, use_reentrant=False)

    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        results = w.run(lambda rank, group: step(model, x, target, rank, group, plan, dim, call))
    assert_equal_to(truth(model, x, target), results, dim)


def test_whole_weights_come_back():
    model = make(device="cuda", **SIZES)
    with tw.virtual_world(4, device="cuda", timeout=5.0) as w:
        wholes = w.run(lambda rank, group: full_state_dict(parallelize(copy.deepcopy(model), PLAN, group)))
    for whole in wholes:
        assert all(torch.equal(whole[key], value) for key, value in model.state_dict().items())
