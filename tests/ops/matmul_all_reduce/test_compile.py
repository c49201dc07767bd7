"""The kernel compiles for sm_90a, under the newest Triton (the one installed) and the oldest supported one."""

from tests.compilers import SHARED_LIMIT, needs_triton, report, variants
from tests.ops.matmul_all_reduce.variants import VARIANTS

OLDEST = (
    "one shot, everything, eight ranks",
    "one shot, shared tiles, fp16",
    "two shots, b not transposed, eight ranks",
    "two shots, (64, 256, 64), shared tiles",
    "slots beyond 2**31 elements",
    "inter-SM",
    "inter-SM, multimem, (64, 128, 64), shared tiles",
)

pytestmark = needs_triton


@variants(VARIANTS, OLDEST)
def test_a_variant_has_the_machine_instructions_it_is_made_for(triton, name):
    r = report("tests.ops.matmul_all_reduce.compiling", triton, name)
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
