# ruff: noqa: E501  (a mutant per row)
"""The protocol tables of the kernel, of movers and of communicators that reduce are true: each edit that breaks one of
their lines is found, harmless ones are not.

An edit is (old text, new text) in one of FILES; the old text must occur exactly once. What is expected is the kind of
finding: R race, D deadlock, P protocol error, W a wrong result; None: the edit is harmless and nothing may be reported.
"""

import pytest

import tileweave as tw
from tests.ops.matmul_all_reduce.problems import assert_right, operands, run_calls
from tests.ops.mutants import put_edited
from tileweave import Plan
from tileweave.emulator import DeadlockError, ProtocolError, RaceError

KINDS = {"R": RaceError, "D": DeadlockError, "P": ProtocolError}
FILES = ("ops/matmul_all_reduce/kernel.py", "tiles/phases.py", "tiles/mover.py", "tiles/reducer.py", "tiles/sums.py")
PERFORMED = "        gl.store_wait(0)\n        gl.barrier()\n        chunk, owner ="
COUNTED = "count_up(mm, SENT + phase, count, tiles * (mm.BN // mm.WIDTH) * mm.HALVES)"
MEET = "met = gl.wait_all(work.flags, phase - work.flags.rank, work.flags.world, epoch, skip=phase)\n        gl.fence_proxy_async()\n"
BEHIND = "met = gl.wait_all(sums.flags, 0, sums.flags.world, epoch)"
ARRIVE = "there = gl.wait(work.flags, work.chunks * work.flags.world + phase, epoch)"
ALL = "gl.signal_all(flags, (work.SHOTS - 1) * work.chunks * flags.world + phase, epoch)"
SLOTS = ("slot = (epoch & 1) * flags.world", "place = (epoch & 1) * flags.world + i ", "place = (epoch & 1) * sums.flags.world + source", "where = [(epoch & 1) * flags.world + owner")  # fmt: skip

COUNT = {  # of parts, in every schedule
    "published after the read wait only": ([(PERFORMED, "        gl.barrier()\n        chunk, owner =")], "R"),
    "no barrier between the full wait and the count": ([(PERFORMED, "        gl.store_wait(0)\n        chunk, owner =")], "R"),
    "parts counted without release": ([('count, sem="acq_rel", scope="gpu") == every', 'count, sem="relaxed", scope="gpu") == every')], "R"),
    "flag raised by every storer": ([("== every - count)", ">= 0)")], "R"),
    "flag raised by the last storer but one": ([("== every - count)", "== every - 2 * count)")], "RD"),
    "parts of one multiplier expected": ([(COUNTED, COUNTED.replace(" * mm.HALVES", ""))], "RD"),
    "count not put back": ([('        gl.atomic_xchg(mm.state + word, 0, sem="relaxed", scope="gpu")\n', "        pass\n")], "RD"),
}  # fmt: skip
BOTH = {  # one shot, and two intra-SM
    **COUNT,
    "tells nobody but itself": ([(ALL, ALL.replace("signal_all(flags, ", "signal(flags, flags.rank, "))], "D"),
    "sends into the slot of the next call": ([(SLOTS[0], SLOTS[0].replace("epoch & 1", "(epoch & 1) ^ 1"))], "RW"),
}  # fmt: skip
ONE_SLOT = [(text, text.replace("& 1", "& 0")) for text in SLOTS]
ONE_SHOT = {
    "one slot for all calls": (ONE_SLOT, "R"),
    "does not wait behind the tile loop": ([(BEHIND, "met = epoch == epoch")], "R"),
    "waits for the previous call's flags": ([(BEHIND, BEHIND.replace("epoch", "epoch - 1"))], "R"),
    "waits for all ranks but the last": ([(BEHIND, BEHIND.replace("world, epoch", "world - 1, epoch"))], "R"),
    "does not send to the last peer": ([("for i in range(flags.world):\n            gl.store_async", "for i in range(flags.world - 1):\n            gl.store_async")], "RW"),
    "sums all sources but the last": ([("(first + j < flags.world)", "(first + j < flags.world - 1)")], "W"),
    "stores into the place of another source": ([("[slot + flags.rank, row, col], buf)\n    else", "[slot + (flags.rank ^ 1), row, col], buf)\n    else")], "RPW"),
    # harmless
    "waits for the peers in another order": ([(BEHIND, "count = sums.flags.world\n    met = gl.wait(sums.flags, count - 1, epoch) & gl.wait_all(sums.flags, 0, count - 1, epoch)")], None),
    "sends to itself first": ([("(flags.rank + 1 + i) % flags.world, [slot", "(flags.rank + i) % flags.world, [slot")], None),
    "a barrier more": ([(PERFORMED, PERFORMED.replace("        chunk", "        gl.barrier()\n        chunk"))], None),
}  # fmt: skip
MOVERS = {  # intra-SM and inter-SM
    "mover does not wait": ([(ARRIVE, "there = epoch == epoch")], "R"),
    "mover waits for the previous call": ([(ARRIVE, ARRIVE.replace("epoch", "epoch - 1"))], "R"),
    "mover waits for parts instead of finished tiles": ([(ARRIVE, ARRIVE.replace("work.chunks * work.flags.world + ", ""))], "RD"),
    "mover does not fence": ([("    gl.fence_proxy_async()\n    return there\n", "    return there\n")], "R"),
    "mover waits once": ([("            if phase != previous:\n", "            if previous < 0:\n")], "R"),
    "mover stores before the tile is there": ([("            mover.ring.consumer_wait(at)\n", "")], "R"),
    "mover loads over what is being stored": ([("            gl.store_read_wait(0)\n            down", "            down")], "R"),
    "mover uses one buffer": ([("mover.bufs.index(to.slot)", "mover.bufs.index(0)"), ("mover.bufs.index(at.slot)", "mover.bufs.index(0)")], "RW"),
    "all chunks have one counter": ([(COUNTED, COUNTED.replace("SENT + phase", "SENT + owner"))], "RD"),
    # harmless
    "mover waits for each tile": ([("            if phase != previous:\n", "            if previous < phase + 1000:\n")], None),
    "movers take the last owner first": ([("owner = (flags.rank + 1 + u // count) % flags.world\n            phase", "owner = (flags.rank + 2 * flags.world - 1 - u // count) % flags.world\n            phase")], None),
}  # fmt: skip
PARTS_TOLD = "gl.signal(flags, owner, chunk * flags.world + flags.rank, epoch)\n"
INTRA_SM = {
    "does not wait for the peers' parts": ([(MEET, "gl.fence_proxy_async()\n")], "R"),
    "waits for the previous call's parts": ([(MEET, MEET.replace("epoch", "epoch - 1"))], "R"),
    "no fence before the peers' parts are loaded": ([(MEET, MEET.replace("        gl.fence_proxy_async()\n", ""))], "R"),
    "waits for the parts of the first chunk": ([(MEET, MEET.replace("phase - work.flags.rank", "0"))], "RD"),
    "mover waits once an owner": ([("            if phase != previous:\n", "            if owner != previous:\n"), ("                previous = phase\n            row", "                previous = owner\n            row")], "R"),
    "mover takes the next owner's tile": ([("source = flags.rank if mover.LOCAL else owner", "source = flags.rank if mover.LOCAL else (owner + 1) % flags.world")], "RW"),
    "parts of all chunks have one flag": ([("            else:\n                " + PARTS_TOLD, "            else:\n                " + PARTS_TOLD.replace("chunk * flags.world + ", ""))], "RD"),
    "finished tiles share the flags of parts": ([(ALL, "gl.signal_all(flags, phase, epoch)")], "RD"),
    "an own tile takes in too few parts": ([("SHOTS, 0 if INTER else WORLD - 1,", "SHOTS, 0 if INTER else WORLD - 2,")], "RDPW"),
    # harmless
    "one slot for all calls, as every rank fetches from every other in each": (ONE_SLOT, None),
    "a fence more": ([(MEET, MEET + "        gl.fence_proxy_async()\n")], None),
}  # fmt: skip
ADD = "if gl.wait_all(flags, chunk * flags.world, flags.world, epoch):"
TELL = "gl.signal_all(flags, (work.chunks + chunk) * flags.world + flags.rank, epoch)"
PUT = "            gl.barrier()\n            if count_up"
REDUCED = "count_up(mm, OWN_WORDS + work.chunks * flags.world + chunk, 1, mm.COMM_SMS)"
INTER_SM = {
    "communicator does not wait": ([(ADD, "if epoch == epoch:")], "R"),
    "communicator waits for the previous call": ([(ADD, ADD.replace("epoch", "epoch - 1"))], "R"),
    "communicator waits for all ranks but the last": ([(ADD, ADD.replace("world, epoch", "world - 1, epoch"))], "R"),
    "communicator waits for the first chunk": ([(ADD, ADD.replace("chunk * flags.world", "0"))], "R"),
    "tells itself only": ([(TELL, TELL.replace("signal_all(flags, ", "signal(flags, flags.rank, "))], "D"),
    "every communicator tells": ([(REDUCED, REDUCED.replace("mm.COMM_SMS", "1"))], "RD"),
    "takes a part of the next tile": ([("part = gl.program_id(0) + i * mm.COMM_SMS", "part = gl.program_id(0) + 1 + i * mm.COMM_SMS")], "RPW"),
    "parts in the place of the next owner": ([("[slot + owner, row, at]", "[slot + (owner + 1) % flags.world, row, at]")], "RW"),
}  # fmt: skip
FABRIC = {
    "chunks share a count": ([(REDUCED, REDUCED.replace(" + chunk,", ","))], "RD"),
    "no fence between multicast and unicast": ([("        gl.fence_proxy_alias()\n    gl.fence_proxy_async()\n    return there", "        pass\n    gl.fence_proxy_async()\n    return there")], "R"),
    "no barrier before the sums are counted": ([(PUT, "            if count_up")], "R"),
}  # fmt: skip
TMA = {
    "no fence before the parts are loaded": ([("    gl.fence_proxy_async()\n    for i in range(parts * flags.world + AHEAD)", "    for i in range(parts * flags.world + AHEAD)")], "R"),
    "sums counted before they are performed": ([("    gl.store_wait(0)\n    return at, to", "    return at, to")], "R"),
    "adds before a part is there": ([("            mm.ring.consumer_wait(at)\n            source", "            source")], "RP"),
    "loads over a sum that is being stored": ([("            gl.store_read_wait(0)\n            gl.mbarrier_expect(mm.ring", "            gl.mbarrier_expect(mm.ring")], "R"),
    "loads over a part that is being added": ([("            gl.fence_async_shared()\n            gl.barrier()\n            at =", "            at =")], "R"),
    "stores a sum before all threads have written it": ([("                gl.fence_async_shared()\n                gl.barrier()\n                for peer", "                for peer")], "R"),
    "does not store to the last peer": ([("for peer in range(flags.world):\n", "for peer in range(flags.world - 1):\n")], "RW"),
    "starts a sum with the one before": ([("gl.where(source == 0, 0.0, total)", "total")], "W"),
}  # fmt: skip

# Two multipliers, tiles of one part; two shots: two chunks, of two tiles and of one, and an owner with fewer columns.
TWO = dict(world=3, m=300, n=136, k=72, extras="br")
PROBLEMS = {
    "one_shot": dict(schedule="one_shot", world=3, m=130, n=136, k=72, extras="brn"),
    "intra": dict(TWO, schedule="intra_sm"),
    "inter": dict(TWO, schedule="inter_sm"),
    "multimem": dict(TWO, schedule="inter_sm", mechanism="multimem"),
}
CASES = [
    *(("one_shot", name, each) for name, each in {**BOTH, **ONE_SHOT}.items()),
    *(("intra", name, each) for name, each in {**BOTH, **MOVERS, **INTRA_SM}.items()),
    *(("inter", name, each) for name, each in {**COUNT, **MOVERS, **INTER_SM, **TMA}.items()),
    *(("multimem", name, each) for name, each in {**INTER_SM, **FABRIC}.items()),
]


def outcome(seed, schedule, world, m, n, k, extras, mechanism="tma"):
    """What three calls of all ranks come to under one schedule: R, D, P, W (wrong result) or None."""
    calls = [operands(world, m, n, k, i, extras) for i in range(3)]
    comm_sms = 2 if schedule == "inter_sm" else 0
    plan = Plan(mechanism, schedule, (128, 64, 64), 2, comm_sms=comm_sms)
    try:
        with tw.virtual_world(world, device="cpu", seed=seed, sms=2 + comm_sms) as w:
            results = run_calls(w, calls, plan=plan)
    except (RaceError, DeadlockError, ProtocolError) as error:
        return next(letter for letter, kind in KINDS.items() if isinstance(error, kind))
    try:
        for outs, call in zip(results, calls, strict=True):
            assert_right(outs, *call)
    except AssertionError:
        return "W"


def judge(problem, expected):
    """The finding in at most eight schedules is one of `expected`; none in three, if there is nothing to find."""
    if expected is None:
        assert [outcome(seed, **problem) for seed in range(3)] == [None] * 3
        return
    found = next(filter(None, (outcome(seed, **problem) for seed in range(8))), None)
    assert found and found in expected, f"expected one of {expected}, found {found}"


@pytest.mark.parametrize("kind, name, case", CASES, ids=[f"{kind}: {name}" for kind, name, _ in CASES])
def test_an_edit_is_judged_rightly(kind, name, case, monkeypatch, tmp_path):
    edits, expected = case
    put_edited(FILES, edits, monkeypatch, tmp_path, "matmul_all_reduce")
    judge(PROBLEMS[kind], expected)


@pytest.mark.parametrize("kind", PROBLEMS)
def test_without_an_edit_nothing_is_found(kind):
    judge(PROBLEMS[kind], None)
