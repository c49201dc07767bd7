"""The collectives' kernel compiles for sm_90a, under the newest Triton and the oldest supported one."""

from tests.compilers import needs_triton, report, variants
from tests.ops.compiling_collectives_variants import VARIANTS

MOVING = ("all_gather", "all_to_all")
OLDEST = (
    "all_gather",
    "all_gather, 2-byte",
    "all_to_all",
    "reduce_scatter, float32, mean",
    "all_reduce, one shot",
    "all_reduce, two shots",
    "beyond 2**31 elements",
)

pytestmark = needs_triton


@variants(VARIANTS, OLDEST)
def test_a_variant_has_the_accesses_it_is_made_for(triton, name):
    launches = report("tests.ops.compiling_collectives", triton, name)
    assert len(launches) == (2 if "two shots" in name else 1)
    for i, r in enumerate(launches):
        assert r["target"] == "sm_90a"
        assert r["registers"] <= 128, "65536 registers for 512 threads"
        # ptxas puts away a few values that only flags need rather than use more than a round number of registers.
        assert r["stack"] <= 32 and r["LDL"] <= 6 and r["STL"] <= 6, "registers are spilled"
        # 16-byte accesses: the layout of a tile, and, where parts are moved and not summed, as many again.
        if "-byte" in name:
            assert r["loads"] == r["stores"] == 0
        elif name.startswith(MOVING) or i == 1:
            assert r["loads"] >= 8 and r["stores"] >= 8
        else:
            assert r["loads"] >= 5 and r["stores"] >= 4
