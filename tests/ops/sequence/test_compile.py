"""The kernels compile for sm_90a, under the newest Triton (the one installed) and the oldest supported one."""

import json
import os
import platform
import subprocess
import sys

import pytest

from tests.lang.test_compile import ROOT, SHARED_LIMIT, old_triton
from tests.ops.sequence.variants import VARIANTS

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason=f"Triton has no wheel for {platform.system()} {platform.machine()}",
)


@pytest.fixture(scope="module", params=["newest", "3.6.0"])
def reports(request):
    """All reports of one Triton."""
    paths = [*([old_triton()] if request.param == "3.6.0" else []), str(ROOT / "src"), str(ROOT)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_DEFAULT_FP_FUSION": "1"}
    program = [sys.executable, str(ROOT / "tests/ops/sequence/compiling.py")]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert {r["triton"] == "3.6.0" for r in found.values()} == {request.param == "3.6.0"}
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_the_machine_instructions_it_is_made_for(reports, name):
    """Workers have 40 registers beside two consumers of 232: a few numbers of theirs, and places of threads, lie on the
    stack, and are looked up some times a tile. The loops that multiply never touch it."""
    r = reports[name]
    assert r["target"] == "sm_90a"
    assert r["stack"] <= 128
    consumers = 1 if "few rows" in name else 2
    assert len(r["loops"]) >= 2 * consumers and all(stack == 0 for _, stack in r["loops"])
    assert r["shared"] <= SHARED_LIMIT
    assert r["UTMALDG"] >= 5 and r["UTMASTG"] >= (2 if "one rank" in name else 3) and r["UTMAREDG"] == 0
    assert r["USETMAXREG"] > 0
