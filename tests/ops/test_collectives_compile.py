"""The collectives' kernel compiles for sm_90a, under the newest Triton and the oldest supported one."""

import json
import os
import subprocess
import sys

import pytest

from tests.lang.test_compile import ROOT, old_triton, pytestmark  # noqa: F401  (the mark is this module's, too)
from tests.ops.compiling_collectives_variants import VARIANTS

MOVING = ("all_gather", "all_to_all")


@pytest.fixture(scope="module", params=["newest", "3.6.0"])
def reports(request):
    """All reports of one Triton."""
    path = [p for p in ("" if request.param == "newest" else old_triton(), str(ROOT / "src"), str(ROOT)) if p]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "tests.ops.compiling_collectives"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    versions = {r["triton"] for r in found.values()}
    assert len(versions) == 1 and (request.param == "newest") != (versions == {"3.6.0"}), versions
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_the_accesses_it_is_made_for(reports, name):
    found = {key: r for key, r in reports.items() if key == name or key.startswith(f"{name}, launch")}
    assert len(found) == (2 if "two shots" in name else 1)
    for key, r in found.items():
        assert r["target"] == "sm_90a"
        assert r["registers"] <= 128, "65536 registers for 512 threads"
        # ptxas puts away a few values that only flags need rather than use more than a round number of registers.
        assert r["stack"] <= 32 and r["LDL"] <= 6 and r["STL"] <= 6, "registers are spilled"
        # 16-byte accesses: the layout of a tile, and, where parts are moved and not summed, as many again.
        if "-byte" in name:
            assert r["loads"] == r["stores"] == 0
        elif name.startswith(MOVING) or key.endswith("launch 1"):
            assert r["loads"] >= 8 and r["stores"] >= 8
        else:
            assert r["loads"] >= 5 and r["stores"] >= 4
