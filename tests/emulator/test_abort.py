"""After a timeout every rank's result is NaN: the real kernel in an emulated world whose abort words are set."""

import pytest
import torch

import tileweave as tw
from tests.ops.mutants import KERNEL, MATMUL, put_edited
from tests.ops.problems import assert_right, operands, run_calls
from tileweave import Plan, lang
from tileweave.emulator import EmulatorError

ABORT = getattr(lang.ABORT, "value", lang.ABORT)
PLANS = {
    "whole tiles": dict(plan=Plan(tile=(128, 64, 64), stages=2)),
    "shared tiles": dict(plan=Plan(tile=(128, 128, 64), stages=2, split=2)),
}
MUTANTS = {  # edits, and of which plans and modes (deterministic or not) they spoil the aborted calls
    "no poison": (KERNEL, [("gl.where(met, row, work.rows)", "row")], "whole tiles", (False, True)),
    "parts of peers not loaded when not met": (
        KERNEL,
        [
            (
                "    if owner_of(work, phase) == flags.rank:\n        for i",
                "    if (owner_of(work, phase) == flags.rank) & met:\n        for i",
            )
        ],
        "whole tiles", (False, True),
    ),
    "the slot zeroed although the peers were not met": (
        KERNEL, [("            if met:", "            if met | True:")], "whole tiles", (False,),
    ),
    "no poison of shared tiles": (
        MATMUL, [('    return part + gl.where(met, 0.0, float("nan"))', "    return part")],
        "shared tiles", (False, True),
    ),
}  # fmt: skip
CASES = [(name, mode) for name, (_, _, _, modes) in MUTANTS.items() for mode in modes]


def assert_poisoned(deterministic, seed, plan, world=3):
    """All ranks make a call, which is right, and after an abort one more, whose every element must be NaN."""
    a, b, _ = operands(world, world * 136, 192, 256, seed=seed)
    options = {"deterministic": deterministic, **PLANS[plan]}
    with tw.virtual_world(world, device="cpu", seed=seed, sms=2 if plan == "whole tiles" else 8 * world) as w:
        (outs,) = run_calls(w, [(a, b, {})], **options)
        assert_right(outs, a, b, deterministic=deterministic)
        for shared in w.workspace.ops.values():
            shared.flags[:, ABORT] = 1
        (outs,) = run_calls(w, [(a, b, {})], **options)
    assert [tuple(out.shape) for out in outs] == [(136, 192)] * world
    assert torch.cat(outs).isnan().all()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_an_aborted_call_gives_nan_on_every_rank(deterministic, plan):
    for seed in range(4):
        assert_poisoned(deterministic, seed, plan)


def test_an_aborted_call_of_a_rank_alone_gives_nan_where_tiles_are_shared():
    for seed in range(4):
        assert_poisoned(False, seed, "shared tiles", world=1)


@pytest.mark.parametrize(("name", "deterministic"), CASES)
def test_an_aborted_call_that_goes_wrong_is_noticed(name, deterministic, tmp_path, monkeypatch):
    file, edits, plan, _ = MUTANTS[name]
    put_edited(file, edits, monkeypatch, tmp_path)
    with pytest.raises((AssertionError, EmulatorError)):
        for seed in range(4):
            assert_poisoned(deterministic, seed, plan, world=1 if "shared" in name else 3)
