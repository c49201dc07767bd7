"""A pytest fixture that checks a kernel's protocol. Opt in, in a conftest.py:

    pytest_plugins = ["tileweave.checker.pytest_plugin"]

and then

    def test_my_kernel(check_schedules):
        check_schedules(my_test, ranks=2)

where `my_test(world)` runs the kernel in an emulated world and asserts that its results are right. Every finding fails
the test with its story. `--tileweave-schedules N` (20) and `--tileweave-seed S` (0) say how many schedules and which.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tileweave.checker.cases import CallableCase
from tileweave.checker.session import Report, check


def pytest_addoption(parser: pytest.Parser) -> None:
    """The two options."""
    group = parser.getgroup("tileweave")
    group.addoption("--tileweave-schedules", type=int, default=20, help="schedules of a check_schedules call")
    group.addoption("--tileweave-seed", type=int, default=0, help="seed of the first of them")


@pytest.fixture
def check_schedules(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """`check_schedules(function, ranks=2, sms=4, schedules=None, seconds=None)`: run a function as
    `tileweave check module:function` does, in this process; fails the test with the story of what it finds, or the
    line that the function was stuck in when its seconds were up, else returns the Report. `schedules` overrides the
    command line's."""
    first = request.config.getoption("--tileweave-seed")
    usual = request.config.getoption("--tileweave-schedules")

    def run(
        function: Callable[..., Any], ranks: int = 2, sms: int = 4, schedules: int | None = None,
        seconds: float | None = None,
    ) -> Report:  # fmt: skip
        seeds = range(first, first + (schedules or usual))
        report = check(CallableCase(function, ranks, sms), seeds, seconds=seconds, processes=1)
        if not report.ok:
            pytest.fail(report.story, pytrace=False)
        if report.stuck:
            pytest.fail(f"stuck when the time was up, at {report.stuck}", pytrace=False)
        return report

    return run
