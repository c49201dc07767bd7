"""After a timeout every rank's result is NaN: the real kernel in an emulated world whose abort words are set."""

from pathlib import Path

import pytest
import torch

import tileweave as tw
from tests.emulator.problems import mutant
from tests.ops.problems import assert_right, operands, run_calls
from tileweave import Plan, lang
from tileweave.emulator import EmulatorError
from tileweave.ops.matmul_reduce_scatter import launch

KERNEL = Path(launch.__file__).with_name("kernel.py")
ABORT = getattr(lang.ABORT, "value", lang.ABORT)
MUTANTS = {
    "no poison": [("    from_row = gl.where(met, row, work.rows)\n", "    from_row = row\n")],
    "own tiles left out when not met": [
        ("        for t in range(own, mm.tiles,", "        for t in range(own, mm.tiles * met,"),
    ],
    "the slot zeroed although the peers were not met": [("        if met:", "        if met | True:")],
}  # fmt: skip
CASES = [(name, mode) for name in MUTANTS for mode in (False, True) if not (mode and "zeroed" in name)]


def assert_poisoned(deterministic, seed):
    """Three ranks make a call, which is right, and after an abort one more, whose every element must be NaN."""
    a, b, _ = operands(3, 3 * 136, 192, 256, seed=seed)
    options = {"deterministic": deterministic, "plan": Plan(tile=(128, 64, 64), stages=2)}
    with tw.virtual_world(3, device="cpu", seed=seed, sms=2) as world:
        (outs,) = run_calls(world, [(a, b, {})], **options)
        assert_right(outs, a, b, deterministic=deterministic)
        for shared in world.workspace.ops.values():
            shared.flags[:, ABORT] = 1
        (outs,) = run_calls(world, [(a, b, {})], **options)
    assert [tuple(out.shape) for out in outs] == [(136, 192)] * 3
    assert torch.cat(outs).isnan().all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_aborted_call_gives_nan_on_every_rank(deterministic):
    for seed in range(4):
        assert_poisoned(deterministic, seed)


@pytest.mark.parametrize(("name", "deterministic"), CASES)
def test_an_aborted_call_that_goes_wrong_is_noticed(name, deterministic, tmp_path, monkeypatch):
    kernel = mutant(tmp_path, KERNEL, MUTANTS[name]).matmul_reduce_scatter_kernel
    monkeypatch.setattr(launch, "matmul_reduce_scatter_kernel", kernel)
    with pytest.raises((AssertionError, EmulatorError)):
        for seed in range(4):
            assert_poisoned(deterministic, seed)
