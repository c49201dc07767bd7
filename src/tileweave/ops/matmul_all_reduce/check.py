"""matmul_all_reduce: its contract, and the path of a call, which is decided before anything is launched.

What decides is plain values, the same on all ranks: a rank's strides or addresses have no part in it.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from tileweave.ops import block_scales
from tileweave.ops.block_scales import KINDS, check_block_scales, scales_in_step
from tileweave.ops.contract import (
    DTYPES,
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
from tileweave.ops.matmul_reduce_scatter import check as scatter
from tileweave.ops.nodes import DIRECT_BYTES, PIECES, pieces
from tileweave.ops.route import Route, by_plan, fallback, over_nodes
from tileweave.planner import H200, Hardware, Plan
from tileweave.planner import matmul_all_reduce as planner
from tileweave.planner.matmul_all_reduce import Problem, unsupported
from tileweave.planner.tiling import CORES

NAME = "matmul_all_reduce"
WAY = "torch.matmul, then the group's all-reduce"  # without a kernel
LEAST_ROWS = 128  # of a rank's share of a piece, over nodes


class Options(NamedTuple):
    """What a call asks for besides its tensors. max_sms: 0 stands for all."""

    deterministic: bool
    norm_eps: float
    max_sms: int


@dataclass(frozen=True)
class Call:
    """A call that keeps the contract. m, n: the product; k: this rank's inner size; bias, residual, norm: whether it
    has these; options.deterministic: of the fallback, as the kernel always is. k counts elements, of which float4 has
    one for two values."""

    dtype: torch.dtype
    m: int
    n: int
    k: int
    bias: bool
    residual: bool
    norm: bool
    options: Options

    @property
    def blocks(self) -> bool:
        """Whether operands have scales of blocks along K."""
        return self.dtype in KINDS

    @property
    def out_dtype(self) -> torch.dtype:
        """Of the result and of what travels."""
        return torch.bfloat16 if self.blocks else self.dtype


def check_kinds(
    a, b, bias, deterministic, residual, norm_weight, norm_eps, plan, max_sms, scale_a=None, scale_b=None
) -> None:
    """TypeError or ValueError for values that an operator's schema cannot hold; the rest is for `check`."""
    extras = ("bias", bias), ("residual", residual), ("norm_weight", norm_weight)
    optional = *extras, ("scale_a", scale_a), ("scale_b", scale_b)
    check_dense(NAME, (("a", a), ("b", b), *((name, x) for name, x in optional if x is not None)))
    if not isinstance(deterministic, bool | None):
        raise TypeError(f"{NAME}: deterministic must be True, False or None, got {deterministic!r}")
    if isinstance(norm_eps, bool) or not isinstance(norm_eps, float | int):
        raise TypeError(f"{NAME}: norm_eps must be a number, got {norm_eps!r}")
    check_plan(NAME, plan)
    check_max_sms(NAME, max_sms)


def check(
    a: Like,
    b: Like,
    bias: Like | None,
    residual: Like | None,
    norm_weight: Like | None,
    options: Options,
    scale_a: Like | None = None,
    scale_b: Like | None = None,
) -> Call:
    """Hold the operator's arguments to the contract; ValueError if they break it."""
    (m, k, n), dtype = check_matrices(NAME, a, b), a.dtype
    if dtype not in (*DTYPES, *KINDS) or b.dtype != dtype:
        raise ValueError(
            f"{NAME}: a and b must both be bfloat16, both float16 or, with scales of blocks, both float8_e4m3fn or "
            f"both float4_e2m1fn_x2, got {dtype} and {b.dtype}"
        )
    if dtype in KINDS:
        check_block_scales(NAME, a, (("scale_a", scale_a, m), ("scale_b", scale_b, n)))
    else:
        check_scale(NAME, "scale_a", scale_a, (m, 1), a)
        check_scale(NAME, "scale_b", scale_b, (1, n), a)
    call = Call(dtype, m, n, k, bias is not None, residual is not None, norm_weight is not None, options)
    wide = call.out_dtype
    for name, x, shape in (("bias", bias, (n,)), ("residual", residual, (m, n)), ("norm_weight", norm_weight, (n,))):
        if x is not None and (tuple(x.shape) != shape or x.dtype != wide or x.device != a.device):
            raise ValueError(
                f"{NAME}: {name} must be {list(shape)} of {wide} on {a.device}, "
                f"got {list(x.shape)} of {x.dtype} on {x.device}"
            )
    if norm_weight is not None and residual is None:
        raise ValueError(f"{NAME}: norm_weight goes with residual, which is None; torch.zeros_like the result would do")
    if not 0 <= options.norm_eps < math.inf:
        raise ValueError(f"{NAME}: norm_eps must be from 0 up, got {options.norm_eps}")
    if options.max_sms < 0:
        raise ValueError(f"{NAME}: max_sms must be at least 0, which stands for all, got {options.max_sms}")
    return call


@lru_cache(maxsize=4096)
def settle(
    site: Site,
    a: Like,
    b: Like,
    bias: Like | None,
    residual: Like | None,
    norm_weight: Like | None,
    options: Options,
    plan: Plan | None,
    scale_a: Like | None = None,
    scale_b: Like | None = None,
) -> tuple[Call, Route]:
    """`check`, then `choose`; remembered."""
    call = check(a, b, bias, residual, norm_weight, options, scale_a, scale_b)
    return call, choose(site, call, a.device, plan)


def choose(site: Site, call: Call, device: torch.device, plan: Plan | None, hardware: Hardware = H200) -> Route:
    """The path of a call; ValueError if it cannot follow the plan. hardware: the planner's; memory is the site's."""
    if site.inside is not None and call.m and call.n and not call.blocks:  # scales of blocks are not cut
        return _over_nodes(site, site.inside, call, device, plan, hardware)
    hardware = site.on(hardware)
    cores = block_scales.CORES if call.blocks else CORES
    refusal = out_of_reach(site, device, cores=cores) or unaddressable(call)
    problem = problem_of(site, call)
    if why := unfit(site, call, plan, hardware):
        raise ValueError(f"{NAME}: {why}")
    if refusal:
        return fallback(NAME, refusal, f"{block_scales.DEQUANTIZED}, {WAY}" if call.blocks else WAY, plan)
    if call.m == 0 or call.n == 0:
        return Route(NAME, site.backend, False, "the result is empty: nothing to launch")
    # What is predicted of the plain way has neither a fixed order nor kernels of its own for the residual and the norm,
    # nor for scales, and leaves no SMs to others.
    ordinary = not (call.options.deterministic or call.options.max_sms or call.residual or call.norm or call.blocks)
    return by_plan(NAME, site, problem, planner, plan, WAY if ordinary else None, hardware)


def unfit(site: Site, call: Call, plan: Plan | None, hardware: Hardware) -> str | None:
    """Why a call at a site cannot follow the plan, if there is one; None if it can."""
    if plan is None:
        return None
    if plan.mechanism == "multimem" and site.unicast:
        return f"plan.mechanism='multimem' needs multicast: {site.unicast}; 'tma' would do"
    return unsupported(problem_of(site, call), plan, site.on(hardware))


def pieces_over_nodes(call: Call, each: int, plan: Plan | None) -> tuple[slice, ...]:
    """The rows of the pieces of a call over nodes with `each` ranks; none where it is one call of the op inside, whose
    sum goes between nodes as a whole: it has few bytes, or there is a plan, which is one of the op's own kernel."""
    if plan is not None or call.m * call.n * call.dtype.itemsize <= DIRECT_BYTES:
        return ()
    return pieces(call.m, each, min(call.m // (LEAST_ROWS * each), PIECES))


def _over_nodes(site: Site, within: Site, call: Call, device: torch.device, plan: Plan | None, hardware) -> Route:
    """The route of a call that is composed over nodes, `within` one of which a rank sees the others."""
    parts = pieces_over_nodes(call, within.world, plan)
    if not parts:
        inner = replace(call, bias=False, residual=False, norm=False)
        check_nodes(NAME, site, lambda each: unfit(each, inner, plan, hardware))
        how = "the sum in the node, then over the nodes"
        return over_nodes(NAME, site, how, choose(within, inner, device, plan, hardware), 1)
    rows = -(-parts[0].stop // within.world) * within.world
    ordered = call.options.deterministic or within.world == 2
    share = scatter.Call(
        call.dtype, False, "sum", ordered, call.dtype, rows, call.n, call.k, rows // within.world, call.options.max_sms
    )
    how = "each piece of rows summed in the node, shares over the nodes, then gathered in the node"
    return over_nodes(NAME, site, how, scatter.choose(within, share, device, None, hardware), len(parts))


def problem_of(site: Site, call: Call) -> Problem:
    """A call as the planner sees it."""
    usable = site.usable(call.options.max_sms)
    multicast = site.unicast is None
    cores, scales = (block_scales.CORES, scales_in_step(call.dtype)) if call.blocks else (site.cores, 0)
    of = cores, call.dtype.itemsize, scales
    return Problem(call.m, call.n, call.k, site.world, usable, call.norm, site.linked, multicast, *of)


def unaddressable(call: Call) -> str | None:
    """Why TMA cannot address these shapes; None if it can."""
    if call.blocks and (why := block_scales.unaddressable(call.k, call.dtype)):
        return why
    return unaligned(("N", call.n, 8), ("K", call.k, 16 // call.dtype.itemsize))
