"""Compile the op's kernel for sm_90a without a GPU, under whichever Triton is on the path, and say what came out.

    python -m tests.ops.matmul_all_reduce.compiling     prints one JSON object: {variant: report}

As tests/compiling.py, of which the fabric is: a variant goes through the op's own launch code.
"""

import json
import sys

import torch

from tests.compiling import CompilingFabric, meta
from tests.ops.matmul_all_reduce.variants import VARIANTS
from tileweave import Plan
from tileweave.ops.matmul_all_reduce.check import Options, settle
from tileweave.ops.matmul_all_reduce.launch import Extras, fused
from tileweave.ops.matmul_reduce_scatter.check import Like, Site


def compiled(world=4, m=64, n=1024, k=512, extras="brn", dtype="bfloat16", b_t=True, **plan) -> dict:
    """One variant; `plan` are fields of a Plan."""
    fabric, kind = CompilingFabric(world), getattr(torch, dtype)
    a, b = meta(m, k, dtype=kind), meta(n, k, dtype=kind).t() if b_t else meta(k, n, dtype=kind)
    shapes = zip("brn", ((n,), (m, n), (n,)), strict=True)
    given = Extras(*(meta(*shape, dtype=kind) if name in extras else None for name, shape in shapes))
    like = Like.of(a), Like.of(b), *map(Like.of, given)
    call, route = settle(Site.of(fabric), *like, Options(False, 1e-6, 0), Plan(**plan))
    fused(fabric, call, a, b, given, route.plan)
    return fabric.reports[-1]


if __name__ == "__main__":
    print(json.dumps({name: compiled(**VARIANTS[name]) for name in sys.argv[1:] or VARIANTS}))
