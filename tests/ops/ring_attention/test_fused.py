"""The kernel in emulated worlds: the real device code under hostile schedules, against the float32 truth."""

import pytest
import torch

import tileweave as tw
from tests.ops.sequence.fused import assert_right, explained, plan, run_calls
from tests.ops.sequence.problems import assert_near, shards, truth, whole
from tileweave.fabric.base import ABORT, HEADER_WORDS
from tileweave.ops.sequence.contract import BLOCKS
from tileweave.tiles import exchange

NAME = "ring_attention"


@pytest.mark.parametrize("causal, placement", [(False, "contiguous"), (True, "contiguous"), (True, "zigzag")])
@pytest.mark.parametrize(
    "world, batch, heads, kv_heads, rows, dim, tile",
    [
        (1, 2, 2, 1, 130, 64, (128, 64, 64)),
        (2, 1, 4, 4, 72, 64, (64, 64, 64)),
        (3, 2, 2, 1, 38, 40, (64, 32, 64)),
        (4, 1, 4, 2, 100, 64, (128, 32, 64)),
        (8, 1, 2, 2, 18, 64, (64, 16, 64)),
        (2, 1, 2, 1, 70, 128, (64, 64, 128)),
    ],
)
def test_every_world_size_and_ragged_shapes_under_several_schedules(
    world, batch, heads, kv_heads, rows, dim, tile, causal, placement
):
    chosen = plan(tile, comm_sms=min(world - 1, 2))
    for seed, layout in enumerate(("bhsd", "bshd")):
        kw = dict(causal=causal, placement=placement, layout=layout, plan=chosen)
        made = [
            whole(batch, heads, kv_heads, world * rows, dim, dtype=torch.bfloat16, seed=10 * seed + i) for i in range(2)
        ]
        calls = [(tensors, kw) for tensors in made]
        with tw.virtual_world(world, device="cpu", seed=seed, sms=4) as w:
            assert w.run(lambda rank, group, kw=kw, made=made: explained(NAME, made[0], group, kw))[0].fused
            assert_right(run_calls(w, NAME, calls), calls)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_calls_with_changing_shapes_masks_and_plans_on_one_workspace_one_rank_late(late):
    world = 3
    shapes = [
        ((1, 4, 2, 3 * 70, 64), dict(causal=True, placement="zigzag", plan=plan())),
        ((2, 2, 1, 3 * 8, 64), dict(plan=plan(comm_sms=3))),
        ((1, 2, 2, 3 * 130, 128), dict(causal=True, plan=plan((128, 64, 128), 4, 2))),
        ((1, 6, 1, 3 * 2, 8), dict(causal=True, placement="zigzag", layout="bshd", plan=plan(comm_sms=2))),
        ((1, 1, 1, 3, 64), dict(plan=plan())),
    ]
    for seed in range(2):
        calls = [(whole(*shape, dtype=torch.bfloat16, seed=10 * seed + i), kw) for i, (shape, kw) in enumerate(shapes)]
        with tw.virtual_world(world, device="cpu", seed=seed, sms=4, delayed=(late,)) as w:
            # once for the workspace to grow (growing makes the ranks meet), once more so that they may drift apart
            for _ in range(2):
                assert_right(run_calls(w, NAME, calls), calls)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_logits_do_not_overflow(dtype):
    tensors = whole(1, 2, 1, 2 * 72, 64, seed=2, times=50, dtype=dtype)
    calls = [(tensors, dict(causal=True, placement="zigzag", plan=plan()))]
    with tw.virtual_world(2, device="cpu", sms=3) as w:
        assert_right(run_calls(w, NAME, calls), calls)


@pytest.mark.parametrize("rows, kv_rows", [(2, 72), (72, 2)])
def test_more_or_fewer_keys_than_queries(rows, kv_rows):
    tensors = whole(1, 2, 1, 2 * rows, 64, kv_rows=2 * kv_rows, dtype=torch.bfloat16)
    calls = [(tensors, dict(plan=plan()))] * 2
    with tw.virtual_world(2, device="cpu", sms=3) as w:
        assert_right(run_calls(w, NAME, calls), calls)


def test_strided_and_misaligned_inputs_are_right():
    tensors = whole(2, 4, 2, 2 * 24, 64, dtype=torch.bfloat16)
    parts = [shards(x, 2) for x in tensors]

    def rank_program(rank, group):
        q, k, v = (x[rank] for x in parts[:3])
        options = dict(causal=True, plan=plan())
        expected = tw.ring_attention(q, k, v, group, **options)
        stepped = [torch.stack([x, x + 1], -1)[..., 0] for x in (q, k, v)]
        shifted = [torch.nn.functional.pad(x, (1, 7))[..., 1:65] for x in (q, k, v)]
        fused = torch.cat([q, k, v], 1).transpose(1, 2).contiguous().transpose(1, 2).split([4, 2, 2], 1)
        for given in (stepped, shifted, fused) * 2:
            assert torch.equal(tw.ring_attention(*given, group, **options), expected)
        expanded = q, k[:, :1].expand_as(k), v[:1].expand_as(v)
        copied = tw.ring_attention(*(x.contiguous() for x in expanded), group, **options)
        assert torch.equal(tw.ring_attention(*expanded, group, **options), copied)

    with tw.virtual_world(2, device="cpu", sms=3) as w:
        w.run(rank_program)


def test_the_planners_own_plan():
    tensors = whole(1, 2, 1, 2 * 130, 64, dtype=torch.bfloat16)
    calls = [(tensors, dict(causal=True, placement="zigzag", layout="bhsd"))]
    with tw.virtual_world(2, device="cpu", sms=4) as w:
        route = w.run(lambda rank, group: explained(NAME, tensors, group, calls[0][1]))[0]
        assert_right(run_calls(w, NAME, calls), calls)
    assert route.fused and route.backend == "emulated" and route.predicted_us > 0
    assert route.plan.tile == (128, 128, 64) and f"push by {route.plan.comm_sms} of 4" in route.reason


def test_what_the_kernel_does_not_take_falls_back_and_says_so():
    cases = [
        (torch.float32, 64, {}, "not torch.float32"),
        (torch.bfloat16, 12, {}, "heads have dimension 12"),
        (torch.bfloat16, 264, {}, "heads have dimension 264"),
        (torch.bfloat16, 64, dict(scale=-0.5), "scale is -0.5"),
    ]
    for dtype, dim, more, words in cases:
        tensors = whole(1, 2, 1, 8, dim, dtype=dtype)
        kw = dict(layout="bhsd", placement="contiguous", **more)
        with tw.virtual_world(2, device="cpu") as w:
            route = w.run(lambda rank, group, t=tensors, kw=kw: explained(NAME, t, group, kw))[0]
            assert not route.fused and words in route.reason
            assert_right(run_calls(w, NAME, [(tensors, kw)]), [(tensors, kw)])
    with tw.virtual_world(2, device="cpu", sms=1) as w:
        tensors = whole(1, 2, 1, 8, 64, dtype=torch.bfloat16)
        route = w.run(lambda rank, group: explained(NAME, tensors, group, dict(layout="bhsd", placement="contiguous")))[
            0
        ]
        assert "one SM cannot communicate" in route.reason


@pytest.mark.parametrize("changes, words", [
    (dict(mechanism="copy_engine"), "'tma'"), (dict(schedule="none"), "'inter_sm'"), (dict(split=2), "split=2"),
    (dict(comm_sms=0), "1 to 3 with 4 SMs"), (dict(comm_sms=4), "1 to 3 with 4 SMs"), (dict(stages=2), "at least 3"),
    (dict(tile=(128, 256, 64)), "keys 16, 32, 64 or 128"), (dict(tile=(64, 64, 128)), "the head dimension 64"),
    (dict(stages=40), "bytes of shared memory"),
])  # fmt: skip
def test_plans_that_cannot_be_are_refused(changes, words):
    q = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16)

    def rank_program(rank, group):
        with pytest.raises(ValueError, match=words):
            tw.ring_attention(q, q, q, group, plan=plan(**changes))

    with tw.virtual_world(2, device="cpu", sms=4) as w:
        w.run(rank_program)


def test_an_aborted_wait_makes_nan_of_what_needed_the_peers():
    tensors = whole(1, 2, 1, 3 * 72, 64, dtype=torch.bfloat16)
    calls = [(tensors, dict(plan=plan()))]
    with tw.virtual_world(3, device="cpu", sms=3) as w:
        run_calls(w, NAME, calls)
        w.workspace.ops[NAME].flags[1, ABORT] = 1
        ((out, lse),) = run_calls(w, NAME, calls)
    true_out, true_lse = truth(tensors, return_lse=True)
    assert out[:, :, 72:144].isnan().all() and lse[:, :, 72:144].isnan().all()
    for rows in (slice(0, 72), slice(144, 216)):
        assert_near([out[:, :, rows], lse[:, :, rows]], [true_out[:, :, rows], true_lse[:, :, rows]], torch.bfloat16)


def test_epochs_may_wrap_and_flags_that_short_calls_leave_out_do_not_fall_behind():
    period = exchange.REFRESH.value
    for causal, start in ((False, period - 3), (True, period - 3), (True, 2**31 - 2)):
        calls = [(whole(1, 2, 1, 2 * 8, 64, dtype=torch.bfloat16), dict(causal=causal, plan=plan()))]
        with tw.virtual_world(2, device="cpu", sms=3) as w:
            run_calls(w, NAME, calls)
            shared = w.workspace.ops[NAME]
            shared.state[:, 0] = start
            shared.flags[:, HEADER_WORDS:] = start
            assert_right(run_calls(w, NAME, calls * 4), calls * 4)
            flags = shared.flags[:, HEADER_WORDS : HEADER_WORDS + 2 * BLOCKS].unflatten(1, (-1, 2))
        if start < 2**30:
            assert (flags[0, 1:, 1] == period).all() and (flags[1, 1:, 0] == period).all()


def test_the_blocks_of_many_heads():
    """More heads than there are flags: a flag is for several."""
    tensors = whole(3, 5, 5, 2 * 4, 8, dtype=torch.bfloat16)
    many = whole(10, 14, 14, 2 * 4, 8, dtype=torch.bfloat16)
    calls = [(x, dict(causal=True, placement="zigzag", plan=plan(comm_sms=2))) for x in (tensors, many, tensors)]
    with tw.virtual_world(2, device="cpu", sms=4) as w:
        assert_right(run_calls(w, NAME, calls), calls)
