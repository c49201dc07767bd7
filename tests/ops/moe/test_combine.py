# ruff: noqa: E501  (a mutant per row)
"""The kernel of moe_matmul_combine in emulated worlds, its gradients and contract, and its protocol: each edit that breaks
a line of its table is found, harmless ones are not. The kinds of findings are those of test_dispatch.py."""

import pytest
import torch

import tileweave as tw
from tests.ops.moe.problems import assert_right, judge, problem, truth
from tests.ops.moe.test_dispatch import KINDS
from tests.ops.moe.test_moe import gradients, true_gradients
from tests.ops.mutants import put_edited
from tileweave import Plan
from tileweave.emulator import DeadlockError, ProtocolError, RaceError
from tileweave.ops.matmul_reduce_scatter import relative_error

NAME = "moe_matmul_combine"


def plan(tile=(64, 64, 64), stages=2):
    """A plan of the fused kernel, made by hand."""
    return Plan("register", "intra_sm", tile, stages)


def back(p, rank, group, chosen, weighted=True, **options):
    """One rank's tokens there, by whatever way, and their experts' rows back through the kernel."""
    first, end = p.experts.of(rank)
    h, route = tw.moe_dispatch_matmul(
        p.x[rank], p.index[rank], p.w[first:end], group, topk_weight=p.weight[rank] if weighted else None,
        experts=p.experts.total, **options,
    )  # fmt: skip
    return tw.moe_matmul_combine(h, p.down[first:end], route, plan=chosen)


@pytest.mark.parametrize("routing", ["random", "skewed", "one", "empty", "same"])
@pytest.mark.parametrize(
    "tokens, experts, k, tile",
    [
        ([70, 0], 5, 3, (64, 64, 64)),
        ([10, 20, 5], 9, 9, (128, 64, 64)),
        ([20, 15, 10, 5], 9, 4, (64, 128, 64)),
        ([8] * 8, 9, 2, (64, 64, 64)),
    ],
)
def test_worlds_and_routings(tokens, experts, k, tile, routing):
    p = problem(tokens, experts, k, 72, 72, routing=routing)
    weighted = routing != "same"
    with tw.virtual_world(len(tokens), device="cpu", sms=2) as world:  # too few SMs for the dispatch's kernel
        outs = world.run(lambda rank, group: back(p, rank, group, plan(tile), weighted))
    assert_right(outs, truth(p, gated=False, weighted=weighted))


def test_calls_follow_each_other_with_a_capacity_and_without_while_a_rank_is_late():
    problems = [
        problem([20, 30, 9], 5, 3, 72, 64, seed=i, routing=r)
        for i, r in enumerate(("random", "same", "empty", "random"))
    ]
    options = {}, dict(capacity=300), dict(capacity=200, max_tokens=30), {}

    def rank_program(rank, group):
        return [back(p, rank, group, plan(), **kw) for p, kw in zip(problems, options, strict=True)]

    for late in (0, 2):
        with tw.virtual_world(3, device="cpu", sms=2, delayed=(late,), seed=late) as world:
            by_rank = world.run(rank_program)
        for outs, p in zip(zip(*by_rank, strict=True), problems, strict=True):
            assert_right(outs, truth(p, gated=False))


@pytest.mark.parametrize("capacity", [20, 40])
def test_rows_over_capacity_count_as_zero(capacity):
    p = problem([30, 40], 6, 3, 64, 64, routing="skewed")

    def rank_program(rank, group):
        first, end = p.experts.of(rank)
        h, route = tw.moe_dispatch_matmul(
            p.x[rank], p.index[rank], p.w[first:end], topk_weight=p.weight[rank], capacity=capacity
        )
        assert route.dropped > 0
        unfused = tw.moe_combine(tw.grouped_matmul(h, p.down[first:end], route.offsets), route)
        return tw.moe_matmul_combine(h, p.down[first:end], route), unfused

    with tw.virtual_world(2, device="cpu", sms=4) as world:
        for fused, unfused in world.run(rank_program):
            assert unfused.any() and relative_error(fused, unfused.float()) <= 0.02


def test_the_result_depends_on_no_timing():
    p = problem([60, 50], 6, 4, 72, 64)

    def outs(seed):
        with tw.virtual_world(2, device="cpu", sms=3, seed=seed, delayed=(seed % 2,)) as world:
            return world.run(lambda rank, group: back(p, rank, group, plan()))

    first = outs(0)
    assert all(torch.equal(*pair) for seed in (1, 2) for pair in zip(first, outs(seed), strict=True))


def test_gradients():
    p = problem([30, 0, 40], 7, 2, 72, 64)
    seeds = [torch.randn(x.shape) for x in p.x]
    with tw.virtual_world(3, device="cpu", sms=2) as world:
        assert all(world.run(lambda rank, group: explained(p, rank).fused))
        got = world.run(lambda rank, group: gradients(p, rank, group, seeds))
    for mine, goal in zip(got, true_gradients(p, seeds), strict=True):
        for g, true in zip(mine, goal, strict=True):
            assert (g.float() - true).norm() <= 0.03 * true.norm() + 1e-6


def explained(p, rank, chosen=None):
    """What `explain` says of a rank's way back."""
    first, end = p.experts.of(rank)
    h, route = tw.moe_dispatch_matmul(p.x[rank], p.index[rank], p.w[first:end], experts=p.experts.total)
    without = tw.explain("moe_combine", h, route)
    assert not without.fused and "all_to_all" in without.reason
    with pytest.raises(ValueError, match=r"moe_combine: y must be \["):
        tw.explain("moe_combine", h[:0] if len(h) else h.new_empty(1, 8), route)
    return tw.explain(NAME, h, p.down[first:end], route, plan=chosen)


def test_which_path_is_taken():
    p, odd = problem([4, 4], 8, 2, 64, 64), problem([4, 4], 8, 2, 20, 64)
    with tw.virtual_world(2, device="cpu") as world:
        for route in world.run(lambda rank, group: explained(p, rank)):
            assert route.fused and route.plan.mechanism == "register" and "row by row" in route.reason
        assert "H = 20 is no multiple of 8" in world.run(lambda rank, group: explained(odd, rank))[0].reason
        with pytest.raises(ValueError, match="has 'register' and 'intra_sm'"):
            world.run(lambda rank, group: explained(p, rank, Plan()))
        with pytest.raises(ValueError, match=r"plan\.split=2, plan\.comm_sms=0: moe_matmul_combine has 1 and 0"):
            world.run(lambda rank, group: explained(p, rank, Plan("register", split=2)))
    with tw.virtual_world(1, device="cpu") as world:
        alone = world.run(lambda rank, group: explained(problem([4], 4, 2, 64, 64), rank))[0]
    assert not alone.fused and "a world of one" in alone.reason


def test_a_broken_contract_is_named():
    p = problem([6], 8, 2)
    h, route = tw.moe_dispatch_matmul(p.x[0], p.index[0], p.w)
    for call in (tw.moe_matmul_combine, lambda *args, **kw: tw.explain(NAME, *args, **kw)):
        with pytest.raises(ValueError, match=r"w must be \[8, 16, H\]"):
            call(h, p.down[1:], route)
        with pytest.raises(ValueError, match=r"w must be \[8, 16, H\] of torch\.bfloat16"):
            call(h, p.down.half(), route)
        with pytest.raises(ValueError, match="h must be"):
            call(h[1:], p.down, route)
        with pytest.raises(TypeError, match="w must be a torch\\.Tensor"):
            call(h, None, route)
        with pytest.raises(TypeError, match="plan must be"):
            call(h, p.down, route, plan="fast")


COUNTED = "    if count_up(mm, SENT, count, mm.tiles * mm.HALVES * (mm.BN // mm.WIDTH)):\n"
TOLD = "        gl.signal_all(work.flags, work.flags.rank, epoch)\n"
MET = "gl.wait_all(work.flags, 0, work.flags.world, epoch)"
MUTANTS = {
    "nobody waits": ([(MET, "epoch == epoch")], "R"),
    "a rank is not waited for": ([(MET, "gl.wait_all(work.flags, 0, work.flags.world - 1, epoch)")], "R"),
    "the call before is waited for": ([(MET, "gl.wait_all(work.flags, 0, work.flags.world, epoch - 1)")], "R"),
    "told by every storer": ([(COUNTED, COUNTED.replace("if count_up(", "if (count >= 0) | count_up("))], "R"),
    "told of a tile too few": ([(COUNTED, COUNTED.replace("mm.tiles *", "(mm.tiles - 1) *"))], "RDW"),
    "told to this rank only": ([(COUNTED + TOLD, COUNTED + "        gl.signal(work.flags, work.flags.rank, work.flags.rank, epoch)\n")], "D"),
    "a rank without tiles does not tell": ([("        if (tiles == 0) & (gl.program_id(0) == 0):\n", "        if (tiles < 0) & (gl.program_id(0) == 0):\n")], "D"),
    "one slot": ([("(epoch & 1).to(gl.int64) * way.slot_lines", "(epoch & 0).to(gl.int64) * way.slot_lines")], "RW"),
    "a row too many": ([("end_of(work.offsets, expert, work.rows), row + mm.ROWS)", "end_of(work.offsets, expert, work.rows) + 1, row + mm.ROWS)")], "RWP"),
    "rows of the part before": ([("rows = row + i * STEP + gl.arange(0, STEP, gl.SliceLayout(1, L))", "rows = row + gl.arange(0, STEP, gl.SliceLayout(1, L))")], "RW"),
    "all rows to this rank": ([("        rank = gl.load(way.row_slot + rows, mask=there, other=0) // way.slots\n", "        rank = gl.load(way.row_slot + rows, mask=there, other=0) * 0 + work.flags.rank\n")], "RW"),
    "rows in the order of this rank": ([("        home = gl.load(way.row_home + rows, mask=there, other=0)\n", "        home = rows\n")], "RWP"),
    "columns beyond a row": ([("mask = there[:, None] & (cols < work.n)[None, :]", "mask = there[:, None] & (cols < work.n + 64)[None, :]")], "RWP"),
    "a choice less": ([("(choice + j < way.CHOICES)", "(choice + j < way.CHOICES - 1)")], "W"),
    "rows of dropped choices": ([("there = (met & (home >= 0))", "there = (met & (home >= -1))")], "RWP"),
    "the weights of the tile's first rows": ([("    rows = row + gl.arange(0, work.matmul.ROWS, gl.SliceLayout(1, LAYOUT))\n", "    rows = gl.arange(0, work.matmul.ROWS, gl.SliceLayout(1, LAYOUT))\n")], "W"),
    "CTAs without tiles go through the roles": ([("    if first_unit(mm) < tiles:\n", "    if first_unit(mm) < tiles + 8:\n")], "RD"),
    # harmless
    "waits twice": ([("    met = " + MET, "    " + MET + "\n    met = " + MET)], None),
    "a barrier more": ([(COUNTED, "    gl.barrier()\n" + COUNTED)], None),
}  # fmt: skip


@pytest.fixture
def mutated(monkeypatch, tmp_path):
    """A function that puts an edited kernel in place of the real one."""
    return lambda edits: put_edited("ops/moe/combine_kernel.py", edits, monkeypatch, tmp_path, NAME)


def outcome(seed):
    """What calls of three ranks come to under one schedule: R, D, P, W (wrong result) or None.

    Two calls each of two problems, of which the second has rows at one rank only, follow each other with nothing between
    them: several tiles to a CTA and several sources to a tile. Two SMs a rank are too few for the kernel of the dispatch.
    The slots are full of NaN before the calls of the second.
    """
    problems = [problem([30, 50, 9], 5, 3, 72, 64, seed=i, routing=r) for i, r in enumerate(("random", "one"))]

    def calls(p):
        def rank_program(rank, group):
            first, end = p.experts.of(rank)
            options = dict(experts=p.experts.total, capacity=300, max_tokens=50)
            h, route = tw.moe_dispatch_matmul(
                p.x[rank], p.index[rank], p.w[first:end], topk_weight=p.weight[rank], **options
            )
            return [tw.moe_matmul_combine(h * sign, p.down[first:end], route, plan=plan()) for sign in (1, -1)]

        return rank_program

    try:
        with tw.virtual_world(3, device="cpu", seed=seed, sms=2, delayed=(seed % 3,)) as world:
            first = world.run(calls(problems[0]))
            world.workspace.ops[NAME].staging.fill_(255)
            second = world.run(calls(problems[1]))
    except (RaceError, DeadlockError, ProtocolError) as error:
        return next(letter for letter, kind in KINDS.items() if isinstance(error, kind))
    try:
        for by_rank, p in zip((first, second), problems, strict=True):
            for sign, outs in zip((1, -1), zip(*by_rank, strict=True), strict=True):
                assert_right(outs, [sign * out for out in truth(p, gated=False)])
    except AssertionError:
        return "W"


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_is_judged_rightly(name, mutated):
    edits, expected = MUTANTS[name]
    mutated(edits)
    judge(outcome, expected)
