"""The variants of the kernels that compiling.py compiles, which only a process with a Triton of its own may import."""

RING = dict(op="ring_attention")
ULYSSES = dict(op="ulysses_attention")
VARIANTS = {
    "ring, zigzag": dict(RING, causal=True, placement="zigzag"),
    "ring, contiguous, causal, bshd, fp16": dict(RING, causal=True, layout="bshd", dtype="float16"),
    "ring, eight ranks, D 64": dict(RING, world=8, dim=64),
    "ring, D 256": dict(RING, dim=256),
    "ring, one rank, few rows": dict(RING, world=1, rows=40),
    "ring, zigzag, two blocks": dict(RING, causal=True, placement="zigzag", schedule="two_blocks"),
    "ring, zigzag, packed": dict(RING, causal=True, placement="zigzag", packed=True),
    "Ulysses, causal": dict(ULYSSES, causal=True),
    "Ulysses, eight ranks, D 64, bshd, fp16": dict(ULYSSES, world=8, dim=64, dtype="float16", layout="bshd"),
    "Ulysses, packed, D 64": dict(ULYSSES, dim=64, packed=True),
    "Ulysses, few rows": dict(ULYSSES, rows=40),
}
