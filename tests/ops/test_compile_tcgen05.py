"""The ops' kernels compile for sm_100a, by tcgen05, under the newest Triton (the one installed) and the oldest one."""

from tests.compilers import NEWEST, SHARED_LIMIT, needs_triton, report, variants
from tests.compiling_tcgen05 import ATTENTION_NAMES, NAMES, SEQUENCE_NAMES

KINDS = {"UTCQMMA": ("float8", "mxfp8"), "UTCOMMA": ("nvfp4",)}  # words of names: products of 8 and of 4 bits
OLDEST = (
    "matmul_reduce_scatter: mxfp8",
    "matmul_reduce_scatter: nvfp4, one shot",
    "matmul_reduce_scatter: smallest tile, deterministic, shared tiles, eight ranks",
    "matmul_all_reduce: two shots, largest tile",
    "matmul_all_reduce: mxfp8, two shots",
    "matmul_all_reduce: nvfp4, one shot",
    "all_gather_matmul: float8 operands, largest tile",
    "all_gather_matmul: mxfp8, three b, gathered, shared tiles",
    "all_gather_matmul: nvfp4",
    "grouped_matmul: smallest tile, fp16, w transposed",
    "moe_dispatch_matmul: gated, largest tile",
    "moe_matmul_combine: w transposed",
)

pytestmark = needs_triton


@variants(NAMES, OLDEST)
def test_a_variant_multiplies_by_tcgen05_alone(triton, name):
    r = report("tests.compiling_tcgen05", triton, name)
    assert r["target"] == "sm_100a"
    assert (r["stack"], r["STL"], r["LDL"]) == (0, 0, 0), "registers are spilled"
    assert r["shared"] <= SHARED_LIMIT
    assert (r["HGMMA"], r["QGMMA"]) == (0, 0), "there is no wgmma on this GPU"
    kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "UTCHMMA")
    assert [each for each in ("UTCHMMA", *KINDS) if r[each]] == [kind] and r[kind] == 4, "a K step of 128 bytes is four"
    assert r["UTCCP"] == (2 if "mxfp8" in name else 8 if "nvfp4" in name else 0), "512 bytes of scales each"
    columns = 128 if "smallest" in name else 512 if "largest" in name or r["UTCCP"] else 256
    assert r["tensor_columns"] == columns, "two accumulators, and scales"
    assert {128, 256} <= set(r["setmaxnreg"]), "of worker warps, and of the multiplier"
    rows = name.startswith("moe_matmul_combine")  # which go home by stores from registers
    assert r["UTMALDG"] >= 2 and (r["UTMASTG"] >= 1) != rows


@variants(ATTENTION_NAMES, ("attention: heads of 64, fp16, bshd",))
def test_attention_multiplies_by_tcgen05_alone(triton, name):
    r = report("tests.compiling_tcgen05", triton, name)
    assert r["target"] == "sm_100a"
    assert (r["stack"], r["STL"], r["LDL"]) == (0, 0, 0), "registers are spilled"
    assert r["shared"] <= SHARED_LIMIT and (r["HGMMA"], r["QGMMA"]) == (0, 0)
    consumers, dim = 1 if "few" in name else 2, 64 if "64" in name else 128
    # 16 rows of K and columns of Q at a time; the first S, another one, O += P V of a block, of the last one
    assert r["UTCHMMA"] == consumers * 2 * (dim // 16 + 128 // 16)
    assert r["tensor_columns"] == 256 * consumers, "S, with P in its place, and O, as a power of two"
    assert r["UTMALDG"] >= 3 and r["UTMASTG"] >= consumers


@variants(SEQUENCE_NAMES, SEQUENCE_NAMES[1:])
def test_attention_between_ranks_multiplies_by_tcgen05_alone(triton, name):
    """As for sm_90a, a few numbers of workers, and places of threads, lie on the stack. The loops of issuers and
    consumers never touch it; those of Triton 3.6 may look a thread's place up, ahead of what one thread does."""
    r = report("tests.compiling_tcgen05", triton, name)
    assert r["target"] == "sm_100a"
    assert r["stack"] <= 128 and r["shared"] <= SHARED_LIMIT and (r["HGMMA"], r["QGMMA"]) == (0, 0)
    assert r["UTCHMMA"] == 2 * 2 * ((64 if "64" in name else 128) // 16 + 128 // 16) and r["tensor_columns"] == 512
    assert len(r["loops"]) == 6, "an issuer's, and a consumer's with and without a mask, of each"
    assert all(stack <= (0 if triton == NEWEST else 4) for _, stack in r["loops"])
    assert {56, 200} <= set(r["setmaxnreg"]), "of worker warps, and of consumers"
    assert r["UTMALDG"] >= 5 and r["UTMASTG"] >= 3


def test_a_collective_that_sums():
    for r in report("tests.compiling_tcgen05", NEWEST, "collectives: all_reduce, two shots"):
        assert r["target"] == "sm_100a" and r["tensor_columns"] == 0
        assert r["stack"] <= 24, "a few values that only flags need, as for sm_90a"
