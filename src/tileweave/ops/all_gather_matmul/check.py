"""all_gather_matmul: its contract, and the path of a call, which is decided before anything is launched.

What decides is plain values, the same on all ranks: a rank's strides or addresses have no part in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
    check_max_sms,
    check_nodes,
    check_plan,
    check_scale,
    out_of_reach,
    unaligned,
)
from tileweave.ops.nodes import cut_for
from tileweave.ops.route import Route, by_plan, fallback, over_nodes
from tileweave.planner import H200, Hardware, Plan
from tileweave.planner import all_gather_matmul as planner
from tileweave.planner.all_gather_matmul import Problem, unsupported
from tileweave.planner.tiling import CORES

NAME = "all_gather_matmul"
WAY = "the group's all-gather, then torch.matmul"  # without a kernel
WAY_OF_BLOCKS = f"the group's all-gather, then torch.matmul of {block_scales.DEQUANTIZED}"
OVER_NODES = "the rows of each node in turn, its own first, while the others arrive"
MAX_B = 3  # matrices that the kernel has arguments for


@dataclass(frozen=True)
class Call:
    """A call that keeps the contract. rows, k: this rank's shard of A; ns: columns of each B.

    max_sms: the largest number of SMs that the kernel may use; 0: all that the fabric has. by_column: whether some B
    has a scale for each column. blocks: whether operands have scales of blocks along K; k counts elements, of which
    float4 has one for two values.
    """

    dtype: torch.dtype
    bias: bool
    return_gathered: bool
    rows: int
    k: int
    ns: tuple[int, ...]
    max_sms: int
    by_column: bool = False
    blocks: bool = False

    @property
    def out_dtype(self) -> torch.dtype:
        """Of the results: that of the operands, or bfloat16 where these have scales."""
        return self.dtype if self.dtype in DTYPES else torch.bfloat16

    @property
    def scaled(self) -> bool:
        """Whether operands have scales, of whole rows and columns."""
        return self.dtype == FP8 and not self.blocks

    @property
    def local(self) -> bool:
        """Whether nothing has to be gathered: each result is empty, or a bias at most."""
        return self.rows == 0 or self.k == 0 or (sum(self.ns) == 0 and not self.return_gathered)


def check_kinds(a, b, bias, return_gathered, plan, max_sms, regather, scale_a=None, scale_b=()) -> None:
    """TypeError or ValueError for values that an operator's schema cannot hold; the rest is for `check`.

    `b` is a sequence; `bias` and `scale_b` as well, or None.
    """
    named = [("a", a), ("scale_a", a if scale_a is None else scale_a)]
    for name, each in (("b", b), ("bias", bias), ("scale_b", scale_b)):
        named += [(f"{name}[{i}]", x) for i, x in enumerate(each or ())]
    check_dense(NAME, named)
    for name, flag in (("return_gathered", return_gathered), ("regather", regather)):
        if not isinstance(flag, bool):
            raise TypeError(f"{NAME}: {name} must be True or False, got {flag!r}")
    check_plan(NAME, plan)
    check_max_sms(NAME, max_sms)


def check(
    a: Like,
    b: Sequence[Like],
    bias: Sequence[Like],
    return_gathered: bool,
    max_sms: int,
    scale_a: Like | None = None,
    scale_b: Sequence[Like] = (),
) -> Call:
    """Hold the operator's arguments to the contract; ValueError if they break it."""
    if not 1 <= len(b) <= MAX_B:
        raise ValueError(f"{NAME}: b must be a matrix or a list of 1 to {MAX_B}, got {len(b)}")
    if len(a.shape) != 2:
        raise ValueError(f"{NAME}: a must be a matrix [M / world, K], got shape {list(a.shape)}")
    (rows, k), dtype = a.shape, a.dtype
    if dtype not in (*DTYPES, FP8, FP4):
        raise ValueError(
            f"{NAME}: a and b must be bfloat16 or float16, or float8_e4m3fn or float4_e2m1fn_x2 with scales, "
            f"got {dtype}"
        )
    for i, x in enumerate(b):
        if len(x.shape) != 2 or x.shape[0] != k:
            raise ValueError(
                f"{NAME}: a is [{rows}, {k}] and b[{i}] {list(x.shape)}: it must be a matrix [{k}, N], with as many "
                "rows as a has columns"
            )
        if x.dtype != dtype or x.device != a.device:
            raise ValueError(f"{NAME}: b[{i}] must be {dtype} on {a.device} as a is, got {x.dtype} on {x.device}")
    if bias and len(bias) != len(b):
        raise ValueError(f"{NAME}: bias must have one for each of the {len(b)} b, got {len(bias)}")
    ns = tuple(x.shape[1] for x in b)
    if scale_b and len(scale_b) != len(b):
        raise ValueError(f"{NAME}: scale_b must have one for each of the {len(b)} b, got {len(scale_b)}")
    blocks = has_blocks(a, scale_a)
    named = [(f"scale_b[{i}]", scale_b[i] if scale_b else None, n) for i, n in enumerate(ns)]
    if blocks:
        check_block_scales(NAME, a, (("scale_a", scale_a, rows), *named))
    else:
        check_scale(NAME, "scale_a", scale_a, (rows, 1), a)
        for name, scale, n in named:
            check_scale(NAME, name, scale, (1, n), a)
    wide = dtype if dtype in DTYPES else torch.bfloat16
    for i, (x, n) in enumerate(zip(bias, ns, strict=False)):
        if tuple(x.shape) != (n,) or x.dtype != wide or x.device != a.device:
            raise ValueError(
                f"{NAME}: bias[{i}] must be [{n}] of {wide} on {a.device}, "
                f"got {list(x.shape)} of {x.dtype} on {x.device}"
            )
    if max_sms < 0:
        raise ValueError(f"{NAME}: max_sms must be at least 0, which stands for all, got {max_sms}")
    by_column = not blocks and any(scale.shape.numel() > 1 for scale in scale_b)
    return Call(dtype, bool(bias), return_gathered, rows, k, ns, max_sms, by_column, blocks)


@lru_cache(maxsize=4096)
def settle(
    site: Site,
    a: Like,
    b: tuple[Like, ...],
    bias: tuple[Like, ...],
    return_gathered,
    plan: Plan | None,
    max_sms,
    scale_a: Like | None = None,
    scale_b: tuple[Like, ...] = (),
) -> tuple[Call, Route]:
    """`check`, then `choose`; remembered."""
    call = check(a, b, bias, return_gathered, max_sms, scale_a, scale_b)
    return call, choose(site, call, a.device, plan)


def choose(site: Site, call: Call, device: torch.device, plan: Plan | None, hardware: Hardware = H200) -> Route:
    """The path of a call; ValueError if it cannot follow the plan. hardware: the planner's; memory is the site's."""
    if site.inside is not None and not call.local and not call.blocks:  # scales of blocks are not cut
        check_nodes(NAME, site, lambda each: unfit(each, call, plan, hardware))
        inside, cut = choose(site.inside, call, device, plan, hardware), rows_over_nodes(call, site.nodes)
        return over_nodes(NAME, site, OVER_NODES, inside, 1 + (site.nodes - 1) * len(cut))
    hardware = site.on(hardware)
    cores = block_scales.CORES if call.blocks else CORES
    refusal = out_of_reach(site, device, cores=cores) or unaddressable(call)
    problem = problem_of(site, call)
    if why := unfit(site, call, plan, hardware):
        raise ValueError(f"{NAME}: {why}")
    if call.local:
        return Route(NAME, site.backend, False, "there is nothing to gather, nor to launch")
    if refusal is None and sum(call.ns) == 0:
        refusal = "the results but for the gathered rows are empty"
    if refusal:
        return fallback(NAME, refusal, WAY_OF_BLOCKS if call.blocks else WAY, plan)
    # torch multiplies what has scales in float32, which is not what is predicted of it, and leaves no SMs to others.
    way = None if call.dtype not in DTYPES or call.max_sms else WAY
    return by_plan(NAME, site, problem, planner, plan, way, hardware)


def unfit(site: Site, call: Call, plan: Plan | None, hardware: Hardware) -> str | None:
    """Why a call at a site cannot follow the plan, if there is one; None if it can."""
    if plan is None:
        return None
    return unsupported(problem_of(site, call), plan, site.on(hardware)) or impossible(site, plan)


def rows_over_nodes(call: Call, nodes: int) -> tuple[slice, ...]:
    """The pieces in which a rank's rows travel to other nodes, and are multiplied there."""
    return cut_for(nodes, call.rows, call.rows * call.k * call.dtype.itemsize)


def impossible(site: Site, plan: Plan) -> str | None:
    """Why a fabric cannot follow a plan; None if it can.

    Copies within one GPU run on SMs, and none would be free while all ranks' kernels wait for them.
    """
    if site.refusal or site.world == 1:  # another path, or a matmul
        return None
    if plan.mechanism == "multimem" and site.unicast:
        return f"plan.mechanism='multimem' needs multicast: {site.unicast}; 'tma' would do"
    if plan.mechanism == "copy_engine" and not site.linked and site.backend != "emulated" and plan.comm_sms < 1:
        return (
            "plan.comm_sms=0: copies within one GPU need SMs, so ranks that share one leave 1 at "
            "least, for which comm_sms counts"
        )
    return None


def problem_of(site: Site, call: Call) -> Problem:
    """A call as the planner sees it."""
    usable = site.usable(call.max_sms)
    cores, scales = (block_scales.CORES, scales_in_step(call.dtype)) if call.blocks else (site.cores, 0)
    return Problem(call.rows, call.ns, call.k, site.world, usable, site.linked, call.dtype.itemsize, cores, scales)


def unaddressable(call: Call) -> str | None:
    """Why TMA cannot address these shapes; None if it can."""
    if call.blocks and (why := block_scales.unaddressable(call.k, call.dtype)):
        return why
    return unaligned(*(("N", n, 8) for n in call.ns), ("K", call.k, 16 // call.dtype.itemsize))
