"""The kernel compiles for sm_90a, under the newest Triton (the one installed) and the oldest supported one."""

import json
import os
import subprocess
import sys

import pytest

from tests.lang.test_compile import ROOT, SHARED_LIMIT, old_triton, pytestmark  # noqa: F401  (this module's mark, too)
from tests.ops.matmul_all_reduce.variants import VARIANTS


@pytest.fixture(scope="module", params=["newest", "3.6.0"])
def reports(request):
    """All reports of one Triton."""
    paths = [*([old_triton()] if request.param == "3.6.0" else []), str(ROOT / "src"), str(ROOT)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_DEFAULT_FP_FUSION": "1"}
    program = [sys.executable, "-m", "tests.ops.matmul_all_reduce.compiling"]
    done = subprocess.run(program, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
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
    assert r["HGMMA"] >= 4, "a K step of 64 is four wgmma"
    assert r["UTMALDG"] >= 2 and r["UTMASTG"] >= 1 and r["UTMAREDG"] == 0
    assert r["USETMAXREG"] > 0
    assert r["narrow"] == 0, "rows are read 16 bytes at a time"
    if "one shot" in name:
        assert r["wide"] >= 2
    assert r["multimem"] == (["multimem.ld_reduce", "multimem.st"] if "multimem" in name else [])
