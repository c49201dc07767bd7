"""Scales of blocks along K on their way to tensor memory: edits of their code are found."""

import pytest

import tileweave as tw
from tests.ops import test_block_scales as blocks
from tests.ops.mutants import BLOCK_SCALES, MATMUL, put_edited
from tileweave.emulator import DeadlockError, ProtocolError, RaceError

KINDS = {"R": RaceError, "D": DeadlockError, "P": ProtocolError}
COPY = "    gl.tcgen05_copy_scales(scales.a_bufs.index(at.slot), scales.a_there)\n"
MULTIPLY = "    gl.tcgen05_mma_scaled(a, b, acc, scales.a_there, scales.b_there, use_acc=use_acc, mbarriers=[read])\n"
SILENT = MULTIPLY.replace("[read]", "[]")
MUTANTS = {
    "scales not waited for": (MATMUL, [(" + BESIDE)", ")")], "DRP"),
    "scales copied behind their product": (BLOCK_SCALES, [(COPY, ""), (MULTIPLY, MULTIPLY + COPY)], "PRW"),
    "scales of one place for all": (BLOCK_SCALES, [("scales.a_bufs.index(at.slot), scales.a_there", "scales.a_bufs.index(0), scales.a_there")], "RW"),
    "scales of the first rows for all": (BLOCK_SCALES, [("bar, a_row, step)", "bar, 0 * a_row, step)")], "W"),
    "scales of the first step for all": (BLOCK_SCALES, [("    of = step *", "    of = 0 * step *")], "W"),
    "places given back before the product": (BLOCK_SCALES, [(COPY, COPY + "    gl.tcgen05_commit(read)\n"), (MULTIPLY, SILENT)], "RPW"),
    # harmless
    "B's scales first": (BLOCK_SCALES, [(COPY, ""), ("    gl.tcgen05_mma_scaled", COPY + "    gl.tcgen05_mma_scaled")], None),
}  # fmt: skip


def outcome(problem, seed):
    """What a call comes to under one schedule: R, D, P, W (wrong result) or None."""
    a, b, scales, truth = problem
    try:
        with tw.virtual_world(2, device="cpu", seed=seed, sms=1) as emulated:
            outs = blocks.run(emulated, a, b, scales, calls=1, plan=blocks.plan())
    except (RaceError, DeadlockError, ProtocolError) as error:
        return next(letter for letter, kind in KINDS.items() if isinstance(error, kind))
    return None if blocks.is_right(outs, truth, 2) else "W"


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_is_judged_rightly(name, monkeypatch, tmp_path):
    file, edits, expected = MUTANTS[name]
    put_edited(file, edits, monkeypatch, tmp_path)
    problem = blocks.operands(2, 2 * 128, 128, 512, blocks.FP8)
    if expected is None:
        assert [outcome(problem, seed) for seed in range(2)] == [None, None]
        return
    found = next(filter(None, (outcome(problem, seed) for seed in range(8))), None)
    assert found and found in expected, f"expected one of {expected}, found {found}"
