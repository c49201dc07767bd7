"""The kernels compile for sm_90a, under the newest Triton (the one installed) and the oldest supported one."""

from tests.compilers import SHARED_LIMIT, needs_triton, report, variants
from tests.ops.sequence.variants import VARIANTS

OLDEST = (
    "ring, zigzag",
    "ring, contiguous, causal, bshd, fp16",
    "ring, D 256",
    "ring, zigzag, two blocks",
    "ring, zigzag, packed",
    "Ulysses, causal",
    "Ulysses, packed, D 64",
    "Ulysses, few rows",
)

pytestmark = needs_triton


@variants(VARIANTS, OLDEST)
def test_a_variant_has_the_machine_instructions_it_is_made_for(triton, name):
    """Workers have 40 registers beside two consumers of 232: a few numbers of theirs, and places of threads, lie on the
    stack, and are looked up some times a tile. The loops that multiply never touch it."""
    r = report("tests.ops.sequence.compiling", triton, name)
    assert r["target"] == "sm_90a"
    assert r["stack"] <= 128
    consumers = 1 if "few rows" in name else 2
    assert len(r["loops"]) >= 2 * consumers and all(stack == 0 for _, stack in r["loops"])
    assert r["shared"] <= SHARED_LIMIT
    assert r["UTMALDG"] >= 5 and r["UTMASTG"] >= (2 if "one rank" in name else 3) and r["UTMAREDG"] == 0
    assert r["USETMAXREG"] > 0
