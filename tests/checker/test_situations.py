"""Each reported fault of another library has what stands for it here, and that is caught."""

import ast
import json
from pathlib import Path

import pytest

from tileweave.checker.tables import SITUATIONS, reason, standing_for

ROOT = Path(__file__).parents[2]
FIGURES = [json.loads(path.read_text()) for path in sorted((ROOT / "docs/figures").glob("mutants_*.json"))]


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation["seen"])
def test_what_stands_for_it_is_there(situation):
    for path in situation.get("planted", []) + situation.get("tests", []):
        file, _, name = path.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body), path
    if situation.get("protocol"):
        assert situation.get("mutants") or situation.get("planted")
    for pattern in situation.get("mutants", []):
        judged = standing_for([pattern], FIGURES)
        survived = [(op, one["key"]) for op, one in judged if not one["caught"]]
        assert len(survived) < len(judged) and all(reason(op, key) for op, key in survived), survived
