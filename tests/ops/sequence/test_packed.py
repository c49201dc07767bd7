"""Packed sequences (cu_seqlens): both ops, fused and not, against the float32 truth; what is refused."""

import pytest
import torch

import tileweave as tw
from tests.ops.sequence.fused import assert_right, explained, plan, run_calls
from tests.ops.sequence.problems import as_function, assert_near, run, truth, whole
from tileweave import nn
from tileweave.ops.sequence.packed import in_tiles, row_bounds

RING, ULYSSES = "ring_attention", "ulysses_attention"


def ends_of(total, seed, most=40):
    """cu_seqlens of sequences of 0 to `most` tokens that together have `total`."""
    g = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, most + 1, (total,), generator=g).cumsum(0)
    return torch.cat((torch.zeros(1), ends[ends < total], torch.tensor([total]))).int()


CASES = [
    (1, 2, 1, 150, 64, (128, 64, 64)),
    (2, 2, 1, 100, 64, (64, 32, 64)),
    (3, 3, 3, 50, 40, (64, 16, 64)),
    (4, 4, 4, 70, 64, (128, 32, 64)),
    (8, 8, 8, 10, 64, (64, 16, 64)),
    (2, 2, 2, 70, 128, (64, 64, 128)),
]


@pytest.mark.parametrize("op, placement", [(RING, "contiguous"), (RING, "zigzag"), (ULYSSES, "contiguous")])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("world, heads, kv_heads, rows, dim, tile", CASES)
def test_the_kernels_under_several_schedules(world, heads, kv_heads, rows, dim, tile, causal, op, placement):
    """Calls of short and of long sequences, and of one, on one workspace."""
    if world == 8 and not causal:
        return  # it takes as long as all others together
    if op == ULYSSES and tile[1] < 64:
        tile = (tile[0], 64, tile[2])
    kw = dict(causal=causal, plan=plan(tile, comm_sms=min(world - 1, 2)))
    kw.update(dict(placement=placement) if op == RING else {})
    total = world * rows
    ends = [ends_of(total, 1, 30), ends_of(total, 2, 3 * rows), torch.tensor([0, total]).int()]
    kw.update(layout="bshd" if causal else "bhsd")
    made = [whole(1, heads, kv_heads, total, dim, dtype=torch.bfloat16, seed=i) for i in range(3)]
    calls = [(x, dict(kw, cu_seqlens=cu)) for x, cu in zip(made, ends, strict=True)]
    with tw.virtual_world(world, device="cpu", seed=world, sms=4) as w:
        assert w.run(lambda rank, group: explained(op, calls[0][0], group, calls[0][1]))[0].fused
        assert_right(run_calls(w, op, calls), calls)


@pytest.mark.parametrize("op", [RING, ULYSSES])
def test_packed_and_other_calls_take_turns(op):
    made = [whole(1, 4, 2, 2 * 100, 64, dtype=torch.bfloat16, seed=i) for i in range(6)]
    more = dict(placement="zigzag") if op == RING else {}
    calls = [
        (x, dict(causal=True, plan=plan(comm_sms=2), cu_seqlens=ends_of(200, i) if i % 3 else None, **more))
        for i, x in enumerate(made)
    ]
    for late in (0, 1):
        with tw.virtual_world(2, device="cpu", seed=late, sms=4, delayed=(late,)) as w:
            assert_right(run_calls(w, op, calls), calls)


@pytest.mark.parametrize("op, placement", [(RING, "contiguous"), (RING, "zigzag"), (ULYSSES, "contiguous")])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_values_and_gradients_of_the_fallback(world, causal, op, placement):
    tensors = whole(1, 2 * world, 2 if world < 3 else world, 6 * world, 8, seed=world)
    for seed in range(2):
        options = dict(causal=causal, cu_seqlens=ends_of(6 * world, seed, 3 * (seed + 1)), grads=True)
        more = dict(placement=placement, return_lse=True) if op == RING else {}
        with tw.virtual_world(world, device="cpu") as w:
            got = run(w, getattr(tw, op), tensors, **options, **more)
        assert_near(got, truth(tensors, **options, **more), torch.float32, slack=5)


@pytest.mark.parametrize("op", [RING, ULYSSES])
def test_gradients_of_the_kernels_results(op):
    tensors = whole(1, 4, 1, 2 * 40, 64, dtype=torch.bfloat16)
    options = dict(causal=True, cu_seqlens=ends_of(80, 3), grads=True)
    with tw.virtual_world(2, device="cpu", sms=4) as w:
        assert_near(run(w, getattr(tw, op), tensors, **options), truth(tensors, **options), torch.bfloat16, slack=5)


@pytest.mark.parametrize("op, more", [(RING, {}), (RING, dict(causal=True, placement="zigzag")), (ULYSSES, {})])
def test_gradcheck(op, more):
    q, k, v, _ = whole(1, 2, 2, 4, 2, dtype=torch.float64)
    with tw.virtual_world(2, device="cpu") as w:
        call = as_function(w, getattr(tw, op), cu_seqlens=torch.tensor([0, 1, 1, 4]).int(), **more)
        assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in (q, k, v)])


def test_the_modules_hand_it_on():
    tensors = whole(1, 4, 4, 24, 8)
    cu = torch.tensor([0, 5, 24]).int()
    for module in (nn.RingAttention, nn.UlyssesAttention):

        def op(q, k, v, group, cu_seqlens, module=module, **options):
            return module(group, **options)(q, k, v, cu_seqlens)

        with tw.virtual_world(2, device="cpu") as w:
            got = run(w, op, tensors, causal=True, cu_seqlens=cu)
        assert_near(got, truth(tensors, causal=True, cu_seqlens=cu), torch.float32)


def test_bounds_of_rows():
    cu, at = torch.tensor([0, 3, 3, 8]).int(), in_tiles([0, 6], 2, 4, torch.device("cpu"))
    assert at.tolist() == [0, 1, 1, 1, 6, 7, 7, 7]
    assert row_bounds(cu, at, False).tolist() == [[0, 3]] * 4 + [[3, 8]] * 4
    assert row_bounds(cu, at, True).tolist() == [[0, 1]] + [[0, 2]] * 3 + [[3, 7]] + [[3, 8]] * 3


Q, K = torch.zeros(1, 4, 6, 8), torch.zeros(1, 2, 6, 8)
CU = torch.tensor([0, 5, 12]).int()
WRONG = [
    (dict(cu_seqlens=[0, 12]), TypeError, "cu_seqlens must be a torch.Tensor or None, got list"),
    (dict(cu_seqlens=CU.long()), ValueError, "cu_seqlens must be int32 .* got torch.int64 of shape"),
    (dict(cu_seqlens=CU[:1]), ValueError, r"two at least, got torch.int32 of shape \[1\]"),
    (dict(cu_seqlens=CU[None]), ValueError, r"of shape \[1, 3\]"),
    (dict(cu_seqlens=CU.to("meta")), ValueError, "cu_seqlens is on the meta device, without data"),
    (dict(q=Q.expand(2, 4, 6, 8), k=K.expand(2, 2, 6, 8), v=K.expand(2, 2, 6, 8)), ValueError, "in one batch, got 2"),
    (dict(k=K[:, :, :4], v=K[:, :, :4]), ValueError, "equally many tokens, got 6 and 4"),
]
WRONG_VALUES = [[1, 12], [0, 11], [0, 7, 5, 12]]


@pytest.mark.parametrize("op", [RING, ULYSSES])
def test_what_is_refused_on_every_rank_before_any_launch(op):
    def rank_program(rank, group):
        for changes, kind, words in WRONG:
            given = {**dict(q=Q, k=K, v=K, cu_seqlens=CU), **changes}
            for call in (getattr(tw, op), lambda *args, **kw: tw.explain(op, *args, **kw)):
                with pytest.raises(kind, match=words):
                    call(given["q"], given["k"], given["v"], group, cu_seqlens=given["cu_seqlens"])
        for ends in WRONG_VALUES:
            with pytest.raises(ValueError, match="begin with 0, never decrease and end with the 12 tokens"):
                getattr(tw, op)(Q, K, K, group, cu_seqlens=torch.tensor(ends).int())

    with tw.virtual_world(2, device="cpu") as w:
        w.run(rank_program)
        assert not w.workspace.ops


def test_ranks_that_disagree_about_the_ends_are_told():
    def rank_program(rank, group):
        tw.ring_attention(Q, K, K, group, cu_seqlens=torch.tensor([0, 5 + rank, 12]).int())

    with tw.virtual_world(2, device="cpu") as w, pytest.raises(RuntimeError, match=r"0, 5, 12.*0, 6, 12"):
        w.run(rank_program)


def test_an_attention_of_ones_own_knows_of_sequences_by_itself():
    with pytest.raises(ValueError, match="cu_seqlens is for the library's own attention"):
        tw.ulysses_attention(Q, K, K, cu_seqlens=torch.tensor([0, 6]).int(), attention=lambda q, k, v, **_: q)
