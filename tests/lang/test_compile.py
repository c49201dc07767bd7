"""Every kernel compiles for sm_90a, under the newest Triton (the one installed) and the oldest supported one."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiling_variants import NAMES

ROOT = Path(__file__).parents[2]
SHARED_LIMIT = 227 * 1024
WITHOUT_ADDS = ("deterministic", "deterministic, shared tiles", "inter-SM, deterministic, shared tiles")
# Some words of worker warps, under the oldest Triton only; none of them in a loop over K.
SPILLED_BYTES = {("3.6.0", "tile (256, 128, 64), 4 stages, split 2"): 24}

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason=f"Triton has no wheel for {platform.system()} {platform.machine()}",
)


def run(triton_path: str | None) -> dict:
    """The reports of all variants under one Triton."""
    path = [p for p in (triton_path, str(ROOT / "src"), str(ROOT)) if p]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/compiling.py")], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def old_triton() -> str:
    """Where the oldest supported Triton lies."""
    path = os.environ.get("TILEWEAVE_OLD_TRITON", str(ROOT / ".cache/triton-3.6.0"))
    assert Path(path, "triton").is_dir(), f"the oldest supported Triton is not in {path}: `make test` puts it there"
    return path


@pytest.fixture(scope="module", params=["newest", "3.6.0"])
def reports(request):
    """All reports of one Triton."""
    found = run(None if request.param == "newest" else old_triton())
    versions = {r["triton"] for r in found.values()}
    assert len(versions) == 1 and (request.param == "newest") != (versions == {"3.6.0"}), versions
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_has_the_machine_instructions_it_is_made_for(reports, name):
    r = reports[name]
    assert r["target"] == "sm_90a"
    if r["stack"] > SPILLED_BYTES.get((r["triton"], name), 0):
        pytest.fail(f"registers are spilled: {r['stack']} bytes of stack, {r['STL']} stores, {r['LDL']} loads")
    assert r["shared"] <= SHARED_LIMIT
    if name == "words":
        assert r["multimem"] == ["multimem.ld_reduce", "multimem.red", "multimem.st"]
        return
    if name.startswith("probe"):
        assert (r["UTMALDG"] > 0) == (r["UTMASTG"] > 0) == ("TMA" in name)
        return
    wgmma = r["HGMMA"] + r["QGMMA"]
    assert wgmma >= 4, "a K step of 128 bytes is four wgmma"
    assert (r["QGMMA"] > 0) == ("float8" in name)
    assert r["UTMALDG"] >= 2 and r["UTMASTG"] >= 1
    adds = name not in WITHOUT_ADDS and not name.startswith("one shot")
    assert (r["UTMAREDG"] > 0) == adds, "adds go by TMA reduce"
    # Worker warps have 64 registers, one multiplier all that a thread can have, two 216 and 224.
    budgets = {64, 216, 224} if wgmma >= 8 else {64, 256}
    assert r["USETMAXREG"] > 0 and budgets <= set(r["setmaxnreg"])
