# ruff: noqa: E501  (a mutant per row)
"""attention by tcgen05 in emulated worlds: right and clean under many schedules, and edits of that core are found.

An edit is (old text, new text) in tiles/attention_tcgen05.py; the old text must occur exactly once. What is expected is the
kind of finding: R race, D deadlock, P protocol error, W a wrong result; None: the edit is harmless.
"""

import pytest
import torch

import tileweave as tw
from tests.ops.attention.problems import assert_right, operands, run
from tests.ops.mutants import ATTENTION, ATTENTION_TCGEN05, put_edited
from tileweave.emulator import DeadlockError, ProtocolError, RaceError
from tileweave.ops.attention import Tiling
from tileweave.ops.attention.check import check, check_tiling, tiling_for

KINDS = {"R": RaceError, "D": DeadlockError, "P": ProtocolError}


def tiling(consumers=2, bn=32, stages=3, q_bufs=2):
    return Tiling(consumers, bn, stages, q_bufs, core="tcgen05")


def world(seed=0, sms=2):
    return tw.virtual_world(1, device="cpu", seed=seed, sms=sms)


@pytest.mark.parametrize(
    "batch, heads, kv_heads, rows, cols, causal, offset",
    [
        (1, 1, 1, 256, 64, False, 0),
        (2, 2, 1, 200, 70, True, 0),
        (1, 2, 1, 140, 200, True, 60),
        (1, 3, 3, 280, 50, True, -150),
        (1, 2, 1, 1, 33, False, 0),
    ],
)
def test_shapes_masks_groups(batch, heads, kv_heads, rows, cols, causal, offset):
    calls = [operands(batch, heads, kv_heads, rows, cols, 64, seed) for seed in range(2)]
    with world(seed=rows) as w:
        results = run(w, *calls, causal=causal, offset=offset, tiling=tiling())
    for result, call in zip(results, calls, strict=True):
        assert_right(result, *call, causal=causal, offset=offset)


@pytest.mark.parametrize("chosen", [tiling(1, 32, 3, 1), tiling(1, 64, 5), tiling(2, 32, 4, 1), tiling(2, 64, 6, 3)])
def test_tilings_under_many_schedules(chosen):
    calls = [operands(1, 2, 1, 300, 120, 64, seed) for seed in range(2)]
    for seed in range(3):
        with world(seed, sms=1 + seed % 3) as w:
            results = run(w, *calls, causal=True, offset=-20, tiling=chosen)
        for result, call in zip(results, calls, strict=True):
            assert_right(result, *call, causal=True, offset=-20)


@pytest.mark.parametrize("dim, dtype", [(8, torch.float16), (72, torch.bfloat16), (128, torch.float16)])
def test_dimensions_and_large_logits(dim, dtype):
    call = operands(1, 1, 1, 160, 80, dim, 1, dtype, times=50)
    with world() as w:
        assert_right(run(w, call, causal=True, tiling=tiling())[0], *call, causal=True)


def test_tilings_that_can_be():
    for dim, rows in ((64, 128), (64, 129), (128, 128), (128, 129)):
        call = check(*operands(1, 1, 1, rows, 8, dim), False, 0, None, "bhsd", False)
        chosen = tiling_for(call, "tcgen05")
        check_tiling(call, chosen, ("tcgen05",))
        assert chosen.core == "tcgen05" and chosen.consumers == 1 + (rows > 128)
    for message, other, cores in (
        ("core must be 'tcgen05' here, got 'wgmma'", Tiling(), ("tcgen05",)),
        ("core must be 'wgmma' here", tiling(), ("wgmma",)),
        ("take_turns must be False", Tiling(take_turns=True, core="tcgen05"), ("tcgen05",)),
        ("bytes of shared memory", tiling(bn=128, stages=4), ("tcgen05",)),
    ):
        with pytest.raises(ValueError, match=message):
            check_tiling(call, other, cores)
    wide = check(*operands(1, 1, 1, 8, 8, 256), False, 0, None, "bhsd", False)
    with pytest.raises(ValueError, match="heads have dimension 256, by tiling"):
        check_tiling(wide, tiling(1, 16), ("tcgen05",))


SCORES = "    gl.mbarrier_wait(products.added.index(MINE), parity ^ 1)\n    k ="
SUMS = "    gl.mbarrier_wait(products.weighed.index(MINE), parity)\n"
TAKEN = "    gl.mbarrier_wait(products.scored.index(MINE), parity)\n"
DONE = "    gl.mbarrier_wait(products.added.index(MINE), parity ^ 1)\n    o ="
STORED = "    gl.tcgen05_store(weights(att, products, MINE), p.to(att.kv_bufs.dtype))\n"
ARRIVE = "    gl.mbarrier_arrive(products.weighed.index(MINE), count=1)\n"
GIVEN = "[att.ROWS, att.D]).store(o.to(att.q_bufs.dtype))\n"
NUMBER = "        att.queries.release(to)\n        q ="
K_AT, V_AT = (f"    att.ring.consumer_wait(at)\n    gl.mbarrier_wait(products.{name}" for name in ("added", "weighed"))
MUTANTS = {
    # the issuers
    "K not waited for": ([(K_AT, K_AT.split("\n", 1)[1])], "R"),
    "V not waited for": ([(V_AT, V_AT.split("\n", 1)[1])], "R"),
    "S over P that is read": ([(SCORES, "    k =")], "R"),
    "P taken before it is there": ([(SUMS, "")], "RP"),
    "S not handed over": ([("told = [att.ring.empty_at(at), products.scored.index(MINE)]", "told = [att.ring.empty_at(at)]")], "D"),
    "O not handed over": ([("told = [att.ring.empty_at(at), products.added.index(MINE)]", "told = [att.ring.empty_at(at)]")], "D"),
    "K not given back": ([("told = [att.ring.empty_at(at), products.scored.index(MINE)]", "told = [products.scored.index(MINE)]")], "D"),
    "V given back while it is read": ([("told = [att.ring.empty_at(at), products.added.index(MINE)]", "told = [products.added.index(MINE)]\n    att.ring.release(at)")], "R"),
    "S added to what was there": ([("use_acc=False, mbarriers", "use_acc=True, mbarriers")], "PW"),
    "O of the tile before kept": ([("v_at, j > 1, parity", "v_at, True, parity")], "PW"),
    "O of one block alone": ([("at, blocks > 1, parity", "at, False, parity")], "W"),
    "the tile's number read late": ([(NUMBER, "        q ="), ("make_channel(Q_BUFS, CONSUMERS * READERS)", "make_channel(Q_BUFS, CONSUMERS)")], "RDPW"),
    "the tile's number not given back": ([(NUMBER, "        q =")], "D"),
    "the other consumer's query": ([(NUMBER + " query_buf(att, to, MINE)", NUMBER + " query_buf(att, to, att.CONSUMERS - 1 - MINE)")], "RW"),
    "one S for both": ([("products.s_bufs.index(MINE), use_acc", "products.s_bufs.index(0), use_acc")], "RP"),
    "one O for both": ([("weights(att, products, MINE), products.o_bufs.index(MINE)", "weights(att, products, MINE), products.o_bufs.index(0)")], "RPW"),
    # the consumers
    "S read before it is there": ([(TAKEN, "")], "RP"),
    "P handed over before it is there": ([(STORED, ""), (ARRIVE, ARRIVE + STORED)], "R"),
    "P not handed over": ([(ARRIVE, "")], "D"),
    "O made smaller behind P's hand-over": ([("    if more:\n", ARRIVE + "    if more:\n"), ("shrink)\n" + ARRIVE, "shrink)\n")], "R"),
    "O not made smaller": ([("    if more:\n", "    if False:\n")], "W"),
    "O of the tile before made smaller": ([("    if more:\n", "    if True:\n")], "P"),
    "O taken before it is there": ([(DONE, "    o =")], "R"),
    "O taken a block early": ([(DONE, DONE.replace("parity ^ 1", "parity"))], "RD"),
    "parity of all blocks the same": ([("    return peak, total, parity ^ 1\n", "    return peak, total, parity\n")], "RDP"),
    "O written without a fence": ([(GIVEN + "        gl.fence_async_shared()\n", GIVEN)], "R"),
    "blocks with a mask taken whole": ([("blocks - whole(att, first_row, cols, offset), 0)", "blocks - whole(att, first_row, cols, offset) - 1, 0)")], "W"),
    # harmless
    "every block with a mask": ([("gl.maximum(blocks - whole(att, first_row, cols, offset), 0)", "blocks")], None),
    "O made smaller before P is stored": ([(STORED, ""), ("shrink)\n" + ARRIVE, "shrink)\n" + STORED + ARRIVE)], None),
    "a commit more": ([("use_acc=more, mbarriers=told)\n", "use_acc=more, mbarriers=told[:1])\n    gl.tcgen05_commit(told[1])\n")], None),
}  # fmt: skip


def outcome(seed):
    """What a call, of which one CTA has four tiles, comes to under one schedule: R, D, P, W (wrong result) or None."""
    call = operands(1, 2, 2, 300, 150, 64, seed)
    try:
        with world(seed, 1) as w:
            (result,) = run(w, call, causal=True, offset=-20, tiling=tiling(2, 32, 3 + seed % 2))
    except (RaceError, DeadlockError, ProtocolError) as error:
        return next(letter for letter, kind in KINDS.items() if isinstance(error, kind))
    try:
        assert_right(result, *call, causal=True, offset=-20)
    except AssertionError:
        return "W"


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_is_judged_rightly(name, monkeypatch, tmp_path):
    edits, expected = MUTANTS[name]
    put_edited((ATTENTION_TCGEN05, ATTENTION), edits, monkeypatch, tmp_path, "attention", ATTENTION)
    if expected is None:
        assert [outcome(seed) for seed in range(2)] == [None, None]
        return
    found = next(filter(None, (outcome(seed) for seed in range(8))), None)
    assert found and found in expected, f"expected one of {expected}, found {found}"
