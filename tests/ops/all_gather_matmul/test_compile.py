"""The kernel compiles for sm_90a, under the newest Triton (the one installed) and the oldest supported one."""

import json
import os
import platform
import subprocess
import sys

import pytest

from tests.lang.test_compile import ROOT, SHARED_LIMIT, old_triton
from tests.ops.all_gather_matmul.variants import VARIANTS

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason=f"Triton has no wheel for {platform.system()} {platform.machine()}",
)


@pytest.fixture(scope="module", params=["newest", "3.6.0"])
def reports(request):
    """All reports of one Triton."""
    paths = [*([old_triton()] if request.param == "3.6.0" else []), str(ROOT / "src"), str(ROOT)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_DEFAULT_FP_FUSION": "1"}
    program = [sys.executable, str(ROOT / "tests/ops/all_gather_matmul/compiling.py")]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {r["triton"] == "3.6.0" for r in found.values()} == {request.param == "3.6.0"}
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_the_machine_instructions_it_is_made_for(reports, name):
    r = reports[name]
    assert r["target"] == "sm_90a"
    assert (r["stack"], r["STL"], r["LDL"]) == (0, 0, 0), "registers are spilled"
    assert r["shared"] <= SHARED_LIMIT
    assert r["QGMMA" if "float8" in name else "HGMMA"] >= 4, "a K step of 128 bytes is four wgmma"
    assert r["UTMALDG"] >= 2 and r["UTMASTG"] >= 1 and r["UTMAREDG"] == 0
    assert r["USETMAXREG"] > 0
    assert r["multimem"] == (["multimem.st"] if "multimem" in name else [])
