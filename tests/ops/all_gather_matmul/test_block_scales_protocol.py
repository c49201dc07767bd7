# ruff: noqa: E501  (a mutant per row)
"""Scales of blocks along K that travel with their rows: edits of their code are found."""

import pytest

import tileweave as tw
from tests.ops.all_gather_matmul import test_block_scales as blocks
from tests.ops.mutants import BLOCK_SCALES, MATMUL, put_edited
from tileweave.emulator import DeadlockError, ProtocolError, RaceError

NAME, KERNEL = "all_gather_matmul", "ops/all_gather_matmul/kernel.py"
KINDS = {"R": RaceError, "D": DeadlockError, "P": ProtocolError}
SEND = "            send_row_scales(work.row_scales, at, j, receiver(work, block), where[0], row, step)\n"
ROWS = "        gl.store_async(work.slots, receiver(work, block), where, place_buf(work.matmul, at, j, work.slots))\n"
COUNT = "(2 if work.BLOCKS else 1)"
SCALES = "            if scales is not None:\n                LOAD_SCALES(work, scales, at, bar, owner, a_row, col, step, epoch, there)\n"
LOAD = "            LOAD(work, at, bar, owner, a_row, col, step, epoch, there)\n"
MUTANTS = {
    "not sent": (KERNEL, [(SEND, "            pass\n")], "RPW"),
    "into the other slot": (KERNEL, [(SEND, SEND.replace("where[0]", "place(work, work.flags.rank, epoch + 1)"))], "RW"),
    "into another source's place": (KERNEL, [(SEND, SEND.replace("where[0]", "place(work, (work.flags.rank + 1) % work.flags.world, epoch)"))], "RW"),
    "to another rank": (KERNEL, [(SEND, SEND.replace("receiver(work, block)", "(receiver(work, block) + 1) % work.flags.world"))], "RPW"),
    "of the first step for all": (KERNEL, [(SEND, SEND.replace("row, step)", "row, step * 0)"))], "RW"),
    "told before they are performed": (KERNEL, [(COUNT, "(4 if work.BLOCKS else 1)")], "R"),
    "the communicator does not wait for them": (KERNEL, [("if work.BLOCKS else 0", "* 0 if work.BLOCKS else 0")], "RPD"),
    "it waits for those of one tile": (KERNEL, [("TILES * (TILE_BYTES + BESIDE)", "TILES * TILE_BYTES + BESIDE")], "RPD"),
    "of two tiles in one place": (BLOCK_SCALES, [("        return of.b_bufs.index(at.slot)", "        return of.a_bufs.index(at.slot)")], "RW"),
    "of tiles beyond the last into the last": (BLOCK_SCALES, [("[place, gl.cdiv(row, BLOCK),", "[place, row // BLOCK,")], "RW"),
    "of own rows for all": (KERNEL, [("    if owner == work.flags.rank:\n        load_scales(", "    if owner >= 0:\n        load_scales(")], "W"),
    "from the other slot": (KERNEL, [("source, place(work, owner, epoch), rows, step)", "source, place(work, owner, epoch + 1), rows, step)")], "RPW"),
    "of rows that may not have come": (KERNEL, [("gl.where(there, row, work.rows)\n        load_row", "(row + work.matmul.BM) % work.rows\n        load_row")], "RPW"),
    "loaded when the tile may be waited for": (MATMUL, [(SCALES, ""), (LOAD, LOAD + SCALES)], "D"),
    # harmless
    "sent ahead of their rows": (KERNEL, [("        if work.BLOCKS:\n" + SEND, ""), (ROWS, "        if work.BLOCKS:\n" + SEND + ROWS)], None),
    "waits for more than it must": (KERNEL, [(COUNT, "1")], None),
}  # fmt: skip


def outcome(calls, seed):
    """What calls come to under one schedule: R, D, P, W (wrong result) or None."""
    chosen = blocks.plan(stages=3)

    def rank_program(rank, group):
        return [
            tw.all_gather_matmul(
                a[rank], b[rank], group, return_gathered=True, plan=chosen, scale_a=s[rank], scale_b=t[rank]
            )
            for a, b, s, t, _ in calls
        ]

    try:
        with tw.virtual_world(3, device="cpu", seed=seed, sms=2) as emulated:
            results = zip(*emulated.run(rank_program), strict=True)
    except tuple(KINDS.values()) as error:
        return next(letter for letter, kind in KINDS.items() if isinstance(error, kind))
    try:
        for each, given in zip(results, calls, strict=True):
            blocks.assert_right(each, given)
    except AssertionError:
        return "W"


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_is_judged_rightly(name, monkeypatch, tmp_path):
    """Two blocks of rows, of nine K steps each, which a communicator that carries two tiles does not divide; three calls."""
    file, edits, expected = MUTANTS[name]
    put_edited(file, edits, monkeypatch, tmp_path, NAME)
    calls = [blocks.operands(3, 200, [72], 1152, blocks.FP8, seed) for seed in range(3)]
    if expected is None:
        assert [outcome(calls, seed) for seed in range(2)] == [None, None]
        return
    found = next(filter(None, (outcome(calls, seed) for seed in range(8))), None)
    assert found and found in expected, f"expected one of {expected}, found {found}"
