"""What a module or a function of modules cannot take is refused by name, not by what chokes on it inside."""

import pytest
import torch

from tileweave import nn

X = torch.randn(4, 8)
NESTED = torch.nested.nested_tensor([X[0, :3], X[0, :1]])
SIZES = {
    "ColumnParallelLinear": {"in_features": 8, "out_features": 8},
    "RowParallelLinear": {"in_features": 8, "out_features": 8},
    "MoE": {"features": 8, "hidden": 8, "experts": 2, "k": 1},
}  # fmt: skip


@pytest.mark.parametrize("wrong", [None, "x", "", b"x", [1], 1.5, float("nan"), True, object(), X, -1])
@pytest.mark.parametrize("kind, word", [(kind, word) for kind, sizes in SIZES.items() for word in sizes])
def test_sizes(kind, word, wrong):
    with pytest.raises((TypeError, ValueError), match=f"^{kind}: {word}: expected a size from 0 up"):
        getattr(nn, kind)(**SIZES[kind] | {word: wrong})


@pytest.mark.parametrize("wrong", [None, 1, "x", [1], X.numpy(), NESTED])
@pytest.mark.parametrize("kind", SIZES)
def test_inputs(kind, wrong):
    with pytest.raises(TypeError, match=f"^{kind}: input must be a dense torch.Tensor, got "):
        getattr(nn, kind)(**SIZES[kind])(wrong)


@pytest.mark.parametrize("wrong", [None, 1, "x", [1], torch.nn.Linear])
def test_modules(wrong):
    calls = {
        "full_state_dict: module": lambda: nn.full_state_dict(wrong),
        "reduce_gradients: module": lambda: nn.reduce_gradients(wrong),
        "parallelize: module": lambda: nn.parallelize(wrong, {"a": "column"}),
        "column_parallel: each layer": lambda: nn.column_parallel(X, wrong),
    }
    for words, call in calls.items():
        with pytest.raises(TypeError, match=rf"^{words} must be a torch\.nn\.Module, got "):
            call()


def test_a_scalar_and_a_seed_that_is_none():
    with pytest.raises(ValueError, match=r"^MoE: input must be \[\.\.\., 8\], got \[\]"):
        nn.MoE(8, 8, 2, 1)(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"^MoE: seed must be an int or None"):
        nn.MoE(8, 8, 2, 1, seed="x")
