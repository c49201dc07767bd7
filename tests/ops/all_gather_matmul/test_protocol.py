# ruff: noqa: E501  (a mutant per row)
"""The protocol tables of the kernel and of the communicator are true: each edit that breaks one of their lines is
found, harmless ones are not. The template's own edits are those of tests/ops/test_protocol.py.

What is expected is the kind of finding: R race, D deadlock, P protocol error, W a wrong result; None: the edit is
harmless and nothing may be reported.
"""

import pytest

from tests.ops.all_gather_matmul.mutants import COMMUNICATOR, KERNEL, found_by, put_edited
from tests.ops.all_gather_matmul.problems import operands, plan

SCHEDULES = ("inter_sm", "intra_sm", "none")

WAIT = "gl.wait(work.flags, owner * work.PER + row // (work.block_tiles * work.matmul.BM), epoch)"
KEPT = "            mm.ring.consumer_wait(at)\n            gl.tma_store(work.gathered"
READ = "            gl.store_read_wait(0)\n"
PERFORMED = "            gl.store_wait(LAG * STORES)\n            gl.barrier()\n"
LAST_ONES = "            gl.store_wait(0)\n"
COUNT = 'gl.atomic_add(mm.state + OWN_WORDS + block, 1, sem="acq_rel", scope="gpu") == mm.COMM_SMS - 1'

MUTANTS = {
    # what a load waits for
    "does not wait for the peers": (KERNEL, [(WAIT, "epoch == epoch")], "R"),
    "waits for the previous call's flags": (KERNEL, [(WAIT, WAIT.replace("epoch)", "epoch - 1)"))], "R"),
    "waits for the first block only": (KERNEL, [(WAIT, WAIT.replace("row // (", "0 * row // ("))], "R"),
    "waits for the next source": (KERNEL, [(WAIT, WAIT.replace("owner *", "(owner + 1) % work.flags.world *"))], "RD"),
    "no proxy fence after the flag": (KERNEL, [("        gl.fence_proxy_async()\n", "")], "R"),
    "one slot for all calls": (KERNEL, [("return (epoch & (work.SLOTS - 1)) * work.slot_places + source", "return source")], "R"),
    "sends into the other slot": (KERNEL, [("where = [place(work, work.flags.rank, epoch), row", "where = [place(work, work.flags.rank, epoch + 1), row")], "RW"),
    "sends into the receiver's place": (KERNEL, [("where = [place(work, work.flags.rank, epoch), row", "where = [place(work, receiver(work, block), epoch), row")], "RW"),
    "loads the place of the next source": (KERNEL, [("where = [place(work, owner, epoch)", "where = [place(work, (owner + 1) % flags.world, epoch)")], "RW"),
    "loads from this rank in the intra-SM schedule": (KERNEL, [("source = owner if work.DIRECT else flags.rank\n", "source = flags.rank\n")], "RW"),
    "sends own rows to another rank in the intra-SM schedule": (KERNEL, [("distance = 0 if work.DIRECT", "distance = 1 if work.DIRECT")], "RW"),
    # gathered rows
    "kept before they are there": (KERNEL, [(KEPT, "            gl.tma_store(work.gathered")], "R"),
    "loaded over while they are stored": (KERNEL, [(READ, "")], "R"),
    "kept by the first column's tiles only": (KERNEL, [("if step % col_tiles(work) == col // mm.BN:", "if (step % col_tiles(work) == 0) & (col == 0):")], "W"),
    "kept in the place of this rank": (KERNEL, [("work.gathered, [owner, row, step", "work.gathered, [work.flags.rank, row, step")], "RW"),
    # who is told
    "tells the next receiver": (KERNEL, [("gl.signal(work.flags, receiver(work, block), flag, epoch)", "gl.signal(work.flags, receiver(work, block + work.blocks), flag, epoch)")], "RD"),
    "tells nobody in the intra-SM schedule": (KERNEL, [("gl.signal_all(work.flags, flag, epoch)", "gl.signal(work.flags, work.flags.rank, flag, epoch)")], "D"),
    "raises the flag of the next block": (KERNEL, [("work.flags.rank * work.PER + block % work.blocks", "work.flags.rank * work.PER + (block + 1) % work.blocks")], "RD"),
    "raises all flags with the first block": (KERNEL, [("gl.where(epoch % REFRESH == 0, ", "gl.where(epoch == epoch, "), ("for flag in range(first, end, work.blocks)", "for flag in range(first, end)")], "R"),
    "one receiver too few": (KERNEL, [("work.MULTIMEM else work.RECEIVERS)", "work.MULTIMEM else work.RECEIVERS - 1)")], "D"),
    "rows of the block before": (KERNEL, [("row = (block % work.blocks * work.block_tiles + t", "row = ((block + 1) % work.blocks * work.block_tiles + t")], "RW"),
    # communicator
    "told before the stores are performed": (COMMUNICATOR, [("            gl.store_wait(LAG * STORES)\n", "")], "R"),
    "told before the last stores are performed": (COMMUNICATOR, [(LAST_ONES, "            gl.store_wait(LAG * STORES)\n")], "R"),
    "told after the read wait only": (COMMUNICATOR, [("            gl.store_wait(LAG * STORES)\n", "            gl.store_read_wait(0)\n"), (LAST_ONES, "            gl.store_read_wait(0)\n")], "R"),
    "told a store too early": (COMMUNICATOR, [("performed = sent - LAG", "performed = sent - LAG + 1")], "R"),
    "no barrier between the full wait and the count": (COMMUNICATOR, [(PERFORMED, PERFORMED.replace("            gl.barrier()\n", ""))], "R"),
    "counted without order": (COMMUNICATOR, [(COUNT, COUNT.replace("acq_rel", "relaxed"))], "R"),
    "told by the first communicator": (COMMUNICATOR, [("== mm.COMM_SMS - 1:", "== 0:")], "R"),
    "count not put back": (COMMUNICATOR, [('        gl.atomic_xchg(mm.state + OWN_WORDS + block, 0, sem="relaxed", scope="gpu")\n', "")], "RD"),
    "one count for all blocks": (COMMUNICATOR, [(COUNT, COUNT.replace("+ block, 1", ", 1")), ("OWN_WORDS + block, 0", "OWN_WORDS, 0")], "RD"),
    "a buffer refilled while a store reads it": (COMMUNICATOR, [("gl.store_read_wait((mm.ring.STAGES - 1 - AHEAD) * STORES)", "gl.store_read_wait((mm.ring.STAGES - AHEAD) * STORES)")], "R"),
    "sent before it is there": (COMMUNICATOR, [("            mm.ring.consumer_wait(at)\n", "")], "R"),
    "fetched to one buffer": (COMMUNICATOR, [("            to = mm.ring.next(to)\n", "")], "RDP"),
    "sent from one buffer": (COMMUNICATOR, [("            at = mm.ring.next(at)\n", "")], "RDPW"),
    "expects too few bytes": (KERNEL, [("(work.a.dtype.primitive_bitwidth // 8)", "(work.a.dtype.primitive_bitwidth // 16)")], "RDP"),
    "the last item of a block left out": (COMMUNICATOR, [("(performed + 1) % share == 0", "performed % share == 0")], "R"),
    # epoch
    "a communicator counts as one storer": (COMMUNICATOR, [("for i in gl.static_range(mm.HALVES)", "for i in gl.static_range(1)")], "RDW"),
    "communicators do not end the call": (KERNEL, [("        finish_all(work.matmul, epoch)\n", "        pass\n")], "RDW"),
    "communicators alone end the call": (KERNEL, [("    if work.LAST:\n", "    if epoch == epoch:\n")], "RDW"),
    # harmless
    "a fence more": (KERNEL, [("        gl.fence_proxy_async()\n", "        gl.fence_proxy_async()\n        gl.fence_proxy_async()\n")], None),
    "waits for each store": (COMMUNICATOR, [("performed = sent - LAG", "gl.store_wait(0)\n        performed = sent - LAG")], None),
    "waits for a flag twice": (KERNEL, [("        there = gl.wait(", "        gl.wait(work.flags, owner * work.PER, epoch)\n        there = gl.wait(")], None),
    "told some stores later": (COMMUNICATOR, [("LAG = gl.constexpr(8)", "LAG = gl.constexpr(11)")], None),
}  # fmt: skip


@pytest.fixture
def mutated(monkeypatch, tmp_path):
    """A function that puts an edited kernel in place of the real one."""
    return lambda file, edits: put_edited(file, edits, monkeypatch, tmp_path)


def outcome(seed):
    """What three calls of three ranks come to under one schedule: R, D, P, W (wrong result) or None.

    Schedules of the op alternate. Two communicators have two blocks of nine tiles each for two receivers: more items than
    they lag behind, and more than the ring has buffers; tiles have two multipliers.
    """
    chosen = plan(stages=3, comm_sms=2, schedule=SCHEDULES[seed % 3])
    calls = [(*operands(3, 200, [72, 8], 520, seed=i)[:2], None, {}) for i in range(3)]
    return found_by(calls, chosen, world=3, seed=seed, sms=4)


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_is_judged_rightly(name, mutated):
    file, edits, expected = MUTANTS[name]
    mutated(file, edits)
    if expected is None:
        assert [outcome(seed) for seed in range(3)] == [None] * 3
        return
    for seed in range(9):
        found = outcome(seed)
        if found:
            break
    assert found and found in expected, f"expected one of {expected}, found {found}"
