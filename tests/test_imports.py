"""Imports point downwards only: what each room of the library may import of the others, read from its source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src/tileweave"
FACE = "tileweave"  # the package's own modules: __init__, explain, __main__
ROOMS = {
    "lang": set(),
    "tiles": {"lang"},
    "emulator": {"lang"},
    "planner": set(),
    "fabric": {"emulator", "lang"},
    "ops": {"planner", "tiles", "fabric", "lang"},
    "nn": {"ops", "fabric"},
    "bench": {"ops", "planner", "tiles", "fabric", "emulator", "lang", FACE},
    "checker": {"ops", "planner", "tiles", "fabric", "emulator", "lang", FACE},
    "cli": {"checker", "bench", "ops", "planner", "fabric", "emulator", "lang", FACE},
    FACE: {"ops", "planner", "fabric"},
}
FILES = {"__main__.py": {"cli"}}  # what starts the command
DEVICE_CODE = {"lang", "tiles"}


def room_of(module: str) -> str:
    """The room of a module of the library: its second name, if that is a folder."""
    name = [*module.split("."), ""][1]
    return name if (SOURCE / name).is_dir() and name else FACE


def imported(path: Path) -> set[str]:
    """The rooms that a file imports from, wherever in it the statement stands."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            modules = [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            modules = [name.name for name in node.names]
        else:
            continue
        rooms |= {room_of(module) for module in modules if module.split(".")[0] == "tileweave"}
    return rooms


def allowed(path: Path) -> set[str]:
    """The rooms that a file may import from, its own included unless it is an op's device code."""
    parts = path.relative_to(SOURCE).parts
    if parts[0] == "ops" and parts[-1].endswith("kernel.py"):
        return DEVICE_CODE
    room = parts[0] if len(parts) > 1 else FACE
    return ROOMS[room] | {room} | FILES.get(str(path.relative_to(SOURCE)), set())


def test_every_room_has_its_rule():
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} == set(ROOMS) - {FACE}


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_downwards(room):
    files = SOURCE.glob("*.py") if room == FACE else (SOURCE / room).rglob("*.py")
    wrong = {str(path.relative_to(SOURCE)): imported(path) - allowed(path) for path in files}
    assert not {path: rooms for path, rooms in wrong.items() if rooms}


def test_what_an_import_names():
    """`from tileweave import lang` is the room, `from tileweave import Plan` is the package's face."""
    assert [room_of(module) for module in ("tileweave.lang", "tileweave.lang.jit", "tileweave.Plan", "tileweave")] == [
        "lang",
        "lang",
        FACE,
        FACE,
    ]


def test_an_import_prints_nothing():
    """Not at the end of the process either, when Triton's binding tells of its objects that somebody still holds."""
    done = subprocess.run([sys.executable, "-c", "import tileweave"], cwd=SOURCE.parent, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
