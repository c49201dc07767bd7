"""Every order of a small call of a shipped kernel, and of the same kernel with a fault."""

import pytest

from tests.checker import kernels
from tileweave.checker import CallableCase, OpCase, catalogue, explore
from tileweave.checker.mutants import mutants, planted
from tileweave.cli import main

SMALL = {"m": 4, "n": 8}


@pytest.mark.parametrize(("ranks", "calls"), [(2, 1), (2, 3), (3, 1)])
def test_all_gather_is_right_in_every_order(ranks, calls):
    report = explore(OpCase("all_gather", ranks, {"m": 4 * ranks, "n": 8}, calls, sms=1), 500)
    assert report.ok and report.complete, report.story
    assert report.schedules > 1 or calls == 1


def test_a_fault_is_found_in_some_order():
    lines = catalogue.reached("all_gather", 1)
    mutant = next(m for m in mutants(lines) if m.operator == "drop" and "gl.barrier()" in m.source)
    with planted(mutant):
        report = explore(OpCase("all_gather", 2, SMALL, 2, sms=1), 500)
    assert not report.ok and report.finding.kind == "race"


def test_an_order_that_few_schedules_take():
    report = explore(CallableCase(kernels.out_of_order), 100)
    assert report.ok and report.complete  # what hosts do between calls of the world commutes, by assumption


def test_the_command(capsys):
    arguments = ["check", "all_gather", "--ranks", "2", "--shape", "m=4,n=8", "--exhaustive", "--schedules", "500"]
    assert main(arguments) == 0
    assert "clean in every order that differs" in capsys.readouterr().out
