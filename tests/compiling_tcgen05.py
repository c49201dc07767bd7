"""Compile the ops' kernels that multiply by tcgen05, for sm_100a, without a GPU: as tests/compiling.py, by its fabric.

NAMES are the variants', by op; only a process with a Triton of its own may call `report`.
"""

import torch

from tileweave import Plan

FP8 = torch.float8_e4m3fn
REDUCE_SCATTER = {
    "planned": dict(),
    "smallest tile, deterministic, shared tiles, eight ranks": dict(
        tile=(128, 64, 64), stages=7, split=2, deterministic=True, world=8, rows=128, n=512
    ),
    "largest tile, fp16 average, a transposed, b not": dict(
        tile=(128, 256, 64), stages=3, dtype=torch.float16, transposed=(True, False), op="avg"
    ),
    "float8 operands": dict(dtype=FP8, scaled=True),
    "inter-SM, float32 result": dict(schedule="inter_sm", comm_sms=8, tile=(128, 128, 64), stages=4, out=torch.float32),
    "one shot, few rows": dict(schedule="one_shot", tile=(128, 128, 64), stages=5, rows=16),
}
NAMES = tuple(f"matmul_reduce_scatter: {name}" for name in REDUCE_SCATTER)


def report(name: str) -> dict:
    """One variant; options that are fields of a Plan make one, without any it is the planner's."""
    from tests import compiling

    op, variant = name.split(": ")
    options = dict({"matmul_reduce_scatter": REDUCE_SCATTER}[op][variant])
    fields = {key: options.pop(key) for key in ("tile", "stages", "split", "schedule", "comm_sms") if key in options}
    plan = Plan(core="tcgen05", **fields) if fields else None
    compiled = {"matmul_reduce_scatter": compiling.reduce_scatter}[op]
    return compiled(plan=plan, core="tcgen05", **options)
