# ruff: noqa: E501  (a mutant per row)
"""The inter-SM schedule's lines of the kernel's protocol table are true. As test_protocol.py, whose edits hold the lines of
both schedules; those of the communicator's own table are in tests/ops/all_gather_matmul/test_protocol.py."""

import pytest

from tests.ops.mutants import KERNEL, put_edited
from tests.ops.test_protocol import MUTANTS as OF_BOTH
from tests.ops.test_protocol import PERFORMED, judge

# For each owner blocks of three, three and two tiles, of one strip each, for two communicators, who send more of them than
# they lag behind; two multipliers; ragged.
PROBLEM = dict(world=3, rows=136, n=200, k=72, sms=5, tile=(128, 64, 64), schedule="inter_sm", comm_sms=2)
READY = "        gl.wait(work.flags, LAST_FLAG - phase, this_epoch(mm))\n"
FENCED = READY + "        gl.fence_proxy_async()\n"
HOME = "gl.signal(work.flags, work.flags.rank, LAST_FLAG - phase, epoch)"
COUNTER = "(LAST_WORD - phase if work.INTER else SENT + owner)"
TELL = "    gl.signal(work.flags, owner_of(work, phase), block % work.blocks * work.flags.world + work.flags.rank, epoch)\n"
TOLD = "block % work.blocks * work.flags.world + work.flags.rank, epoch)"

MUTANTS = {
    # parts at home
    "kept in the place of the next owner": ([("gl.tma_store(work.home, [0, owner, row", "gl.tma_store(work.home, [0, (owner + 1) % flags.world, row")], "RW"),
    "told after the read wait only": ([(PERFORMED, "        gl.store_read_wait(0)\n        gl.barrier()\n        sent")], "R"),
    "no barrier between the full wait and the count": ([(PERFORMED, "        gl.store_wait(0)\n        sent")], "R"),
    "one counter for all phases": ([(COUNTER, "(LAST_WORD + 0 * phase)")], "RD"),
    "all tiles of an owner expected": ([("tiles = tiles_in(work, phase // work.flags.world) if work.INTER else tiles_per_owner(work)", "tiles = tiles_per_owner(work)")], "D"),
    "communicators told of the next phase": ([(HOME, HOME.replace("- phase", "- phase - 1"))], "RD"),
    "a peer told instead of the communicators": ([(HOME, HOME.replace("work.flags.rank", "owner"))], "RD"),
    "flags of phases among those of the peers": ([(HOME, HOME.replace("LAST_FLAG - ", "")), (READY, READY.replace("LAST_FLAG - ", ""))], "RD"),
    # what a communicator waits for
    "fetches before the block is there": ([(READY, "")], "R"),
    "waits for the previous call's block": ([(READY, READY.replace("(mm))", "(mm) - 1)"))], "R"),
    "no fence before the fetch": ([(FENCED, READY)], "R"),
    "waits for the first block only": ([("    if i == 0:\n", "    if block + i == 0:\n")], "R"),
    "expects half a strip": ([("ready_at(at), mm.BM * mm.WIDTH", "ready_at(at), mm.ROWS * mm.WIDTH")], "RDP"),
    # what it sends
    "fetches the halves of a strip to one place": ([("part_buf(mm, at, half, work.home)", "part_buf(mm, at, 0, work.home)")], "RPW"),
    "sends the first half twice": ([("buf = part_buf(work.matmul, at, half", "buf = part_buf(work.matmul, at, 0 * half")], "RW"),
    "leaves out the last strip": ([("there = t < tiles_in(work, block % work.blocks)", "there = item + 1 < tiles_in(work, block % work.blocks) * (mm.BN // mm.WIDTH)")], "RW"),
    "sends a tile of the next block as well": ([("there = t < tiles_in(work, block % work.blocks)", "there = t <= tiles_in(work, block % work.blocks)")], "RW"),
    "takes the next block's tiles": ([("block % work.blocks * work.block_tiles\n", "(block + 1) % work.blocks * work.block_tiles\n")], "RDW"),
    "sends into the other slot": ([("    slot = epoch & 1\n", "    slot = 1 - (epoch & 1)\n")], "RW"),
    "a block of one owner left out": ([("(work.flags.world - 1) * work.blocks, work.share", "(work.flags.world - 1) * work.blocks - 1, work.share")], "D"),
    # who is told, and what own tiles wait for
    "one flag for all blocks": ([(TOLD, "work.flags.rank, epoch)")], "RD"),
    "tells the next receiver": ([("gl.signal(work.flags, owner_of(work, phase), block", "gl.signal(work.flags, (owner_of(work, phase) + 1) % work.flags.world, block")], "RD"),
    "own tiles wait for the first block": ([("first = phase - work.flags.rank if work.INTER else 0", "first = 0")], "RD"),
    "own tiles do not wait": OF_BOTH["does not wait for the peers"][1:],
    "own tiles wait for the previous call": OF_BOTH["waits for the previous call's flags"][1:],
    "no fence after the flags": OF_BOTH["no proxy fence after the flags"][1:],
    "slot not zeroed": OF_BOTH["slot not zeroed"][1:],
    "one slot for all calls": OF_BOTH["one slot for all calls"][1:],
    "communicators do not end the call": ([("    finish_all(work.matmul, epoch)\n", "")], "RDW"),
    # harmless
    "sends to the owners in another order": ([("t = block // work.blocks * tiles_per_owner", "t = (block // work.blocks + 1) % (work.flags.world - 1) * tiles_per_owner")], None),
    "waits for the block before each strip": ([("    if i == 0:\n", "    if i >= 0:\n")], None),
    "tells in strips that lie beyond": ([("phase, row, col = strip(work, block, 0)\n    gl", "phase, row, col = strip(work, block, work.share)\n    gl")], None),
    "a fence more": ([(FENCED, FENCED + "        gl.fence_proxy_async()\n")], None),
}  # fmt: skip


# One communicator, which has sent less than all of a block when it tells of the one before.
ALONE = dict(PROBLEM, sms=4, comm_sms=1)
OF_LATER_BLOCKS = [
    (
        TELL,
        "    for b in range(block % work.blocks, work.blocks):\n        gl.signal(work.flags, owner_of(work, phase), b * work.flags.world + work.flags.rank, epoch)\n",
    )
]


def test_raised_flags_of_later_blocks_are_found(monkeypatch, tmp_path):
    put_edited(KERNEL, OF_LATER_BLOCKS, monkeypatch, tmp_path)
    judge([ALONE], "R")


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_is_judged_rightly(name, monkeypatch, tmp_path):
    edits, expected = MUTANTS[name]
    put_edited(KERNEL, edits, monkeypatch, tmp_path)
    judge([PROBLEM], expected)


def test_without_an_edit_nothing_is_found():
    judge([PROBLEM, ALONE], None)
