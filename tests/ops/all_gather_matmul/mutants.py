"""The op with edits in the text of its kernel, of the communicator or of the host's copies; what calls come to."""

import importlib.util
import sys
from pathlib import Path

import tileweave as tw
from tests.ops.all_gather_matmul.problems import assert_right, run_calls
from tileweave.emulator import DeadlockError, ProtocolError, RaceError
from tileweave.ops.all_gather_matmul import launch

SOURCES = Path(launch.__file__).parents[2]
COMMUNICATOR, KERNEL = "tiles/communicator.py", "ops/all_gather_matmul/kernel.py"
PLACES = "ops/all_gather_matmul/places.py"
KINDS = {"R": RaceError, "D": DeadlockError, "P": ProtocolError}


def put_edited(file, edits, monkeypatch, folder):
    """Put what comes of edits (old, new) of `file` in place of the real code; an old text must occur exactly once.

    `folder`: where the edited copies are written.
    """
    modules = {}
    for path in (COMMUNICATOR, KERNEL, PLACES):
        text = (SOURCES / path).read_text()
        for old, new in edits if path == file else ():
            assert text.count(old) == 1, f"the text to edit occurs {text.count(old)} times: {old!r}"
            text = text.replace(old, new)
        for original, name in modules.items():
            text = text.replace(f"from tileweave.{original} import", f"from {name} import")
        name = f"mutant_{folder.name}_{Path(path).stem}"
        target = folder / f"{name}.py"
        target.write_text(text)
        spec = importlib.util.spec_from_file_location(name, target)
        monkeypatch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
        spec.loader.exec_module(sys.modules[name])
        modules[path.removesuffix(".py").replace("/", ".")] = name
    kernel, places = (sys.modules[modules[f"ops.all_gather_matmul.{name}"]] for name in ("kernel", "places"))
    monkeypatch.setattr(launch, "all_gather_matmul_kernel", kernel.all_gather_matmul_kernel)
    for name in ("Places", "places_of", "copying"):
        monkeypatch.setattr(launch, name, getattr(places, name))


def found_by(calls, chosen, *, world, seed, sms):
    """What calls (a, b, bias, keyword arguments) of unscaled operands come to under one schedule: R, D, P, W (wrong
    result) or None."""
    try:
        with tw.virtual_world(world, device="cpu", seed=seed, sms=sms) as w:
            results = run_calls(w, calls, plan=chosen, return_gathered=True)
    except (RaceError, DeadlockError, ProtocolError) as error:
        return next(letter for letter, kind in KINDS.items() if isinstance(error, kind))
    try:
        for outs, (a, b, bias, _) in zip(results, calls, strict=True):
            assert_right(outs, a, b, bias, True)
    except AssertionError:
        return "W"
