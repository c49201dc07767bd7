# ruff: noqa: E501  (a mutant per row)
"""As test_protocol.py, for the tables and host code of the other mechanisms, and for the scales of 8-bit operands."""

import pytest

import tileweave as tw
from tests.ops.all_gather_matmul import test_float8 as float8
from tests.ops.all_gather_matmul.mutants import COMMUNICATOR, KERNEL, KINDS, PLACES, found_by, put_edited
from tests.ops.all_gather_matmul.problems import operands, plan
from tileweave.ops.all_gather_matmul import places

ENTERS = "    gl.wait_all(flags, WORLD * PER, WORLD, epoch - 1, skip=WORLD * PER + rank)\n"
USED = 'gl.atomic_add(used, count, sem="acq_rel", scope="gpu") == parts - count'
BACK = "            gl.signal(work.flags, owner, work.flags.world * work.PER + work.flags.rank, epoch)\n"
ROWS = "                yield self.places.rows[peer, self.rank, block], a[block]\n"
FLAGS = "                yield self.flags[peer, first + i : first + end], self.words[i:end]\n"

COPY_ENGINE = {
    # when a place may be written again
    "does not wait for the peers to be done": (KERNEL, [(ENTERS, "")], "R"),
    "waits for all but one": (KERNEL, [(ENTERS, ENTERS.replace("WORLD, epoch", "WORLD - 1, epoch"))], "R"),
    "waits for the call before the last": (KERNEL, [(ENTERS, ENTERS.replace("epoch - 1", "epoch - 2"))], "R"),
    "waits for this call's": (KERNEL, [(ENTERS, ENTERS.replace("epoch - 1", "epoch"))], "D"),
    "the host does not launch what waits": (PLACES, [("        fabric.launch(await_places_kernel, 1, self.args, num_warps=1, variant=self.variant)\n", "")], "RD"),
    "done with the first parts": (KERNEL, [(USED, USED.replace("== parts - count", "== 0"))], "RD"),
    "counted without order": (KERNEL, [(USED, USED.replace("acq_rel", "relaxed"))], "R"),
    "count not put back": (KERNEL, [('            gl.atomic_xchg(used, 0, sem="relaxed", scope="gpu")\n', "")], "RDW"),
    "one count for all sources": (KERNEL, [("used = mm.state + OWN_WORDS + owner", "used = mm.state + OWN_WORDS")], "RD"),
    "counts half of the parts": (KERNEL, [("(mm.BN // mm.WIDTH) * mm.HALVES\n        used", "(mm.BN // mm.WIDTH)\n        used")], "RD"),
    "tells the next source": (KERNEL, [(BACK, BACK.replace("flags, owner,", "flags, (owner + 1) % work.flags.world,"))], "RD"),
    "tells nobody": (KERNEL, [(BACK, "            pass\n")], "D"),
    "tells of the last call": (KERNEL, [(BACK, BACK.replace("epoch)", "epoch - 1)"))], "D"),
    # what is copied, and told
    "a flag ahead of its rows": (PLACES, [(ROWS, ""), (FLAGS, FLAGS + ROWS)], "R"),
    "all flags with the first block": (PLACES, [("end = per if i == last else i + 1", "end = per")], "R"),
    "the last flags left behind": (PLACES, [("end = per if i == last else i + 1", "end = i + 1")], None),
    "the flag of the next block": (PLACES, [(FLAGS, FLAGS.replace("first + i : first + end]", "first + (i + 1) % per : first + (i + 1) % per + 1]").replace("[i:end]", "[i : i + 1]"))], "RD"),
    "flags of another source": (PLACES, [("first = HEADER_WORDS + self.rank * per", "first = HEADER_WORDS + (self.rank + 1) % world * per")], "RD"),
    "into the receiver's own place": (PLACES, [(ROWS, ROWS.replace("[peer, self.rank, block]", "[peer, peer, block]"))], "RW"),
    "the first rows again": (PLACES, [(ROWS, ROWS.replace("a[block]", "a[: block.stop - block.start]"))], "W"),
    "a receiver left out": (PLACES, [("for distance in range(1, world)", "for distance in range(2, world)")], "D"),
    "to the next receiver's flag": (PLACES, [(FLAGS, FLAGS.replace("self.flags[peer,", "self.flags[peer - 1,"))], "RD"),
    "words of the last call": (KERNEL, [("gl.store(state + OWN_WORDS + WORLD + i, epoch)", "gl.store(state + OWN_WORDS + WORLD + i, epoch - 1)")], "D"),
    "words of the next call": (KERNEL, [("gl.store(state + OWN_WORDS + WORLD + i, epoch)", "gl.store(state + OWN_WORDS + WORLD + i, epoch + 1)")], "RDW"),
    "a word left out": (KERNEL, [("for i in gl.static_range(PER):", "for i in gl.static_range(1):")], "D"),
    "no proxy fence after the flag": (KERNEL, [("        gl.fence_proxy_async()\n", "")], "R"),
    "two places although there is one": (KERNEL, [("return (epoch & (work.SLOTS - 1)) * work.slot_places + source", "return (epoch & 1) * work.flags.world + source")], "RWP"),
    # harmless
    "waits twice": (KERNEL, [(ENTERS, ENTERS + ENTERS)], None),
    "tells twice": (KERNEL, [(BACK, BACK + BACK)], None),
}  # fmt: skip

REGISTER = {
    "told before all threads have stored": (COMMUNICATOR, [("        gl.barrier()\n        count_block", "        count_block")], "R"),
    "counted without order": (COMMUNICATOR, [('gl.atomic_add(mm.state + OWN_WORDS + block, 1, sem="acq_rel"', 'gl.atomic_add(mm.state + OWN_WORDS + block, 1, sem="relaxed"')], "R"),
    "rows beyond the end": (KERNEL, [("+ cols, x, mask=rows < work.rows)", "+ cols, x, mask=rows >= 0)")], "RPW"),
    "into the other slot": (KERNEL, [("work.at.places + lines_to(work, receiver(work, block), work.flags.rank, epoch)", "work.at.places + lines_to(work, receiver(work, block), work.flags.rank, epoch + 1)")], "RW"),
    "to another rank": (KERNEL, [("work.at.places + lines_to(work, receiver(work, block),", "work.at.places + lines_to(work, (receiver(work, block) + 1) % work.flags.world,")], "RW"),
    "no proxy fence after the flag": (KERNEL, [("        gl.fence_proxy_async()\n", "")], "R"),
    "a place half as far": (KERNEL, [("place(work, source, epoch).to(gl.int64) * work.at.place_lines", "place(work, source, epoch).to(gl.int64) * (work.at.place_lines // 2)")], "RW"),
    "a share left out": (COMMUNICATOR, [("        for i in range(0, share):\n            COPY", "        for i in range(0, share - 1):\n            COPY")], "RW"),
    "waits for a flag twice": (KERNEL, [("        there = gl.wait(", "        gl.wait(work.flags, owner * work.PER, epoch)\n        there = gl.wait(")], None),
}  # fmt: skip

MULTIMEM = {
    "no alias fence behind the flag": (KERNEL, [("            gl.fence_proxy_alias()\n", "            pass\n")], "R"),
    "no proxy fence after the flag": (KERNEL, [("        gl.fence_proxy_async()\n", "")], "R"),
    "told before all threads have stored": (COMMUNICATOR, [("        gl.barrier()\n        count_block", "        count_block")], "R"),
    "into the other slot": (KERNEL, [("work.at.everywhere + place(work, work.flags.rank, epoch)", "work.at.everywhere + place(work, work.flags.rank, epoch + 1)")], "RW"),
    "into another source's place": (KERNEL, [("work.at.everywhere + place(work, work.flags.rank, epoch)", "work.at.everywhere + place(work, (work.flags.rank + 1) % work.flags.world, epoch)")], "RW"),
    "tells one rank": (KERNEL, [("if work.DIRECT or work.MULTIMEM:\n            gl.signal_all", "if work.DIRECT:\n            gl.signal_all")], "D"),
    "tiles beyond a block": (KERNEL, [("    if row < work.rows:\n", "    if row >= 0:\n")], "RPW"),
    "places without room for whole tiles": (PLACES, [("math.ceil(call.rows / bm) * bm if plan.mechanism == MULTIMEM else call.rows", "call.rows")], "RPW"),
    "a fence more": (KERNEL, [("            gl.fence_proxy_alias()\n", "            gl.fence_proxy_alias()\n            gl.fence_proxy_alias()\n")], None),
}  # fmt: skip

TO = "lines_to(work, receiver(work, block + peer * work.blocks), work.flags.rank, epoch)"
SCALES = {
    "told before all threads have stored scales": (KERNEL, [("gl.store(work.at.scales + to + rows, scales, mask=rows < end)\n        gl.barrier()\n", "gl.store(work.at.scales + to + rows, scales, mask=rows < end)\n")], "R"),
    "scales not sent": (KERNEL, [("    send_scales(work, block, epoch)\n", "")], "W"),
    "scales into the other slot": (KERNEL, [(TO, TO.replace("epoch)", "epoch + 1)"))], "RW"),
    "scales to another rank": (KERNEL, [(TO, TO.replace("block + peer", "block + (1 + peer)"))], "RW"),
    "scales of the first block only": (KERNEL, [("end = gl.minimum(first + work.block_tiles * work.matmul.BM, work.rows)", "end = gl.where(first == 0, gl.minimum(work.block_tiles * work.matmul.BM, work.rows), first)")], "W"),
    "scales of the block before": (KERNEL, [("scales = gl.load(work.at.scale_a + rows * work.at.step_a,", "scales = gl.load(work.at.scale_a + (rows + 1) % work.rows * work.at.step_a,")], "W"),
    "scales of own rows for all": (KERNEL, [("    if owner != work.flags.rank:\n        source =", "    if owner > work.flags.world:\n        source =")], "W"),
    "scales from the other slot": (KERNEL, [("lines_to(work, source, owner, work.epoch)", "lines_to(work, source, owner, work.epoch + 1)")], "RW"),
    "the epoch read when it may have advanced": (KERNEL, [("lines_to(work, source, owner, work.epoch)", "lines_to(work, source, owner, this_epoch(work.matmul))")], "RW"),
    "flags raised ahead of the scales": (KERNEL, [("    send_scales(work, block, epoch)\n", ""), ("    if work.LAST:\n", "    for block in range(0, work.blocks * (work.flags.world - 1)):\n        send_scales(work, block, epoch)\n    if work.LAST:\n")], "R"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(places, "COPY_BYTES", 1)


def judge(expected, outcome, monkeypatch, folder, file, edits):
    put_edited(
        file, [*edits, *([("COPY_BYTES = 4 << 20", "COPY_BYTES = 1")] if file == PLACES else [])], monkeypatch, folder
    )
    if expected is None:
        assert [outcome(seed) for seed in range(3)] == [None] * 3
        return
    found = next(filter(None, map(outcome, range(9))), None)
    assert found and found in expected, f"expected one of {expected}, found {found}"


@pytest.mark.parametrize("name", COPY_ENGINE)
def test_edits_of_the_copy_engine(name, monkeypatch, tmp_path):
    """Three blocks of a shard, two tiles side by side, of two multipliers each; three calls."""
    chosen = plan(stages=3, mechanism="copy_engine", comm_sms=0)
    calls = [(*operands(3, 264, [72, 8], 200, seed=i)[:2], None, {}) for i in range(3)]
    file, edits, expected = COPY_ENGINE[name]
    judge(expected, lambda seed: found_by(calls, chosen, world=3, seed=seed, sms=3), monkeypatch, tmp_path, file, edits)


@pytest.mark.parametrize("name", REGISTER)
def test_edits_of_the_register_mechanism(name, monkeypatch, tmp_path):
    file, edits, expected = REGISTER[name]
    calls = [(*operands(3, 200, [72, 8], 200, seed=i)[:2], None, {}) for i in range(3)]

    def outcome(seed):
        chosen = plan(stages=3, comm_sms=2, mechanism="register", schedule=("inter_sm", "intra_sm")[seed % 2])
        return found_by(calls, chosen, world=3, seed=seed, sms=4)

    judge(expected, outcome, monkeypatch, tmp_path, file, edits)


@pytest.mark.parametrize("name", MULTIMEM)
def test_edits_of_multimem(name, monkeypatch, tmp_path):
    file, edits, expected = MULTIMEM[name]
    calls = [(*operands(3, 200, [72, 8], 200, seed=i)[:2], None, {}) for i in range(3)]
    chosen = plan(stages=3, comm_sms=3, mechanism="multimem")
    judge(expected, lambda seed: found_by(calls, chosen, world=3, seed=seed, sms=5), monkeypatch, tmp_path, file, edits)


@pytest.mark.parametrize("name", SCALES)
def test_edits_of_what_scales_need(name, monkeypatch, tmp_path):
    file, edits, expected = SCALES[name]
    given = [float8.operands(3, 200, [72], 528, True, seed=i) for i in range(3)]
    chosen = plan(tile=(128, 64, 128), comm_sms=1)

    def outcome(seed):
        def rank_program(rank, group):
            return [
                tw.all_gather_matmul(
                    a[rank],
                    b[rank],
                    group,
                    bias=bias[rank],
                    return_gathered=True,
                    plan=chosen,
                    scale_a=s[rank],
                    scale_b=t[rank],
                )
                for a, b, bias, s, t in given
            ]

        try:
            with tw.virtual_world(3, device="cpu", seed=seed, sms=3) as w:
                results = zip(*w.run(rank_program), strict=True)
        except tuple(KINDS.values()) as error:
            return next(letter for letter, kind in KINDS.items() if isinstance(error, kind))
        try:
            for outs, each in zip(results, given, strict=True):
                float8.assert_scaled_right(outs, each)
        except AssertionError:
            return "W"

    judge(expected, outcome, monkeypatch, tmp_path, file, edits)
