"""Edited copies of the kernel files, to see that a fault is noticed."""

import importlib.util
from pathlib import Path
from types import ModuleType


def mutant(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """`module` with one edit of its text, in which `old` occurs once. `folder`: where the copy is written."""
    text = Path(module.__file__).read_text()
    assert text.count(old) == 1, f"the text to edit occurs {text.count(old)} times: {old!r}"
    path = folder / "mutant.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutant", path)
    edited = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(edited)
    return edited
