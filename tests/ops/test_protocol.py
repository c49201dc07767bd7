"""The protocol tables of the kernel and of the matmul template are true: each edit that breaks one of their lines is
found, harmless ones are not.

An edit is (old text, new text) in kernel.py or a tile file; the old text must occur exactly once. What is expected is
the kind of finding: R race, D deadlock, P protocol error, W a wrong result; None: the edit is harmless and nothing may
be reported.
"""

import pytest

import tileweave as tw
from tests.ops.mutants import CHANNEL, KERNEL, MATMUL, put_edited
from tests.ops.problems import assert_right, operands, run_calls
from tileweave import Plan
from tileweave.emulator import DeadlockError, ProtocolError, RaceError

KINDS = {"R": RaceError, "D": DeadlockError, "P": ProtocolError}

# What the calls of a schedule are, of tiles that have two parts. The rings wrap within a tile, and CTAs have several.
WHOLE = [dict(world=3, rows=136, n=200, k=200, sms=2, tile=(128, 128, 64))]
# Tiles that three CTAs share: all of them, of every owner; of a rank alone; or one, of this rank, after two whole ones.
SHARED = [
    dict(world=3, rows=72, n=72, k=200, sms=9, split=3, tile=(128, 128, 64)),
    dict(world=1, rows=72, n=72, k=200, sms=3, split=3, tile=(128, 128, 64)),
    dict(world=3, rows=72, n=264, k=200, sms=4, split=3, tile=(128, 128, 64)),
]

READ_WAIT = "            gl.store_read_wait(0)\n            result.release(done)\n"
WRITTEN = "            result.consumer_wait(done)\n            if not finished"
EARLY = """            if not finished:  # early, as its round trip is long: the other roles have read the epoch by now
                finish(mm, epoch)
                finished = epoch == epoch
"""
PERFORMED = "        gl.store_wait(0)\n        gl.barrier()\n        sent"
ALL_FLAGS = "gl.wait_all(work.flags, first, work.flags.world, epoch, skip=phase)"
EXPECTS = "gl.mbarrier_expect(bar, mm.BM * mm.WIDTH * (work.out.dtype.primitive_bitwidth // 8))"
LOADERS_MEET = "            met = MEET(work, owner, epoch)\n            previous = owner\n        for j in range(share, mm.BN // mm.WIDTH, shares):\n            at ="
GIVEN = """    for j in gl.static_range(mm.BN // mm.WIDTH):
        if j % mm.split != share:
            gl.store(scratch_at(mm, first_unit(mm), HALF, j, LAYOUT), part_of(mm, parts, j, LAYOUT))
    gl.barrier()
"""
TOLD = """    own = FIRST_SHARE + HALF * unit_step(mm) + first_unit(mm)
    gl.signal(mm.flags, mm.flags.rank, own, epoch)
"""

MUTANTS = {
    # storer: parts on their way
    "sends before the multiplier has written": (MATMUL, [(WRITTEN, "            if not finished")], "R"),
    "result stored before it is written": (MATMUL, [(WRITTEN, "            if owner != work.flags.rank:\n                result.consumer_wait(done)\n            if not finished")], "R"),
    "buffer released before a send has read it": (MATMUL, [(READ_WAIT, "            if owner == work.flags.rank:\n                gl.store_read_wait(0)\n            result.release(done)\n")], "R"),
    "buffer released before the result's store has read it": (MATMUL, [(READ_WAIT, "            if owner != work.flags.rank:\n                gl.store_read_wait(0)\n            result.release(done)\n")], "R"),
    "buffer released with the newest store unread": (MATMUL, [(READ_WAIT, READ_WAIT.replace("(0)", "(1)"))], "R"),
    "buffer not released": (MATMUL, [(READ_WAIT, "            gl.store_read_wait(0)\n")], "D"),
    "one buffer for all parts": (MATMUL, [("HALF * mm.result_0.STAGES + at.slot", "HALF * mm.result_0.STAGES")], "R"),
    "the same buffers for both multipliers": (MATMUL, [("HALF * mm.result_0.STAGES + at.slot", "at.slot")], "R"),
    "sends into the wrong slot": (KERNEL, [("owner, [slot, row, col], buf", "owner, [slot ^ 1, row, col], buf")], "RW"),
    "stores into the wrong slot": (KERNEL, [("[slot * work.flags.world + work.flags.rank, row", "[(slot ^ 1) * work.flags.world + work.flags.rank, row")], "RW"),
    "stores into the place of another source": (KERNEL, [("[slot * work.flags.world + work.flags.rank, row", "[slot * work.flags.world + owner, row")], "RW"),
    "one slot for all calls": (KERNEL, [("    slot = epoch & 1\n", "    slot = epoch & 0\n"), ("place = epoch & 1", "place = epoch & 0"), ("(epoch & 1).to(gl.int64)", "(epoch & 0).to(gl.int64)")], "R"),
    # storer: who is told
    "published after the read wait only": (KERNEL, [(PERFORMED, "        gl.barrier()\n        sent")], "R"),
    "no barrier between the full wait and the count": (KERNEL, [(PERFORMED, "        gl.store_wait(0)\n        sent")], "R"),
    "parts counted without release": (KERNEL, [('gl.atomic_add(sent, count, sem="acq_rel", scope="gpu")', 'gl.atomic_add(sent, count, sem="relaxed", scope="gpu")')], "R"),
    "flag raised by the last storer but one": (KERNEL, [("== all_parts - count)", "== all_parts - 2 * count)")], "RD"),
    "flag raised by every storer": (KERNEL, [("== all_parts - count)", ">= 0)")], "R"),
    "parts of one multiplier expected": (KERNEL, [("(work.matmul.BN // work.matmul.WIDTH) * work.matmul.HALVES", "(work.matmul.BN // work.matmul.WIDTH)")], "RD"),
    "one part a tile expected": (KERNEL, [("tiles * (work.matmul.BN // work.matmul.WIDTH) * ", "tiles * ")], "RD"),
    "one part a tile counted": (MATMUL, [("            count += 1\n", ""), ("        after, next_share", "        count += 1\n        after, next_share")], "D"),
    "counted again for the next owner": (MATMUL, [("            count = 0\n", "")], "RD"),
    "all parts counted for the last owner": (MATMUL, [("if (next_owner != owner) | (after >= mm.tiles):", "if after >= mm.tiles:")], "D"),
    "count not put back": (KERNEL, [('            gl.atomic_xchg(sent, 0, sem="relaxed", scope="gpu")\n', "")], "RD"),
    "does not tell one peer": (KERNEL, [("            gl.signal(work.flags, owner, work.flags.rank, epoch)", "            gl.signal(work.flags, work.flags.rank, work.flags.rank, epoch)")], "D"),
    # what the peers have sent
    "does not wait for the peers": (KERNEL, [(ALL_FLAGS, "epoch == epoch")], "R"),
    "waits for the previous call's flags": (KERNEL, [(ALL_FLAGS, ALL_FLAGS.replace("epoch", "epoch - 1"))], "R"),
    "waits for one peer only": (KERNEL, [(ALL_FLAGS, "gl.wait(work.flags, (phase + 1) % work.flags.world, epoch)")], "R"),
    "does not wait for the last peer": (KERNEL, [(ALL_FLAGS, ALL_FLAGS.replace("work.flags.world", "work.flags.world - 1"))], "R"),
    "loader does not wait for the peers": (MATMUL, [(LOADERS_MEET, LOADERS_MEET.replace("MEET(work, owner, epoch)", "epoch == epoch"))], "R"),
    "no proxy fence after the flags": (KERNEL, [("        gl.fence_proxy_async()\n    return met", "    return met")], "R"),
    "a peer's part loaded over an unread one": (KERNEL, [("            mm.ring.producer_wait(at)\n", "")], "RP"),
    "expects too few bytes of a peer's part": (KERNEL, [(EXPECTS, EXPECTS.replace("// 8", "// 16"))], "RDP"),
    "expects too many bytes of a peer's part": (KERNEL, [(EXPECTS, EXPECTS.replace("// 8", "// 4"))], "D"),
    "loads the parts into one buffer": (KERNEL, [("part_buf(mm, at, half, work.slots), bar", "part_buf(mm, mm.ring.start(), half, work.slots), bar")], "RW"),
    "a peer's part takes no place in the loader's ring": (KERNEL, [("            at = more(mm).next(at)\n    return at", "    return at")], "RDP"),
    "a peer's part takes no place in the multiplier's ring": (KERNEL, [("            at = more(work.matmul).next(at)\n", "")], "RDP"),
    "takes in the place of this rank": (KERNEL, [("(flags.rank + 1 + i) % flags.world", "(flags.rank + i) % flags.world")], "RW"),
    "a peer's part read before it is there": (MATMUL, [("    mm.ring.consumer_wait(at)\n    part +=", "    part +=")], "R"),
    "a peer's part not released": (MATMUL, [("    mm.ring.release(at)\n    return part", "    return part")], "DR"),
    "no fence between a peer's part and the next load": (MATMUL, [("    gl.fence_async_shared()\n    mm.ring.release(at)\n    return part", "    mm.ring.release(at)\n    return part")], "R"),
    "a peer's part released before it is read": (MATMUL, [("    part += part_buf(", "    gl.fence_async_shared()\n    mm.ring.release(at)\n    part += part_buf("), ("    gl.fence_async_shared()\n    mm.ring.release(at)\n    return part", "    return part")], "R"),
    # the adding slot is left zero
    "slot not zeroed": (KERNEL, [("                zero_part(work, row, col, epoch)\n", "                pass\n")], "W"),
    "next part zeroed": (KERNEL, [("zero_part(work, row, col, epoch)\n", "zero_part(work, row, col + mm.WIDTH, epoch)\n")], "RW"),
    "other slot zeroed": (KERNEL, [("(epoch & 1).to(gl.int64)", "(1 - (epoch & 1)).to(gl.int64)")], "RW"),
    "half a part zeroed": (KERNEL, [("for r in range(0, work.matmul.ROWS, ROWS)", "for r in range(0, work.matmul.ROWS // 2, ROWS)")], "W"),
    "zeroed beyond the rows": (KERNEL, [("mask=(row + i < work.rows)[:, None] & ", "mask=")], "RWP"),
    # multiplier
    "part written before a buffer is free": (MATMUL, [("                result.producer_wait(done)\n", "")], "R"),
    "no shared-memory fence before the store": (MATMUL, [("                gl.fence_async_shared()\n                result.publish(done)", "                result.publish(done)")], "R"),
    "published before it is written": (MATMUL, [("                result_buf(mm", "                result.publish(done)\n                result_buf(mm"), ("                gl.fence_async_shared()\n                result.publish(done)", "                gl.fence_async_shared()")], "R"),
    # epoch
    "epoch not advanced": (MATMUL, [('            gl.atomic_xchg(mm.state + EPOCH, epoch, sem="relaxed", scope="gpu")\n', "")], "R"),
    "epoch advanced by every storer": (MATMUL, [('        if gl.atomic_add(mm.state + DONE, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) * mm.HALVES - 1:', "        if True:")], "RD"),
    "epoch advanced when half the storers have come": (MATMUL, [("== gl.num_programs(0) * mm.HALVES - 1:", "== gl.num_programs(0) - 1:")], "R"),
    "DONE without order": (MATMUL, [('mm.state + DONE, 1, sem="acq_rel", scope="gpu"', 'mm.state + DONE, 1, sem="relaxed", scope="gpu"')], "R"),
    "DONE not put back": (MATMUL, [('            gl.atomic_xchg(mm.state + DONE, 0, sem="relaxed", scope="gpu")\n', "")], "RD"),
    "no barrier before DONE": (MATMUL, [("        gl.barrier()\n        if gl.atomic_add(mm.state + DONE", "        if gl.atomic_add(mm.state + DONE")], "R"),
    "DONE before the multiplier has read the epoch": (MATMUL, [("            result.consumer_wait(done)\n" + EARLY, EARLY + "            result.consumer_wait(done)\n")], "R"),
    "multiplier reads the epoch after its first part": (MATMUL, [("                done = result.next(done)\n", "                done = result.next(done)\n                epoch = this_epoch(mm)\n")], "R"),
    "loader reads the epoch for its own tiles": (MATMUL, [(LOADERS_MEET, LOADERS_MEET.replace("MEET(work, owner, epoch)", "MEET(work, owner, this_epoch(mm))"))], "R"),
    "storer reads the epoch for its own tiles": (MATMUL, [("            met = MEET(work, owner, epoch)\n            previous = owner\n        for j in range(share, mm.BN // mm.WIDTH, shares):\n            result", "            met = MEET(work, owner, this_epoch(mm))\n            previous = owner\n        for j in range(share, mm.BN // mm.WIDTH, shares):\n            result")], "R"),
    # operand ring
    "loader does not wait for an empty slot": (MATMUL, [("            mm.ring.producer_wait(at)\n", "")], "RP"),
    "slot released under the wgmma in flight": (MATMUL, [("        mm.ring.release(last, pred=step > 0)", "        mm.ring.release(at)"), ("    mm.ring.release(last, pred=steps > 0)\n", "")], "RP"),
    "operands read before they are there": (MATMUL, [("        mm.ring.consumer_wait(at)\n        a =", "        a =")], "RP"),
    "accumulator read with a wgmma in flight": (MATMUL, [("num_outstanding=0, deps=[acc]", "num_outstanding=1, deps=[acc]")], "R"),
    "last slot of a tile not released": (MATMUL, [("    mm.ring.release(last, pred=steps > 0)\n", "")], "D"),
    "first slot released again": (MATMUL, [("        last = at\n", "")], "RDP"),
    "expects one operand's bytes": (MATMUL, [("(mm.A_ROWS + mm.ACC) * ", "mm.ACC * ")], "RDP"),
    "wrong parity of the producer": (CHANNEL, [("at.parity ^ 1)", "at.parity)")], "D"),
    "wrong parity of the consumer": (CHANNEL, [("self.ready.index(at.slot), at.parity)", "self.ready.index(at.slot), at.parity ^ 1)")], "RDP"),
    "parity of the first round for ever": (CHANNEL, [("at.parity ^ wraps.to(gl.int32)", "at.parity")], "RDP"),
    "parity changes a use too early": (CHANNEL, [("slot == self.FIRST + self.STAGES", "slot == self.FIRST + self.STAGES - 1")], "RDP"),
    "empty waits for an arrival more": (CHANNEL, [("count=CONSUMERS)", "count=CONSUMERS + 1)")], "D"),
    "empty waits for one multiplier": (CHANNEL, [("count=CONSUMERS)", "count=1)")], "RP"),
    # harmless
    "waits for all wgmma each step": (MATMUL, [("num_outstanding=1, deps=[pending]", "num_outstanding=0, deps=[pending]")], None),
    "a barrier more": (KERNEL, [(PERFORMED, PERFORMED.replace("        sent", "        gl.barrier()\n        sent"))], None),
    "a fence more": (KERNEL, [("        gl.fence_proxy_async()\n    return met", "        gl.fence_proxy_async()\n        gl.fence_proxy_async()\n    return met")], None),
    "waits for the peers in another order": (KERNEL, [(ALL_FLAGS, "gl.wait_all(work.flags, phase + 1, work.flags.world - 1 - phase, epoch) & gl.wait_all(work.flags, 0, phase, epoch)")], None),
    "full wait before the buffer is released": (MATMUL, [(READ_WAIT, READ_WAIT.replace("            result", "            gl.store_wait(0)\n            result"))], None),
    "published after each tile": (MATMUL, [("if (next_owner != owner) | (after >= mm.tiles):", "if epoch == epoch:")], None),
    "epoch advanced at the end": (MATMUL, [(EARLY, "")], None),
}  # fmt: skip

MUTANTS_OF_SHARES = {
    "told before the shares are stored": (MATMUL, [(GIVEN + TOLD, TOLD + GIVEN)], "R"),
    "no barrier between the shares and the flag": (MATMUL, [(GIVEN, GIVEN.replace("    gl.barrier()\n", ""))], "R"),
    "does not wait for the others' shares": (MATMUL, [("    return gl.wait_all(mm.flags, own - share, mm.split, epoch, skip=own)", "    return epoch == epoch")], "R"),
    "waits for all shares but the last": (MATMUL, [("own - share, mm.split, epoch", "own - share, mm.split - 1, epoch")], "R"),
    "waits for the flags of the next CTAs": (MATMUL, [("own - share, mm.split, epoch", "own, mm.split, epoch")], "RD"),
    "waits for the previous call's shares": (MATMUL, [("own - share, mm.split, epoch", "own - share, mm.split, epoch - 1")], "R"),
    "one flag for all shares of a tile": (MATMUL, [("gl.signal(mm.flags, mm.flags.rank, own, epoch)", "gl.signal(mm.flags, mm.flags.rank, own - share, epoch)")], "D"),
    "one flag for both multipliers": (MATMUL, [("FIRST_SHARE + HALF * unit_step(mm) + first_unit(mm)", "FIRST_SHARE + first_unit(mm)")], "R"),
    "flags of shares among the op's": (MATMUL, [("own = FIRST_SHARE + HALF", "own = HALF")], "RD"),
    "takes its own share instead of another": (MATMUL, [("- share + (share + i) % mm.split", "- share + i")], "RW"),
    "takes one share only": (MATMUL, [("    for i in range(1, mm.split):\n", "    for i in range(1, 2):\n")], "W"),
    "keeps the part that another finishes": (MATMUL, [("if j % mm.split != share:", "if (j + 1) % mm.split != share:")], "RW"),
    "one place for all parts of a share": (MATMUL, [(" * (mm.BN // mm.WIDTH) + j\n", " * (mm.BN // mm.WIDTH)\n")], "RW"),
    "one place for both multipliers": (MATMUL, [("(cta * mm.HALVES + HALF) *", "cta * mm.HALVES *")], "R"),
    "places of CTAs overlap": (MATMUL, [("(cta * mm.HALVES + HALF) *", "(cta + HALF) *")], "R"),
    "shares overlap": (MATMUL, [("            last = (share + 1) * mm.k_steps // mm.split\n", "            last = (share + 1) * mm.k_steps // mm.split + 1\n")], "W"),
    "shares are not told apart": (MATMUL, [("            first = share * mm.k_steps // mm.split\n", "            first = 0\n")], "W"),
    "a shared tile's parts stored by all": (MATMUL, [("        for j in range(share, mm.BN // mm.WIDTH, shares):\n            result", "        for j in range(0, mm.BN // mm.WIDTH):\n            result")], "D"),
    "a shared tile's sums loaded by all": (MATMUL, [("        for j in range(share, mm.BN // mm.WIDTH, shares):\n            at =", "        for j in range(0, mm.BN // mm.WIDTH):\n            at =")], "RDPW"),
    "a rank alone does not count calls": (MATMUL, [("    if (mm.flags.world > 1) | mm.SHARED:\n", "    if mm.flags.world > 1:\n")], "R"),
    # those above that shared tiles reach in another way
    "published after the read wait only": MUTANTS["published after the read wait only"],
    "no fence between a peer's part and the next load": MUTANTS["no fence between a peer's part and the next load"],
    "DONE before the multiplier has read the epoch": MUTANTS["DONE before the multiplier has read the epoch"],
    "no barrier before DONE": MUTANTS["no barrier before DONE"],
    "slot not zeroed": MUTANTS["slot not zeroed"],
    "flag raised by every storer": MUTANTS["flag raised by every storer"],
    # harmless
    "takes the shares in another order": (MATMUL, [("(share + i) % mm.split", "(share + mm.split - i) % mm.split")], None),
    "waits for the shares one by one, its own too": (MATMUL, [("    return gl.wait_all(mm.flags, own - share, mm.split, epoch, skip=own)", "    met = epoch == epoch\n    for i in range(mm.split):\n        met = met & gl.wait(mm.flags, own - share + i, epoch)\n    return met")], None),
    "gives all parts": (MATMUL, [("if j % mm.split != share:", "if share >= 0:")], None),
    "epoch advanced at the end": MUTANTS["epoch advanced at the end"],
}  # fmt: skip


def outcome(seed, world, rows, n, k, sms, tile, split=1, schedule="intra_sm", comm_sms=0):
    """What four calls of all ranks come to under one schedule: R, D, P, W (wrong result) or None.

    Odd seeds take the deterministic mode.
    """
    deterministic = bool(seed % 2)
    calls = [(*operands(world, world * rows, n, k, seed=i)[:2], {}) for i in range(4)]
    plan = Plan(schedule=schedule, tile=tile, stages=2, split=split, comm_sms=comm_sms)
    try:
        with tw.virtual_world(world, device="cpu", seed=seed, sms=sms) as w:
            results = run_calls(w, calls, deterministic=deterministic, plan=plan)
    except (RaceError, DeadlockError, ProtocolError) as error:
        return next(letter for letter, kind in KINDS.items() if isinstance(error, kind))
    try:
        for outs, (a, b, _) in zip(results, calls, strict=True):
            assert_right(outs, a, b, deterministic=deterministic)
    except AssertionError:
        return "W"


def judge(problems, expected):
    """The finding in at most twelve schedules is one of `expected`; none in four a problem, if there is nothing to find."""
    schedules = [(seed, problem) for seed in range(12) for problem in problems]
    if expected is None:
        assert [outcome(seed, **problem) for seed, problem in schedules if seed < 4] == [None] * 4 * len(problems)
        return
    found = next(filter(None, (outcome(seed, **problem) for seed, problem in schedules)), None)
    assert found and found in expected, f"expected one of {expected}, found {found}"


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_is_judged_rightly(name, monkeypatch, tmp_path):
    file, edits, expected = MUTANTS[name]
    put_edited(file, edits, monkeypatch, tmp_path)
    judge(WHOLE, expected)


@pytest.mark.parametrize("name", MUTANTS_OF_SHARES)
def test_an_edit_of_shared_tiles_is_judged_rightly(name, monkeypatch, tmp_path):
    file, edits, expected = MUTANTS_OF_SHARES[name]
    put_edited(file, edits, monkeypatch, tmp_path)
    judge(SHARED, expected)


@pytest.mark.parametrize("problem", [*WHOLE, *SHARED])
def test_without_an_edit_nothing_is_found(problem):
    judge([problem], None)
