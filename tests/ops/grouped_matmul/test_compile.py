"""grouped_matmul's kernels compile for sm_90a, under the newest Triton and the oldest supported one."""

from tests.compilers import SHARED_LIMIT, needs_triton, report, variants
from tests.ops.grouped_matmul.variants import VARIANTS

OLDEST = (
    "planned",
    "two multipliers",
    "one multiplier",
)

pytestmark = needs_triton


@variants(VARIANTS, OLDEST)
def test_a_variant_has_the_machine_instructions_it_is_made_for(triton, name):
    table, matmul = report("tests.ops.grouped_matmul.compiling", triton, name)
    for r in (table, matmul):
        assert r["target"] == "sm_90a" and r["stack"] == r["LDL"] == r["STL"] == 0 and r["shared"] <= SHARED_LIMIT
    assert table["HGMMA"] == 0
    assert matmul["HGMMA"] and matmul["UTMALDG"] and matmul["UTMASTG"] and not matmul["UTMAREDG"]
