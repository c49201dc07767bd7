"""A small model for the tests of tileweave.nn, its one-process truth, and a training step on every rank of a world."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from tileweave.nn import Column, Row, column_parallel, parallelize, reduce_gradients
from tileweave.ops.matmul_reduce_scatter import relative_error

PLAN = {"gate": "column", "up": "column", "down": "row"}
REPLICATED = {"gate": Column(False), "up": Column(False), "down": Row(False)}


class Block(nn.Module):
    """A SwiGLU block with a norm and a residual. One of the two projections has a bias, unless both have."""

    def __init__(self, width=24, inner=48, gate_bias=False):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, inner, bias=gate_bias)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x):
        gate, up = column_parallel(self.norm(x), self.gate, self.up)
        return x + self.down(F.silu(gate) * up)


def make(seed=0, dtype=torch.bfloat16, device="cpu", **sizes):
    """A block with random weights."""
    torch.manual_seed(seed)
    return Block(**sizes).to(device, dtype)


def data(*shape, seed=1, dtype=torch.bfloat16, device="cpu"):
    """Random input, and what the loss compares the output with."""
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(*shape, generator=generator) for _ in range(2))
    return x.to(device, dtype), target.to(device)


def loss_of(out, target, count):
    """The tokens' share of the mean squared error of `count` numbers."""
    return ((out.float() - target) ** 2).sum() / count


def truth(model, x, target):
    """Output, gradient of x, gradients of the parameters by name: of one process, in float32."""
    model, x = copy.deepcopy(model).float(), x.float().clone().requires_grad_()
    out = model(x)
    loss_of(out, target, target.numel()).backward()
    return out.detach(), x.grad, {name: p.grad for name, p in model.named_parameters()}


def step(model, x, target, rank, group, plan=PLAN, dim=-2, call=lambda model, x: model(x)):
    """The same on a rank whose x and target are its shard along `dim`, or all of it if dim is None."""
    model = parallelize(copy.deepcopy(model), plan, group)
    world, count = group.size(), target.numel()
    if dim is not None:
        x, target = (each.chunk(world, dim)[rank] for each in (x, target))
    x = x.clone().requires_grad_()
    out = call(model, x)
    loss_of(out, target, count).backward()
    reduce_gradients(model)
    return out.detach(), x.grad, {name: p.grad for name, p in model.named_parameters()}


def joined(parts, whole):
    """The ranks' parts of a parameter or gradient put together along the dimension in which they are smaller."""
    dims = [i for i, (part, all_) in enumerate(zip(parts[0].shape, whole.shape, strict=True)) if part != all_]
    if not dims:
        for other in parts:
            assert torch.equal(other, parts[0])
        return parts[0]
    return torch.cat(list(parts), dims[0])


def assert_equal_to(true, results, dim, bound=0.02):
    """What the ranks' `step` returned is near what `truth` did."""
    outs, grads, named = zip(*results, strict=True)
    pairs = [(outs, true[0]), (grads, true[1])]
    for parts, whole in pairs:
        got = joined(parts, whole) if dim is None else torch.cat(list(parts), dim)
        assert relative_error(got, whole) <= bound, relative_error(got, whole)
    for name, whole in true[2].items():
        got = joined([grads[name] for grads in named], whole)
        assert relative_error(got, whole) <= bound, (name, relative_error(got, whole))
