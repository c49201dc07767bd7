"""The ops that multiply by tcgen05, in the emulator: right and clean under schedules of its own, and edits of that core
are found."""

import pytest

import tileweave as tw
from tests.ops import problems as scatter
from tests.ops import test_float8 as float8
from tests.ops.all_gather_matmul import problems as gather
from tests.ops.matmul_all_reduce import problems as reduce
from tests.ops.mutants import MATMUL, TCGEN05, put_edited
from tileweave import Plan
from tileweave.emulator import DeadlockError, ProtocolError, RaceError

KINDS = {"R": RaceError, "D": DeadlockError, "P": ProtocolError}


def plan(**changes):
    return Plan(**{**dict(tile=(128, 64, 64), stages=2, core="tcgen05"), **changes})


# world, m, n, k, SMs and plan: every ring of a CTA wraps; a wave of shared tiles; places of the sources, and average
REDUCE_SCATTER = {
    "whole": (2, 2 * 136, 136, 136, 1, plan(), {}),
    "shared": (2, 2 * 72, 136, 200, 8, plan(tile=(128, 128, 64), split=2), dict(deterministic=True)),
    "added": (3, 3 * 40, 264, 72, 2, plan(), dict(op="avg")),
    "inter-SM": (2, 2 * 136, 136, 72, 3, plan(schedule="inter_sm", comm_sms=1), {}),
    "one shot": (3, 3 * 24, 136, 136, 2, plan(schedule="one_shot"), {}),
}


def reduce_scatter(name, seed):
    """Results of two calls, each beside its operands and what was asked for."""
    world, m, n, k, sms, chosen, kw = REDUCE_SCATTER[name]
    calls = []
    for i in range(2):
        a, b, bias = scatter.operands(world, m, n, k, 2 * seed + i, a_t=bool(i), b_t=not i, bias=True)
        calls.append((a, b, dict(bias=bias, **kw)))
    with tw.virtual_world(world, device="cpu", seed=seed, sms=sms) as w:
        return zip(scatter.run_calls(w, calls, plan=chosen), calls, strict=True)


@pytest.mark.parametrize("name", REDUCE_SCATTER)
def test_matmul_reduce_scatter_is_right_and_clean(name):
    for seed in range(2):
        for outs, (a, b, kw) in reduce_scatter(name, seed):
            scatter.assert_right(outs, a, b, **kw)


def test_float8_operands():
    """Scales are those of a part's rows and columns."""
    a, b, scales = float8.operands(2, 2 * 136, 136, 272, True)
    with tw.virtual_world(2, device="cpu", sms=3) as w:
        outs = float8.run(w, a, b, scales, calls=2, plan=plan(tile=(128, 128, 128)))
    float8.assert_scaled_right(outs, a, b, scales)


@pytest.mark.parametrize("schedule", ["one_shot", "intra_sm", "inter_sm"])
def test_matmul_all_reduce_is_right_and_clean(schedule):
    a, b, extras = reduce.operands(2, 136, 264, 136, 1)
    chosen = plan(schedule=schedule, comm_sms=int(schedule == "inter_sm"))
    with tw.virtual_world(2, device="cpu", seed=1, sms=2 + chosen.comm_sms) as w:
        for results in reduce.run_calls(w, [(a, b, extras)] * 2, plan=chosen):
            reduce.assert_right(results, a, b, extras)


@pytest.mark.parametrize("way", [*gather.WAYS, dict(schedule="one_shot")], ids=gather.way_name)
def test_all_gather_matmul_is_right_and_clean(way):
    a, b, bias = gather.operands(2, 136, (72, 136), 200, 1)
    with tw.virtual_world(2, device="cpu", seed=1, sms=3) as w:
        calls = [(a, b, bias, dict(return_gathered=True))] * 2
        for results in gather.run_calls(w, calls, plan=gather.plan(core="tcgen05", **way)):
            gather.assert_right(results, a, b, bias, True)


TURN = "            mm.ring.consumer_wait(at)\n"
FILLED = "        gl.tcgen05_commit(full.ready_at(to))\n"
READ = "        if mm.TENSOR:\n            accumulators.ring.release(taken)\n"
MUTANTS = {
    "operands multiplied before they are there": (TCGEN05, [(TURN, "")], "whole", "RP"),
    "the accumulator filled again before it is read": (TCGEN05, [("        full.producer_wait(to)\n", "")], "whole", "RP"),
    "an accumulator never handed over": (TCGEN05, [(FILLED, "")], "whole", "D"),
    "handed over before its products are done": (TCGEN05, [(FILLED, "        full.publish(to)\n")], "whole", "RP"),
    "handed over before its products are issued": (TCGEN05, [(FILLED, ""), (TURN, FILLED.replace("        gl", "            gl", 1) + TURN)], "whole", "RPD"),
    "operands given back before they are read": (TCGEN05, [("mbarriers=read)\n", "mbarriers=[])\n                mm.ring.release(at)\n")], "whole", "R"),
    "operands not given back": (TCGEN05, [("mbarriers=read)", "mbarriers=[])")], "whole", "D"),
    "adds to what the last tile left": (TCGEN05, [("use_acc=step > first", "use_acc=True")], "whole", "PW"),
    "a share adds to what the last tile left": (TCGEN05, [("use_acc=step > first", "use_acc=step > 0")], "shared", "PW"),
    "one accumulator for two": (TCGEN05, [("accumulators.bufs.index(to.slot)", "accumulators.bufs.index(0)")], "whole", "RPW"),
    "parts read before the products are done": (MATMUL, [("            accumulators.ring.consumer_wait(taken)\n", "")], "whole", "RP"),
    "the accumulator given back before it is read": (MATMUL, [(READ, "        if mm.TENSOR:\n"), ("            parts = accumulators.bufs.index(taken.slot)\n", "            parts = accumulators.bufs.index(taken.slot)\n            accumulators.ring.release(taken)\n")], "whole", "R"),
    "the accumulator not given back": (MATMUL, [(READ, "        if mm.TENSOR:\n")], "whole", "D"),
    "the loader reads the epoch late": (MATMUL, [("NOBODY, NOTHING, now, scales, LOAD_SCALES)", "NOBODY, NOTHING)")], "whole", "R"),
    "the fetcher reads the epoch late": (TCGEN05, [("    met = epoch == epoch\n    at, previous", "    epoch = gl.load(mm.state) + 1\n    met = epoch == epoch\n    at, previous")], "whole", "R"),
    "peers' parts in the operands' places": (TCGEN05, [("mm.ring.behind(MORE).start(), -1", "mm.ring.start(), -1")], "whole", "RDPW"),
    "the fetcher does not meet the peers": (TCGEN05, [("            met = MEET(work, owner, epoch)\n", "")], "whole", "RPW"),
    # harmless
    "a commit more": (TCGEN05, [("mbarriers=read)\n", "mbarriers=[])\n                gl.tcgen05_commit(mm.ring.empty_at(at))\n")], "whole", None),
    "a fence more": (MATMUL, [(READ, "        gl.fence_async_shared()\n" + READ)], "whole", None),
}  # fmt: skip


def outcome(name, seed):
    """What two calls come to under one schedule: R, D, P, W (wrong result) or None."""
    try:
        results = list(reduce_scatter(name, seed))
    except (RaceError, DeadlockError, ProtocolError) as error:
        return next(letter for letter, kind in KINDS.items() if isinstance(error, kind))
    try:
        for outs, (a, b, kw) in results:
            scatter.assert_right(outs, a, b, **kw)
    except AssertionError:
        return "W"


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_is_judged_rightly(name, monkeypatch, tmp_path):
    file, edits, problem, expected = MUTANTS[name]
    put_edited(file, edits, monkeypatch, tmp_path)
    if expected is None:
        assert [outcome(problem, seed) for seed in range(2)] == [None, None]
        return
    found = next(filter(None, (outcome(problem, seed) for seed in range(8))), None)
    assert found and found in expected, f"expected one of {expected}, found {found}"
