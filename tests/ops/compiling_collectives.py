"""Compile the collectives' kernel for sm_90a without a GPU, under whichever Triton is on the path.

As tests/compiling.py, whose fabric compiles instead of launching.
"""

import re

import torch

from tests.compiling import CompilingFabric, disassemblies, meta
from tests.ops.compiling_collectives_variants import VARIANTS
from tileweave.ops.collectives.check import check
from tileweave.ops.collectives.launch import prepare

ACCESSES = {"loads": r"\bLDG\.E\.(\S+\.)?128\b", "stores": r"\bSTG\.E\.(\S+\.)?128\b"}


def report(name: str, core: str = "wgmma") -> list[dict]:
    """One variant through the op's own launch code, for the GPUs that have `core`: a report for each launch."""
    world, dtype, shape, op, options = VARIANTS[name]
    fabric = CompilingFabric(world, core)
    with disassemblies() as texts:
        x = meta(*shape, dtype=getattr(torch, dtype))
        prepare(fabric, check(op, world, x, *options)).launch(fabric, x)
    return [
        {**each, **{what: len(re.findall(pattern, sass)) for what, pattern in ACCESSES.items()}}
        for each, sass in zip(fabric.reports, texts, strict=True)
    ]
