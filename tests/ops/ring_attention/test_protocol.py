# ruff: noqa: E501  (a mutant per row)
"""The protocol table of the kernel is true: each edit that breaks one of its lines is found, harmless ones are not. The
template's own edits are those of tests/tiles, the communicator's those of tests/ops/all_gather_matmul.

What is expected is the kind of finding: R race, D deadlock, P protocol error, W a wrong result; None: the edit is
harmless and nothing may be reported.
"""

import pytest
import torch

from tests.ops.sequence.fused import plan
from tests.ops.sequence.mutants import judge, put_edited
from tests.ops.sequence.problems import whole

NAME = "ring_attention"
WAIT = "gl.wait(work.flags, block * work.flags.world + source, work.epoch)"
MINE = "place(work, flags.rank, to, head)"
OWN_KEYS = "gl.where(source == flags.rank, own, offset)"
THEIRS = "place(work, source, work.flags.rank, "
SIGNAL = "raise_flag(work, receiver(work, block), 0, block // reach(work))"
NOTHING = "raise_flag(work, peer, 0, b)"
OWN = 'if gl.atomic_add(state + DONE, 1, sem="acq_rel", scope="gpu") == work.ends - 1:'

MUTANTS = {
    # what a load waits for
    "does not wait for the peers": ([(WAIT, "source >= 0")], "R"),
    "waits for the previous call's flags": ([(WAIT, WAIT.replace("work.epoch)", "work.epoch - 1)"))], "R"),
    "waits for the first block only": ([(WAIT, WAIT.replace("block * work.flags.world + source", "source"))], "R"),
    "waits for another source": ([(WAIT, WAIT.replace("+ source", "+ (source + 1) % work.flags.world"))], "RD"),
    "no proxy fence after the flag": ([(f"{WAIT}\n    gl.fence_proxy_async()\n", f"{WAIT}\n")], "R"),
    "believes in blocks that have not come": ([("known = block + 1", "known = block + 2")], "R"),
    "believes in all sources after the first": ([("(0 if work.CAUSAL and work.PIECES == 1 else (flags.rank + 1) % flags.world)", "source")], "R"),
    # slots
    "one slot for all calls": ([("slot = (work.epoch + head // work.held) & 1", "slot = (head // work.held) & 1")], "R"),
    "sends into the other slot": ([(MINE, f"{MINE}\n    slot = (slot + flags.world - 1) % (2 * flags.world - 2)")], "RW"),
    "sends into another rank's place": ([(MINE, MINE.replace("flags.rank, to", "(flags.rank + 1) % flags.world, to"))], "RW"),
    "loads the place of another source": ([(THEIRS, THEIRS.replace("source", "(source + 1) % work.flags.world"))], "RW"),
    # what is sent, who is told
    "heads that are not there": ([("| (head >= work.batch_heads // att.group)", "")], "R"),
    "heads of the first block only": ([("head = block // reach(work) * work.height + number", "head = number")], "RW"),
    "half of the keys to everybody": ([("(receiver(work, block) > work.flags.rank) & (row >= end)", "(row >= end)")], "RW"),
    "half of the keys to the wrong ranks": ([("(receiver(work, block) > work.flags.rank) &", "(receiver(work, block) < work.flags.rank) &")], "RW"),
    "tells another receiver": ([(SIGNAL, SIGNAL.replace("receiver(work, block)", "receiver(work, block + 1)"))], "RD"),
    "raises the first block's flag for all": ([(SIGNAL, SIGNAL.replace("block // reach(work)", "0"))], "RD"),
    "sends to one too few": ([("return flags.world - 1 - flags.rank * (1 if", "return flags.world - 2 - flags.rank * (0 if")], "D"),
    "does not tell those who see nothing": ([(NOTHING, "pass")], "RD"),
    "expects too few bytes": ([("att.BN * att.D * 2)\n    if is_v", "att.BN * att.D)\n    if is_v")], "RDP"),
    # the mask
    "the diagonal of earlier ranks too": ([(OWN_KEYS, OWN_KEYS.replace("==", "<="))], "W"),
    "no diagonal": ([(OWN_KEYS, "offset")], "W"),
    "a second piece masked as the first": ([("own = piece * (work.rows - work.padded)", "own = 0 * piece")], "W"),
    "all of the earlier ranks' keys": ([("gl.where(source < flags.rank, cols // work.PIECES, cols)", "cols")], "RW"),
    "later ranks for the first piece": ([("gl.where(row < work.padded, work.flags.rank + 1, count)", "count")], "RDW"),
    # the end
    "does not make sure of all peers": ([("        gl.wait_all(work.flags, 0, work.flags.world, work.epoch, skip=work.flags.rank)\n", "        pass\n")], "R"),
    "communicators do not end the call": ([("    finish(work)\n\n\n", "    pass\n\n\n")], "RDW"),
    "ends counted without order": ([(OWN, OWN.replace("acq_rel", "relaxed"))], "R"),
    "the count of ends is not put back": ([('            gl.atomic_xchg(state + DONE, 0, sem="relaxed", scope="gpu")\n', "")], "RDW"),
    "the epoch is not advanced": ([('            gl.atomic_xchg(state + EPOCH, work.epoch, sem="relaxed", scope="gpu")\n', "            pass\n")], "RDW"),
    # harmless
    "a fence more": ([(f"{WAIT}\n", f"{WAIT}\n    gl.fence_proxy_async()\n")], None),
    "remembers nothing": ([("known = block + 1", "known = known")], None),
}  # fmt: skip


CREDIT = "gl.wait(flags, (work.FLAGS + block // reach(work)) * flags.world + to, epoch)"
FINISHED = 'if gl.atomic_add(finished, att.ROWS, sem="acq_rel", scope="gpu") == rows - att.ROWS:'
TWO_BLOCKS = {
    "credits not waited for": ([(CREDIT, "pass")], "R"),
    "credits of the block before": ([(CREDIT, CREDIT.replace("block // reach(work)", "gl.maximum(block // reach(work) - 1, 0)"))], "R"),
    "credits of the call before": ([(CREDIT, CREDIT.replace("epoch)", "epoch - 1)"))], "R"),
    "credits of another rank": ([(CREDIT, CREDIT.replace("+ to,", "+ (to + 1) % flags.world,"))], "RD"),
    "no proxy fence behind a credit": ([(f"{CREDIT}\n            gl.fence_proxy_async()\n", f"{CREDIT}\n")], "R"),
    "no credit for the second block": ([("            give_credits(work, 1)\n", "")], "D"),
    "a credit for the third block at the start": ([("            give_credits(work, 1)\n", "            give_credits(work, 1)\n            give_credits(work, 2)\n")], "R"),
    "given back before the last rows are finished": ([(FINISHED, FINISHED.replace("rows -", "rows - 2 *"))], "RD"),
    "finished rows counted without order": ([(FINISHED, FINISHED.replace("acq_rel", "relaxed"))], "R"),
    "finished rows not put back": ([('        gl.atomic_xchg(finished, 0, sem="relaxed", scope="gpu")\n', "")], "RD"),
    "another block let in": ([("give_credits(work, block + 2)", "give_credits(work, block + 3)")], "D"),
    "nothing given back": ([("give_credits(work, block + 2)", "pass")], "D"),
    "blocks of one slot": ([("slot = (work.epoch + head // work.held) & 1", "slot = work.epoch & 1")], "R"),
    # harmless
    "credits given twice": ([("            give_credits(work, 1)\n", "            give_credits(work, 1)\n            give_credits(work, 1)\n")], None),
}  # fmt: skip


def two_block_calls():
    """Three calls of three ranks: three blocks of two heads, the last one of one."""
    found = []
    for placement in ("zigzag", "contiguous"):
        kw = dict(causal=placement == "zigzag", placement=placement, plan=plan(schedule="two_blocks", comm_sms=2))
        found.append([(whole(1, 5, 5, 3 * 70, 64, dtype=torch.bfloat16, seed=i), kw) for i in range(3)])
    return found


PACKED = {
    "looks back beyond the beginning": ([("visible & (columns[None, :] >=", "visible & (columns[None, :] + att.BN >=")], "W"),
    "takes a block whole that not all rows see": ([("beginning(att, first_row + att.ROWS - 1, offset) > 0", "offset < 0")], "W"),
    "ends where it begins": ([("att.bounds + 2 * rows + 1)", "att.bounds + 2 * rows)")], "W"),
    "a segment begins too late": ([("gl.maximum(beginning(att, row, position), 0)", "gl.maximum(beginning(att, row, position) + 1, 0)")], "W"),
    "another place of the second piece": ([("2 * flags.world - 1 - source) * work.rows", "2 * flags.world - 2 - source) * work.rows")], "RW"),
    "the other piece's keys": ([("start += piece * work.rows", "start += (1 - piece) * work.rows")], "RW"),
    "sources that no tile has waited for": ([("if not work.attention.PACKED:", "if True:")], "R"),
    "only half of the pieces": ([("count *= work.PIECES", "count *= 1")], "W"),
    # harmless
    "all keys to everybody": ([("end = work.cols // 2 + (att.BN if att.PACKED else 0)", "end = work.cols")], None),
    "every block with a mask": ([("beginning(att, first_row + att.ROWS - 1, offset) > 0", "offset == offset")], None),
}  # fmt: skip


def packed_calls():
    """Three calls of three ranks, in zigzag order, of sequences that end anywhere."""
    made = [whole(1, 4, 2, 3 * 100, 64, dtype=torch.bfloat16, seed=i) for i in range(3)]
    ends = [0, 40, 170], [0, 1, 120, 121, 121, 230], [0]
    kw = dict(causal=True, placement="zigzag", plan=plan((64, 16, 64), comm_sms=2))
    return [[(x, dict(kw, cu_seqlens=torch.tensor([*e, 300]).int())) for x, e in zip(made, ends, strict=True)]]


def calls():
    """Three calls of three ranks: two blocks of a head or two, by two communicators; of zigzag and of contiguous shards."""
    found = []
    for placement in ("zigzag", "contiguous"):
        kw = dict(causal=True, placement=placement, plan=plan(comm_sms=2))
        found.append([(whole(1, 6, 3, 3 * 100, 64, dtype=torch.bfloat16, seed=i), kw) for i in range(3)])
    return found


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_is_judged_rightly(name, monkeypatch, tmp_path):
    edits, expected = MUTANTS[name]
    put_edited(NAME, edits, monkeypatch, tmp_path)
    judge(NAME, calls(), expected)


@pytest.mark.parametrize("name", PACKED)
def test_an_edit_of_what_packed_rows_see_is_judged_rightly(name, monkeypatch, tmp_path):
    edits, expected = PACKED[name]
    put_edited(NAME, edits, monkeypatch, tmp_path)
    judge(NAME, packed_calls(), expected)


@pytest.mark.parametrize("name", TWO_BLOCKS)
def test_an_edit_of_credits_is_judged_rightly(name, monkeypatch, tmp_path):
    edits, expected = TWO_BLOCKS[name]
    put_edited(NAME, edits, monkeypatch, tmp_path)
    judge(NAME, two_block_calls(), expected)
