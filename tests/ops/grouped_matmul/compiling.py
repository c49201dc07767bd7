"""Compile grouped_matmul's kernels without a GPU, for sm_90a or, by tcgen05, for sm_100a, under
whichever Triton is on the path.

As tests/compiling.py, whose fabric compiles instead of launching. A report is of two launches: the table, the matmul.
"""

import torch

from tests.compiling import CompilingFabric, meta
from tests.ops.grouped_matmul.variants import VARIANTS
from tileweave import Plan
from tileweave.ops.contract import Like, Site
from tileweave.ops.grouped_matmul.check import check, choose
from tileweave.ops.grouped_matmul.launch import fused


def reports(dtype, rows, experts, k, n, transposed, tile, stages, core="wgmma") -> list[dict]:
    """One variant through the op's own launch code."""
    fabric, dtype = CompilingFabric(1, core), getattr(torch, dtype)
    x, w = meta(rows, k, dtype=dtype), meta(experts, k, n, dtype=dtype)
    w = w.transpose(1, 2).contiguous().transpose(1, 2) if transposed else w
    offsets = meta(experts, dtype=torch.int32)
    call = check(Like.of(x), Like.of(w), Like.of(offsets))
    plan = Plan(tile=tile, stages=stages, core=core) if tile else None
    plan = choose(Site.of(fabric), call, fabric.device, plan).plan
    fused(fabric, call, x, w, offsets, plan)
    return fabric.reports


def report(name: str) -> list[dict]:
    """One variant."""
    return reports(*VARIANTS[name])
