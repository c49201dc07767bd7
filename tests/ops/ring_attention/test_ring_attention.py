"""The op in emulated worlds, against the float32 truth of the whole sequence: values, errors, paths."""

import pytest
import torch

import tileweave as tw
from tests.ops.sequence.problems import assert_near, run, shards, truth, whole
from tileweave import Plan

NAME = "ring_attention"
PLACEMENTS = ["contiguous", "zigzag"]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_every_world_size_layout_and_mask(world, causal, placement):
    tensors = whole(2, 4, 2, 6 * world, 16, seed=world)
    for layout in ("bhsd", "bshd"):
        options = dict(causal=causal, placement=placement, layout=layout, return_lse=True)
        with tw.virtual_world(world, device="cpu") as w:
            assert_near(run(w, tw.ring_attention, tensors, **options), truth(tensors, **options), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("heads, kv_heads", [(32, 8), (6, 1), (3, 3)])
def test_grouped_and_multi_query_heads_and_dtypes(heads, kv_heads, dtype):
    tensors = whole(1, heads, kv_heads, 16, 8, seed=1, dtype=dtype)
    for causal in (False, True):
        options = dict(causal=causal, placement="zigzag", return_lse=True, scale=0.3)
        with tw.virtual_world(2, device="cpu") as w:
            assert_near(run(w, tw.ring_attention, tensors, **options), truth(tensors, **options), dtype)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_large_logits_do_not_overflow(placement):
    for dtype in (torch.float16, torch.bfloat16):
        tensors = whole(1, 2, 1, 32, 64, seed=2, times=50, dtype=dtype)
        options = dict(causal=True, placement=placement, return_lse=True)
        with tw.virtual_world(4, device="cpu") as w:
            got = run(w, tw.ring_attention, tensors, **options)
        assert all(x.isfinite().all() for x in got)
        assert_near(got, truth(tensors, **options), dtype)


@pytest.mark.parametrize("rows, kv_rows", [(2, 16), (16, 2), (4, 0), (0, 4), (0, 0)])
def test_more_or_fewer_keys_than_queries_and_none(rows, kv_rows):
    """Queries without keys have out 0 and lse -inf."""
    tensors = whole(2, 2, 1, rows, 8, kv_rows=kv_rows)
    with tw.virtual_world(2, device="cpu") as w:
        got = run(w, tw.ring_attention, tensors, return_lse=True)
    assert_near(got, truth(tensors, return_lse=True), torch.float32)
    if not kv_rows:
        assert not got[0].any() and got[1].isneginf().all()


def test_strided_inputs_are_read_as_they_lie_and_left_alone():
    tensors = whole(2, 4, 2, 12, 16)
    parts = [shards(x, 2) for x in tensors]

    def rank_program(rank, group):
        q, k, v = (x[rank] for x in parts[:3])
        expected = tw.ring_attention(q, k, v, group, causal=True)
        stepped = [torch.stack([x, x + 1], -1)[..., 0] for x in (q, k, v)]
        fused = torch.cat([q, k, v], 1).transpose(1, 2).contiguous().transpose(1, 2).split([4, 2, 2], 1)
        expanded = q, k[:, :1].expand_as(k), v[:, :1].expand_as(v)
        for given in (stepped, fused):
            copies = [x.clone() for x in given]
            assert torch.equal(tw.ring_attention(*given, group, causal=True), expected)
            assert all(torch.equal(x, y) for x, y in zip(given, copies, strict=True))
        assert torch.equal(
            tw.ring_attention(*expanded, group), tw.ring_attention(*(x.contiguous() for x in expanded), group)
        )

    with tw.virtual_world(2, device="cpu") as w:
        w.run(rank_program)


def test_explain_says_why_nothing_is_fused():
    q = torch.zeros(1, 2, 4, 8)
    route = tw.explain(NAME, q, q, q)
    assert not route.fused and route.backend == "fallback" and route.op == NAME
    assert "PyTorch's attention" in route.reason


Q, K = torch.zeros(2, 4, 6, 8), torch.zeros(2, 2, 6, 8)
WRONG = [
    (dict(q=1.0), TypeError, "q must be a torch.Tensor, got float"),
    (dict(v=K.to_sparse()), TypeError, "v must be a dense tensor.*to_dense"),
    (dict(q=Q[0]), ValueError, r"q must have the dimensions bhsd, got shape \[4, 6, 8\]"),
    (dict(k=K.half()), ValueError, "bfloat16, float16, float32 or float64, got torch.float32, torch.float16"),
    (dict(q=Q.int(), k=K.int(), v=K.int()), ValueError, "got torch.int32"),
    (dict(k=K.to("meta")), ValueError, "q is on cpu and k on meta"),
    (dict(v=K[:, :, :4]), ValueError, r"k and v must have one shape, got \[2, 2, 6, 8\] and \[2, 2, 4, 8\]"),
    (dict(k=K[:1], v=K[:1]), ValueError, "one batch and one head dimension"),
    (dict(k=Q[:, :3], v=Q[:, :3]), ValueError, "multiple of those of k and v.*got 4, 3"),
    (dict(k=K[:, :, :4], v=K[:, :, :4], causal=True), ValueError, "equally many tokens, got 6 and 4"),
    (dict(layout="sbhd"), ValueError, "layout must be 'bhsd' or 'bshd', got 'sbhd'"),
    (dict(placement="striped"), ValueError, "placement must be 'contiguous' or 'zigzag', got 'striped'"),
    (dict(q=Q[:, :, :5], placement="zigzag"), ValueError, "two equal pieces .*q has 5 tokens and k 6"),
    (dict(causal=1), TypeError, "causal must be True or False, got 1"),
    (dict(return_lse=None), TypeError, "return_lse must be True or False, got None"),
    (dict(scale="small"), TypeError, "scale must be a float or None, got 'small'"),
    (dict(scale=float("nan")), ValueError, r"scale must be finite, or None for 1 / sqrt\(8\), got nan"),
    (dict(plan="fast"), TypeError, "plan must be a tileweave.Plan or None, got str"),
    (dict(plan=Plan()), ValueError, "plan"),
]


@pytest.mark.parametrize("changes, kind, words", WRONG)
def test_wrong_arguments_are_refused_on_every_rank_before_any_launch(changes, kind, words):
    changes = dict(changes)
    tensors = [changes.pop(name, x) for name, x in (("q", Q), ("k", K), ("v", K))]

    def rank_program(rank, group):
        for call in (tw.ring_attention, lambda *args, **kw: tw.explain(NAME, *args, **kw)):
            with pytest.raises(kind, match=words):
                call(*tensors, group, **changes)

    with tw.virtual_world(2, device="cpu") as w:
        w.run(rank_program)
        assert not w.workspace.ops


def test_ranks_that_disagree_are_told():
    def rank_program(rank, group):
        tw.ring_attention(Q, K, K, group, causal=rank == 0)

    with (
        tw.virtual_world(2, device="cpu") as w,
        pytest.raises(RuntimeError, match="causal is True on rank 0, False on rank 1"),
    ):
        w.run(rank_program)
