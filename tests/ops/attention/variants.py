"""The variants of the kernel that compiling.py compiles, which only a process with a Triton of its own may import."""

D128, D64, D256 = dict(dim=128), dict(dim=64), dict(dim=256)
VARIANTS = {
    "full": D128,
    "causal, log-sum-exp, grouped heads": dict(D128, causal=True, return_lse=True, kv_heads=2),
    "fp16, bshd": dict(D128, dtype="float16", layout="bshd"),
    "few rows": dict(D128, rows=16, return_lse=True),
    "turns": dict(D128, tiling=dict(take_turns=True)),
    "narrow blocks": dict(D128, tiling=dict(bn=64, stages=10)),
    "one query buffer": dict(D128, tiling=dict(stages=6, q_bufs=1)),
    "heads of 64": dict(D64, return_lse=True),
    "heads of 256": dict(D256, return_lse=True),
    "heads of 256, fp16, few rows": dict(D256, rows=16, dtype="float16"),
}
