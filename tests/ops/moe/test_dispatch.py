# ruff: noqa: E501  (a mutant per row)
"""The kernel of moe_dispatch_matmul in emulated worlds, and its protocol: each edit that breaks a line of its table is
found, harmless ones are not.

What is expected is the kind of finding: R race, D deadlock, P protocol error, W a wrong result; None: the edit is
harmless and nothing may be reported.
"""

import pytest
import torch

import tileweave as tw
from tests.ops.moe.problems import assert_right, judge, problem, run, there_and_back, truth
from tests.ops.moe.test_moe import gradients, true_gradients
from tests.ops.mutants import put_edited
from tileweave import Plan
from tileweave.emulator import DeadlockError, ProtocolError, RaceError
from tileweave.fabric.base import HEADER_WORDS
from tileweave.ops.moe import kernel
from tileweave.ops.moe.launch import FLAGS
from tileweave.planner import moe as planner


def plan(tile=(64, 64, 64), stages=2, comm_sms=2):
    """A plan of the fused kernel, made by hand."""
    return Plan("tma", "inter_sm", tile, stages, comm_sms=comm_sms)


@pytest.mark.parametrize("routing", ["random", "skewed", "one", "empty", "same"])
@pytest.mark.parametrize(
    "tokens, experts, k, tile, comm_sms",
    [
        ([70, 0], 9, 3, (64, 64, 64), 2),
        ([20, 90, 5], 8, 2, (128, 64, 64), 3),
        ([40, 30, 20, 10], 17, 4, (64, 128, 64), 2),
        ([8] * 8, 16, 2, (64, 64, 64), 2),
    ],
)
def test_worlds_and_routings(tokens, experts, k, tile, comm_sms, routing):
    p = problem(tokens, experts, k, 72, 72, routing=routing)
    with tw.virtual_world(len(tokens), device="cpu", sms=4) as world:
        results = run(world, p, gated=False, second=False, plan=plan(tile, comm_sms=comm_sms))
    assert_right([out for out, *_ in results], truth(p, gated=False, second=False))


def test_as_many_ranks_as_there_may_be():
    """Rows go to the last one only, by one communicator each."""
    world = planner.MOST_RANKS
    assert (kernel.MOST_RANKS.value, kernel.EXPERTS.value) == (world, planner.MOST_EXPERTS)
    p = problem([1] * world, world, 1, 64, 64, routing="one")
    with tw.virtual_world(world, device="cpu", sms=2) as ranks:
        results = run(ranks, p, gated=False, second=False, plan=plan(comm_sms=1))
    assert_right([out for out, *_ in results], truth(p, gated=False, second=False))


def test_other_numbers_of_communicators_in_turn():
    """Which leave other flags out."""
    problems = [problem([90, 40], 5, 3, 64, 64, seed=i) for i in range(4)]
    plans = [plan(comm_sms=comm_sms) for comm_sms in (3, 1, 2, 3)]

    def rank_program(rank, group):
        return [
            there_and_back(p, rank, group, False, True, False, plan=each)[0]
            for p, each in zip(problems, plans, strict=True)
        ]

    with tw.virtual_world(2, device="cpu", sms=4, delayed=(0,)) as world:
        by_rank = world.run(rank_program)
    for outs, p in zip(zip(*by_rank, strict=True), problems, strict=True):
        assert_right(outs, truth(p, gated=False, second=False))


def test_gated_with_a_capacity_and_without_in_turn():
    problems = [
        problem([40, 70, 9], 9, 3, 72, 136, seed=i, routing=r)
        for i, r in enumerate(("random", "skewed", "same", "random"))
    ]

    def rank_program(rank, group):
        options = [{}, dict(capacity=500), dict(capacity=400, max_tokens=70), {}]
        return [
            there_and_back(p, rank, group, plan=plan((64, 128, 64)), **kw)[0]
            for p, kw in zip(problems, options, strict=True)
        ]

    for late in range(3):
        with tw.virtual_world(3, device="cpu", sms=4, delayed=(late,), seed=late) as world:
            by_rank = world.run(rank_program)
        for outs, p in zip(zip(*by_rank, strict=True), problems, strict=True):
            assert_right(outs, truth(p))


@pytest.mark.parametrize(
    "tile, transposed",
    [((64, 128, 64), (False, False)), ((128, 256, 64), (True, True)), ((64, 256, 64), (True, False))],
)
def test_gates_and_activations_in_the_epilogue(tile, transposed):
    p = problem([30, 20], 3, 2, 136, 200)

    def lying(w, flag):
        return w.transpose(1, 2).contiguous().transpose(1, 2) if flag else w

    p.w, p.gate = map(lying, (p.w, p.gate), transposed)
    chosen = plan(tile)
    with tw.virtual_world(2, device="cpu", sms=4) as world:
        gated = run(world, p, second=False, plan=chosen)
        plain = run(world, p, gated=False, activation="silu", second=False, plan=chosen)
        with pytest.raises(ValueError, match="half of a tile's columns are the gate's"):
            run(world, p, plan=plan((64, 64, 64)))
    assert_right([out for out, *_ in gated], truth(p, second=False))
    assert_right([out for out, *_ in plain], truth(p, gated=False, activation="silu", second=False))


@pytest.mark.parametrize("capacity", [3, 40])
def test_rows_over_capacity_are_dropped_as_without_the_kernel(capacity):
    p = problem([30, 40], 6, 3, 64, 64, routing="skewed")
    with tw.virtual_world(2, device="cpu", sms=4) as world:
        fused = run(world, p, gated=False, capacity=capacity, plan=plan())
    with tw.virtual_world(2, device="cpu", sms=2) as world:
        unfused = run(world, p, gated=False, capacity=capacity)
    for (out, y, route), (out_2, y_2, route_2) in zip(fused, unfused, strict=True):
        assert route.dropped == route_2.dropped and torch.equal(route.place, route_2.place)
        assert torch.equal(y, y_2) and torch.equal(out, out_2)


def test_gradients():
    p = problem([30, 0, 40], 7, 2, 72, 64)
    seeds = [torch.randn(x.shape) for x in p.x]
    with tw.virtual_world(3, device="cpu", sms=4) as world:
        got = world.run(lambda rank, group: gradients(p, rank, group, seeds, plan=plan((64, 128, 64))))
    for mine, goal in zip(got, true_gradients(p, seeds), strict=True):
        for g, true in zip(mine, goal, strict=True):
            assert (g.float() - true).norm() <= 0.03 * true.norm() + 1e-6


def test_flags_that_calls_leave_out_do_not_fall_behind():
    """They would seem reached after 2**31 steps. Every flag is raised every so many calls, to the last step of that one."""
    period, steps = kernel.REFRESH.value, kernel.STEPS.value
    p = problem([5, 3], 4, 1, 64, 64)
    with tw.virtual_world(2, device="cpu", sms=4) as world:
        run(world, p, gated=False, second=False, plan=plan())
        shared = world.workspace.ops["moe_dispatch_matmul"]
        shared.state[:, 0] = period - 2
        run(world, p, gated=False, second=False, plan=plan())
        flags = shared.flags[:, HEADER_WORDS:][:, : FLAGS // 3 * 3]  # of two sources, and of tiles
        assert flags.max() < period * steps
        results = run(world, p, gated=False, second=False, plan=plan())
    assert_right([out for out, *_ in results], truth(p, gated=False, second=False))
    assert (flags == period * steps + steps - 1).all()


def test_ranks_that_disagree_are_told():
    def rank_program(rank, group):
        plan = Plan(schedule="inter_sm", tile=(128 if rank else 64, 64, 64), stages=2, comm_sms=2)
        x, index = torch.randn(8, 64).bfloat16(), torch.randint(0, 4, (8, 2))
        tw.moe_dispatch_matmul(x, index, torch.randn(2, 64, 64).bfloat16(), group, capacity=32, plan=plan)

    with tw.virtual_world(2, device="cpu") as world, pytest.raises(RuntimeError, match="moe_dispatch_matmul"):
        world.run(rank_program)


def test_which_path_is_taken():
    p = problem([4, 4], 8, 2, 64, 64)

    def path(sms, h=64, **options):
        with tw.virtual_world(2, device="cpu", sms=sms) as world:
            x, w = torch.zeros(4, h).bfloat16(), torch.zeros(4, h, 64).bfloat16()
            return world.run(lambda rank, group: tw.explain("moe_dispatch_matmul", x, p.index[rank], w, **options))[0]

    assert path(4).fused and path(4).plan.comm_sms == 1
    assert "if a rank comes to have more than" in path(4).reason
    assert path(4, capacity=8).fused and "if a rank" not in path(4, capacity=8).reason
    crowded = path(4, capacity=1 << 24)
    assert not crowded.fused and "a rank may have 16777216 rows" in crowded.reason
    assert path(2).fused and not path(1).fused and "a rank has 1" in path(1).reason
    assert not path(4, h=20).fused and "no multiple of 8" in path(4, h=20).reason
    with pytest.raises(ValueError, match="expected 1 to 3 of 4 SMs"):
        path(4, plan=plan(comm_sms=4))
    with pytest.raises(ValueError, match="has 'tma' and 'inter_sm'"):
        path(4, plan=Plan())


KERNEL = "ops/moe/kernel.py"
KINDS = {"R": RaceError, "D": DeadlockError, "P": ProtocolError}
WAIT = "gl.wait(work.flags, flag, epoch * STEPS + i // work.COMM_SMS + 1)"
SENT = "gl.signal(flags, to, flags.rank * work.PER + me, epoch * STEPS + i + 1)"
CARRIED = "    gl.store_wait(0)\n    gl.barrier()\n"
AGAIN = "return row != targets + i"
BOXES = "range(0, mm.k_steps, LINES)"

MUTANTS = {
    "a loader does not wait": ([(WAIT, "epoch == epoch")], "R"),
    "a loader waits for the tile before": ([(WAIT, WAIT.replace(" + 1)", ")"))], "R"),
    "a loader waits for another communicator": ([("work.flags.world * work.PER + i % work.COMM_SMS", "work.flags.world * work.PER + (i + 1) % work.COMM_SMS")], "RD"),
    "no proxy fence after the flag": ([("    gl.fence_proxy_async()\n    return there\n", "    return there\n")], "R"),
    "no proxy fence after the tokens' flags": ([("    gl.fence_proxy_async()\n    at = carry", "    at = carry")], "R"),
    "a communicator does not wait for tokens": ([("            gl.wait_all(work.flags, source * work.PER, work.COMM_SMS, done)\n", "            pass\n")], "R"),
    "a communicator waits for a round less": ([("last // (tr.block * work.COMM_SMS) + 1", "last // (tr.block * work.COMM_SMS)")], "R"),
    "a communicator waits for one communicator": ([("source * work.PER, work.COMM_SMS, done)", "source * work.PER, 1, done)")], "R"),
    "a communicator waits for the source before": ([("gl.wait_all(work.flags, source * work.PER, work.COMM_SMS, done)", "gl.wait_all(work.flags, (source + 1) % work.flags.world * work.PER, work.COMM_SMS, done)")], "RD"),
    "a communicator waits for its first rows only": ([("mask=rows < end, other=-1)", "mask=rows < row + 8, other=-1)")], "R"),
    "rows of a token are not copied": ([(AGAIN, "return row < targets - 4096")], "W"),
    "a row less is copied": ([("i * work.matmul.BM, end - row, True", "i * work.matmul.BM, end - row - 1, True")], "W"),
    "all rows are copied": ([(AGAIN, "return row >= 0")], "RNW"),
    "copied to the row's number": ([("flags.rank, i * work.matmul.BM, end", "flags.rank, row, end")], "RW"),
    "told before the stores are performed": ([(CARRIED, "    gl.store_read_wait(0)\n    gl.barrier()\n")], "R"),
    "told before all threads know that they are": ([(CARRIED, "    gl.store_wait(0)\n")], "R"),
    "a store less is waited for": ([(CARRIED, CARRIED.replace("0", "1"))], "R"),
    "a buffer is filled that is being sent": ([("gl.store_read_wait(ring.STAGES - 1 - AHEAD)", "pass")], "R"),
    "rows are sent before they are loaded": ([("                    ring.consumer_wait(at)\n", "")], "RP"),
    "a communicator tells the next rank": ([(SENT, SENT.replace("to, flags.rank", "(to + 1) % flags.world, flags.rank"))], "RD"),
    "a communicator tells a round ahead": ([(SENT, SENT.replace("i + 1)", "i + 2)"))], "R"),
    "a rank less": ([("    for distance in range(1, flags.world + 1):\n        to", "    for distance in range(1, flags.world):\n        to")], "RDW"),
    "sent to the next rank": ([("tr.send_token + begin, to, tr", "tr.send_token + begin, (to + 1) % flags.world, tr")], "RW"),
    "sent in the order of the first rank": ([("tr.send_token + begin", "tr.send_token + first")], "W"),
    "places of another rank": ([("tr.send_place + begin", "tr.send_place + first")], "RWP"),
    "no row is carried": ([(BOXES, "range(0, mm.k_steps - 64, LINES)")], "RW"),
    "communicators do not end the call": ([("epoch * STEPS + STEPS - 1)\n    finish_all(work.matmul, epoch)\n", "epoch * STEPS + STEPS - 1)\n")], "RDWP"),
    "what a tile takes is sent behind it": ([("tile + work.COMM_SMS + gl.minimum(tile, LOOK), NO_TILE - 1)", "tile - work.COMM_SMS, NO_TILE - 1)")], "D"),
    "what no own tile takes is not sent": ([("range(turns + 1)", "range(turns)")], "DRW"),
    "what other ranks need is not looked at": ([("    some = first < sent\n", "    some = (first < sent) & (to == flags.rank)\n")], "DRW"),
    "CTAs without tiles go through the roles": ([("    if first_unit(mm) < tiles:\n", "    if first_unit(mm) < tiles + 8:\n")], "R"),
    # harmless
    "waits for a flag twice": ([("    there = " + WAIT, "    gl." + WAIT[3:] + "\n    there = " + WAIT)], None),
    "a fence more": ([("    gl.fence_proxy_async()\n    return", "    gl.fence_proxy_async()\n    gl.fence_proxy_async()\n    return")], None),
    "nothing is sent ahead of the tile that takes it": ([("tile + work.COMM_SMS + gl.minimum(tile, LOOK), NO_TILE - 1)", "tile, NO_TILE - 1)")], None),
    "all is sent first": ([("gl.where(turn < turns, tile + work.COMM_SMS + gl.minimum(tile, LOOK), NO_TILE - 1)", "NO_TILE - 1")], None),
}  # fmt: skip


@pytest.fixture
def mutated(monkeypatch, tmp_path):
    """A function that puts an edited kernel in place of the real one."""
    return lambda edits: put_edited(KERNEL, edits, monkeypatch, tmp_path, "moe_dispatch_matmul")


def outcome(seed):
    """What four calls of three ranks come to under one schedule: R, D, P, W (wrong result) or None.

    Four communicators have several rounds of 32 tokens each, tiles of 64 rows; the third call has no tokens for some experts.
    The slots are full of NaN before the second call.
    """
    problems = [
        problem([150, 100, 9], 5, 3, 72, 64, seed=i, routing=r)
        for i, r in enumerate(("random", "same", "one", "random"))
    ]
    chosen = plan(comm_sms=4)

    def calls(some):
        options = dict(plan=chosen, capacity=800, max_tokens=150)
        return lambda rank, group: [there_and_back(p, rank, group, False, True, False, **options)[0] for p in some]

    try:
        with tw.virtual_world(3, device="cpu", seed=seed, sms=7, delayed=(seed % 3,)) as world:
            by_rank = world.run(calls(problems[:1]))
            world.workspace.ops["moe_dispatch_matmul"].staging.fill_(255)
            by_rank = [first + others for first, others in zip(by_rank, world.run(calls(problems[1:])), strict=True)]
    except (RaceError, DeadlockError, ProtocolError) as error:
        return next(letter for letter, kind in KINDS.items() if isinstance(error, kind))
    try:
        for outs, p in zip(zip(*by_rank, strict=True), problems, strict=True):
            assert_right(outs, truth(p, gated=False, second=False))
    except AssertionError:
        return "W"


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_is_judged_rightly(name, mutated):
    edits, expected = MUTANTS[name]
    mutated(edits)
    judge(outcome, expected)


@pytest.mark.parametrize("width", [64, 128])
def test_a_row_of_more_lines_than_a_box_has_goes_in_several(width, mutated):
    """The last box is not full, nor is its last line."""
    p = problem([5, 3], 3, 2, 64 * (width + 1) + 8, 64, routing="same")
    chosen = plan((64, width, 64))

    def outs():
        with tw.virtual_world(2, device="cpu", sms=3) as world:
            run(world, problem([5, 3], 3, 2, 64, 64), gated=False, second=False, plan=chosen)
            return [out for out, *_ in run(world, p, gated=False, second=False, plan=chosen)]

    assert_right(outs(), truth(p, gated=False, second=False))
    mutated([(BOXES, "range(0, gl.minimum(mm.k_steps, LINES), LINES)")])
    wrong = outs()
    with pytest.raises(AssertionError):
        assert_right(wrong, truth(p, gated=False, second=False))


def test_what_is_due_is_told_by_the_rank_that_needs_it_first(mutated):
    """Each rank's tokens come first at the other rank, and last at home."""
    p = problem([200, 200], 4, 2, 64, 64)
    p.index = [torch.tensor([[2 - 2 * rank, 2 * rank + 1]] * 200) for rank in range(2)]

    def outs():
        with tw.virtual_world(2, device="cpu", sms=3) as world:
            return [out for out, *_ in run(world, p, gated=False, second=False, plan=plan(comm_sms=1))]

    assert_right(outs(), truth(p, gated=False, second=False))
    due = "gl.min(gl.where(some, places // work.matmul.BM, NO_TILE), 0)"
    last = "gl.max(gl.where(some, places // work.matmul.BM, 0), 0) + NO_TILE * gl.min(1 - some.to(gl.int32), 0)"
    mutated([(due, last)])
    with pytest.raises(DeadlockError):
        outs()
