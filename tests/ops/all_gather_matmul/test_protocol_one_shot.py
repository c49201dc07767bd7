# ruff: noqa: E501  (a mutant per row)
"""What the one-shot schedule has of the kernel's protocol table is true. As test_protocol.py."""

import pytest

from tests.ops.all_gather_matmul.mutants import KERNEL, PLACES, found_by, put_edited
from tests.ops.all_gather_matmul.problems import operands, plan

WAIT = "gl.wait_all(work.flags, first * work.PER, last - first + 1, epoch, step=work.PER)"
FENCED = WAIT + "\n    gl.fence_proxy_async()\n"
WHERE = "where = [epoch & 1, gl.where(there, row, work.rows * work.flags.world), step"

MUTANTS = {
    "does not wait": (KERNEL, [(WAIT, "epoch == epoch")], "R"),
    "waits for the previous call": (KERNEL, [(WAIT, WAIT.replace("epoch,", "epoch - 1,"))], "R"),
    "does not wait for the last owner": (KERNEL, [(WAIT, WAIT.replace("last - first + 1", "last - first"))], "R"),
    "waits for the first owner's other flags": (KERNEL, [(WAIT, WAIT.replace(", step=work.PER", ""))], "RD"),
    "waits for the first ranks": (KERNEL, [(WAIT, WAIT.replace("first * work.PER", "0"))], "R"),
    "no proxy fence after the flags": (KERNEL, [(FENCED, WAIT + "\n")], "R"),
    "loads the other slot": (KERNEL, [(WHERE, WHERE.replace("epoch & 1", "1 - (epoch & 1)"))], "RW"),
    "own rows not sent": (KERNEL, [("RECEIVERS: gl.constexpr = WORLD if JOINED else WORLD - 1", "RECEIVERS: gl.constexpr = WORLD - 1")], "D"),
    "sends into the other slot": (KERNEL, [("where = [place(work, work.flags.rank, epoch), row", "where = [place(work, work.flags.rank, epoch + 1), row")], "RW"),
    "the slots begin a place too near": (PLACES, [("elements.stride(0), math.ceil(elements.shape[1] // 2 / step)", "elements.stride(0), world - 1")], "RW"),
    "one slot for all calls": (KERNEL, [(WHERE, WHERE.replace("epoch & 1", "epoch & 0")), ("return (epoch & (work.SLOTS - 1)) * work.slot_places + source", "return source")], "R"),
    # harmless
    "waits for all ranks": (KERNEL, [(WAIT, "gl.wait_all(work.flags, 0, work.flags.world, epoch, step=work.PER)")], None),
    "own rows first": (KERNEL, [("distance = 0 if work.DIRECT else 1 + block // work.blocks", "distance = block // work.blocks")], None),
}  # fmt: skip


def found(seed):
    """Tiles of which each has rows of two of three ranks, several a CTA."""
    calls = [(*operands(3, 60, [72], 136, seed=i), {}) for i in range(4)]
    return found_by(calls, plan(schedule="one_shot"), world=3, seed=seed, sms=3)


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_is_judged_rightly(name, monkeypatch, tmp_path):
    file, edits, expected = MUTANTS[name]
    put_edited(file, edits, monkeypatch, tmp_path)
    if expected is None:
        assert [found(seed) for seed in range(4)] == [None] * 4
    else:
        finding = next(filter(None, map(found, range(12))), None)
        assert finding and finding in expected, f"expected one of {expected}, found {finding}"
