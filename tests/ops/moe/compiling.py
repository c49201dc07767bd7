"""Compile moe_dispatch_matmul's kernel for sm_90a without a GPU, under whichever Triton is on the path.

    python -m tests.ops.moe.compiling     prints one JSON object: {variant: report}

Run in a subprocess, as tests/compiling.py, whose fabric compiles instead of launching.
"""

import json

import torch

from tests.compiling import CompilingFabric, meta
from tests.ops.moe.variants import VARIANTS
from tileweave import Plan, TokenRoute
from tileweave.ops.moe.check import choose
from tileweave.ops.moe.launch import fused
from tileweave.ops.moe.routing import Experts, Sends


def report(dtype, world, products, transposed, tiling) -> dict:
    """One variant through the op's own launch code."""
    fabric, dtype = CompilingFabric(world), getattr(torch, dtype)
    x, w = meta(512, 256, dtype=dtype), meta(16, 256, 512, dtype=dtype)
    w = w.transpose(1, 2).contiguous().transpose(1, 2) if transposed else w
    plan = None if tiling is None else Plan("tma", "inter_sm", tiling[0], tiling[1], comm_sms=8)
    plan = choose(fabric, x, w, Experts(16 * world, world), plan).plan
    words = [meta(*shape, dtype=torch.int32) for shape in ((16,), (1024,), (512, world), (512, 2), (1,))]
    route = TokenRoute(words[0], words[1], None, *words[2:], 512, 512, None)
    sends = Sends(meta(512, world, dtype=torch.long), 1024)
    fused(fabric, x, [w] * products, route, sends, 16, plan)
    return fabric.reports[-1]


if __name__ == "__main__":
    print(json.dumps({name: report(*variant) for name, variant in VARIANTS.items()}))
