"""Compile the kernels of expert parallelism without a GPU, for sm_90a or, by tcgen05, for sm_100a, under
whichever Triton is on the path.

As tests/compiling.py, whose fabric compiles instead of launching.
"""

import torch

from tests.compiling import CompilingFabric, meta
from tests.ops.moe.variants import COMBINE_VARIANTS, ROUTE_VARIANTS, VARIANTS
from tileweave import Plan, TokenRoute
from tileweave.ops.contract import Like, Site
from tileweave.ops.moe import combine_launch
from tileweave.ops.moe.check import choose, choose_combine, combine_problem_of
from tileweave.ops.moe.launch import fused
from tileweave.ops.moe.routing import Experts, Lists
from tileweave.ops.moe.routing_launch import aligned, find_route


def route_of(world, row_weight) -> TokenRoute:
    """A route of 512 tokens to 1024 rows of 16 experts."""
    shapes = (16,), (1024,), (1024,), (512, world), (512, 2), (512, 2), (1,), (world, 17)
    words = [meta(*shape, dtype=torch.int32) for shape in shapes]
    return TokenRoute(*words[:3], row_weight, *words[3:], 512, 1024, Experts(16 * world, world), None)


def dispatch_report(dtype, world, gated, silu, transposed, tiling, core="wgmma") -> dict:
    """One variant of moe_dispatch_matmul through the op's own launch code."""
    fabric, dtype = CompilingFabric(world, core), getattr(torch, dtype)
    x, w = meta(512, 256, dtype=dtype), meta(16, 256, 512, dtype=dtype)
    w = w.transpose(1, 2).contiguous().transpose(1, 2) if transposed else w
    plan = None if tiling is None else Plan("tma", "inter_sm", tiling[0], tiling[1], comm_sms=8, core=core)
    plan = choose(Site.of(fabric), Like.of(w), gated, Experts(16 * world, world), 1024, plan).plan
    r, experts = route_of(world, None), Experts(16 * world, world)
    lists = Lists(*(meta(*shape, dtype=torch.int32) for shape in ((1024,), (2, world, 512), (world,), (world, 17))))
    there = r.offsets, r.row_slot, r.token_slot, experts, lists, r.slots
    fused(fabric, x, w, w if gated else None, *there, 1024, silu, plan)
    return fabric.reports[-1]


def combine_report(dtype, world, weighted, transposed, tiling, core="wgmma") -> dict:
    """A variant of moe_matmul_combine."""
    fabric, dtype = CompilingFabric(world, core), getattr(torch, dtype)
    h, w = meta(1024, 256, dtype=dtype), meta(16, 256, 512, dtype=dtype)
    w = w.transpose(1, 2).contiguous().transpose(1, 2) if transposed else w
    plan = None if tiling is None else Plan("register", "intra_sm", *tiling, core=core)
    site = Site.of(fabric)
    problem = combine_problem_of(site, Like.of(w), 16 * world, 1024, 2)
    plan = choose_combine(site, h.shape[0], Like.of(w), problem, plan).plan
    r = route_of(world, meta(1024, dtype=torch.float32) if weighted else None)
    lists = r.row_weight, r.offsets, r.row_slot, r.row_home, r.home, r.slots, r.homes
    combine_launch.fused(fabric, h, w, *lists, plan)
    return fabric.reports[-1]


def route_report(index, world, experts, k, weight, which) -> dict:
    """A kernel of a route of 512 tokens, or of what travels on it."""
    fabric, experts = CompilingFabric(world), Experts(experts, world)
    topk_index = meta(512, k, dtype=getattr(torch, index))
    topk_weight = None if weight is None else meta(512, k, dtype=getattr(torch, weight))
    *_, rows, sends, sent, bounds, _ = find_route(fabric, topk_index, topk_weight, experts, 1024, 512)
    aligned(fabric, Lists(rows[0, :1024], sends, sent, bounds), 128)
    return fabric.reports[which]


def report(name: str) -> dict:
    """One variant of any."""
    if name in ROUTE_VARIANTS:
        return route_report(*ROUTE_VARIANTS[name])
    return dispatch_report(*VARIANTS[name]) if name in VARIANTS else combine_report(*COMBINE_VARIANTS[name])
