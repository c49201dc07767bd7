"""The op in emulated worlds, against the float32 truth of the whole sequence: values, gradients, errors, paths."""

import functools

import pytest
import torch
import torch.nn.functional as F

import tileweave as tw
from tests.ops.sequence.problems import as_function, assert_near, laid, run, truth, whole
from tileweave import Plan

NAME = "ulysses_attention"
HEADS = [(1, 4, 2), (2, 4, 4), (2, 8, 2), (3, 6, 3), (4, 8, 2), (8, 16, 1), (8, 32, 8)]  # world, heads, kv_heads


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("world, heads, kv_heads", HEADS)
def test_every_world_size_and_number_of_heads(world, heads, kv_heads, causal):
    for layout in ("bhsd", "bshd"):
        tensors = whole(2, heads, kv_heads, 3 * world, 8, seed=world)
        options = dict(causal=causal, layout=layout, grads=True)
        with tw.virtual_world(world, device="cpu") as w:
            got = run(w, tw.ulysses_attention, tensors, **options)
        assert_near(got, truth(tensors, **options), torch.float32, slack=5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_scale_and_large_logits(dtype):
    for times in (1, 50):
        tensors = whole(1, 8, 2, 32, 16, dtype=dtype, times=times)
        options = dict(causal=True, scale=0.3)
        with tw.virtual_world(4, device="cpu") as w:
            assert_near(run(w, tw.ulysses_attention, tensors, **options), truth(tensors, **options), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_gradients_of_half_precision_and_of_heads_that_ranks_share(dtype, kv_heads):
    tensors = whole(1, 8, kv_heads, 32, 16, dtype=dtype)
    options = dict(causal=True, grads=True)
    with tw.virtual_world(4, device="cpu") as w:
        assert_near(run(w, tw.ulysses_attention, tensors, **options), truth(tensors, **options), dtype, slack=4)


@pytest.mark.parametrize("rows, kv_rows", [(2, 8), (8, 2), (4, 0), (0, 4)])
def test_more_or_fewer_keys_than_queries_and_none(rows, kv_rows):
    tensors = whole(2, 2, 1, rows, 8, kv_rows=kv_rows)
    with tw.virtual_world(2, device="cpu") as w:
        got = run(w, tw.ulysses_attention, tensors, grads=True)
    assert_near(got, truth(tensors, grads=True), torch.float32, slack=5)


@pytest.mark.parametrize("world, kv_heads", [(1, 1), (2, 2), (2, 1)])
def test_gradcheck(world, kv_heads):
    q, k, v, _ = whole(1, 2, kv_heads, 2 * world, 2, dtype=torch.float64)
    with tw.virtual_world(world, device="cpu") as w:
        call = as_function(w, tw.ulysses_attention, causal=True, layout="bshd")
        assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in (q, k, v)])


def by_torch(q, k, v, *, causal, scale, layout):
    """PyTorch's attention in a layout."""
    q, k, v = (laid(x, layout) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return laid(out, layout)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("world, heads, kv_heads", HEADS[:5])
def test_an_attention_of_the_callers(world, heads, kv_heads, layout):
    tensors = whole(2, heads, kv_heads, 3 * world, 8, seed=world)
    options = dict(causal=True, layout=layout, grads=True)
    attention = functools.partial(by_torch, layout=layout)
    with tw.virtual_world(world, device="cpu") as w:
        got = run(w, tw.ulysses_attention, tensors, attention=attention, **options)
    assert_near(got, truth(tensors, **options), torch.float32, slack=5)


def test_an_attention_that_returns_something_else_is_refused():
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match=r"attention must return a tensor like its q, \[1, 2, 4, 8\], got \[1, 2\]"):
        tw.ulysses_attention(q, q, q, attention=lambda q, k, v, **_: q[:, :, 0, 0])
    with pytest.raises(ValueError, match="got tuple"):
        tw.ulysses_attention(q, q, q, attention=lambda q, k, v, **_: (q, k))


def test_explain_says_why_nothing_is_fused():
    q = torch.zeros(1, 2, 4, 8)
    route = tw.explain(NAME, q, q, q)
    assert not route.fused and route.backend == "fallback" and "all-to-all" in route.reason
    assert (
        "the caller's attention"
        in tw.explain(NAME, q, q, q, attention=functools.partial(by_torch, layout="bhsd")).reason
    )


Q, K = torch.zeros(2, 6, 4, 8), torch.zeros(2, 2, 4, 8)
WRONG = [
    (dict(q=Q[:, :4], k=Q[:, :4], v=Q[:, :4]), ValueError, "4 heads, not divisible by the world size 3; 3 or 6 would"),
    (dict(q=Q[:, :2]), ValueError, "2 heads, not divisible by the world size 3; 3 would be"),
    (dict(), ValueError, "k and v have 2 heads in a world of 3: one must be a multiple of the other"),
    (dict(k=K[:, :, :3], v=K[:, :, :3], causal=True), ValueError, "equally many tokens, got 4 and 3"),
    (dict(layout=1), TypeError, "layout must be a string, got 1"),
    (dict(attention="flash"), TypeError, "attention must be callable or None, got str"),
    (
        dict(attention=F.scaled_dot_product_attention),
        TypeError,
        r"lambda q, k, v, causal, scale: scaled_dot_product_at",
    ),
    (dict(attention=lambda q, k, v: q), TypeError, r"called as .*causal=causal.* takes \(q, k, v\): got an unexpected"),
    (dict(attention=by_torch, plan=Plan()), ValueError, "plan is for the library's own attention"),
    (dict(k=Q[:, :3], v=Q[:, :3], plan=Plan()), ValueError, "plan"),
]


@pytest.mark.parametrize("changes, kind, words", WRONG)
def test_wrong_arguments_are_refused_on_every_rank_before_any_launch(changes, kind, words):
    changes = dict(changes)
    tensors = [changes.pop(name, x) for name, x in (("q", Q), ("k", K), ("v", K))]

    def rank_program(rank, group):
        for call in (tw.ulysses_attention, lambda *args, **kw: tw.explain(NAME, *args, **kw)):
            with pytest.raises(kind, match=words):
                call(*tensors, group, **changes)

    with tw.virtual_world(3, device="cpu") as w:
        w.run(rank_program)
        assert not w.workspace.ops
