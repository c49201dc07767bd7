"""Tiny sequences of two batches by the kernels, emulated, element by element."""

import pytest
import torch

import tileweave as tw
from tests.ops.sequence.fused import explained, plan, run_calls
from tests.ops.sequence.problems import assert_each_near, truth, whole


@pytest.mark.parametrize("op, placement", [("ring_attention", "zigzag"), ("ulysses_attention", None)])
@pytest.mark.parametrize("world, rows", [(1, 16), (2, 16), (3, 18), (8, 16)])
def test_sixteen_tokens_of_two_batches_in_both_layouts(world, rows, op, placement):
    """Of eight ranks each has two tokens."""
    heads = 2 if op == "ring_attention" else 2 * world if world < 8 else world
    options = dict(plan=plan(comm_sms=min(world - 1, 1)), **(dict(placement=placement) if placement else {}))
    calls = [
        (whole(2, heads, 1, rows, 64, dtype=torch.bfloat16, seed=seed), dict(options, layout=layout, causal=seed == 0))
        for seed, layout in enumerate(("bhsd", "bshd"))
    ]
    with tw.virtual_world(world, device="cpu", seed=rows, sms=2) as w:
        assert w.run(lambda rank, group: explained(op, calls[0][0], group, options))[0].fused
        results = run_calls(w, op, calls)
    for (out, *_), (tensors, kw) in zip(results, calls, strict=True):
        assert_each_near(out, truth(tensors, **kw)[0], torch.bfloat16)
