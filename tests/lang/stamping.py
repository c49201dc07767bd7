"""Kernels with timestamps, compiled for sm_90a without a GPU. Imported by tests/compile_server.py."""

import re
from unittest import mock

import triton

from tests import compiling
from tileweave.bench import compile as compiler
from tileweave.lang.stamps import rebuilt, stamped, warps_of

VARIANTS = {"roles": "inter-SM, float32 result, one multiplier", "no roles": "probe: flags"}


def report(name: str) -> dict:
    """A kernel with stamps beside the same without."""
    kernels, compile_kernel = [], triton.compile

    def kept(*args, **options):
        kernels.append(compile_kernel(*args, **options))
        return kernels[-1]

    with mock.patch.object(triton, "compile", kept):
        compiling.report(VARIANTS[name])
    (compiled,) = kernels
    ptx = compiled.asm["ptx"]
    text, sites = stamped(ptx, 0x7F0123456800)
    lines = iter(text.splitlines())
    builds = [compiled.asm["cubin"], *(rebuilt(compiled, each).kernel for each in (ptx, text))]
    usage, (released, *sass) = zip(*map(compiler._disassembled, builds), strict=True)
    return {
        "triton": triton.__version__,
        "unchanged": sass[0] == released,
        "only stamps are added": all(line in lines for line in ptx.splitlines()),
        "stack": [int(re.search(r"STACK:(\d+)", each)[1]) for each in usage[1:]],
        "clocks": [len(re.findall("SR_GLOBALTIMERLO", each)) for each in sass],
        "waits": [len(re.findall(r"SYNCS.PHASECHK.TRANS64.TRYWAIT", each)) for each in sass],
        "warps": warps_of(ptx),
        "sites": [[site.role, site.kind, site.place] for site in sites],
    }
