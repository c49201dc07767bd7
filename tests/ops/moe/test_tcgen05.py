# ruff: noqa: E501  (a mutant per row)
"""The experts' ops by tcgen05, in the emulator: right and clean under schedules of its own, and edits are found."""

import pytest

import tileweave as tw
from tests.ops.grouped_matmul import test_grouped_matmul as grouped
from tests.ops.moe.problems import assert_right, judge, problem, run, there_and_back, truth
from tests.ops.moe.test_combine import back
from tests.ops.mutants import GROUPED, MATMUL, TCGEN05, put_edited
from tileweave import Plan
from tileweave.emulator import DeadlockError, ProtocolError, RaceError

KINDS = {"R": RaceError, "D": DeadlockError, "P": ProtocolError}
DISPATCH, COMBINE = "ops/moe/kernel.py", "ops/moe/combine_kernel.py"


def plan(mechanism="tma", schedule="intra_sm", comm_sms=0, tile=(128, 64, 64)):
    """A plan made by hand."""
    return Plan(mechanism, schedule, tile, 2, 1, comm_sms, core="tcgen05")


THERE = plan("tma", "inter_sm", 2)
GATE = plan("tma", "inter_sm", 2, (128, 128, 64))
BACK = plan("register")


@pytest.mark.parametrize("name", grouped.SIZES)
@pytest.mark.parametrize("tile, sms", [((128, 64, 64), 1), ((128, 256, 64), 3)])
def test_grouped_matmul_is_right_and_clean(name, tile, sms):
    """On one SM all rings of a CTA wrap."""
    given = grouped.problem(grouped.SIZES[name], k=200, beyond=9 * (sms - 1), transposed=sms > 1)
    out = grouped.emulated(lambda: tw.grouped_matmul(*given, plan=plan(tile=tile)), sms, sms)
    grouped.assert_right(out, *given)


@pytest.mark.parametrize("routing", ["random", "one", "empty"])
@pytest.mark.parametrize(
    "options, tile",
    [
        (dict(gated=True), (128, 128, 64)),
        (dict(gated=True), (128, 256, 64)),
        (dict(gated=False, activation="silu"), (128, 64, 64)),
    ],
)
def test_moe_dispatch_matmul_is_right_and_clean(options, tile, routing):
    p = problem([140, 30, 0], 4, 2, 136, 200, routing=routing)
    if tile[1] == 256:
        p.w, p.gate = (w.mT.contiguous().mT for w in (p.w, p.gate))
    for seed in range(2):
        with tw.virtual_world(3, device="cpu", seed=seed, sms=3 + seed) as world:
            results = run(world, p, second=False, plan=plan("tma", "inter_sm", 2, tile), **options)
        assert_right([out for out, *_ in results], truth(p, second=False, **options))


@pytest.mark.parametrize("routing", ["random", "one", "empty"])
def test_moe_matmul_combine_is_right_and_clean(routing):
    p = problem([70, 0, 30], 4, 3, 136, 200, routing=routing)
    for seed in range(2):
        with tw.virtual_world(3, device="cpu", seed=seed, sms=2) as world:
            calls = world.run(lambda rank, group: [back(p, rank, group, BACK) for _ in range(2)])
        for outs in zip(*calls, strict=True):
            assert_right(outs, truth(p, gated=False))


def multiply_grouped(seed):
    """A grouped matmul of ragged experts on one SM."""
    given = grouped.problem([3, 0, 230, 9], k=136, beyond=5, seed=seed)
    grouped.assert_right(grouped.emulated(lambda: tw.grouped_matmul(*given, plan=plan()), seed, 1), *given)


def dispatch_gated(seed):
    """Two gated dispatches of two ranks."""
    problems = [problem([150, 20], 3, 2, 72, 72, seed=i) for i in range(2)]
    with tw.virtual_world(2, device="cpu", seed=seed, sms=3, delayed=(seed % 2,)) as world:
        calls = world.run(
            lambda rank, group: [there_and_back(p, rank, group, second=False, plan=GATE)[0] for p in problems]
        )
    for outs, p in zip(zip(*calls, strict=True), problems, strict=True):
        assert_right(outs, truth(p, second=False))


def combine(seed):
    """Two ways back of two ranks."""
    problems = [problem([150, 100], 2, 2, 72, 72, seed=i) for i in range(2)]
    with tw.virtual_world(2, device="cpu", seed=seed, sms=2, delayed=(seed % 2,)) as world:
        calls = world.run(lambda rank, group: [back(p, rank, group, BACK) for p in problems])
    for outs, p in zip(zip(*calls, strict=True), problems, strict=True):
        assert_right(outs, truth(p, gated=False))


OPS = {"grouped_matmul": multiply_grouped, "moe_dispatch_matmul": dispatch_gated, "moe_matmul_combine": combine}
GATE_PART = "parts.slice(mm.BN + j * mm.WIDTH, mm.WIDTH)"
FILLED = "        gl.tcgen05_commit(full.ready_at(to))\n"
MUTANTS = {  # an op, a file, its edits and the kinds of findings: those of test_dispatch.py
    "handed over before its products are done": ("grouped_matmul", TCGEN05, [(FILLED, "        full.publish(to)\n")], "RP"),
    "the accumulator filled again before it is read": ("grouped_matmul", TCGEN05, [("        full.producer_wait(to)\n", "")], "RP"),
    "operands not given back": ("grouped_matmul", TCGEN05, [("mbarriers=read)", "mbarriers=[])")], "D"),
    "a ragged part by TMA": ("grouped_matmul", GROUPED, [("if row + mm.ROWS <= end:", "if row < end:")], "RW"),
    "an expert's rows by half a tile": ("grouped_matmul", GROUPED, [("if row + mm.ROWS <= end:", "if row + mm.ROWS // 2 <= end:")], "RW"),
    "the product gates itself": ("moe_dispatch_matmul", TCGEN05, [(GATE_PART, "parts.slice(j * mm.WIDTH, mm.WIDTH)")], "W"),
    "the sides are taken for each other": ("moe_dispatch_matmul", DISPATCH, [("silu(sides[1]) * sides[0]", "silu(sides[0]) * sides[1]")], "W"),
    "both accumulators end in one": ("moe_dispatch_matmul", TCGEN05, [("accumulators.bufs.index(to.slot)", "accumulators.bufs.index(0)")], "RPW"),
    "parts read before the products are done": ("moe_dispatch_matmul", MATMUL, [("            accumulators.ring.consumer_wait(taken)\n", "")], "RP"),
    "no proxy fence after the flag": ("moe_dispatch_matmul", DISPATCH, [("    gl.fence_proxy_async()\n    return there\n", "    return there\n")], "R"),
    "the weights of other rows": ("moe_matmul_combine", COMBINE, [("rows = row + gl.arange(0, work.matmul.ROWS, gl.SliceLayout(1, LAYOUT))", "rows = row + 1 + gl.arange(0, work.matmul.ROWS, gl.SliceLayout(1, LAYOUT))")], "W"),
    # harmless
    "no multiplier leaves anything out": ("grouped_matmul", GROUPED, [("return gl.where(row < end_of(work.offsets, expert, work.rows), steps, 0)", "return steps")], None),
    "a fence more": ("moe_dispatch_matmul", TCGEN05, [("        part = gl.tcgen05_load(parts", "        gl.fence_async_shared()\n        part = gl.tcgen05_load(parts")], None),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_is_judged_rightly(name, monkeypatch, tmp_path):
    op, file, edits, expected = MUTANTS[name]
    put_edited(file, edits, monkeypatch, tmp_path, op)

    def outcome(seed):
        try:
            OPS[op](seed)
        except (RaceError, DeadlockError, ProtocolError) as error:
            return next(letter for letter, kind in KINDS.items() if isinstance(error, kind))
        except AssertionError:
            return "W"

    judge(outcome, expected)
