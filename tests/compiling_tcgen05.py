"""Compile the ops' kernels that multiply by tcgen05, for sm_100a, without a GPU: as tests/compiling.py, by its fabric.

NAMES are the variants', by op; only a process with a Triton of its own may call `report`.
"""

import torch

from tileweave import Plan

FP8, FP4 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2
REDUCE_SCATTER = {
    "planned": dict(),
    "smallest tile, deterministic, shared tiles, eight ranks": dict(
        tile=(128, 64, 64), stages=7, split=2, deterministic=True, world=8, rows=128, n=512
    ),
    "largest tile, fp16 average, a transposed, b not": dict(
        tile=(128, 256, 64), stages=3, dtype=torch.float16, transposed=(True, False), op="avg"
    ),
    "float8 operands": dict(dtype=FP8, scaled=True),
    "mxfp8": dict(dtype=FP8, blocks=torch.float8_e8m0fnu),
    "mxfp8, inter-SM, shared tiles": dict(
        dtype=FP8,
        blocks=torch.float8_e8m0fnu,
        schedule="inter_sm",
        comm_sms=8,
        tile=(128, 128, 128),
        stages=4,
        split=2,
        rows=128,
    ),
    "nvfp4": dict(dtype=FP4, blocks=FP8),
    "nvfp4, one shot": dict(dtype=FP4, blocks=FP8, rows=32),
    "inter-SM, float32 result": dict(schedule="inter_sm", comm_sms=8, tile=(128, 128, 64), stages=4, out=torch.float32),
    "one shot, few rows": dict(schedule="one_shot", tile=(128, 128, 64), stages=5, rows=16),
}
ALL_REDUCE = {
    "two shots, largest tile": dict(
        schedule="intra_sm", tile=(128, 256, 64), stages=3, m=4096, n=4096, extras="br", dtype="float16"
    ),
    "mxfp8, two shots": dict(
        schedule="intra_sm",
        tile=(128, 128, 128),
        stages=4,
        m=1000,
        n=4096,
        extras="br",
        dtype="float8_e4m3fn",
        blocks=torch.float8_e8m0fnu,
    ),
    "mxfp8, inter-SM": dict(
        schedule="inter_sm",
        comm_sms=8,
        tile=(128, 128, 128),
        stages=4,
        m=1000,
        n=4096,
        dtype="float8_e4m3fn",
        blocks=torch.float8_e8m0fnu,
    ),
    "nvfp4, one shot": dict(schedule="one_shot", tile=(128, 128, 128), stages=4, dtype="float4_e2m1fn_x2", blocks=FP8),
}
ALL_GATHER = {
    "three b, gathered, shared tiles": dict(
        ns=(1024, 136, 64), gathered=True, tile=(128, 128, 64), stages=4, split=2, rows=100
    ),
    "float8 operands, largest tile": dict(dtype="float8_e4m3fn", tile=(128, 256, 128), stages=3, b_t=True),
    "mxfp8, three b, gathered, shared tiles": dict(
        ns=(1024, 136, 64),
        gathered=True,
        dtype="float8_e4m3fn",
        blocks=torch.float8_e8m0fnu,
        tile=(128, 128, 128),
        stages=4,
        split=2,
        rows=100,
    ),
    "mxfp8, intra-SM": dict(
        schedule="intra_sm",
        dtype="float8_e4m3fn",
        blocks=torch.float8_e8m0fnu,
        tile=(128, 128, 128),
        stages=4,
    ),
    "nvfp4": dict(dtype="float4_e2m1fn_x2", blocks=FP8, tile=(128, 128, 128), stages=4),
}
GROUPED = {
    "largest tile, planned": dict(
        dtype="bfloat16", rows=32768, experts=32, k=7168, n=2048, transposed=False, tile=None, stages=0
    ),
    "smallest tile, fp16, w transposed": dict(
        dtype="float16", rows=100, experts=512, k=256, n=256, transposed=True, tile=(128, 64, 64), stages=6
    ),
}
DISPATCH = {
    "gated, largest tile": dict(gated=True, silu=False, transposed=False, tiling=((128, 256, 64), 3)),
    "gated, w transposed": dict(gated=True, silu=False, transposed=True, tiling=((128, 128, 64), 4)),
}
COMBINE = {
    "largest tile": dict(weighted=True, transposed=False, tiling=((128, 256, 64), 3)),
    "w transposed": dict(weighted=True, transposed=True, tiling=((128, 128, 64), 4)),
}
OPS = {
    "matmul_reduce_scatter": REDUCE_SCATTER, "matmul_all_reduce": ALL_REDUCE, "all_gather_matmul": ALL_GATHER,
    "grouped_matmul": GROUPED, "moe_dispatch_matmul": DISPATCH, "moe_matmul_combine": COMBINE,
}  # fmt: skip
ATTENTION = {
    "causal, log-sum-exp, grouped heads": dict(dim=128, causal=True, return_lse=True, kv_heads=2),
    "heads of 64, fp16, bshd": dict(dim=64, dtype="float16", layout="bshd"),
    "few rows": dict(dim=128, rows=16),
}
SEQUENCE = {
    "ring_attention": {"zigzag, two blocks": dict(causal=True, placement="zigzag", schedule="two_blocks")},
    "ulysses_attention": {"packed, causal, heads of 64": dict(dim=64, causal=True, packed=True)},
}
ATTENTION_NAMES = tuple(f"attention: {name}" for name in ATTENTION)
SEQUENCE_NAMES = tuple(f"{op}: {name}" for op, variants in SEQUENCE.items() for name in variants)
NAMES = tuple(f"{op}: {name}" for op, variants in OPS.items() for name in variants)
PLANS = ("tile", "stages", "split", "schedule", "comm_sms")


def report(name: str) -> dict | list[dict]:
    """One variant, or one of the collectives; of matmul_reduce_scatter, without any field of a Plan, the planner's."""
    from tests import compiling
    from tests.ops.all_gather_matmul.compiling import compiled as gather
    from tests.ops.attention.compiling import compiled as attention
    from tests.ops.compiling_collectives import report as collectives
    from tests.ops.grouped_matmul.compiling import reports as grouped
    from tests.ops.matmul_all_reduce.compiling import compiled as reduce
    from tests.ops.moe.compiling import combine_report, dispatch_report
    from tests.ops.sequence.compiling import compiled as sequence

    op, variant = name.split(": ")
    if op == "collectives":
        return collectives(variant, "tcgen05")
    if op == "attention":
        return attention(core="tcgen05", **ATTENTION[variant])
    if op in SEQUENCE:
        return sequence(op, core="tcgen05", **SEQUENCE[op][variant])
    options = dict(OPS[op][variant])
    if op == "matmul_reduce_scatter":
        fields = {key: options.pop(key) for key in PLANS if key in options}
        plan = Plan(core="tcgen05", **fields) if fields else None
        return compiling.reduce_scatter(plan=plan, core="tcgen05", **options)
    if op == "grouped_matmul":
        return grouped(core="tcgen05", **options)[-1]
    if op in ("moe_dispatch_matmul", "moe_matmul_combine"):
        made = dispatch_report if op == "moe_dispatch_matmul" else combine_report
        return made("bfloat16", 8, core="tcgen05", **options)
    return {"matmul_all_reduce": reduce, "all_gather_matmul": gather}[op](core="tcgen05", **options)
