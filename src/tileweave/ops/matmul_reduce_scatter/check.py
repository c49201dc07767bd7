"""matmul_reduce_scatter: its contract, and the path of a call, which is decided before anything is launched."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from tileweave.ops import block_scales
from tileweave.ops.block_scales import check_block_scales, has_blocks, scales_in_step
from tileweave.ops.contract import (
    DTYPES,
    FP4,
    FP8,
    Like,
    Site,
    check_dense,
    check_matrices,
    check_max_sms,
    check_nodes,
    check_plan,
    check_scale,
    out_of_reach,
    unaligned,
)
from tileweave.ops.nodes import cut_for
from tileweave.ops.route import Route, by_plan, fallback, over_nodes
from tileweave.planner import H200, Hardware, Plan, Problem, unsupported
from tileweave.planner import plan as planner
from tileweave.planner.tiling import CORES

NAME = "matmul_reduce_scatter"
WAY = "torch.matmul, then the group's reduce-scatter"  # without a kernel
OVER_NODES = "the rows of each node in turn, its own last, whose sums travel while the next are computed"
REDUCTIONS = ("sum", "avg")


@dataclass(frozen=True)
class Call:
    """A call that keeps the contract. m, n: the full product; k: this rank's inner size; rows: m / world.

    deterministic: the parts of the sources are kept apart. Two ranks always do that: a sum of one part needs no adding,
    and a place that is overwritten needs no zeroing.
    max_sms: the largest number of SMs that the kernel may use; 0: all that the fabric has. blocks: whether operands
    have scales of blocks along K; k counts elements, of which float4 has one for two values.
    """

    dtype: torch.dtype
    bias: bool
    op: str
    deterministic: bool
    out_dtype: torch.dtype
    m: int
    n: int
    k: int
    rows: int
    max_sms: int
    blocks: bool = False


def check_kinds(a, b, op, bias, deterministic, out_dtype, plan, max_sms, scale_a=None, scale_b=None) -> None:
    """TypeError or ValueError for values that an operator's schema cannot hold; the rest is for `check`."""
    optional = ("bias", bias), ("scale_a", scale_a), ("scale_b", scale_b)
    check_dense(NAME, (("a", a), ("b", b), *((name, x) for name, x in optional if x is not None)))
    if not isinstance(deterministic, bool | None):
        raise TypeError(f"{NAME}: deterministic must be True, False or None, got {deterministic!r}")
    if op not in REDUCTIONS:
        raise ValueError(f"{NAME}: op must be 'sum' or 'avg', got {op!r}")
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"{NAME}: out_dtype must be a torch.dtype or None, got {type(out_dtype).__name__}")
    check_plan(NAME, plan)
    check_max_sms(NAME, max_sms)


def check(
    world: int, a: Like, b: Like, op, bias: Like | None, deterministic, out_dtype, max_sms, scale_a=None, scale_b=None
) -> Call:
    """Hold the operator's arguments to the contract, in a group of `world` ranks; ValueError if they break it."""
    (m, k, n), dtype = check_matrices(NAME, a, b), a.dtype
    if dtype not in (*DTYPES, FP8, FP4) or b.dtype != dtype:
        raise ValueError(
            f"{NAME}: a and b must both be bfloat16, both float16, both float8_e4m3fn or both float4_e2m1fn_x2, got "
            f"{dtype} and {b.dtype}"
        )
    blocks = has_blocks(a, scale_a)
    if blocks:
        check_block_scales(NAME, a, (("scale_a", scale_a, m), ("scale_b", scale_b, n)))
    else:
        check_scale(NAME, "scale_a", scale_a, (m, 1), a)
        check_scale(NAME, "scale_b", scale_b, (1, n), a)
    wide = dtype if dtype in DTYPES else torch.bfloat16
    if m % world:
        near = f"{m - m % world} or {m - m % world + world}"
        raise ValueError(f"{NAME}: a has {m} rows, not divisible by the world size {world}; {near} would be")
    if op not in REDUCTIONS:
        raise ValueError(f"{NAME}: op must be 'sum' or 'avg', got {op!r}")
    if bias is not None and (tuple(bias.shape) != (n,) or bias.dtype != wide or bias.device != a.device):
        raise ValueError(
            f"{NAME}: bias must be [{n}] of {wide} on {a.device}, "
            f"got {list(bias.shape)} of {bias.dtype} on {bias.device}"
        )
    if out_dtype not in (None, wide, torch.float32):
        raise ValueError(f"{NAME}: out_dtype must be {wide} or torch.float32, got {out_dtype}")
    if max_sms < 0:
        raise ValueError(f"{NAME}: max_sms must be at least 0, which stands for all, got {max_sms}")
    ordered = deterministic or world == 2
    return Call(dtype, bias is not None, op, ordered, out_dtype or wide, m, n, k, m // world, max_sms, blocks)


@lru_cache(maxsize=4096)
def settle(
    site: Site,
    a: Like,
    b: Like,
    op,
    bias: Like | None,
    deterministic,
    out_dtype,
    plan: Plan | None,
    max_sms,
    scale_a: Like | None = None,
    scale_b: Like | None = None,
) -> tuple[Call, Route]:
    """`check`, then `choose`; remembered."""
    call = check(site.world, a, b, op, bias, deterministic, out_dtype, max_sms, scale_a, scale_b)
    return call, choose(site, call, a.device, plan)


def choose(site: Site, call: Call, device: torch.device, plan: Plan | None, hardware: Hardware = H200) -> Route:
    """The path of a call; ValueError if it cannot follow the plan. hardware: the planner's; memory is the site's."""
    if site.inside is not None and call.rows and call.n and not call.blocks:  # scales of blocks are not cut
        ordered = call.deterministic or site.inside.world == 2
        cut = columns_over_nodes(call, site.nodes)
        inner = replace(call, m=call.m // site.nodes, n=cut[0].stop, bias=False, deterministic=ordered)
        check_nodes(NAME, site, lambda each: unfit(each, inner, plan, hardware))
        inside = choose(site.inside, inner, device, plan, hardware)
        return over_nodes(NAME, site, OVER_NODES, inside, 1 + (site.nodes - 1) * len(cut))
    hardware = site.on(hardware)
    cores = block_scales.CORES if call.blocks else CORES
    refusal = out_of_reach(site, device, cores=cores) or unaddressable(call)
    problem = problem_of(site, call)
    if why := unfit(site, call, plan, hardware):
        raise ValueError(f"{NAME}: {why}")
    if refusal:
        return fallback(NAME, refusal, f"{block_scales.DEQUANTIZED}, {WAY}" if call.blocks else WAY, plan)
    if call.rows == 0 or call.n == 0:
        return Route(NAME, site.backend, False, "the result is empty: nothing to launch")
    way = WAY if plain_alike(call, site.world) else None
    return by_plan(NAME, site, problem, planner, plan, way, hardware)


def unfit(site: Site, call: Call, plan: Plan | None, hardware: Hardware) -> str | None:
    """Why a call at a site cannot follow the plan, if there is one; None if it can."""
    if plan is None:
        return None
    return unsupported(problem_of(site, call), plan, site.on(hardware))


def columns_over_nodes(call: Call, nodes: int) -> tuple[slice, ...]:
    """The columns of the pieces in which what a node has for another's ranks is computed, and travels."""
    return cut_for(nodes, call.n, call.rows * call.n * call.out_dtype.itemsize)


def plain_alike(call: Call, world: int) -> bool:
    """Whether the plain way gives what the call asks for, at the speed that is predicted for it: NCCL's order of a sum
    is its own, torch multiplies float8 with scales, or into float32, in float32, and neither leaves SMs to others."""
    ordered = call.deterministic and world > 2
    return call.dtype in DTYPES and call.out_dtype == call.dtype and not ordered and not call.max_sms


def problem_of(site: Site, call: Call) -> Problem:
    """The call as the planner sees it."""
    return Problem(
        call.m,
        call.n,
        call.k,
        site.world,
        call.out_dtype.itemsize,
        site.usable(call.max_sms),
        call.deterministic,
        linked=site.linked,
        operand_bytes=call.dtype.itemsize,
        cores=block_scales.CORES if call.blocks else site.cores,
        scales=scales_in_step(call.dtype) if call.blocks else 0,
    )


def unaddressable(call: Call) -> str | None:
    """Why TMA cannot address these shapes; None if it can."""
    if call.blocks and (why := block_scales.unaddressable(call.k, call.dtype)):
        return why
    return unaligned(("N", call.n, 8), ("K", call.k, 16 // call.dtype.itemsize))
