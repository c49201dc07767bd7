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

NAME = "ulysses_attention"
WAIT = "gl.wait(work.flags, block * work.flags.world + source, work.epoch)"
BACK = "gl.wait(flags, flag, work.epoch)"
FENCE = "    gl.fence_proxy_async()\n    return there"
FENCE_BACK = "                gl.fence_proxy_async()\n                previous = flag"
SIGNAL = "gl.signal(work.flags, peer, (first + b) * work.flags.world + work.flags.rank, work.epoch)"
PERFORMED = "        gl.store_wait(0)\n        gl.barrier()\n"
STORED = 'gl.atomic_add(stored, 1, sem="acq_rel", scope="gpu") == high'
FOUND = "there & (flag != previous)"
COLLECT = "    collect(work, gl.cdiv(tiles, work.matmul.COMM_SMS), returned)\n"
SEND = "    send_blocks(work, (flags.world - 1) * work.blocks, work.share, work.epoch, fetch, send, tell)\n"

MUTANTS = {
    # what comes
    "does not wait for the peers": ([(WAIT, "source >= 0")], "R"),
    "does not wait for queries": ([("return before_kv(work, batch, head, row // work.padded, known)", "return known == known, known")], "R"),
    "waits for the previous call's flags": ([(WAIT, WAIT.replace("work.epoch)", "work.epoch - 1)"))], "R"),
    "waits for the first block only": ([(WAIT, WAIT.replace("block * work.flags.world + source", "source"))], "R"),
    "waits for another source": ([(WAIT, WAIT.replace("+ source", "+ (source + 1) % work.flags.world"))], "RD"),
    "no proxy fence after the flag": ([(FENCE, "    return there")], "R"),
    "one slot for all calls": ([("return (work.epoch & 1) * work.flags.world + source", "return source")], "R"),
    "loads q from this rank's place": ([("at = [place(work, source), batch * work.heads + head, gl.where", "at = [place(work, rank), batch * work.heads + head, gl.where")], "RW"),
    "heads of the first block only": ([("n // (work.flags.world - 1) * work.height + number", "number")], "RW"),
    "no values": ([("kind = gl.where(is_q, 0, 1 + w % 2)", "kind = gl.where(is_q, 0, 1)")], "RW"),
    "heads of this rank": ([("kv_head = to * work.all_kv_heads", "kv_head = work.flags.rank * work.all_kv_heads")], "W"),
    "tells another receiver": ([("raise_flag(work, peer(work, n, True), 0", "raise_flag(work, peer(work, n + 1, True), 0")], "RD"),
    "raises the first block's flag for all": ([(SIGNAL, SIGNAL.replace("(first + b)", "first"))], "RD"),
    "expects too few bytes": ([("att.ROWS * att.D * 2)\n    gl.tma_load(att.q_desc", "att.ROWS * att.D)\n    gl.tma_load(att.q_desc")], "RDP"),
    # the mask
    "no diagonal": ([("gl.where(row * 0 + i == 0, -first * work.padded, offset)", "offset")], "RW"),
    "a source too few": ([("row // work.padded + 1 if", "gl.maximum(row // work.padded, 1) if")], "RDW"),
    # what goes back
    "told before the stores are performed": ([(PERFORMED, "        gl.barrier()\n")], "R"),
    "told after the read wait only": ([(PERFORMED, "        gl.store_read_wait(0)\n        gl.barrier()\n")], "R"),
    "no barrier between the full wait and the count": ([(PERFORMED, "        gl.store_wait(0)\n")], "R"),
    "counted without order": ([(STORED, STORED.replace("acq_rel", "relaxed"))], "R"),
    "told by the first storer": ([("(work.padded // att.ROWS) - 1:", "0:")], "R"),
    "the count of stores is not put back": ([('            gl.atomic_xchg(stored, 0, sem="relaxed", scope="gpu")\n', "")], "RD"),
    "one count for all sources": ([("block * flags.world + source\n        if", "block * flags.world\n        if")], "RD"),
    "stored in the owner's place": ([("at = [place(work, flags.rank), batch", "at = [place(work, source), batch")], "RW"),
    "does not wait for what comes back": ([(BACK, "work.epoch == work.epoch")], "R"),
    "waits for one block only": ([("flag = (work.FLAGS + block)", "flag = (work.FLAGS + 0 * block)")], "R"),
    "waits once": ([(FOUND, "there & (previous == -1)")], "R"),
    "no proxy fence before what comes back": ([(FENCE_BACK, "                previous = flag")], "R"),
    "a buffer refilled while it is stored": ([("        gl.store_read_wait(0)\n        if i < count:", "        if i < count:")], "R"),
    "stored before it is there": ([("            att.queries.consumer_wait(at)\n            for part", "            for part")], "R"),
    "collects before everything is sent": ([(SEND, ""), (COLLECT, COLLECT + SEND)], "RDP"),
    "does not collect": ([(COLLECT, "")], "RW"),
    # the end
    "communicators do not end the call": ([("    finish(work)\n\n\n", "    pass\n\n\n")], "RDW"),
    "the count of ends is not put back": ([('            gl.atomic_xchg(state + DONE, 0, sem="relaxed", scope="gpu")\n', "")], "RDW"),
    "the epoch is not advanced": ([('            gl.atomic_xchg(state + EPOCH, work.epoch, sem="relaxed", scope="gpu")\n', "            pass\n")], "RDW"),
    # harmless
    "a fence more": ([(FENCE, "    gl.fence_proxy_async()\n" + FENCE)], None),
    "waits for every tile that comes back": ([(FOUND, "there")], None),
}  # fmt: skip


def calls():
    """Three calls of three ranks: two blocks of heads of K and V, by two communicators; causal and not."""
    return [
        [
            (whole(1, 9, 9, 3 * 70, 64, dtype=torch.bfloat16, seed=i), dict(causal=causal, plan=plan(comm_sms=2)))
            for i in range(3)
        ]
        for causal in (True, False)
    ]


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_is_judged_rightly(name, monkeypatch, tmp_path):
    edits, expected = MUTANTS[name]
    put_edited(NAME, edits, monkeypatch, tmp_path)
    judge(NAME, calls(), expected)
