"""Mutants follow the source: what the rules plant is planted where they say, and is caught or explained."""

import json
import os
import time
from pathlib import Path

import pytest

from tileweave.checker import catalogue, reach, tables
from tileweave.checker.mutants import mutants, planted
from tileweave.checker.setups import setups
from tileweave.checker.trial import run_trial

DOCS = Path(__file__).parents[2] / "docs"
FIGURES = [json.loads(path.read_text()) for path in sorted(DOCS.glob("figures/mutants_*.json"))]
SAMPLE = 6  # mutants of each op that a run of this file judges; which, the day says


@pytest.fixture(scope="module")
def of_all_gather():
    lines = catalogue.reached("all_gather", 1)
    return lines, mutants(lines)


def test_rules_reach_every_kind_of_statement(of_all_gather):
    _, found = of_all_gather
    operators = {mutant.operator for mutant in found}
    assert {"drop", "later", "earlier", "double", "flag", "fewer", "value less", "slot", "order relaxed"} <= operators
    assert len({mutant.key for mutant in found}) == len(found)


def test_a_mutant_is_planted_and_taken_out_again(of_all_gather):
    lines, found = of_all_gather
    mutant = next(m for m in found if m.operator == "drop" and "gl.barrier()" in m.source)
    told = catalogue.judge("all_gather", mutant, lines[mutant.file, mutant.line], 2)
    assert told["caught"] == "race" and told["after"] == 1
    assert run_trial(setups("all_gather")[0], 0).finding is None


def test_a_place_that_is_not_there_is_an_error(of_all_gather):
    mutant = of_all_gather[1][0]
    with pytest.raises(LookupError), planted(type(mutant)(**{**vars(mutant), "line": 1})):
        run_trial(setups("all_gather")[0], 0)


def test_every_statement_of_a_kernel_is_reached_and_what_is_not_is_told(monkeypatch):
    assert reach.unreached(["all_gather", "reduce_scatter"]) == []
    lines = catalogue.reached("all_gather", 1)
    left = next(line for line in lines)
    monkeypatch.setattr(reach, "reached", lambda op, processes: {line: [0] for line in lines if line != left})
    assert len(reach.unreached(["all_gather"])) == 1


def test_a_run_goes_on_from_its_figures(tmp_path):
    out, options = tmp_path / "figures.json", dict(schedules=1, seed=3)
    catalogue.run("all_gather", sample=3, out=out, **options)
    began = json.loads(out.read_text())["mutants"]
    assert len(began) == 3
    catalogue.run("all_gather", sample=5, out=out, processes=2, **options)
    text = out.read_text()
    figures = json.loads(text)
    assert len(figures["mutants"]) >= 5 and all(one in figures["mutants"] for one in began)
    out.write_text(text.replace(figures["device_code"], "another"))
    catalogue.run("all_gather", sample=1, out=out, **options)
    assert len(json.loads(out.read_text())["mutants"]) == 1


def test_what_comes_of_a_mutant_depends_on_nothing_else(of_all_gather):
    lines, found = of_all_gather
    tasks = [(mutant, lines[mutant.file, mutant.line]) for mutant in found[:4]]
    here = [catalogue.judge("all_gather", *task, 2) for task in tasks]
    back = [catalogue.judge("all_gather", *task, 2) for task in reversed(tasks)][::-1]
    assert [{**one, "seconds": 0} for one in here] == [{**one, "seconds": 0} for one in back]


@pytest.mark.parametrize("op", ["all_gather", "matmul_reduce_scatter"])
def test_a_rotating_sample_is_caught_or_explained(op):
    day = int(os.environ.get("TILEWEAVE_MUTANTS_SEED", time.time() // 86400))
    figures = catalogue.run(op, schedules=catalogue.SCHEDULES, sample=SAMPLE, seed=day, seconds=60)
    unexplained = [m["key"] for m in figures["mutants"] if not m["caught"] and not tables.reason(op, m["key"])]
    assert figures["mutants"] and not unexplained, f"day {day}"


@pytest.mark.parametrize("figures", FIGURES, ids=lambda figures: figures["op"])
def test_no_survivor_of_a_full_run_is_unexplained(figures):
    left = [m["key"] for m in figures["mutants"] if not m["caught"] and not tables.reason(figures["op"], m["key"])]
    assert not left
    caught = [m for m in figures["mutants"] if m["caught"]]
    assert sum(m["after"] <= 5 for m in caught) >= 0.95 * len(caught)


def test_a_reason_is_of_survivors_only():
    """One that also covers what is caught would hide it if it were no longer caught; one of nothing has outlived it."""
    judged = [(figures["op"], one) for figures in FIGURES for one in figures["mutants"]]
    assert not [one["key"] for op, one in judged if one["caught"] and tables.reason(op, one["key"])]
    given = {tables.reason(op, one["key"]) for op, one in judged if not one["caught"]}
    assert given == set(json.loads(Path(tables.__file__).with_name("harmless.json").read_text()).values())


def test_the_page_is_made_from_the_figures():
    page = DOCS / "mutants.md"
    assert tables.page(page.read_text(), DOCS) == page.read_text(), (
        "run python -m tileweave.checker.tables docs/mutants.md"
    )
