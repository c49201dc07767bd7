"""What no code of the library may do with what other processes, or files, hand it: unpickle it."""

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src/tileweave"
UNPICKLING = re.compile(
    r"^\s*(?:import|from)\s+(?:_?pickle|cloudpickle|dill|marshal|shelve)\b"
    r"|\b(?:all_gather|gather|broadcast|scatter|send|recv)_object(?:_list)?\b"
    r"|\btorch\.load\(|\b_unpickle\w*",
    re.MULTILINE,
)


def test_nothing_is_unpickled():
    found = {str(path.relative_to(SOURCE)): UNPICKLING.findall(path.read_text()) for path in SOURCE.rglob("*.py")}
    assert len(found) > 150 and not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize(
    "text",
    ["import pickle", "    from pickle import loads", "dist.all_gather_object(x, y)", "broadcast_object_list([])",
     "torch.load('x')", "scatter_object_list"],
)  # fmt: skip
def test_what_is_looked_for_is_found(text):
    assert UNPICKLING.search(text)
    assert not UNPICKLING.search("json.loads(text); gl.load(pointer); pickled = 1; an all-gather of objects")
