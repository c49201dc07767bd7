"""The kernels of expert parallelism compile for sm_90a, under the newest Triton and the oldest supported one."""

from tests.compilers import SHARED_LIMIT, needs_triton, report, variants
from tests.ops.moe.variants import COMBINE_VARIANTS, ROUTE_VARIANTS, VARIANTS

OLDEST = (
    "gated, w transposed",
    "two multipliers",
    "tall",
    "combine, w transposed",
    "combine, one multiplier",
)

pytestmark = needs_triton


@variants([*VARIANTS, *COMBINE_VARIANTS], OLDEST)
def test_a_variant_has_the_machine_instructions_it_is_made_for(triton, name):
    r = report("tests.ops.moe.compiling", triton, name)
    assert r["target"] == "sm_90a" and r["shared"] <= SHARED_LIMIT
    assert r["stack"] == r["LDL"] == r["STL"] == 0, "registers are spilled"
    assert r["HGMMA"] and r["UTMALDG"] and not r["UTMAREDG"]
    assert bool(r["UTMASTG"]) == (name in VARIANTS), "only rows go home by stores from registers"


@variants(ROUTE_VARIANTS, tuple(ROUTE_VARIANTS)[:5])
def test_kernels_of_a_route_compile(triton, name):
    r = report("tests.ops.moe.compiling", triton, name)
    assert r["target"] == "sm_90a" and r["shared"] <= SHARED_LIMIT
    assert r["stack"] == r["LDL"] == r["STL"] == 0, "registers are spilled"
