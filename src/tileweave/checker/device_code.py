"""The device code of an op: which files it is made of, and a mark of them, for figures that hold for this code only."""

import hashlib
import re
from pathlib import Path

import tileweave
from tileweave.checker.problems import PROBLEMS

_SOURCES = Path(tileweave.__file__).parent


def files(op: str) -> list[Path]:
    """An op's kernel, and the tile files and other kernels that its room imports, in the order of their names."""
    waiting = sorted((_SOURCES / "ops" / PROBLEMS[op].room).glob("*.py"))
    device, seen = set(), set(waiting)
    while waiting:
        path = waiting.pop()
        if path.parent.name == "tiles" or path.name.endswith("kernel.py"):
            device.add(path)
        for name in re.findall(r"^\s*from tileweave\.((?:tiles|ops)\.[\w.]+) import", path.read_text(), re.MULTILINE):
            file = _SOURCES / f"{name.replace('.', '/')}.py"
            found = [file] if file.exists() else (_SOURCES / name.replace(".", "/")).glob("*kernel.py")
            waiting += [path for path in found if path not in seen]
            seen.update(found)
    return sorted(device)


def own_files(op: str) -> list[Path]:
    """Those of them that are no other op's: its kernels and the tile files."""
    return [path for path in files(op) if path.parent.name in ("tiles", PROBLEMS[op].room)]


def digest(op: str) -> str:
    """A mark of the device code of an op: another if one of its files has changed."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in files(op))).hexdigest()[:12]
