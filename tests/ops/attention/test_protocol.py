# ruff: noqa: E501  (a mutant per row)
"""The protocol table of the attention template is true: each edit that breaks one of its lines is found, harmless ones are not.

An edit is (old text, new text) in tiles/attention.py; the old text must occur exactly once. What is expected is the kind of
finding: R race, D deadlock, P protocol error, W a wrong result; None: the edit is harmless and nothing may be reported.
"""

import pytest

import tileweave as tw
from tests.ops.attention.problems import assert_right, operands, run
from tests.ops.mutants import ATTENTION, put_edited
from tileweave.emulator import DeadlockError, ProtocolError, RaceError
from tileweave.ops.attention import Tiling

KINDS = {"R": RaceError, "D": DeadlockError, "P": ProtocolError}
QUERY = "        att.queries.producer_wait(to)\n        announce(att, to, n)\n        bar ="
LAST = "    att.queries.producer_wait(to)\n    announce(att, to, n)\n    att.queries.publish(to)\n"
FIRST_S = "    s = gl.warpgroup_mma_wait(0, deps=[s])\n    att.ring.release(at)\n"
NEXT_S = "    s = gl.warpgroup_mma_wait(1, deps=[s])\n    att.ring.release(at)\n"
TOOK_IN = "    o = gl.warpgroup_mma_wait(0, deps=[o])\n    att.ring.release(v_at)\n"
TOOK_LAST = "    o = gl.warpgroup_mma_wait(0, deps=[o])\n    att.ring.release(at)\n"
MULTIPLY_LAST = "    o = gl.warpgroup_mma(operand(att, p, LO), block_of(att, at), o, is_async=True)\n"
CONSUME = "    to, at, parity = att.queries.start(), att.ring.start(), 0\n    att.queries.consumer_wait(to)\n"
HAND_OVER = "        q.store(o.to(att.q_bufs.dtype))\n        gl.fence_async_shared()\n        gl.mbarrier_arrive(finished_at(att, to, MINE), count=1)\n"
STORE = "        gl.store_read_wait(0)\n        att.queries.release(to)\n"


def without(text, line):
    """The edit that takes a line out of a text."""
    assert line in text
    return [(text, text.replace(line, ""))]


def swapped(text):
    """The edit that exchanges a text's last two lines."""
    *before, a, b = text.splitlines(keepends=True)
    return [(text, "".join((*before, b, a)))]


MUTANTS = {
    # the loader
    "query over the one before": (without(QUERY, "        att.queries.producer_wait(to)\n"), "RP"),
    "tile announced too early": ([(QUERY, "        announce(att, to, n)\n        att.queries.producer_wait(to)\n        bar =")], "R"),
    "end announced too early": (without(LAST, "    att.queries.producer_wait(to)\n"), "RP"),
    "end not announced": (without(LAST, "    att.queries.publish(to)\n"), "D"),
    "block over the one before": ([("    att.ring.producer_wait(at)\n    bar =", "    bar =")], "RP"),
    "fewer bytes of a query expected": ([("Q_BYTES: gl.constexpr = att.CONSUMERS * att.ROWS", "Q_BYTES: gl.constexpr = att.ROWS")], "RP"),
    "fewer bytes of a block expected": ([("gl.mbarrier_expect(bar, att.BN * att.D * ", "gl.mbarrier_expect(bar, att.BN * att.D // 2 * ")], "RDP"),
    "V brought once too often": ([("if (i > 0) | (j > 0):", "if j > -1:")], "RDPW"),
    "last V not brought": (without("        at = bring(work, LOAD_KV, True, at, batch, head, v_source, v_row, there)\n        n = draw(att)\n", "        at = bring(work, LOAD_KV, True, at, batch, head, v_source, v_row, there)\n"), "RDPW"),
    "V of the same block": ([("                if (i > 0) | (j > 0):\n", "                v_row = k_row\n                if (i > 0) | (j > 0):\n")], "W"),
    "counter not put back": ([("    if drawn == att.tiles - 1:", "    if drawn == -1:")], "W"),
    "counter put back too early": ([("    if drawn == att.tiles - 1:", "    if drawn == 1:")], "RDPW"),
    "first tiles drawn too": ([("return computing + drawn", "return drawn")], "RDPW"),
    "a tile is left out": ([("return computing + drawn", "return computing + 1 + drawn")], "W"),
    # rings
    "queries released by one storer": ([("make_channel(Q_BUFS, CONSUMERS * READERS)", "make_channel(Q_BUFS, 1)")], "RDP"),
    "blocks released by one consumer": ([("make_channel(STAGES, CONSUMERS),", "make_channel(STAGES, 1),")], "RP"),
    "one barrier for both consumers' rows": ([("att.finished.index(to.slot * att.CONSUMERS + MINE)", "att.finished.index(to.slot * att.CONSUMERS)")], "RDPW"),
    "one barrier for all query buffers": ([("att.finished.index(to.slot * att.CONSUMERS + MINE)", "att.finished.index(MINE)")], "RDPW"),
    # the consumers
    "query not waited for": (without(CONSUME, "    att.queries.consumer_wait(to)\n"), "RP"),
    "first K not waited for": ([("    att.ring.consumer_wait(at)\n    await_turn", "    await_turn")], "R"),
    "second K not waited for": ([("    att.ring.consumer_wait(at)\n    for i", "    for i")], "R"),
    "next K not waited for": ([("    att.ring.consumer_wait(after)", "    pass")], "R"),
    "V not waited for": ([("    att.ring.consumer_wait(v_at)\n", "")], "R"),
    "first S used before it is there": ([(FIRST_S, FIRST_S.replace("wait(0", "wait(1"))], "R"),
    "S used before it is there": ([(NEXT_S, NEXT_S.replace("wait(1", "wait(2"))], "R"),
    "O used before it is there": ([(TOOK_IN, TOOK_IN.replace("wait(0", "wait(1"))], "R"),
    "last O used before it is there": ([(TOOK_LAST, TOOK_LAST.replace("wait(0", "wait(1"))], "R"),
    "first K released while it is read": (swapped(FIRST_S), "R"),
    "K released while it is read": (swapped(NEXT_S), "R"),
    "V released while it is read": (swapped(TOOK_IN), "R"),
    "last V released while it is read": (swapped(TOOK_LAST), "R"),
    "K and V released behind S": ([(NEXT_S, NEXT_S + "    att.ring.release(v_at)\n"), (TOOK_IN, TOOK_IN.replace("    att.ring.release(v_at)\n", ""))], "R"),
    "K not released": (without(NEXT_S, "    att.ring.release(at)\n"), "D"),
    "V not released": (without(TOOK_IN, "    att.ring.release(v_at)\n"), "D"),
    "last V not released": (without(TOOK_LAST, "    att.ring.release(at)\n"), "D"),
    "O written without a fence": (without(HAND_OVER, "        gl.fence_async_shared()\n"), "R"),
    "O handed over before it is written": ([(HAND_OVER, "".join(HAND_OVER.splitlines(True)[i] for i in (2, 0, 1)))], "R"),
    "O not handed over": (without(HAND_OVER, HAND_OVER.splitlines(True)[2]), "D"),
    "O written into the other one's rows": ([("q = query_buf(att, to, MINE)", "q = query_buf(att, to, att.CONSUMERS - 1 - MINE)")], "RW"),
    "a mask that shows one column more": ([("columns[None, :] < end[:, None]", "columns[None, :] <= end[:, None]")], "W"),
    "a block with a mask taken whole": ([("limit(att, first_row, cols, offset), 0) // att.BN", "limit(att, first_row, cols, offset), 0) // att.BN + 1")], "W"),
    "a block that is seen left out": ([("return gl.cdiv(visible, att.BN)", "return gl.maximum(gl.cdiv(visible, att.BN) - 1, gl.where(i == 0, 1, 0))")], "W"),
    "rows that have seen nothing": ([("    if GUARD:\n", "    if False:\n")], "W"),
    "O not shrunk": ([("    o = o * gl.convert_layout(shrink, gl.SliceLayout(1, LO))[:, None]\n", "")], "W"),
    # the storers
    "rows stored before they are there": ([("        gl.mbarrier_wait(finished_at(att, to, MINE), to.parity)\n", "")], "R"),
    "query buffer released while it is read": (without(STORE, "        gl.store_read_wait(0)\n"), "R"),
    "query buffer not released": (without(STORE, "        att.queries.release(to)\n"), "D"),
    # harmless
    "every block with a mask": ([("gl.maximum(limit(att, first_row, cols, offset), 0) // att.BN", "gl.minimum(cols, 0)")], None),
    "K released with V": ([(NEXT_S, NEXT_S.replace("    att.ring.release(at)\n", "")), (TOOK_IN, TOOK_IN + "    att.ring.release(at)\n")], None),
    "a fence more": ([(HAND_OVER, HAND_OVER.replace("        gl.fence_async_shared()\n", 2 * "        gl.fence_async_shared()\n"))], None),
    "tiles drawn before the last V is brought": ([("        at = bring(work, LOAD_KV, True, at, batch, head, v_source, v_row, there)\n        n = draw(att)\n", "        n = draw(att)\n        at = bring(work, LOAD_KV, True, at, batch, head, v_source, v_row, there)\n")], None),
}  # fmt: skip
TURNS = {
    "turn not passed on": ([("        gl.mbarrier_arrive(att.turns.index((MINE + 1) % att.CONSUMERS), count=1)\n", "        pass\n")], "D"),
    "nobody begins": ([("parity ^ (1 if MINE == 0 else 0)", "parity")], "D"),
    "turns of one parity": ([("    return parity ^ 1\n", "    return parity\n")], "DP"),
    "last V taken in in turn": ([(MULTIPLY_LAST, "    await_turn(att, parity, MINE)\n" + MULTIPLY_LAST + "    parity = pass_turn(att, parity, MINE)\n")], None),
}  # fmt: skip
CASES = [(False, name, case) for name, case in MUTANTS.items()] + [(True, name, case) for name, case in TURNS.items()]


def outcome(seed, turns):
    """What two calls come to under one schedule: R, D, P, W (wrong result) or None."""
    calls = [operands(1, 3, 3, 150, 100, 64, i) for i in range(2)]
    tiling = Tiling(2, bn=16, stages=3 + seed % 2, take_turns=turns)
    try:
        with tw.virtual_world(1, device="cpu", seed=seed, sms=2) as w:
            results = run(w, *calls, causal=True, offset=-20, tiling=tiling)
    except (RaceError, DeadlockError, ProtocolError) as error:
        return next(letter for letter, kind in KINDS.items() if isinstance(error, kind))
    try:
        for result, call in zip(results, calls, strict=True):
            assert_right(result, *call, causal=True, offset=-20)
    except AssertionError:
        return "W"


def judge(turns, expected):
    """The finding in at most eight schedules is one of `expected`; none in three, if there is nothing to find."""
    if expected is None:
        assert [outcome(seed, turns) for seed in range(3)] == [None] * 3
        return
    found = next(filter(None, (outcome(seed, turns) for seed in range(8))), None)
    assert found and found in expected, f"expected one of {expected}, found {found}"


@pytest.mark.parametrize("turns, name, case", CASES, ids=[name for _, name, _ in CASES])
def test_an_edit_is_judged_rightly(turns, name, case, monkeypatch, tmp_path):
    edits, expected = case
    put_edited(ATTENTION, edits, monkeypatch, tmp_path, "attention", ATTENTION)
    judge(turns, expected)


@pytest.mark.parametrize("turns", [False, True])
def test_without_an_edit_nothing_is_found(turns):
    judge(turns, None)
