"""Schedules passed add up in a file, for device code and a problem that stay as they are."""

import json
from dataclasses import replace

import pytest

from tileweave.checker import OPS, OpCase, check, ledger
from tileweave.checker.device_code import digest, files
from tileweave.checker.small import as_if_large, small


def test_seeds_add_up_until_something_changes():
    book = {}
    assert ledger.passed(book, "grouped_matmul") == 0
    assert ledger.advance(book, "grouped_matmul", 2) == ""
    first = book["grouped_matmul"]["seconds"]
    assert ledger.advance(book, "grouped_matmul", 3) == "" and book["grouped_matmul"]["seconds"] > first > 0
    assert book["grouped_matmul"]["schedules"] == ledger.passed(json.loads(json.dumps(book)), "grouped_matmul") == 5
    for name, other in (("device_code", "another"), ("variants", {"more": ""}), ("sizes", {}), ("sms", 3)):
        assert ledger.passed({"grouped_matmul": {**book["grouped_matmul"], name: other}}, "grouped_matmul") == 0


def test_what_does_not_end_in_time_is_not_counted(monkeypatch):
    monkeypatch.setattr(ledger, "LIMIT", 0.0)
    book = {}
    assert "seeds from 0: 0 of 2 have ended" in ledger.advance(book, "grouped_matmul", 2) and not book


@pytest.mark.parametrize("op", OPS)
def test_small_calls_are_a_check_in_each_variant(op):
    case = small(op)
    usual = OpCase(op, 2).all_variants
    assert len(case.all_variants) == len([name for name, options in usual.items() if "scaled" not in options])
    with as_if_large(op):
        for name, options in case.all_variants.items():
            report = check(replace(case, variants={name: options}), [5], processes=1)
            assert report.ok and not report.too_small, (name, report.too_small, report.story)


def test_the_op_with_fewest_is_next(monkeypatch, tmp_path, capsys):
    file = tmp_path / "book.json"
    made = []

    def advance(book, op, count, processes):
        book[op] = {"schedules": ledger.passed(book, op) + count, **ledger._problem(op)}
        made.append((op, count))
        return "a story" if stops and len(made) == 3 else ""

    monkeypatch.setattr(ledger, "advance", advance)
    monkeypatch.setattr("sys.argv", ["ledger", str(file), "all_gather", "all_reduce", "--until", "40"])
    stops = False
    assert ledger.main() == 0
    assert made == [("all_gather", 25), ("all_reduce", 25), ("all_gather", 15), ("all_reduce", 15)]
    file.unlink()
    made.clear()
    stops = True
    assert ledger.main() == 1
    assert {op: entry["schedules"] for op, entry in json.loads(file.read_text()).items()} == dict(made[:2])
    assert "a story" in capsys.readouterr().err


def test_every_op_has_device_code_of_its_own():
    for op in OPS:
        names = [f"{path.parent.name}/{path.name}" for path in files(op)]
        assert any(name.endswith("/kernel.py") for name in names) and len(digest(op)) == 12
    assert "moe/kernel.py" in [f"{path.parent.name}/{path.name}" for path in files("moe_dispatch_matmul")]
