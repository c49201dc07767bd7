"""Checks a communication protocol on a CPU: an op, or a test of a kernel of one's own, under many hostile schedules.

    report = check(OpCase("matmul_reduce_scatter", 4), seeds=range(100))
    report = check(FunctionCase("my_module:my_test", ranks=2), seeds=range(100), seconds=60)

`tileweave check` is this from the command line, `tileweave.checker.pytest_plugin` from pytest.
"""

from tileweave.checker.cases import CallableCase, FunctionCase
from tileweave.checker.ops import OPS, OpCase
from tileweave.checker.session import Report, check, explore
from tileweave.checker.story import story
from tileweave.checker.trial import SCENARIOS, Finding, Outcome, run_trial

__all__ = [
    "OPS",
    "SCENARIOS",
    "CallableCase",
    "Finding",
    "FunctionCase",
    "OpCase",
    "Outcome",
    "Report",
    "check",
    "explore",
    "run_trial",
    "story",
]
