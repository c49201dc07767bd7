"""Gradients of the op in emulated worlds, against those of one process."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tileweave as tw
from tests.ops.sequence.problems import as_function, assert_near, run, truth, whole

PLACEMENTS = ["contiguous", "zigzag"]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_equal_those_of_one_process(world, causal, placement):
    for heads, kv_heads, layout in ((2, 2, "bhsd"), (4, 2, "bshd"), (3, 1, "bhsd")):
        tensors = whole(2, heads, kv_heads, 4 * world, 8, seed=world)
        options = dict(causal=causal, placement=placement, layout=layout, grads=True)
        with tw.virtual_world(world, device="cpu") as w:
            got = run(w, tw.ring_attention, tensors, **options)
        assert_near(got, truth(tensors, **options), torch.float32, slack=5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_half_precision(dtype):
    tensors = whole(1, 8, 2, 32, 16, dtype=dtype)
    options = dict(causal=True, placement="zigzag", grads=True)
    with tw.virtual_world(2, device="cpu") as w:
        assert_near(run(w, tw.ring_attention, tensors, **options), truth(tensors, **options), dtype, slack=4)


@pytest.mark.parametrize("rows, kv_rows", [(2, 8), (4, 0), (0, 4)])
def test_of_other_numbers_of_keys_and_none(rows, kv_rows):
    tensors = whole(2, 2, 1, rows, 8, kv_rows=kv_rows)
    with tw.virtual_world(2, device="cpu") as w:
        assert_near(run(w, tw.ring_attention, tensors, grads=True), truth(tensors, grads=True), torch.float32, slack=5)


@pytest.mark.parametrize("world, options", [
    (1, dict(causal=True)), (2, {}), (2, dict(causal=True, placement="zigzag", layout="bshd")), (3, dict(causal=True)),
])  # fmt: skip
def test_gradcheck(world, options):
    """Numerical derivatives, of the whole inputs: a run of the world each."""
    q, k, v, _ = whole(1, 2, 1, 2 * world, 2, dtype=torch.float64)
    with tw.virtual_world(world, device="cpu") as w:
        call = as_function(w, tw.ring_attention, **options)
        assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in (q, k, v)])


def test_only_some_inputs_need_gradients_and_lse_has_none():
    q, k, v, _ = whole(1, 2, 2, 8, 4)

    def rank_program(rank, group):
        keys = k.clone().requires_grad_()
        out, lse = tw.ring_attention(q, keys, v, group, return_lse=True)
        assert out.requires_grad and not lse.requires_grad
        out.sum().backward()
        assert keys.grad is not None

    with tw.virtual_world(2, device="cpu") as w:
        w.run(rank_program)


def test_checkpointing_gives_the_same_gradients():
    tensors = whole(1, 2, 1, 8, 4)

    def checkpointed(*args, **options):
        return checkpoint(tw.ring_attention, *args, use_reentrant=False, **options)

    with tw.virtual_world(2, device="cpu") as w:
        plain, again = (run(w, op, tensors, causal=True, grads=True) for op in (tw.ring_attention, checkpointed))
    assert all(torch.equal(x, y) for x, y in zip(plain, again, strict=True))


def test_what_has_no_rules_is_refused_by_name():
    q = torch.randn(1, 1, 4, 2, requires_grad=True)
    out = tw.ring_attention(q, q, q)
    with pytest.raises(NotImplementedError, match="ring_attention has no second derivatives"):
        torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"ring_attention has no rules for torch.func transforms"):
        torch.func.grad(lambda x: tw.ring_attention(x, x, x).sum())(q.detach())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q.detach(), q.detach())
        with pytest.raises(NotImplementedError, match="ring_attention has no forward-mode derivative"):
            tw.ring_attention(dual, dual, dual)
