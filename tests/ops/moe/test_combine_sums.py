# ruff: noqa: E501  (a mutant per row)
"""moe_matmul_combine with communicators, which send a token's rows at a rank as one: values, what crosses, contract, and the
protocol, as test_combine.py has it for the way without."""

import pytest
import torch

import tileweave as tw
from tests.ops.moe.combining import NAME, mutated, outcome_of  # noqa: F401  (a fixture)
from tests.ops.moe.problems import assert_right, judge, problem, truth
from tests.ops.moe.test_combine import back, explained
from tests.ops.moe.test_combine import plan as by_choice
from tileweave import Plan
from tileweave.fabric import Fabric
from tileweave.ops.descriptors import parallel_view
from tileweave.ops.matmul_reduce_scatter import relative_error
from tileweave.planner import moe_combine


def plan(tile=(64, 64, 64), stages=2, comm_sms=1):
    """A plan made by hand."""
    return Plan("register", "inter_sm", tile, stages, comm_sms=comm_sms)


@pytest.mark.parametrize(
    "tokens, experts, k, h, tile, comm_sms, routing",
    [
        ([70, 0], 5, 3, 72, (64, 64, 64), 1, "random"),
        ([10, 20, 5], 9, 9, 328, (128, 64, 64), 2, "skewed"),
        ([20, 15, 10, 5], 9, 4, 136, (64, 128, 64), 1, "same"),
        ([8] * 8, 9, 2, 72, (64, 64, 64), 1, "one"),
    ],
)
def test_worlds_and_routings(tokens, experts, k, h, tile, comm_sms, routing):
    p = problem(tokens, experts, k, h, 72, routing=routing)
    weighted = routing != "same"
    with tw.virtual_world(len(tokens), device="cpu", sms=3) as world:
        outs = world.run(lambda rank, group: back(p, rank, group, plan(tile, comm_sms=comm_sms), weighted))
    assert_right(outs, truth(p, gated=False, weighted=weighted))


def test_rows_over_capacity_count_as_zero_and_no_timing_shows():
    p = problem([30, 40], 6, 3, 64, 64, routing="skewed")

    def rank_program(rank, group):
        first, end = p.experts.of(rank)
        h, route = tw.moe_dispatch_matmul(
            p.x[rank], p.index[rank], p.w[first:end], topk_weight=p.weight[rank], capacity=20
        )
        assert route.dropped > 0
        unfused = tw.moe_combine(tw.grouped_matmul(h, p.down[first:end], route.offsets), route)
        return tw.moe_matmul_combine(h, p.down[first:end], route, plan=plan()), unfused

    outs = []
    for late in range(2):
        with tw.virtual_world(2, device="cpu", sms=3, seed=late, delayed=(late,)) as world:
            outs.append(world.run(rank_program))
    for (fused, unfused), (again, _) in zip(*outs, strict=True):
        assert unfused.any() and relative_error(fused, unfused.float()) <= 0.02 and torch.equal(fused, again)


def test_the_planner_takes_them_on_all_ranks_where_it_predicts_them_to_be_faster(monkeypatch):
    """Whatever each has of tokens and experts: here it is made to believe in a link, and in any gain at all."""
    monkeypatch.setattr(Fabric, "linked", True)
    monkeypatch.setattr(moe_combine, "MARGIN", 0.0)
    moe_combine.summing.cache_clear()
    p = problem([30, 0], 5, 3, 72, 72)
    try:
        with tw.virtual_world(2, device="cpu", sms=3) as world:
            told = world.run(lambda rank, group: explained(p, rank))
            outs = world.run(lambda rank, group: back(p, rank, group, None))
    finally:
        moe_combine.summing.cache_clear()
    assert [route.plan.schedule for route in told] == ["inter_sm"] * 2 and "sum of its own" in told[0].reason
    assert_right(outs, truth(p, gated=False))


@pytest.mark.parametrize("chosen", [plan(), by_choice()], ids=["sums", "rows"])
def test_what_crosses(chosen):
    """As many rows as tokens have ranks or, without communicators, choices: counted where they have arrived."""
    p = problem([12, 9, 7], 6, 4, 64, 64)

    def rank_program(rank, group):
        first, end = p.experts.of(rank)
        h, route = tw.moe_dispatch_matmul(p.x[rank], p.index[rank], p.w[first:end])
        channel = group.world.fabric(rank).channel(NAME, 0, 1 << 20)
        channel.staging[rank] = 255  # NaN
        group.world.fabric(rank).rendezvous()
        tw.moe_matmul_combine(h, p.down[first:end], route, plan=chosen)
        homes = 3 * route.slots if chosen.comm_sms else route.homes
        places = parallel_view(channel.staging, 2, (homes, 64), torch.bfloat16)[0]
        arrived = int((~places[rank].isnan()).all(-1).sum())
        return arrived, int((route.token_slot >= 0).sum()), int((route.home >= 0).sum())

    with tw.virtual_world(3, device="cpu", sms=3) as world:
        for arrived, ranks, choices in world.run(rank_program):
            assert ranks < choices and arrived == (ranks if chosen.comm_sms else choices)


def test_what_a_plan_may_ask_for():
    p = problem([4, 4], 8, 2, 64, 64)
    with tw.virtual_world(2, device="cpu", sms=3) as world:
        assert all(each.fused for each in world.run(lambda rank, group: explained(p, rank, plan())))
        for wrong in (plan(comm_sms=0), plan(comm_sms=3)):
            with pytest.raises(ValueError, match="with 'inter_sm', 1 to 2 of 3 SMs"):
                world.run(lambda rank, group: explained(p, rank, wrong))  # noqa: B023
    with tw.virtual_world(2, device="cpu", sms=1) as world, pytest.raises(ValueError, match="and a rank has 1"):
        world.run(lambda rank, group: explained(p, rank, plan()))
    with tw.virtual_world(2, device="cpu", sms=3) as world, pytest.raises(RuntimeError, match="schedule"):
        world.run(lambda rank, group: back(p, rank, group, plan() if rank else by_choice()))


WAITED = "met = gl.wait(flags, flags.world + chunk, epoch)"
STORED = "    gl.store_wait(0)\n    gl.barrier()\n    if count_up(mm, STORED"
SENT = "    gl.barrier()\n    if count_up(mm, SENT, 1, mm.COMM_SMS):\n"
PLACE = "there = slot_of(work, to, epoch) + (rank * way.slots + slot).to(gl.int64) * work.n"
MUTANTS = {
    "communicators do not wait": ([(WAITED, "met = epoch == epoch")], "R"),
    "they wait for the first chunk": ([(WAITED, WAITED.replace(" + chunk", ""))], "R"),
    "parts are not performed": ([(STORED, STORED.replace("    gl.store_wait(0)\n", ""))], "R"),
    "parts are told of without a barrier": ([(STORED, STORED.replace("    gl.barrier()\n", ""))], "R"),
    "told of a tile too few": ([("row_tiles * width * mm.HALVES", "(row_tiles * width - 1) * mm.HALVES")], "RDW"),
    "rows of the next expert": ([("    end = end_of(work.offsets, owner // CHUNKS, work.rows)\n", "    end = work.rows\n")], "R"),
    "sums are not performed": ([(SENT, SENT.replace("    gl.barrier()\n", ""))], "R"),
    "every communicator tells": ([(SENT, SENT.replace("mm.COMM_SMS", "1"))], "R"),
    "a rank without tiles does not tell": ([(SENT, SENT.replace("if count", "if (mm.tiles > 0) & count"))], "D"),
    "a rank without tiles waits for chunks": ([("    if mm.tiles > 0:\n", "    if mm.tiles >= 0:\n")], "D"),
    "the last row of a token is left out": ([("there = start + i + j < stop\n", "there = start + i + j < stop - 1\n")], "W"),
    "the last token is left out": ([("- to * work.way.slots + 1\n", "- to * work.way.slots\n")], "W"),
    "to the place of another rank": ([(PLACE, PLACE.replace("rank *", "to *"))], "RW"),
    "one slot": ([(PLACE, PLACE.replace("to, epoch", "to, epoch * 2"))], "RW"),
    "a chunk less": ([("range(0, CHUNKS)", "range(0, CHUNKS - 1)")], "W"),
    "columns beyond a row": ([("mask = (slot < count)[:, None] & (cols < end)[None, :]", "mask = (slot < count)[:, None] & (cols < end + 64)[None, :]")], "RWP"),
    # harmless
    "to the ranks before first": ([("(flags.rank + distance) % flags.world, first", "(flags.rank + flags.world - distance) % flags.world, first")], None),
}  # fmt: skip


def outcome(seed):
    """Of two calls, and one of which two ranks have no rows. Two communicators, four chunks."""
    sizes = 4, 3, 200, 64
    return outcome_of(seed, [16, 24, 5], sizes, plan(comm_sms=2), sms=4, capacity=140, signs=((1, -1), (1,)))


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_is_judged_rightly(name, mutated):  # noqa: F811
    edits, expected = MUTANTS[name]
    mutated(edits)
    judge(outcome, expected)
