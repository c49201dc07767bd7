"""nn.MoE: the same values and gradients whatever the world, state dicts, refusals."""

import copy

import pytest
import torch
from torch import nn

import tileweave as tw
from tileweave.nn import ColumnParallelLinear, MoE, full_state_dict, reduce_gradients

SIZES = dict(features=24, hidden=16, experts=7, k=3, dtype=torch.bfloat16, seed=3)


def step(group, x, **options):
    """Result, gradients of x and of the parameters, of a rank's layer."""
    layer = MoE(**SIZES, group=group, **options)
    x = x.clone().requires_grad_()
    out = layer(x)
    out.float().square().sum().backward()
    return out.detach(), x.grad, {name: p.grad for name, p in layer.named_parameters()}


@pytest.mark.parametrize("world", [2, 3])
def test_it_is_the_layer_of_one_rank(world):
    x = torch.randn(world, 2, 5, 24).bfloat16()
    with tw.virtual_world(1, device="cpu") as one:
        ((out, grad_x, grads),) = one.run(lambda rank, group: step(group, x))
    with tw.virtual_world(world, device="cpu") as several:
        for options in ({}, dict(capacity=64)):
            results = several.run(lambda rank, group, options=options: step(group, x[rank], **options))
            near(torch.stack([r[0] for r in results]), out)
            near(torch.stack([r[1] for r in results]), grad_x)
            near(sum(r[2]["router"].float() for r in results), grads["router"])
            for name in MoE.SPLIT:
                near(torch.cat([r[2][name] for r in results]), grads[name])


def test_gradients_of_a_model_with_experts_are_summed():
    """Those of what all ranks have, the router's too, and not the experts'."""
    x = torch.randn(3, 5, 24).bfloat16()

    def rank_program(rank, group, tokens):
        model = nn.Sequential(nn.RMSNorm(24, dtype=torch.bfloat16), MoE(**SIZES, group=group))
        model(tokens).float().square().sum().backward()
        reduce_gradients(model)
        return {name: p.grad for name, p in model.named_parameters()}

    with tw.virtual_world(1, device="cpu") as one:
        (whole,) = one.run(lambda rank, group: rank_program(rank, group, x))
    with tw.virtual_world(3, device="cpu") as several:
        results = several.run(lambda rank, group: rank_program(rank, group, x[rank]))
    for name, goal in whole.items():
        parts = [grads[name] for grads in results]
        if name.removeprefix("1.") in MoE.SPLIT:
            near(torch.cat(parts), goal)
        else:
            assert all(torch.equal(part, parts[0]) for part in parts), name
            near(parts[0], goal)


def test_gradients_of_experts_beside_layers_that_are_not_sequence_parallel_are_refused():
    def rank_program(rank, group):
        model = nn.Sequential(
            ColumnParallelLinear(24, 24, group=group, sequence_parallel=False), MoE(**SIZES, group=group)
        )
        with pytest.raises(ValueError, match="all be sequence parallel, or none, and MoE always is"):
            reduce_gradients(model)

    with tw.virtual_world(2, device="cpu") as world:
        world.run(rank_program)


def near(got, goal):
    assert got.shape == goal.shape
    assert (got.float() - goal.float()).norm() <= 0.02 * goal.float().norm()


def test_state_dicts_copies_and_refusals():
    whole = MoE(**SIZES)
    assert [list(p.shape) for p in whole.parameters()] == [[7, 24], [7, 24, 16], [7, 24, 16], [7, 16, 24]]

    def rank_program(rank, group):
        layer = MoE(**{**SIZES, "seed": 4}, group=group)
        layer.load_state_dict(whole.state_dict())
        twin = copy.deepcopy(layer)
        twin.load_state_dict(layer.state_dict())
        assert torch.equal(twin.up, whole.up[layer.first : layer.end]) and torch.equal(twin.router, whole.router)
        full = full_state_dict(nn.Sequential(layer))
        assert full.keys() == {f"0.{name}" for name in whole.state_dict()}
        assert all(torch.equal(full[f"0.{name}"], each) for name, each in whole.state_dict().items())
        assert layer.state_dict()["up"].shape == layer.up.shape
        with pytest.raises(ValueError, match="at least one for each of 2 ranks"):
            MoE(8, 8, 1, 1, group=group)
        with pytest.raises(ValueError, match="k must be from 1 to 8"):
            MoE(8, 8, 8, 9, group=group)
        with pytest.raises(ValueError, match=r"\[..., 24\]"):
            layer(torch.zeros(2, 8).bfloat16())
        return layer.end - layer.first

    with tw.virtual_world(2, device="cpu") as world:
        assert world.run(rank_program) == [4, 3]


def test_float32_weights_under_autocast():
    def rank_program(rank, group):
        layer = MoE(features=24, hidden=16, experts=4, k=2, seed=0, group=group)
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(torch.randn(5, 24))
        out.float().sum().backward()
        return out.dtype, layer.up.grad.dtype

    with tw.virtual_world(2, device="cpu") as world:
        assert world.run(rank_program) == [(torch.bfloat16, torch.float32)] * 2


def test_compiled_in_a_full_graph():
    def rank_program(rank, group):
        layer = MoE(features=24, hidden=16, experts=4, k=2, dtype=torch.bfloat16, seed=0, group=group, capacity=40)
        x = torch.randn(5, 24).bfloat16()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
        found = []
        for call in (layer, compiled):
            layer.zero_grad()
            out = call(x)
            out.float().square().sum().backward()
            found.append([out.detach(), *(p.grad.clone() for p in layer.parameters())])
        return found

    with tw.virtual_world(2, device="cpu") as world:
        for plain, by_compiler in world.run(rank_program):
            for got, goal in zip(by_compiler, plain, strict=True):
                near(got, goal)
