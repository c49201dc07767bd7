"""The kernels of expert parallelism compile for sm_90a, under the newest Triton and the oldest supported one."""

import json
import os
import subprocess
import sys

import pytest

from tests.lang.test_compile import ROOT, SHARED_LIMIT, old_triton, pytestmark  # noqa: F401
from tests.ops.moe.variants import COMBINE_VARIANTS, VARIANTS


@pytest.fixture(scope="module", params=["newest", "3.6.0"])
def reports(request):
    """All reports of one Triton."""
    path = [p for p in ("" if request.param == "newest" else old_triton(), str(ROOT / "src"), str(ROOT)) if p]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "tests.ops.moe.compiling"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    versions = {r["triton"] for r in found.values()}
    assert len(versions) == 1 and (request.param == "newest") != (versions == {"3.6.0"}), versions
    return found


@pytest.mark.parametrize("name", [*VARIANTS, *COMBINE_VARIANTS])
def test_a_variant_has_the_machine_instructions_it_is_made_for(reports, name):
    r = reports[name]
    assert r["target"] == "sm_90a" and r["shared"] <= SHARED_LIMIT
    assert r["stack"] == r["LDL"] == r["STL"] == 0, "registers are spilled"
    assert r["HGMMA"] and r["UTMALDG"] and not r["UTMAREDG"]
    assert bool(r["UTMASTG"]) == (name in VARIANTS), "rows go home by stores from registers, nothing else does"
