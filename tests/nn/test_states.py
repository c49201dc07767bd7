"""State dicts, whole and in parts; gradients of what is not split."""

import copy

import pytest
import torch
from torch import nn

import tileweave as tw
from tests.nn.models import PLAN, REPLICATED, Block, make
from tileweave.nn import ColumnParallelLinear, RowParallelLinear, full_state_dict, parallelize, reduce_gradients


def in_world(world, fn):
    with tw.virtual_world(world, device="cpu") as w:
        return w.run(fn)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("assign", [False, True])
def test_whole_weights_in_and_out(world, assign):
    """And parts in and out, in between."""
    saved = make(seed=7).state_dict()

    def rank_program(rank, group):
        model = parallelize(make(seed=8), PLAN, group)
        before = {key: x.clone() for key, x in saved.items()}
        assert not model.load_state_dict(saved, strict=True, assign=assign).missing_keys
        parts = model.state_dict()
        assert parts["down.weight"].shape == (24, 48 // world) and parts["up.bias"].shape == (48 // world,)
        if assign and world > 1:  # a part of its own, not a view that keeps the whole alive
            assert model.up.weight.untyped_storage().nbytes() == 2 * model.up.weight.numel()
        other = parallelize(make(seed=9), PLAN, group)
        other.load_state_dict(parts, strict=True, assign=assign)
        whole = full_state_dict(other)
        assert all(torch.equal(saved[key], before[key]) for key in saved)
        return whole

    for whole in in_world(world, rank_program):
        assert whole.keys() == saved.keys()
        assert all(x.is_contiguous() and torch.equal(x, saved[key]) for key, x in whole.items())
        make(seed=1).load_state_dict(whole, strict=True)


def test_whole_weights_are_gathered_only_where_they_are_asked_for():
    """The wish holds for one thread and one call, through wrappers that change names too."""

    def rank_program(rank, group):
        model = torch.compile(parallelize(make(), PLAN, group), backend="eager")
        whole = full_state_dict(model)
        assert whole["_orig_mod.up.weight"].shape == (48, 24)
        assert model.state_dict()["_orig_mod.up.weight"].shape == (24, 24)

    in_world(2, rank_program)


def test_loading_is_strict():
    saved = make().state_dict()
    wrong = {**saved, "down.weight": torch.zeros(24, 47), "more": torch.zeros(1)}
    del wrong["up.bias"]

    def rank_program(rank, group):
        model = parallelize(make(), PLAN, group)
        before = model.down.weight.clone()
        with pytest.raises(RuntimeError) as failure:
            model.load_state_dict(wrong)
        text = str(failure.value)
        assert (
            "down.weight must be [24, 48], the whole of it, or [24, 24], the part of one of 2 ranks, got [24, 47]"
            in text
        )
        assert 'Missing key(s) in state_dict: "up.bias"' in text and 'Unexpected key(s) in state_dict: "more"' in text
        assert "size mismatch" not in text and torch.equal(model.down.weight, before)

    in_world(2, rank_program)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_from_linear_keeps_dtype_device_and_what_is_frozen(kind):
    linear = nn.Linear(8, 8, dtype=torch.float16)
    linear.bias.requires_grad_(False)
    meta = nn.Linear(8, 8, device="meta")

    def rank_program(rank, group):
        layer = kind.from_linear(linear, group, max_sms=3)
        assert layer.weight.dtype == torch.float16 and layer.max_sms == 3
        assert layer.weight.requires_grad and not layer.bias.requires_grad
        layer.weight.data.fill_(0)  # a copy
        later = kind.from_linear(meta, group)
        assert later.weight.is_meta
        later.to_empty(device="cpu").load_state_dict(linear.state_dict())
        assert torch.equal(later.whole("weight"), linear.weight.float())

    in_world(2, rank_program)
    assert linear.weight.any()


def test_gradients_of_whole_parameters_are_summed():
    def rank_program(rank, group):
        model = parallelize(Block(), PLAN, group)
        model.head = nn.Linear(2, 2, dtype=torch.bfloat16)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, rank + 1)
        model.head.bias.grad = None
        reduce_gradients(model)
        return {name: p.grad for name, p in model.named_parameters()}

    for rank, grads in enumerate(in_world(3, rank_program)):
        assert grads.pop("head.bias") is None
        for name, grad in grads.items():
            split = name.startswith(("gate", "up")) or name == "down.weight"
            assert (grad == (rank + 1 if split else 6)).all(), name


def test_gradients_without_sequence_parallel_layers_are_complete():
    def rank_program(rank, group):
        model = parallelize(Block(), REPLICATED, group)
        model.norm.weight.grad = torch.ones(24)
        reduce_gradients(model)
        assert (model.norm.weight.grad == 1).all()

    in_world(2, rank_program)


def test_tied_layers_are_whole_under_both_names():
    model = nn.ModuleDict(dict(a=nn.Linear(8, 8)))
    model["b"] = model["a"]

    def rank_program(rank, group):
        mine = parallelize(copy.deepcopy(model), {"a": "row"}, group)
        assert mine["a"] is mine["b"]
        return full_state_dict(mine)

    for whole in in_world(2, rank_program):
        assert all(torch.equal(x, whole[key]) for key, x in model.state_dict().items())


def test_gradients_of_a_model_that_mixes_both_kinds_are_refused():
    """Which norms see tokens of one rank, and which see all, cannot be told."""

    def rank_program(rank, group):
        both = nn.Sequential(
            ColumnParallelLinear(16, 16, group=group),
            RowParallelLinear(16, 16, group=group, sequence_parallel=False),
        )
        with pytest.raises(ValueError, match="must all be sequence parallel, or none"):
            reduce_gradients(both)

    in_world(2, rank_program)
