"""matmul_reduce_scatter: its contract, and the path of a call, which is decided before anything is launched."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from tileweave.fabric import MAX_RANKS
from tileweave.ops.contract import DTYPES, FP8, Like, Site, check_scale
from tileweave.ops.route import Route
from tileweave.planner import H200, Plan, Problem, plan_for, unsupported

NAME = "matmul_reduce_scatter"
REDUCTIONS = ("sum", "avg")


@dataclass(frozen=True)
class Call:
    """A call that keeps the contract. m, n: the full product; k: this rank's inner size; rows: m / world.

    deterministic: the parts of the sources are kept apart. Two ranks always do that: a sum of one part needs no adding,
    and a place that is overwritten needs no zeroing.
    max_sms: the largest number of SMs that the kernel may use; 0: all that the fabric has.
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


class Agreement(NamedTuple):
    """What of a call all ranks must agree on."""

    call: Call
    plan: Plan | None

    def __str__(self) -> str:
        c, plan = self.call, "no fused kernel" if self.plan is None else self.plan.brief()
        return (
            f"{NAME} of [{c.m}, {c.k}] @ [{c.k}, {c.n}] {c.dtype} -> {c.out_dtype}, op={c.op!r}, bias={c.bias}, "
            f"deterministic={c.deterministic}, max_sms={c.max_sms or None}, {plan}"
        )


def check_kinds(a, b, op, bias, deterministic, out_dtype, plan, max_sms, scale_a=None, scale_b=None) -> None:
    """TypeError or ValueError for values that an operator's schema cannot hold; the rest is for `check`."""
    optional = ("bias", bias), ("scale_a", scale_a), ("scale_b", scale_b)
    for name, x in (("a", a), ("b", b), *((name, a if x is None else x) for name, x in optional)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{NAME}: {name} must be a torch.Tensor, got {type(x).__name__}")
        if x.layout != torch.strided:
            raise TypeError(f"{NAME}: {name} must be a dense tensor, got {x.layout}; {name}.to_dense() would be")
    if deterministic not in (None, True, False):
        raise TypeError(f"{NAME}: deterministic must be True, False or None, got {deterministic!r}")
    if op not in REDUCTIONS:
        raise ValueError(f"{NAME}: op must be 'sum' or 'avg', got {op!r}")
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"{NAME}: out_dtype must be a torch.dtype or None, got {type(out_dtype).__name__}")
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"{NAME}: plan must be a tileweave.Plan or None, got {type(plan).__name__}")
    if max_sms is None:
        return
    if not isinstance(max_sms, int) or isinstance(max_sms, bool):
        raise TypeError(f"{NAME}: max_sms must be an int or None, got {type(max_sms).__name__}")
    if max_sms < 1:
        raise ValueError(f"{NAME}: max_sms must be at least 1, or None for all, got {max_sms}")
    if max_sms >= 2**31:
        raise ValueError(f"{NAME}: max_sms must be below 2**31, or None for all, got {max_sms}")


def check(
    world: int, a: Like, b: Like, op, bias: Like | None, deterministic, out_dtype, max_sms, scale_a=None, scale_b=None
) -> Call:
    """Hold the operator's arguments to the contract, in a group of `world` ranks; ValueError if they break it."""
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise ValueError(
            f"{NAME}: a and b must be matrices [M, K] and [K, N], got shapes {list(a.shape)} and {list(b.shape)}"
        )
    (m, k), (k_b, n) = a.shape, b.shape
    dtype = a.dtype
    if k != k_b:
        raise ValueError(f"{NAME}: a is [{m}, {k}] and b is [{k_b}, {n}]: a's columns must be as many as b's rows")
    if dtype not in (*DTYPES, FP8) or b.dtype != dtype:
        raise ValueError(
            f"{NAME}: a and b must both be bfloat16, both float16 or both float8_e4m3fn, got {dtype} and {b.dtype}"
        )
    check_scale(NAME, "scale_a", scale_a, (m, 1), a)
    check_scale(NAME, "scale_b", scale_b, (1, n), a)
    wide = torch.bfloat16 if dtype == FP8 else dtype
    if b.device != a.device:
        raise ValueError(f"{NAME}: a is on {a.device} and b on {b.device}: they must be on one device")
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
    return Call(
        dtype, bias is not None, op, deterministic or world == 2, out_dtype or wide, m, n, k, m // world, max_sms
    )


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


def choose(site: Site, call: Call, device: torch.device, plan: Plan | None) -> Route:
    """The path of a call; ValueError if it cannot follow the plan."""
    refusal = site.refusal or unaddressable(call)
    if refusal is None and site.world > MAX_RANKS:
        refusal = f"the group has {site.world} ranks, more than the {MAX_RANKS} that a channel has words for"
    if refusal is None and device.type != site.device.type:
        refusal = f"a is on {device}, the ranks of this world are on {site.device}"
    problem = problem_of(site, call)
    if plan is not None and (why := unsupported(problem, plan)):
        raise ValueError(f"{NAME}: {why}")
    if refusal:
        return Route(NAME, "fallback", False, f"{refusal}: torch.matmul, then the group's reduce-scatter")
    if call.rows == 0 or call.n == 0:
        return Route(NAME, site.backend, False, "the result is empty: nothing to launch")
    plan = plan or plan_for(problem)
    return Route(NAME, site.backend, True, plan.reason, plan)


def problem_of(site: Site, call: Call) -> Problem:
    """The call as the planner sees it."""
    sms = site.sms or H200.sms
    return Problem(
        call.m,
        call.n,
        call.k,
        site.world,
        call.out_dtype.itemsize,
        min(sms, call.max_sms) if call.max_sms else sms,
        call.deterministic,
        linked=site.backend == "processes",
        operand_bytes=call.dtype.itemsize,
    )


def unaddressable(call: Call) -> str | None:
    """Why TMA cannot address these shapes; None if it can. Its strides are multiples of 16 bytes."""
    for name, size, unit in (("N", call.n, 8), ("K", call.k, 16 // call.dtype.itemsize)):
        if size % unit:
            return f"{name} = {size} is not a multiple of {unit}, so rows are not 16-byte aligned as TMA needs"
    return None
