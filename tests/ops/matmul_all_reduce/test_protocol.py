# ruff: noqa: E501  (a mutant per row)
"""The protocol table of the kernel is true: each edit that breaks one of its lines is found, harmless ones are not.

An edit is (old text, new text) in kernel.py; the old text must occur exactly once. What is expected is the kind of
finding: R race, D deadlock, P protocol error, W a wrong result; None: the edit is harmless and nothing may be reported.
"""

import pytest

import tileweave as tw
from tests.ops.matmul_all_reduce.problems import assert_right, operands, run_calls
from tests.ops.mutants import put_edited
from tileweave import Plan
from tileweave.emulator import DeadlockError, ProtocolError, RaceError

KINDS = {"R": RaceError, "D": DeadlockError, "P": ProtocolError}
PERFORMED = "        gl.store_wait(0)\n        gl.barrier()\n        chunk ="
MEET = "met = gl.wait_all(work.flags, phase - work.flags.rank, work.flags.world, epoch, skip=phase)\n        gl.fence_proxy_async()\n"
BEHIND = "met = gl.wait_all(work.flags, (work.SHOTS - 1) * count, count, epoch)"
MOVER = "there = gl.wait(flags, work.chunks * flags.world + phase, epoch)\n                gl.fence_proxy_async()\n"
ALL = "gl.signal_all(flags, (work.SHOTS - 1) * work.chunks * flags.world + phase, epoch)"
SLOTS = ("(epoch & 1) * flags.world + flags.rank", "(epoch & 1) * flags.world + i ", "(epoch & 1) * work.flags.world + owner", "(epoch & 1) * work.flags.world + source")  # fmt: skip

BOTH = {  # found in either schedule
    "published after the read wait only": ([(PERFORMED, "        gl.barrier()\n        chunk =")], "R"),
    "no barrier between the full wait and the count": ([(PERFORMED, "        gl.store_wait(0)\n        chunk =")], "R"),
    "parts counted without release": ([('gl.atomic_add(sent, count, sem="acq_rel", scope="gpu")', 'gl.atomic_add(sent, count, sem="relaxed", scope="gpu")')], "R"),
    "flag raised by every storer": ([("== all_parts - count)", ">= 0)")], "R"),
    "flag raised by the last storer but one": ([("== all_parts - count)", "== all_parts - 2 * count)")], "RD"),
    "parts of one multiplier expected": ([("(mm.BN // mm.WIDTH) * mm.HALVES\n        sent", "(mm.BN // mm.WIDTH)\n        sent")], "RD"),
    "count not put back": ([('            gl.atomic_xchg(sent, 0, sem="relaxed", scope="gpu")\n', "")], "RD"),
    "tells nobody but itself": ([(ALL, ALL.replace("signal_all(flags, ", "signal(flags, flags.rank, "))], "D"),
    "sends into the slot of the next call": ([(SLOTS[0], SLOTS[0].replace("epoch & 1", "(epoch & 1) ^ 1"))], "RW"),
}  # fmt: skip
ONE_SLOT = [(text, text.replace("& 1", "& 0")) for text in SLOTS]
ONE_SHOT = {
    "one slot for all calls": (ONE_SLOT, "R"),
    "does not wait behind the tile loop": ([(BEHIND, "met = epoch == epoch")], "R"),
    "waits for the previous call's flags": ([(BEHIND, BEHIND.replace("epoch", "epoch - 1"))], "R"),
    "waits for all ranks but the last": ([(BEHIND, BEHIND.replace("count, epoch", "count - 1, epoch"))], "R"),
    "does not send to the last peer": ([("for i in range(flags.world):\n            gl.store_async", "for i in range(flags.world - 1):\n            gl.store_async")], "RW"),
    "sums all sources but the last": ([("(first + j < flags.world)", "(first + j < flags.world - 1)")], "W"),
    "stores into the place of another source": ([("flags.world, [place, row, col], buf)\n    if work.SHOTS == 2", "flags.world, [place ^ 1, row, col], buf)\n    if work.SHOTS == 2")], "RPW"),
    # harmless
    "waits for the peers in another order": ([(BEHIND, "met = gl.wait(work.flags, count - 1, epoch) & gl.wait_all(work.flags, 0, count - 1, epoch)")], None),
    "sends to itself first": ([("(flags.rank + 1 + i) % flags.world, [place", "(flags.rank + i) % flags.world, [place")], None),
    "a barrier more": ([(PERFORMED, PERFORMED.replace("        chunk", "        gl.barrier()\n        chunk"))], None),
}  # fmt: skip
TWO_SHOTS = {
    "does not wait for the peers' parts": ([(MEET, "gl.fence_proxy_async()\n")], "R"),
    "waits for the previous call's parts": ([(MEET, MEET.replace("epoch", "epoch - 1"))], "R"),
    "no fence before the peers' parts are loaded": ([(MEET, MEET.replace("        gl.fence_proxy_async()\n", ""))], "R"),
    "waits for the parts of the first chunk": ([(MEET, MEET.replace("phase - work.flags.rank", "0"))], "RD"),
    "mover does not wait": ([(MOVER, "gl.fence_proxy_async()\n")], "R"),
    "mover waits for the previous call": ([(MOVER, MOVER.replace("epoch", "epoch - 1"))], "R"),
    "mover waits for parts instead of finished tiles": ([(MOVER, MOVER.replace("work.chunks * flags.world + ", ""))], "R"),
    "mover does not fence": ([(MOVER, MOVER.replace("                gl.fence_proxy_async()\n", ""))], "R"),
    "mover waits once an owner": ([("            if phase != previous:\n", "            if owner != previous:\n"), ("                previous = phase\n            row", "                previous = owner\n            row")], "R"),
    "mover waits once": ([("            if phase != previous:\n", "            if previous < 0:\n")], "R"),
    "mover stores before the tile is there": ([("            work.moves.consumer_wait(at)\n", "")], "R"),
    "mover loads over what is being stored": ([("            gl.store_read_wait(0)\n            from_row", "            from_row")], "R"),
    "mover uses one buffer": ([("[place, from_row", "[place, from_row + 0"), ("work.move_bufs.index(to.slot)", "work.move_bufs.index(0)"), ("work.move_bufs.index(at.slot)", "work.move_bufs.index(0)")], "RW"),
    "mover takes the next owner's tile": ([("gl.load_async(work.slots, owner, where, work.move_bufs", "gl.load_async(work.slots, (owner + 1) % work.flags.world, where, work.move_bufs")], "RW"),
    "all chunks have one counter": ([("mm.state + SENT + phase", "mm.state + SENT + phase % flags.world")], "RD"),
    "parts of all chunks have one flag": ([("phase % flags.world, chunk * flags.world + flags.rank, epoch)", "phase % flags.world, flags.rank, epoch)")], "RD"),
    "finished tiles share the flags of parts": ([(ALL, "gl.signal_all(flags, phase, epoch)")], "RD"),
    "an own tile takes in too few parts": ([("return work.flags.world - 1 +", "return work.flags.world - 2 +")], "RDPW"),
    # harmless
    "one slot for all calls, as every rank fetches from every other in each": (ONE_SLOT, None),
    "a fence more": ([(MEET, MEET + "        gl.fence_proxy_async()\n")], None),
    "mover waits for each tile": ([("            if phase != previous:\n", "            if previous < phase + 1000:\n")], None),
    "movers take the last owner first": ([("owner = (flags.rank + 1 + u // count) % flags.world\n            phase", "owner = (flags.rank + 2 * flags.world - 1 - u // count) % flags.world\n            phase")], None),
}  # fmt: skip
NORMED = {  # two shots that end with whole rows
    "does not wait behind the tile loop": ONE_SHOT["does not wait behind the tile loop"],
    "waits for the first chunk": ([(BEHIND, BEHIND.replace("count, epoch", "work.flags.world, epoch"))], "R"),
    "fetches from the next owner": ([("total += fetch(work, owner, owner,", "total += fetch(work, (owner + 1) % flags.world, owner,")], "RW"),
}  # fmt: skip

# Two multipliers, tiles of one part; two shots: two chunks, of two tiles and of one, and an owner with fewer rows.
PROBLEMS = {
    "one_shot": dict(schedule="one_shot", world=3, m=130, n=136, k=72, extras="brn"),
    "two shots": dict(schedule="intra_sm", world=3, m=300, n=136, k=72, extras="br"),
    "two shots, normed": dict(schedule="intra_sm", world=3, m=300, n=136, k=72, extras="rn"),
}
CASES = [
    *(("one_shot", name, each) for name, each in {**BOTH, **ONE_SHOT}.items()),
    *(("two shots", name, each) for name, each in {**BOTH, **TWO_SHOTS}.items()),
    *(("two shots, normed", name, each) for name, each in NORMED.items()),
]


def outcome(seed, schedule, world, m, n, k, extras):
    """What three calls of all ranks come to under one schedule: R, D, P, W (wrong result) or None."""
    calls = [operands(world, m, n, k, i, extras) for i in range(3)]
    plan = Plan(schedule=schedule, tile=(128, 64, 64), stages=2)
    try:
        with tw.virtual_world(world, device="cpu", seed=seed, sms=2) as w:
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
    put_edited("ops/matmul_all_reduce/kernel.py", edits, monkeypatch, tmp_path, "matmul_all_reduce")
    judge(PROBLEMS[kind], expected)


@pytest.mark.parametrize("kind", PROBLEMS)
def test_without_an_edit_nothing_is_found(kind):
    judge(PROBLEMS[kind], None)
