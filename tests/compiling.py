"""Compile kernels for sm_90a without a GPU, under whichever Triton is on the path, and say what came out.

A variant of an op goes through the op's own launch code on a fabric that compiles instead of launching, so what is
compiled is what would run. Imported by tests/compile_server.py.
"""

import contextlib
from dataclasses import replace
from unittest import mock

import torch

from tests.compiling_variants import tiling_name
from tileweave import Plan
from tileweave.bench import compile as compiler
from tileweave.bench.probe.copies import NAIVE, Arena, Copy
from tileweave.bench.probe.kernel import mbarrier_kernel
from tileweave.bench.probe.latency import HandOver
from tileweave.fabric.base import BLOCK_WORDS, STATE_WORDS, Channel, Fabric
from tileweave.ops.contract import Like, Site
from tileweave.ops.descriptors import describe
from tileweave.ops.matmul_reduce_scatter.check import settle
from tileweave.ops.matmul_reduce_scatter.launch import fused
from tileweave.planner.tiling import TILINGS


def meta(*shape, dtype=torch.bfloat16):
    """A tensor without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


@contextlib.contextmanager
def disassemblies():
    """A list that gets the machine code of whatever is compiled meanwhile."""
    texts, disassembled = [], compiler._disassembled

    def kept(cubin):
        usage, sass = disassembled(cubin)
        texts.append(sass)
        return usage, sass

    with mock.patch.object(compiler, "_disassembled", kept):
        yield texts


class CompilingFabric(Fabric):
    """A fabric whose launches are compilations for the GPUs that have `core`; rank 0 of `world_size`. All tensors are
    "meta": without memory."""

    backend, rank, sms, device = "virtual", 0, 132, torch.device("meta")

    def __init__(self, world_size, core="wgmma"):
        self.world_size, self.cores, self.reports = world_size, (core,), []

    def refusal(self):
        return None

    def multicast_refusal(self):
        return None

    def gather_values(self, value):
        return [value] * self.world_size

    def channel(self, op, adding_bytes, staging_bytes):
        arenas = [meta(self.world_size, 2 * n + 256, dtype=torch.uint8) for n in (adding_bytes, staging_bytes)]
        flags, state = meta(self.world_size, BLOCK_WORDS, dtype=torch.int32), meta(STATE_WORDS, dtype=torch.int32)
        return Channel(op, flags, state, *arenas, 1_000_000, multicast=lambda view: 1 << 40)

    def launch(self, kernel, grid, args, *, num_warps, variant=None, copies=()):
        capability = 100 if self.cores == ("tcgen05",) else 90
        self.reports.append(compiler.compile_report(kernel, args, num_warps, capability))

    def _reduce_scatter(self, x):
        raise NotImplementedError

    def all_gather(self, x):
        raise NotImplementedError

    def _agree(self, call):
        raise NotImplementedError


def block_scales(m, n, k, dtype):
    """Scales of blocks along K, of so many elements, of both operands."""
    columns = k // 32 if dtype == torch.float8_e8m0fnu else 2 * k // 16
    return tuple(meta(-(-rows // 128) * 128, columns, dtype=dtype) for rows in (m, n))


def reduce_scatter(
    world=4,
    dtype=torch.bfloat16,
    transposed=(False, True),
    bias=True,
    plan=None,
    rows=256,
    n=1024,
    scaled=False,
    blocks=None,
    core="wgmma",
    **options,
) -> dict:
    """One variant of matmul_reduce_scatter, through the op; blocks: the dtype of scales of blocks along K."""
    fabric = CompilingFabric(world, core)
    a, b = meta(rows * world, 512, dtype=dtype), meta(512, n, dtype=dtype)
    a, b = (x.t().contiguous().t() if flag else x for x, flag in zip((a, b), transposed, strict=True))
    extra = meta(n, dtype=torch.bfloat16 if scaled or blocks else dtype) if bias else None
    scales = (meta(rows * world, 1, dtype=torch.float32), meta(1, n, dtype=torch.float32)) if scaled else (None, None)
    if blocks:
        scales = block_scales(rows * world, n, 512, blocks)
    deterministic = options.get("deterministic", False)
    like = Like.of(a), Like.of(b), options.get("op", "sum"), Like.of(extra)
    of_scales = map(Like.of, scales)
    call, route = settle(Site.of(fabric), *like, deterministic, options.get("out"), plan, 0, *of_scales)
    fused(fabric, call, a, b, extra, route.plan, scales if scaled or blocks else None)
    return fabric.reports[0]


def words() -> dict:
    """The primitives that no op uses yet."""
    from tests.lang import words_kernel as w

    x, pt = meta(2, 1024), describe(meta(2, 64, 64), (1, 64, 64))
    flags = meta(2, BLOCK_WORDS, dtype=torch.int32)
    return compiler.compile_report(w.every_primitive, (0, pt, x, 1 << 40, 1024, flags, BLOCK_WORDS, 1_000_000, 2), 4)


def launched(call) -> dict:
    """What is launched on one of two ranks."""
    fabric = CompilingFabric(2)
    call(fabric)
    return fabric.reports[0]


def probed(copy) -> dict:
    """A copy of `tileweave probe`."""
    return launched(lambda fabric: Arena(fabric, 4 << 20).enqueue(copy, 3))


INTER_SM = Plan(schedule="inter_sm", comm_sms=8)
ONE_SHOT = Plan(schedule="one_shot", tile=(64, 128, 64), stages=8)
VARIANTS = {
    "add": reduce_scatter,
    "deterministic": lambda: reduce_scatter(deterministic=True),
    "fp16 average, a transposed, b not": lambda: reduce_scatter(
        dtype=torch.float16, transposed=(True, False), op="avg"
    ),
    "float8 operands": lambda: reduce_scatter(dtype=torch.float8_e4m3fn, scaled=True),
    "float8 operands, one rank, largest tile": lambda: reduce_scatter(
        world=1, rows=8192, n=8192, dtype=torch.float8_e4m3fn, scaled=True, bias=False, plan=Plan(tile=(128, 256, 128))
    ),
    "float32 result": lambda: reduce_scatter(out=torch.float32, bias=False),
    "one rank": lambda: reduce_scatter(world=1),
    "eight ranks": lambda: reduce_scatter(world=8, bias=False),
    "slots beyond 2**31 elements": lambda: reduce_scatter(rows=(1 << 16) + 1000, n=1 << 15),
    "one rank, shared tiles": lambda: reduce_scatter(world=1, plan=Plan(tile=(128, 128, 64), stages=4, split=4)),
    "deterministic, shared tiles": lambda: reduce_scatter(
        deterministic=True, plan=Plan(tile=(128, 128, 64), stages=4, split=2)
    ),
    "float32 result, shared tiles": lambda: reduce_scatter(
        out=torch.float32, plan=Plan(tile=(128, 128, 64), stages=4, split=2)
    ),
    "average, a transposed, b not, shared tiles": lambda: reduce_scatter(
        transposed=(True, False), op="avg", plan=Plan(tile=(128, 256, 64), stages=4, split=2)
    ),
    "inter-SM, add": lambda: reduce_scatter(plan=INTER_SM),
    "inter-SM, deterministic, shared tiles": lambda: reduce_scatter(
        deterministic=True, rows=100, plan=replace(INTER_SM, tile=(128, 128, 64), split=2)
    ),
    "inter-SM, float32 result, one multiplier": lambda: reduce_scatter(
        out=torch.float32, transposed=(True, False), op="avg", plan=replace(INTER_SM, tile=(64, 256, 64))
    ),
    "inter-SM, float8 operands": lambda: reduce_scatter(
        dtype=torch.float8_e4m3fn, scaled=True, plan=replace(INTER_SM, tile=(128, 128, 128))
    ),
    "one shot": lambda: reduce_scatter(rows=16, plan=ONE_SHOT),
    "one shot, average, eight ranks, largest tile": lambda: reduce_scatter(
        world=8, rows=24, n=8192, op="avg", plan=replace(ONE_SHOT, tile=(128, 256, 64), stages=4)
    ),
    "one shot, float32 result, shared tiles, a transposed, b not": lambda: reduce_scatter(
        world=2, rows=100, out=torch.float32, transposed=(True, False), plan=replace(ONE_SHOT, split=4, stages=6)
    ),
    "one shot, float8 operands": lambda: reduce_scatter(
        dtype=torch.float8_e4m3fn, scaled=True, rows=40, plan=replace(ONE_SHOT, tile=(128, 128, 128), stages=6)
    ),
    "one shot, shared tiles": lambda: reduce_scatter(
        rows=40, plan=replace(ONE_SHOT, tile=(128, 128, 64), split=2, stages=6)
    ),
    **{
        tiling_name(tiling, split): lambda tiling=tiling, split=split: reduce_scatter(
            plan=Plan(tile=tiling.tile, stages=tiling.stages, split=split), rows=128, n=512
        )
        for tiling in TILINGS
        for split in (1, 2)
    },
    "words": words,
    "probe: TMA, 16 KB tiles": lambda: probed(Copy("tma", "put", 1 << 20, 16384, 16)),
    "probe: TMA, 1 KB tiles": lambda: probed(Copy("tma", "get", 1 << 20, 1024, 16, ways=2)),
    "probe: registers": lambda: probed(Copy("register", "put", 4 << 20, 16, 16)),
    "probe: the naive way": lambda: probed(Copy("naive", "put", 1 << 20, 4, 16, naive=NAIVE)),
    "probe: flags": lambda: launched(lambda fabric: HandOver(fabric, True).enqueue(10)),
    "probe: mbarriers": lambda: launched(
        lambda fabric: fabric.launch(mbarrier_kernel, 1, (meta(1, dtype=torch.int32), 10), num_warps=4)
    ),
}


def report(name: str) -> dict:
    """One variant."""
    return VARIANTS[name]()
