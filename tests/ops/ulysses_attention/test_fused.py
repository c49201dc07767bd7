"""The kernel in emulated worlds: the real device code under hostile schedules, against the float32 truth."""

import pytest
import torch

import tileweave as tw
from tests.ops.sequence.fused import assert_right, explained, plan, run_calls
from tests.ops.sequence.problems import assert_near, shards, truth, whole
from tileweave.fabric.base import ABORT, HEADER_WORDS
from tileweave.ops.sequence.contract import BLOCKS
from tileweave.tiles import exchange

NAME = "ulysses_attention"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "world, batch, heads, kv_heads, rows, dim, tile",
    [
        (1, 2, 2, 1, 130, 64, (128, 64, 64)),
        (2, 1, 4, 4, 72, 64, (64, 64, 64)),
        (2, 2, 4, 1, 40, 128, (64, 64, 128)),
        (3, 2, 6, 3, 38, 40, (64, 64, 64)),
        (4, 1, 8, 2, 100, 64, (128, 128, 64)),
        (8, 1, 8, 8, 9, 64, (64, 64, 64)),
    ],
)
def test_every_world_size_and_ragged_shapes_under_several_schedules(
    world, batch, heads, kv_heads, rows, dim, tile, causal
):
    chosen = plan(tile, comm_sms=min(world - 1, 2))
    for seed, layout in enumerate(("bhsd", "bshd")):
        kw = dict(causal=causal, layout=layout, plan=chosen)
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
        ((1, 6, 3, 3 * 70, 64), dict(causal=True, plan=plan())),
        ((2, 3, 1, 3 * 8, 64), dict(plan=plan(comm_sms=3))),
        ((1, 3, 3, 3 * 130, 128), dict(causal=True, plan=plan((128, 64, 128), 4, 2))),
        ((1, 12, 6, 3 * 2, 8), dict(causal=True, layout="bshd", plan=plan(comm_sms=2))),
        ((1, 3, 3, 3, 64), dict(plan=plan())),
    ]
    for seed in range(2):
        calls = [(whole(*shape, dtype=torch.bfloat16, seed=10 * seed + i), kw) for i, (shape, kw) in enumerate(shapes)]
        with tw.virtual_world(world, device="cpu", seed=seed, sms=4, delayed=(late,)) as w:
            # once for the workspace to grow (growing makes the ranks meet), once more so that they may drift apart
            for _ in range(2):
                assert_right(run_calls(w, NAME, calls), calls)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_logits_do_not_overflow(dtype):
    calls = [(whole(1, 4, 2, 2 * 72, 64, seed=2, times=50, dtype=dtype), dict(causal=True, plan=plan()))]
    with tw.virtual_world(2, device="cpu", sms=3) as w:
        assert_right(run_calls(w, NAME, calls), calls)


@pytest.mark.parametrize("rows, kv_rows", [(2, 72), (72, 2)])
def test_more_or_fewer_keys_than_queries(rows, kv_rows):
    calls = [(whole(1, 2, 1, 2 * rows, 64, kv_rows=2 * kv_rows, dtype=torch.bfloat16), dict(plan=plan()))] * 2
    with tw.virtual_world(2, device="cpu", sms=3) as w:
        assert_right(run_calls(w, NAME, calls), calls)


def test_strided_and_misaligned_inputs_are_right():
    parts = [shards(x, 2) for x in whole(2, 4, 2, 2 * 24, 64, dtype=torch.bfloat16)]

    def rank_program(rank, group):
        q, k, v = (x[rank] for x in parts[:3])
        options = dict(causal=True, plan=plan())
        expected = tw.ulysses_attention(q, k, v, group, **options)
        stepped = [torch.stack([x, x + 1], -1)[..., 0] for x in (q, k, v)]
        shifted = [torch.nn.functional.pad(x, (1, 7))[..., 1:65] for x in (q, k, v)]
        joined = torch.cat([q, k, v], 1).transpose(1, 2).contiguous().transpose(1, 2).split([4, 2, 2], 1)
        for given in (stepped, shifted, joined) * 2:
            assert torch.equal(tw.ulysses_attention(*given, group, **options), expected)

    with tw.virtual_world(2, device="cpu", sms=3) as w:
        w.run(rank_program)


def test_the_planners_own_plan():
    calls = [(whole(1, 4, 2, 2 * 130, 64, dtype=torch.bfloat16), dict(causal=True))]
    with tw.virtual_world(2, device="cpu", sms=4) as w:
        route = w.run(lambda rank, group: explained(NAME, calls[0][0], group, {}))[0]
        assert_right(run_calls(w, NAME, calls), calls)
    assert route.fused and route.backend == "emulated" and route.plan.tile == (128, 128, 64)


def test_what_the_kernel_does_not_take_falls_back_and_says_so():
    for dtype, dim, words in (
        (torch.float32, 64, "not torch.float32"),
        (torch.bfloat16, 136, "takes multiples of 8 up to 128"),
    ):
        calls = [(whole(1, 2, 2, 8, dim, dtype=dtype), {})]
        with tw.virtual_world(2, device="cpu") as w:
            route = w.run(lambda rank, group, t=calls[0][0]: explained(NAME, t, group, {}))[0]
            assert not route.fused and words in route.reason
            assert_right(run_calls(w, NAME, calls), calls)


@pytest.mark.parametrize("changes, words", [
    (dict(schedule="none"), "'inter_sm'"), (dict(comm_sms=4), "1 to 3 with 4"), (dict(tile=(64, 32, 64)), "64 or 128"),
])  # fmt: skip
def test_plans_that_cannot_be_are_refused(changes, words):
    q = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)

    def rank_program(rank, group):
        with pytest.raises(ValueError, match=words):
            tw.ulysses_attention(q, q, q, group, plan=plan(**changes))

    with tw.virtual_world(2, device="cpu", sms=4) as w:
        w.run(rank_program)


def test_an_aborted_wait_makes_nan_of_what_needed_the_peers():
    tensors = whole(1, 3, 3, 3 * 72, 64, dtype=torch.bfloat16)
    calls = [(tensors, dict(plan=plan()))]
    with tw.virtual_world(3, device="cpu", sms=3) as w:
        run_calls(w, NAME, calls)
        w.workspace.ops[NAME].flags[1, ABORT] = 1
        ((out,),) = run_calls(w, NAME, calls)
    (true,) = truth(tensors)
    assert out[:, :, 72:144].isnan().all() and out[:, 1].isnan().all()  # rows and heads of rank 1
    for rows in (slice(0, 72), slice(144, 216)):
        for head in (0, 2):
            assert_near([out[:, head, rows]], [true[:, head, rows]], torch.bfloat16)


def test_epochs_may_wrap_and_flags_that_short_calls_leave_out_do_not_fall_behind():
    period = exchange.REFRESH.value
    for start in (period - 3, 2**31 - 2):
        calls = [(whole(1, 2, 2, 2 * 8, 64, dtype=torch.bfloat16), dict(plan=plan()))]
        with tw.virtual_world(2, device="cpu", sms=3) as w:
            run_calls(w, NAME, calls)
            shared = w.workspace.ops[NAME]
            shared.state[:, 0] = start
            shared.flags[:, HEADER_WORDS:] = start
            assert_right(run_calls(w, NAME, calls * 4), calls * 4)
            flags = shared.flags[:, HEADER_WORDS : HEADER_WORDS + 4 * BLOCKS].unflatten(1, (2, -1, 2))
        if start < 2**30:
            assert (flags[0, :, 1:, 1] == period).all() and (flags[1, :, 1:, 0] == period).all()


def test_the_blocks_of_many_heads():
    """More heads than there are flags: a flag is for several."""
    few, many = (whole(batch, 10, 10, 2 * 4, 8, dtype=torch.bfloat16) for batch in (1, 12))
    calls = [(x, dict(causal=True, plan=plan(comm_sms=2))) for x in (few, many, few)]
    with tw.virtual_world(2, device="cpu", sms=4) as w:
        assert_right(run_calls(w, NAME, calls), calls)
