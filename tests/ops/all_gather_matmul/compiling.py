"""Compile the op's kernel for sm_90a without a GPU, under whichever Triton is on the path, and say what came out.

As tests/compiling.py, of which the fabric is: a variant goes through the op's own launch code.
"""

import torch

from tests.compiling import CompilingFabric, block_scales, meta
from tests.ops.all_gather_matmul.variants import VARIANTS
from tileweave import Plan
from tileweave.ops.all_gather_matmul.check import settle
from tileweave.ops.all_gather_matmul.launch import fused
from tileweave.ops.contract import Like, Site


def compiled(
    world=4, ns=(1024,), bias=True, b_t=True, gathered=False, dtype="bfloat16", rows=1000, core="wgmma",
    blocks=None, **plan,
) -> dict:  # fmt: skip
    """One variant; `plan` are fields of a Plan, blocks: the dtype of scales of blocks along K."""
    fabric, kind = CompilingFabric(world, core), getattr(torch, dtype)
    k = 512 if blocks else 520 if kind.itemsize == 2 else 528
    a = meta(rows, k, dtype=kind)
    b = [meta(n, k, dtype=kind).t() if b_t else meta(k, n, dtype=kind) for n in ns]
    scaled = kind == torch.float8_e4m3fn and not blocks
    biases = [meta(n, dtype=torch.bfloat16 if scaled or blocks else kind) for n in ns] if bias else []
    scales = (meta(rows, 1, dtype=torch.float32), [meta(1, n, dtype=torch.float32) for n in ns]) if scaled else None
    if blocks:
        scales = block_scales(rows, 0, k, blocks)[0], [block_scales(0, n, k, blocks)[1] for n in ns]
    chosen = Plan(core=core, **{**dict(schedule="inter_sm", comm_sms=4 if world > 1 else 0), **plan})
    like = Like.of(a), tuple(map(Like.of, b)), tuple(map(Like.of, biases))
    of_scales = (Like.of(scales[0]), tuple(map(Like.of, scales[1]))) if scales else ()
    call, route = settle(Site.of(fabric), *like, gathered, chosen, 0, *of_scales)
    fused(fabric, call, a, b, biases, route.plan, scales)
    return fabric.reports[-1]


def report(name: str) -> dict:
    """One variant."""
    return compiled(**VARIANTS[name])
