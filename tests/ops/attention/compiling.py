"""Compile the kernel for sm_90a without a GPU, under whichever Triton is on the path, and say what came out.

As tests/compiling.py, of which the fabric is: a variant goes through the op's own launch code.
"""

import re

import torch

from tests.compiling import CompilingFabric, disassemblies, meta
from tests.ops.attention.variants import VARIANTS
from tileweave.ops.attention import Tiling, attention

LOOP = re.compile(r"\b(MUFU\.EX2|WARPGROUP\.DEPBAR\.LE gsb0, 0x[01])")


def compiled(dim, rows=4096, kv_heads=8, dtype="bfloat16", tiling=None, layout="bhsd", core="wgmma", **options) -> dict:
    """One variant; `tiling` are fields of a Tiling."""
    fabric, kind, heads = CompilingFabric(1, core), getattr(torch, dtype), 8
    shapes = ((2, heads, rows, dim), (2, kv_heads, 4096, dim), (2, kv_heads, 4096, dim))
    order = (0, 1, 2, 3) if layout == "bhsd" else (0, 2, 1, 3)
    given = [meta(*(shape[i] for i in order), dtype=kind) for shape in shapes]
    with disassemblies() as texts:
        attention(fabric, *given, layout=layout, tiling=None if tiling is None else Tiling(**tiling), **options)
    return {**fabric.reports[-1], "loops": loops(texts[-1])}


def loops(sass: str) -> list[int]:
    """For each loop over blocks, how many exponentials lie between the wait for S and that for O: hidden behind P V."""
    found, inside = [], None
    for word in LOOP.findall(sass):
        if word.endswith("0x1"):
            inside = 0
        elif word.endswith("0x0") and inside is not None:
            found.append(inside)
            inside = None
        elif word.startswith("MUFU") and inside is not None:
            inside += 1
    return found


def report(name: str) -> dict:
    """One variant."""
    return compiled(**VARIANTS[name])
