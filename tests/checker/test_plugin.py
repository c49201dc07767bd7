"""The pytest fixture, and the lesson's kernel: clean, found when broken, and taken by the compiler."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tileweave import lang, virtual_world
from tileweave.checker import CallableCase, check
from tileweave.fabric import fabric_of

ROOT = Path(__file__).parents[2]
LESSON = runpy.run_path(str(ROOT / "examples/05_broadcast_matmul.py"))
TESTS = f"""
import runpy
import threading
LESSON = runpy.run_path({str(ROOT / "examples/05_broadcast_matmul.py")!r})

def test_right(check_schedules):
    report = check_schedules(LESSON["right"], ranks=2)
    assert report.schedules == 3 and report.seed is None

def test_wrong(check_schedules):
    check_schedules(LESSON["told_too_early"], ranks=2)

def waits():
    threading.Barrier(2).wait()

def test_stuck(check_schedules):
    check_schedules(waits, seconds=0.1)
"""


def test_the_fixture(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tileweave.checker.pytest_plugin"]\n')
    (tmp_path / "test_them.py").write_text(TESTS)
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tileweave-schedules", "3", str(tmp_path)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1 and "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "stuck when the time was up, at test_them.py:" in done.stdout and "in waits: threading.Bar" in done.stdout
    assert "A race on global memory inbox" in done.stdout and "What would: store_wait" in done.stdout


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_lesson_is_clean(ranks):
    report = check(CallableCase(LESSON["right"], ranks), range(14), processes=1)
    assert report.ok, report.story
    assert report.flag_uses == 3


@pytest.mark.parametrize("name", ["told_too_early", "never_acknowledged"])
def test_the_lesson_broken_is_found(name):
    report = check(CallableCase(LESSON[name], 2), range(7), processes=1)
    assert not report.ok and report.finding.kind == "race" and "broadcast_async" in report.story


@pytest.mark.skipif(not lang.HAS_TRITON, reason="compiling takes Triton")
def test_the_lesson_compiles():
    from tileweave.bench.compile import compile_report

    a, b = torch.randn(128, 192).bfloat16(), torch.randn(192, 64).bfloat16()
    with virtual_world(2, device="cpu") as world:
        args, _ = world.run(lambda rank, group: LESSON["prepare"](fabric_of(group), a, b))[0]
    report = compile_report(LESSON["broadcast_matmul_kernel"], args, num_warps=4)
    assert report["HGMMA"] and report["UTMALDG"] and report["UTMASTG"] and report["stack"] == 0
