"""Where Triton is not installed the emulator runs the same kernels."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
sys.modules["triton"] = None  # as if it were not installed
from tileweave import lang
assert not lang.HAS_TRITON
from tests.emulator import problems
from tests.emulator.kernels import attention, matmul, matmul_reduce_scatter, primitives, puts
from tests.emulator.test_words import test_scalars, test_tiles
from tests.emulator.test_flags import ping
for run, kernel in ((problems.run_reduce_scatter, matmul_reduce_scatter), (problems.run_matmul, matmul),
                    (problems.run_attention, attention), (problems.run_put, puts)):
    error, _ = run(kernel, 0)
    assert error < 1e-2, (kernel.__name__, error)
test_scalars(-7, 2)
test_tiles()
ping(0)
assert problems.outcome(problems.run_put, puts, 0, last=(0, 1))[0] == "Race"
try:
    primitives.writes[(1,)](None, 1.0, 64)
except RuntimeError as error:
    print("ran without Triton;", error)
"""


def test_the_emulator_needs_no_triton():
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "ran without Triton" in done.stdout
