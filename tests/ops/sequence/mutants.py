"""A kernel of the attention ops with edits in its text, put in place of the real one."""

import importlib.util
import sys
from pathlib import Path

import tileweave as tw
from tests.ops.sequence.fused import assert_right, run_calls
from tileweave.emulator import DeadlockError, ProtocolError, RaceError

SOURCES = Path(tw.__file__).parent
KINDS = {"R": RaceError, "D": DeadlockError, "P": ProtocolError}


def put_edited(op, edits, monkeypatch, folder):
    """Edits are (old, new); an old text must occur exactly once: in the kernel, the template, or what they share.

    `folder`: where the copies are written.
    """
    names = ("attention", "attention_tcgen05", "attention_roles", "exchange")
    paths = {**{name: f"tiles/{name}.py" for name in names}, "kernel": f"ops/{op}/kernel.py"}
    texts = {name: (SOURCES / path).read_text() for name, path in paths.items()}
    for old, new in edits:
        count = sum(text.count(old) for text in texts.values())
        assert count == 1, f"the text to edit occurs {count} times: {old!r}"
        texts = {name: text.replace(old, new) for name, text in texts.items()}
    for name, text in texts.items():
        module_name = f"mutant_{folder.name}_{name}"
        for shared in names:
            text = text.replace(f"from tileweave.tiles.{shared} import", f"from mutant_{folder.name}_{shared} import")
        target = folder / f"{module_name}.py"
        target.write_text(text)
        spec = importlib.util.spec_from_file_location(module_name, target)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, module_name, module)
        spec.loader.exec_module(module)
    monkeypatch.setattr(f"tileweave.ops.{op}.launch.{op}_kernel", getattr(module, f"{op}_kernel"))


def outcome(op, calls, seed, size=3, sms=4):
    """What the calls come to under one schedule: R, D, P, W (a wrong result) or None."""
    try:
        with tw.virtual_world(size, device="cpu", seed=seed, sms=sms) as world:
            results = run_calls(world, op, calls)
    except (RaceError, DeadlockError, ProtocolError) as error:
        return next(letter for letter, kind in KINDS.items() if isinstance(error, kind))
    try:
        assert_right(results, calls)
    except AssertionError:
        return "W"


def judge(op, calls, expected, seeds=6, world=3):
    """AssertionError unless what is found is one of `expected`; if that is None, unless nothing is found."""
    if expected is None:
        assert [outcome(op, made, seed) for seed, made in zip(range(3), calls * 3, strict=False)] == [None] * 3
        return
    for seed in range(seeds):
        found = outcome(op, calls[seed % len(calls)], seed, world)
        if found:
            break
    assert found and found in expected, f"expected one of {expected}, found {found}"
