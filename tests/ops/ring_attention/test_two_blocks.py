"""The schedule that keeps two blocks of heads of each peer: in emulated worlds; its memory; the planner's choice."""

import pytest
import torch

import tileweave as tw
from tests.ops.sequence.fused import assert_right, explained, plan, run_calls
from tests.ops.sequence.problems import whole
from tileweave.fabric.base import ABORT, HEADER_WORDS
from tileweave.ops.ring_attention.check import CHANNELS, blocks_at_most, held_heads
from tileweave.planner.attention import GATHERED_BYTES, TWO_BLOCKS, Problem, plan_for
from tileweave.tiles import exchange

NAME = "ring_attention"


@pytest.mark.parametrize("causal, placement", [(False, "contiguous"), (True, "contiguous"), (True, "zigzag")])
@pytest.mark.parametrize(
    "world, batch, heads, kv_heads, rows, dim, tile",
    [
        (2, 2, 4, 2, 70, 64, (64, 64, 64)),
        (3, 2, 6, 3, 38, 40, (64, 32, 64)),
        (4, 1, 4, 4, 50, 64, (128, 32, 64)),
        (4, 1, 2, 1, 18, 64, (64, 16, 64)),
        (8, 1, 7, 7, 6, 64, (64, 16, 64)),
    ],
)
def test_every_world_size_and_ragged_shapes(world, batch, heads, kv_heads, rows, dim, tile, causal, placement):
    chosen = plan(tile, comm_sms=min(world - 1, 2), schedule=TWO_BLOCKS)
    kw = dict(causal=causal, placement=placement, layout="bshd" if causal else "bhsd", plan=chosen)
    made = [whole(batch, heads, kv_heads, world * rows, dim, dtype=torch.bfloat16, seed=i) for i in range(2)]
    calls = [(tensors, kw) for tensors in made]
    with tw.virtual_world(world, device="cpu", seed=world, sms=4) as w:
        assert w.run(lambda rank, group: explained(NAME, made[0], group, kw))[0].plan.schedule == TWO_BLOCKS
        assert_right(run_calls(w, NAME, calls), calls)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_calls_of_both_schedules_with_changing_shapes_one_rank_late(late):
    ends = torch.tensor([0, 50, 51, 3 * 60]).int()
    shapes = [
        ((1, 8, 4, 3 * 60, 64), dict(causal=True, placement="zigzag", plan=plan(schedule=TWO_BLOCKS))),
        ((2, 2, 2, 3 * 8, 64), dict(plan=plan(comm_sms=3, schedule=TWO_BLOCKS))),
        ((1, 6, 3, 3 * 60, 64), dict(causal=True, plan=plan((128, 64, 64), 4, 2))),
        ((1, 7, 7, 3 * 60, 64), dict(cu_seqlens=ends, plan=plan(comm_sms=2, schedule=TWO_BLOCKS))),
        ((1, 1, 1, 3, 64), dict(plan=plan(schedule=TWO_BLOCKS))),
    ]
    calls = [(whole(*shape, dtype=torch.bfloat16, seed=i), kw) for i, (shape, kw) in enumerate(shapes)]
    with tw.virtual_world(3, device="cpu", seed=late, sms=4, delayed=(late,)) as w:
        for _ in range(2):
            assert_right(run_calls(w, NAME, calls), calls)


@pytest.mark.parametrize("world, heads", [(2, 5), (3, 4), (4, 12), (8, 16), (11, 32)])
def test_slots_hold_as_many_keys_as_two_ranks_have(world, heads):
    assert 2 * (world - 1) * held_heads(heads, world) <= 2 * heads
    assert held_heads(heads, world) * blocks_at_most(world, True) >= heads


def test_the_workspace_is_that_of_the_slots():
    world, heads = 4, 6
    tensors = whole(1, heads, heads, world * 64, 64, dtype=torch.bfloat16)
    with tw.virtual_world(world, device="cpu", sms=3) as w:
        run_calls(w, NAME, [(tensors, dict(plan=plan(schedule=TWO_BLOCKS)))])
        held = w.workspace.ops[CHANNELS[1]].staging.shape[1]
        assert list(w.workspace.ops) == [CHANNELS[1]]
    two_blocks = 2 * 2 * heads * 64 * 64 * 2  # k and v
    assert two_blocks <= held <= 1.01 * two_blocks


def test_an_aborted_wait_makes_nan_of_what_needed_the_peers():
    tensors = whole(1, 4, 4, 3 * 40, 64, dtype=torch.bfloat16)
    calls = [(tensors, dict(plan=plan(schedule=TWO_BLOCKS)))]
    with tw.virtual_world(3, device="cpu", sms=3) as w:
        run_calls(w, NAME, calls)
        w.workspace.ops[CHANNELS[1]].flags[1, ABORT] = 1
        ((out, lse),) = run_calls(w, NAME, calls)
    assert out[:, :, 40:80].isnan().all() and lse[:, :, 40:80].isnan().all()


def test_epochs_may_wrap_and_flags_that_short_calls_leave_out_do_not_fall_behind():
    period, most = exchange.REFRESH.value, blocks_at_most(3, True)
    for start in (period - 3, 2**31 - 2):
        calls = [(whole(1, 4, 4, 3 * 8, 64, dtype=torch.bfloat16), dict(plan=plan(schedule=TWO_BLOCKS)))]
        with tw.virtual_world(3, device="cpu", sms=3) as w:
            run_calls(w, NAME, calls)
            shared = w.workspace.ops[CHANNELS[1]]
            shared.state[:, 0] = start
            shared.flags[:, HEADER_WORDS:] = start
            assert_right(run_calls(w, NAME, calls * 4), calls * 4)
            flags = shared.flags[:, HEADER_WORDS : HEADER_WORDS + 2 * most * 3].unflatten(1, (2, most, 3))
        if start < 2**30:
            assert (flags[0, :, 2:, 1:] == period).all()


def test_a_world_of_one_has_no_peers_and_the_planner_takes_it_where_all_keys_would_be_too_many():
    q = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16)
    words = "'two_blocks': ring_attention has 'inter_sm'"
    with tw.virtual_world(1, device="cpu") as w, pytest.raises(ValueError, match=words):
        w.run(lambda rank, group: tw.ring_attention(q, q, q, group, plan=plan(comm_sms=0, schedule=TWO_BLOCKS)))
    for gathered, schedule in ((GATHERED_BYTES, "inter_sm"), (GATHERED_BYTES + 1, TWO_BLOCKS)):
        found = plan_for(Problem(NAME, 128, 4096, 8, 132, 1e15, 1 << 30, True, gathered))
        assert found.schedule == schedule and ("two blocks of heads" in found.reason) == (schedule == TWO_BLOCKS)
