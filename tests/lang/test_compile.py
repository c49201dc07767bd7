"""Every kernel compiles for sm_90a, under the newest Triton (the one installed) and the oldest supported one."""

import pytest

from tests.compilers import SHARED_LIMIT, needs_triton, report, variants
from tests.compiling_variants import NAMES

WITHOUT_ADDS = ("deterministic", "deterministic, shared tiles", "inter-SM, deterministic, shared tiles")
# Some words of worker warps, under the oldest Triton only; none of them in a loop over K.
SPILLED_BYTES = {("3.6.0", "tile (256, 128, 64), 4 stages, split 2"): 24}

OLDEST = (
    "deterministic, shared tiles",
    "float8 operands",
    "average, a transposed, b not, shared tiles",
    "one rank, shared tiles",
    "slots beyond 2**31 elements",
    "inter-SM, add",
    "inter-SM, float32 result, one multiplier",
    "one shot, float32 result, shared tiles, a transposed, b not",
    "tile (64, 64, 64), 10 stages, split 2",
    "tile (256, 128, 64), 4 stages, split 2",
    "tile (128, 256, 64), 4 stages, split 1",
    "words",
    "probe: the naive way",
    "probe: flags",
    "probe: mbarriers",
)

pytestmark = needs_triton


@variants(NAMES, OLDEST)
def test_a_variant_has_the_machine_instructions_it_is_made_for(triton, name):
    r = report("tests.compiling", triton, name)
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
