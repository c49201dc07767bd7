"""The kernel compiles for sm_90a, under the newest Triton (the one installed) and the oldest supported one."""

from tests.compilers import SHARED_LIMIT, needs_triton, report, variants
from tests.ops.all_gather_matmul.variants import VARIANTS

OLDEST = (
    "inter-SM, three b, gathered, b not transposed",
    "intra-SM, everything, tiles shared",
    "none, three b, gathered, tiles shared",
    "slots beyond 2**31 elements",
    "copy engine",
    "by registers, fp16",
    "multimem",
    "float8, three b, gathered",
    "float8, by registers",
    "one shot, three b, gathered, tiles shared, eight ranks",
)

pytestmark = needs_triton


@variants(VARIANTS, OLDEST)
def test_a_variant_has_the_machine_instructions_it_is_made_for(triton, name):
    r = report("tests.ops.all_gather_matmul.compiling", triton, name)
    assert r["target"] == "sm_90a"
    assert (r["stack"], r["STL"], r["LDL"]) == (0, 0, 0), "registers are spilled"
    assert r["shared"] <= SHARED_LIMIT
    assert r["QGMMA" if "float8" in name else "HGMMA"] >= 4, "a K step of 128 bytes is four wgmma"
    assert r["UTMALDG"] >= 2 and r["UTMASTG"] >= 1 and r["UTMAREDG"] == 0
    assert r["USETMAXREG"] > 0
    assert r["multimem"] == (["multimem.st"] if "multimem" in name else [])
