"""Schedules passed add up in a file, for device code and a problem that stay as they are."""

import json

from tileweave.checker import OPS, ledger
from tileweave.checker.device_code import digest, files


def test_seeds_add_up_until_something_changes(monkeypatch):
    monkeypatch.setattr(ledger, "RANKS", 2)
    book = {}
    assert ledger.passed(book, "all_gather") == 0
    assert ledger.advance(book, "all_gather", 0.5, 1) == ""
    first = book["all_gather"]["schedules"]
    ledger.advance(book, "all_gather", 0.5, 1)
    assert 0 < first < book["all_gather"]["schedules"] == ledger.passed(json.loads(json.dumps(book)), "all_gather")
    for name, other in (("device_code", "another"), ("variants", ["more"]), ("sizes", {})):
        assert ledger.passed({"all_gather": {**book["all_gather"], name: other}}, "all_gather") == 0


def test_the_op_with_fewest_is_next(monkeypatch, tmp_path, capsys):
    file = tmp_path / "book.json"
    made = []

    def advance(book, op, seconds, processes):
        book[op] = {"schedules": 5, **ledger._problem(op)}
        made.append(op)
        return "" if len(made) < 3 else "a story"

    monkeypatch.setattr(ledger, "advance", advance)
    monkeypatch.setattr(
        "sys.argv", ["ledger", str(file), "all_gather", "reduce_scatter", "all_reduce", "--seconds", "9"]
    )
    assert ledger.main() == 1
    assert made == ["all_gather", "reduce_scatter", "all_reduce"] and list(json.loads(file.read_text())) == made[:2]
    assert "a story" in capsys.readouterr().err


def test_every_op_has_device_code_of_its_own():
    for op in OPS:
        names = [f"{path.parent.name}/{path.name}" for path in files(op)]
        assert any(name.endswith("/kernel.py") for name in names) and len(digest(op)) == 12
    assert "moe/kernel.py" in [f"{path.parent.name}/{path.name}" for path in files("moe_dispatch_matmul")]
