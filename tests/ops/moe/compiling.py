"""Compile the kernels of expert parallelism for sm_90a without a GPU, under whichever Triton is on the path.

    python -m tests.ops.moe.compiling     prints one JSON object: {variant: report}

Run in a subprocess, as tests/compiling.py, whose fabric compiles instead of launching.
"""

import json

import torch

from tests.compiling import CompilingFabric, meta
from tests.ops.moe.variants import COMBINE_VARIANTS, VARIANTS
from tileweave import Plan, TokenRoute
from tileweave.ops.moe import combine_launch
from tileweave.ops.moe.check import choose, choose_combine
from tileweave.ops.moe.launch import fused
from tileweave.ops.moe.routing import Experts, Sends


def route_of(world, row_weight) -> TokenRoute:
    """A route of 512 tokens to 1024 rows of 16 experts."""
    shapes = (16,), (1024,), (1024,), (512, world), (512, 2), (512, 2), (1,)
    words = [meta(*shape, dtype=torch.int32) for shape in shapes]
    return TokenRoute(*words[:3], row_weight, *words[3:], 512, 1024, None)


def report(dtype, world, products, transposed, tiling) -> dict:
    """One variant through the op's own launch code."""
    fabric, dtype = CompilingFabric(world), getattr(torch, dtype)
    x, w = meta(512, 256, dtype=dtype), meta(16, 256, 512, dtype=dtype)
    w = w.transpose(1, 2).contiguous().transpose(1, 2) if transposed else w
    plan = None if tiling is None else Plan("tma", "inter_sm", tiling[0], tiling[1], comm_sms=8)
    plan = choose(fabric, x, w, Experts(16 * world, world), plan).plan
    route = route_of(world, None)
    sends = Sends(meta(512, world, dtype=torch.long), 1024)
    fused(fabric, x, [w] * products, route, sends, 16, plan)
    return fabric.reports[-1]


def combine_report(dtype, world, weighted, transposed, tiling) -> dict:
    """A variant of moe_matmul_combine."""
    fabric, dtype = CompilingFabric(world), getattr(torch, dtype)
    h, w = meta(1024, 256, dtype=dtype), meta(16, 256, 512, dtype=dtype)
    w = w.transpose(1, 2).contiguous().transpose(1, 2) if transposed else w
    plan = None if tiling is None else Plan("register", "intra_sm", *tiling)
    plan = choose_combine(fabric, h, w, plan).plan
    combine_launch.fused(fabric, h, w, route_of(world, meta(1024, dtype=torch.float32) if weighted else None), plan)
    return fabric.reports[-1]


if __name__ == "__main__":
    found = {name: report(*variant) for name, variant in VARIANTS.items()}
    print(json.dumps(found | {name: combine_report(*variant) for name, variant in COMBINE_VARIANTS.items()}))
