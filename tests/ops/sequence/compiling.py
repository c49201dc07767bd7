"""Compile the attention ops' kernels for sm_90a without a GPU, under whichever Triton is on the path.

As tests/compiling.py, of which the fabric is: a variant goes through the op's own launch code. A report also has
`loops`: of each innermost loop that multiplies, how many wgmma it has and how often it touches the stack; by tcgen05 of
those that multiply and of those that load the sums, other warps'.
"""

import importlib
import re
from dataclasses import replace

import torch

from tests.compiling import CompilingFabric, disassemblies, meta
from tests.ops.sequence.variants import VARIANTS
from tileweave.ops.contract import Site
from tileweave.ops.sequence.contract import likes
from tileweave.ops.sequence.launch import fused

COUNTED = re.compile(r"\b(HGMMA|UTCHMMA|LDTM)\b")


def multiplying_loops(sass) -> list[tuple[int, int]]:
    """(products or loads of sums, stack accesses) of the innermost loops that have any: from a branch's target up to
    it. What lies in between belongs to one warp partition: a branch from a wait's slow path, at the end of the code,
    closes no loop."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+([^;]*);", sass)]
    loops = []
    for at, text in code:
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) <= at:
            body = [x for place, x in code if int(target[1], 16) <= place <= at]
            if any(COUNTED.search(x) for x in body) and not any("USETMAXREG" in x or "EXIT" in x for x in body):
                loops.append((int(target[1], 16), at, body))
    inner = [
        body
        for first, last, body in loops
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b, _ in loops)
    ]
    return [
        (sum(bool(COUNTED.search(x)) for x in b), sum(bool(re.search(r"\b(STL|LDL)", x)) for x in b)) for b in inner
    ]


def compiled(
    op,
    world=4,
    rows=1000,
    dim=128,
    dtype="bfloat16",
    causal=False,
    layout="bhsd",
    placement=None,
    packed=False,
    core="wgmma",
    **planned,
) -> dict:
    """One variant; `planned`: what its plan has otherwise."""
    fabric, kind = CompilingFabric(world, core), getattr(torch, dtype)
    cu_seqlens = meta(9, dtype=torch.int32) if packed else None
    q, k, v = (
        meta(1 if packed else 2, *((h, rows) if layout == "bhsd" else (rows, h)), dim, dtype=kind) for h in (32, 8, 8)
    )
    check, launch = (importlib.import_module(f"tileweave.ops.{op}.{name}") for name in ("check", "launch"))
    more = [placement or "contiguous"] if op == "ring_attention" else []
    call, route = check.settle(Site.of(fabric), *likes(q, k, v, cu_seqlens), causal, None, layout, *more, None)
    with disassemblies() as texts:
        fused(launch.prepare, fabric, call, q, k, v, replace(route.plan, **planned), cu_seqlens)
    return {**fabric.reports[-1], "loops": [loop for sass in texts for loop in multiplying_loops(sass)]}


def report(name: str) -> dict:
    """One variant."""
    return compiled(**VARIANTS[name])
