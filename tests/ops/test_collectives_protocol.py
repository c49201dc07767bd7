"""The protocol table of the collectives' kernel is true: each edit that breaks one of its lines is found, harmless ones
are not. As test_protocol.py: R race, D deadlock, P protocol error, W wrong result; None: nothing may be reported."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import tileweave as tw
from tests.ops.collectives import assert_right, inputs, run_calls
from tileweave import lang
from tileweave.emulator import DeadlockError, ProtocolError, RaceError
from tileweave.ops.collectives import launch, passes

KERNEL = Path(launch.__file__).with_name("kernel.py")
ABORT = getattr(lang.ABORT, "value", lang.ABORT)
KINDS = {"R": RaceError, "D": DeadlockError, "P": ProtocolError}
ADVANCE = '        gl.atomic_xchg(state + EPOCH, epoch, sem="relaxed", scope="gpu")\n'
LAST = '    if gl.atomic_add(state + DONE, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:'

MUTANTS = {
    "no barrier before the flag": ("    gl.barrier()\n    gl.signal_all", "    gl.signal_all", "R"),
    "published before it is laid out": (
        "            lay_out(work, step)\n            publish(flags, epoch * STEPS + step)",
        "            publish(flags, epoch * STEPS + step)\n            lay_out(work, step)",
        "R",
    ),
    "tells one rank only": ("    gl.signal_all(flags, gl", "    gl.signal(flags, (flags.rank + 1) % flags.world, gl", "D"),
    "tells another CTA": ("gl.program_id(0) * flags.world + flags.rank, value", "flags.rank, value", "RDP"),
    "the same flag for all steps": ("publish(flags, epoch * STEPS + step)", "publish(flags, epoch * STEPS)", "D"),
    "does not wait": ("met = arrived(flags, epoch * STEPS + step - 1)", "met = epoch == epoch", "R"),
    "waits for the step before": ("arrived(flags, epoch * STEPS + step - 1)", "arrived(flags, epoch * STEPS + step - 2)", "R"),
    "waits for the call before": ("arrived(flags, epoch * STEPS + step - 1)", "arrived(flags, (epoch - 1) * STEPS + step)", "R"),
    "waits for one rank only": ("gl.wait_all(flags, gl.program_id(0) * flags.world, flags.world, value)", "gl.wait(flags, gl.program_id(0) * flags.world, value)", "R"),
    "waits for another CTA": ("gl.wait_all(flags, gl.program_id(0) * flags.world, flags.world, value)", "gl.wait_all(flags, 0, flags.world, value)", "R"),
    "one slot for all calls": ("slot = (epoch & 1)", "slot = (epoch & 0)", "R"),
    "slots run into each other": ("gl.int64) * slot_lines", "gl.int64) * (slot_lines // 2)", "R"),
    "parts run into each other": ("part.to(gl.int64) * work.part_lines", "part.to(gl.int64) * (work.part_lines - 1)", "RW"),
    "takes from another source": ("in_slot(work, source, mine, i, L), mask=keep & met, other=-1", "in_slot(work, (source + 1) % 3, mine, i, L), mask=keep & met, other=-1", "W"),
    "epoch not advanced": (ADVANCE, "        pass\n", "RDWP"),
    "epoch advanced by every CTA": (LAST, "    if True:", "RD"),
    "DONE without order": (LAST, LAST.replace("acq_rel", "relaxed"), "R"),
    "DONE not put back": ('        gl.atomic_xchg(state + DONE, 0, sem="relaxed", scope="gpu")\n', "", "RD"),
    "takes more than its share": ("gl.minimum(first + work.block, work.part)", "gl.minimum(first + work.block + 1, work.part)", "R"),
    # harmless
    "a barrier more": ("    gl.barrier()\n    gl.signal_all", "    gl.barrier()\n    gl.barrier()\n    gl.signal_all", None),
    "parts in another order": ("part = (flags.rank + 1 + n) % PARTS", "part = (flags.rank + 2 + n) % PARTS", None),
    "waits for a step more": ("        if step > 0:\n            met", "        if step > 0:\n            arrived(flags, epoch * STEPS)\n            met", None),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Several tiles, CTAs and steps."""
    monkeypatch.setattr(passes, "TILE", 64)
    monkeypatch.setattr(passes, "STEP_TILES", 1)
    monkeypatch.setattr(passes, "STEPS", 4)
    monkeypatch.setattr(launch, "STEPS", 4)


def mutated(monkeypatch, tmp_path, old, new):
    """Put an edited kernel in place of the real one."""
    text = KERNEL.read_text()
    assert text.count(old) == 1, f"the text to edit occurs {text.count(old)} times: {old!r}"
    target = tmp_path / f"mutant_{tmp_path.name}.py"
    target.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(target.stem, target)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, target.stem, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(launch, "collective_kernel", module.collective_kernel)


def outcome(seed):
    """What three rounds of calls of three ranks come to under one schedule: R, D, P, W (wrong result) or None."""
    calls = []
    for i in range(3):
        calls.append(("all_gather", inputs(3, (70, 8), i), {}))
        calls.append(("reduce_scatter", inputs(3, (5, 3 * 72), i), dict(dim=1)))
        calls.append(("all_to_all", inputs(3, (3, 33, 8), i), dict(split_dim=0, concat_dim=1)))
    try:
        with tw.virtual_world(3, device="cpu", seed=seed, sms=2) as world:
            results = run_calls(world, calls)
    except (RaceError, DeadlockError, ProtocolError) as error:
        return next(letter for letter, kind in KINDS.items() if isinstance(error, kind))
    try:
        for outs, (name, xs, options) in zip(results, calls, strict=True):
            assert_right(name, outs, xs, **options)
    except AssertionError:
        return "W"


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_is_judged_rightly(name, monkeypatch, tmp_path):
    old, new, expected = MUTANTS[name]
    mutated(monkeypatch, tmp_path, old, new)
    if expected is None:
        assert [outcome(seed) for seed in range(3)] == [None] * 3
        return
    for seed in range(12):
        found = outcome(seed)
        if found:
            break
    assert found and found in expected, f"expected one of {expected}, found {found}"


def aborted(seed):
    """Results of each collective in a world in which a wait has timed out; first, one that is right."""
    calls = [
        ("all_gather", inputs(3, (70, 8), seed), {}),
        ("all_to_all", inputs(3, (3, 33, 8), seed), dict(split_dim=0, concat_dim=1)),
        ("reduce_scatter", inputs(3, (5, 3 * 72), seed, torch.float32), dict(dim=1)),
        ("all_reduce", inputs(3, (50, 7), seed), dict(op="avg")),
    ]
    with tw.virtual_world(3, device="cpu", seed=seed, sms=2) as world:
        for outs, (name, xs, options) in zip(run_calls(world, calls), calls, strict=True):
            assert_right(name, outs, xs, **options)
        world.workspace.ops["collectives"].flags[:, ABORT] = 1
        return run_calls(world, calls)


@pytest.mark.parametrize("shots", [1 << 40, 0])
def test_after_a_timeout_every_result_is_nan(shots, monkeypatch):
    monkeypatch.setattr(passes, "ONE_SHOT_BYTES", shots)
    for seed in range(2):
        assert all(out.isnan().all() for outs in aborted(seed) for out in outs)


@pytest.mark.parametrize(
    "edit",
    [
        ("mask=keep & met, other=-1)", "mask=keep)"),
        ("gl.where(met, 0.0, INFINITY) * 0.0", "0.0"),
    ],
)
def test_results_that_are_not_poisoned_are_noticed(edit, monkeypatch, tmp_path):
    mutated(monkeypatch, tmp_path, *edit)
    with pytest.raises((AssertionError, RaceError)):
        for seed in range(4):
            assert all(out.isnan().all() for outs in aborted(seed) for out in outs)
