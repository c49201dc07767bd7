"""Compile the collectives' kernel for sm_90a without a GPU, under whichever Triton is on the path.

    python -m tests.ops.compiling_collectives     prints one JSON object: {variant: report}

Run in a subprocess, as tests/compiling.py, whose fabric compiles instead of launching.
"""

import json
import re
import sys

import torch

import tests.compiling
from tests.ops.compiling_collectives_variants import VARIANTS
from tileweave.bench import compile as reports
from tileweave.ops.collectives.check import check
from tileweave.ops.collectives.launch import prepare

ACCESSES = {"loads": r"\bLDG\.E\.(\S+\.)?128\b", "stores": r"\bSTG\.E\.(\S+\.)?128\b"}


def main() -> None:
    """Every variant through the op's own launch code."""
    reports.ELEMENT_TYPES.update({torch.int8: "i8", torch.int16: "i16"})
    disassembled, texts = reports._disassembled, []

    def kept(cubin):
        usage, sass = disassembled(cubin)
        texts.append(sass)
        return usage, sass

    reports._disassembled = kept
    found = {}
    for name in sys.argv[1:] or VARIANTS:
        world, dtype, shape, op, options = VARIANTS[name]
        fabric = tests.compiling.CompilingFabric(world)
        texts.clear()
        x = tests.compiling.meta(*shape, dtype=getattr(torch, dtype))
        prepare(fabric, check(op, world, x, *options)).launch(fabric, x)
        assert len(texts) == len(fabric.reports)
        for i, (report, sass) in enumerate(zip(fabric.reports, texts, strict=True)):
            counts = {what: len(re.findall(pattern, sass)) for what, pattern in ACCESSES.items()}
            found[f"{name}, launch {i}" if len(texts) > 1 else name] = {**report, **counts}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
