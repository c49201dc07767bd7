"""The kernel compiles for sm_90a, under the newest Triton (the one installed) and the oldest supported one."""

import json
import os
import subprocess
import sys

import pytest

from tests.lang.test_compile import ROOT, SHARED_LIMIT, old_triton, pytestmark  # noqa: F401  (this module's mark, too)
from tests.ops.attention.variants import VARIANTS


@pytest.fixture(scope="module", params=["newest", "3.6.0"])
def reports(request):
    """All reports of one Triton."""
    paths = [*([old_triton()] if request.param == "3.6.0" else []), str(ROOT / "src"), str(ROOT)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_DEFAULT_FP_FUSION": "1"}
    program = [sys.executable, "-m", "tests.ops.attention.compiling"]
    done = subprocess.run(program, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {r["triton"] == "3.6.0" for r in found.values()} == {request.param == "3.6.0"}
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_the_machine_instructions_it_is_made_for(reports, name):
    r, variant = reports[name], VARIANTS[name]
    assert r["target"] == "sm_90a"
    assert (r["stack"], r["STL"], r["LDL"]) == (0, 0, 0), "registers are spilled"
    assert r["shared"] <= SHARED_LIMIT
    consumers = 1 if variant.get("rows") == 16 else 2
    default = {64: 128, 128: 128, 256: 32}[variant["dim"]]
    bn, dim = variant.get("tiling", {}).get("bn", default), variant["dim"]
    # The first block, one with a mask, one without; and P V of the last.
    assert r["HGMMA"] == consumers * 3 * (dim // 16 + bn // 16)
    assert r["loops"] == [bn // 2 + 2] * 2 * consumers, (
        "exponentials are behind the wait for P V, where nothing hides them"
    )
    assert r["UTMALDG"] >= 3 and r["UTMASTG"] >= consumers and r["USETMAXREG"] > 0
