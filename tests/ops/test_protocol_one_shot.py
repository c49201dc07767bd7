# ruff: noqa: E501  (a mutant per row)
"""The one-shot schedule's line of the kernel's protocol table, and the table of `sums`, are true. As test_protocol.py."""

import pytest

from tests.ops.mutants import KERNEL, SUMS, put_edited
from tests.ops.test_protocol import judge

# Tiles of two multipliers, whose parts have rows of two ranks; several tiles a CTA, which also sums several rows.
PROBLEM = dict(world=3, rows=60, n=72, k=72, sms=3, tile=(128, 64, 64), schedule="one_shot")
PERFORMED = "    gl.store_wait(0)\n    gl.barrier()\n    if count_up"
MET = "    met = gl.wait_all(sums.flags, 0, sums.flags.world, epoch)\n"
EVERY = "mm.tiles * (mm.BN // mm.WIDTH) * mm.HALVES)"
TOLD = "        gl.signal_all(work.flags, work.flags.rank, epoch)\n"

MUTANTS = {
    # where parts go
    "the last owner of a part left out": (KERNEL, [("    for i in range(owners):", "    for i in range(owners - 1):")], "RW"),
    "rows of the next rank": (KERNEL, [("first - owner * rows, col, buf", "first - (owner + 1) * rows, col, buf")], "RPW"),
    "sent to an owner too many, above the rows that his places have": (KERNEL, [("first // rows + 1\n", "first // rows + 2\n")], "P"),
    "rows counted from the tile's first": (KERNEL, [("first - owner * rows, col, buf", "gl.maximum(first - owner * rows, 0), col, buf")], "RW"),
    "sends into the other slot": (KERNEL, [("    slot = epoch & 1\n", "    slot = 1 - (epoch & 1)\n")], "RW"),
    "one slot for all calls": (KERNEL + " " + SUMS, [("    slot = epoch & 1\n", "    slot = epoch & 0\n"), ("    place = (epoch & 1) * sums", "    place = (epoch & 0) * sums")], "R"),
    "one place for all sources": (KERNEL, [("[slot * work.flags.world + work.flags.rank, row, col]", "[slot * work.flags.world, row, col]")], "RW"),
    # who is told
    "told after the read wait only": (KERNEL, [(PERFORMED, PERFORMED.replace("store_wait", "store_read_wait"))], "R"),
    "no barrier between the full wait and the count": (KERNEL, [(PERFORMED, PERFORMED.replace("    gl.barrier()\n", ""))], "R"),
    "parts of one multiplier expected": (KERNEL, [(EVERY, EVERY.replace(" * mm.HALVES", ""))], "RD"),
    "parts of a rank's own rows expected": (KERNEL, [(EVERY, EVERY.replace("mm.tiles", "gl.cdiv(work.rows, mm.BM) * gl.cdiv(work.n, mm.BN)"))], "RD"),
    "one peer not told": (KERNEL, [(TOLD, "        gl.signal(work.flags, work.flags.rank, work.flags.rank, epoch)\n")], "D"),
    # what is summed
    "does not wait": (SUMS, [(MET, "    met = epoch == epoch\n")], "R"),
    "waits for the previous call": (SUMS, [(MET, MET.replace("epoch)", "epoch - 1)"))], "R"),
    "does not wait for the last rank": (SUMS, [(MET, MET.replace("flags.world,", "flags.world - 1,"))], "R"),
    "does not wait for this rank": (SUMS, [(MET, MET.replace("epoch)", "epoch, skip=sums.flags.rank)"))], "R"),
    "sums the other slot": (SUMS, [("    place = (epoch & 1) * sums", "    place = (1 - (epoch & 1)) * sums")], "RW"),
    "leaves out a source": (SUMS, [("met & (first + j < flags.world)", "met & (first + j < flags.world - 1)")], "W"),
    "leaves out a row": (SUMS, [("for item in range(gl.program_id(0), extras.m * pieces", "for item in range(gl.program_id(0), extras.m * pieces - 1")], "W"),
    "reads the epoch behind the tiles": (KERNEL, [("slot_stride // LINE), epoch)", "slot_stride // LINE), this_epoch(mm))")], "RD"),
    # harmless
    "sums from the last row on": (SUMS, [("        row = item // pieces\n", "        row = extras.m - 1 - item // pieces\n")], None),
    "owners of a part in order": (KERNEL, [("(rank + i) % owners", "i")], None),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_is_judged_rightly(name, monkeypatch, tmp_path):
    files, edits, expected = MUTANTS[name]
    put_edited(files.split(), edits, monkeypatch, tmp_path)
    judge([PROBLEM], expected)


def test_without_an_edit_nothing_is_found():
    judge([PROBLEM], None)
