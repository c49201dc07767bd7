"""Compile the op's kernel for sm_90a without a GPU, under whichever Triton is on the path, and say what came out.

As tests/compiling.py, of which the fabric is: a variant goes through the op's own launch code.
"""

import re

import torch

from tests.compiling import CompilingFabric, block_scales, disassemblies, meta
from tests.ops.matmul_all_reduce.variants import VARIANTS
from tileweave import Plan
from tileweave.ops.contract import Like, Site
from tileweave.ops.matmul_all_reduce.check import Options, settle
from tileweave.ops.matmul_all_reduce.launch import Extras, fused

LOADS = {"wide": r"\bLDG\.E\.(\S+\.)?128\b", "narrow": r"\bLDG\.E\.(\S+\.)?U16\b"}


def compiled(
    world=4, m=64, n=1024, k=512, extras="brn", dtype="bfloat16", b_t=True, core="wgmma", blocks=None, **plan
) -> dict:
    """One variant; `plan` are fields of a Plan, blocks: the dtype of scales of blocks along K."""
    fabric, kind = CompilingFabric(world, core), getattr(torch, dtype)
    a, b = meta(m, k, dtype=kind), meta(n, k, dtype=kind).t() if b_t else meta(k, n, dtype=kind)
    shapes = zip("brn", ((n,), (m, n), (n,)), strict=True)
    wide = torch.bfloat16 if blocks else kind
    given = Extras(*(meta(*shape, dtype=wide) if name in extras else None for name, shape in shapes))
    like = Like.of(a), Like.of(b), *map(Like.of, given)
    scales = block_scales(m, n, k, blocks) if blocks else None
    of_scales = map(Like.of, scales or ())
    call, route = settle(Site.of(fabric), *like, Options(False, 1e-6, 0), Plan(core=core, **plan), *of_scales)
    with disassemblies() as texts:
        fused(fabric, call, a, b, given, route.plan, scales)
    counts = {what: len(re.findall(pattern, texts[-1])) for what, pattern in LOADS.items()}
    return {**fabric.reports[-1], **counts}


def report(name: str) -> dict:
    """One variant."""
    return compiled(**VARIANTS[name])
