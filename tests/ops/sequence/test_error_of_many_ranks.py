"""The error does not grow with the number of ranks, as it does where a ring's state is rounded at each step."""

import pytest
import torch

import tileweave as tw
from tileweave.ops.attention import reference

ROWS, HEADS, MANY = 256, 8, 8


def error(op, world, dim, causal, fused):
    """The relative error of a call by so many ranks, in their kernels or by the fallback."""
    g = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, HEADS, ROWS, dim, generator=g).bfloat16() for _ in range(3)]

    def call(rank, group):
        mine = [x.chunk(world, 2)[rank] for x in whole]
        assert tw.explain(op, *mine, group, causal=causal).fused == fused
        return getattr(tw, op)(*mine, group, causal=causal)

    with tw.virtual_world(world, device="cpu") as emulated:
        out = torch.cat(emulated.run(call), 2).float()
    truth = reference(*whole, causal=causal)[0].float()
    return ((out - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("dim, fused", [(64, True), (20, False)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("op", ["ring_attention", "ulysses_attention"])
def test_eight_ranks_are_as_near_as_one(op, causal, dim, fused):
    one, many = (error(op, world, dim, causal, fused) for world in (1, MANY))
    assert 0 < many < 1.1 * one < 2**-8
