"""grouped_matmul: its contract, and the path of a call, which is decided before anything is launched."""

from dataclasses import dataclass

import torch

from tileweave.ops.contract import DTYPES, Like, Site, check_dense, check_plan, out_of_reach, unaligned
from tileweave.ops.route import Route, fallback
from tileweave.planner import H200, Hardware, Plan
from tileweave.planner.moe import GroupedProblem, plan_for, unsupported

NAME = "grouped_matmul"


@dataclass(frozen=True)
class Call:
    """A call that keeps the contract: x [rows, k], w [experts, k, n]."""

    dtype: torch.dtype
    rows: int
    experts: int
    k: int
    n: int


def check_kinds(x, w, offsets, plan) -> None:
    """TypeError for values that an operator's schema cannot hold; the rest is for `check`."""
    check_dense(NAME, (("x", x), ("w", w), ("offsets", offsets)))
    check_plan(NAME, plan)


def check(x: Like, w: Like, offsets: Like) -> Call:
    """Hold the operator's arguments to the contract; ValueError if they break it. Offsets are not looked at."""
    if len(x.shape) != 2 or len(w.shape) != 3 or x.shape[1] != w.shape[1]:
        raise ValueError(f"{NAME}: x must be [T, H] and w [E, H, I], got {list(x.shape)} and {list(w.shape)}")
    if w.shape[0] < 1:
        raise ValueError(f"{NAME}: w must have an expert at least, got {list(w.shape)}")
    if x.dtype not in DTYPES or w.dtype != x.dtype:
        raise ValueError(f"{NAME}: x and w must both be bfloat16 or both float16, got {x.dtype} and {w.dtype}")
    if tuple(offsets.shape) != (w.shape[0],) or offsets.dtype != torch.int32:
        raise ValueError(
            f"{NAME}: offsets must be [{w.shape[0]}] of int32, an end for each expert, got {list(offsets.shape)} of "
            f"{offsets.dtype}"
        )
    if w.device != x.device or offsets.device != x.device:
        raise ValueError(
            f"{NAME}: x, w and offsets must be on one device, got {x.device}, {w.device} and {offsets.device}"
        )
    return Call(x.dtype, x.shape[0], w.shape[0], x.shape[1], w.shape[2])


def check_offsets(offsets: torch.Tensor) -> None:
    """ValueError if an expert ends before the one ahead of it. The host waits for the offsets."""
    falls = (offsets[1:] < offsets[:-1]).nonzero()
    if len(falls):
        e = int(falls[0]) + 1
        raise ValueError(
            f"{NAME}: offsets must not decrease, as they are the ends of experts' rows, but offsets[{e}] = "
            f"{int(offsets[e])} is below offsets[{e - 1}] = {int(offsets[e - 1])}"
        )


def choose(site: Site, call: Call, device: torch.device, plan: Plan | None, hardware: Hardware = H200) -> Route:
    """The path of a call; ValueError if it cannot follow the plan. hardware: that of the planner, if not an H200."""
    problem = GroupedProblem(call.rows, call.experts, call.n, call.k, site.usable(0), site.cores)
    if plan is not None and (why := unsupported(problem, plan, hardware)):
        raise ValueError(f"{NAME}: {why}")
    refusal = out_of_reach(site, device, "x") or unaddressable(call)
    if refusal:
        return fallback(NAME, refusal, "a torch.matmul for each expert", plan)
    if call.n == 0 or call.k == 0:
        return Route(NAME, site.backend, False, "nothing to multiply")
    found = site.measured(NAME, problem) if plan is None else None
    made = plan or (found.plan if found else plan_for(problem, hardware))
    return Route(NAME, site.backend, True, made.reason, made, measured_us=found.measured_us if found else None)


def unaddressable(call: Call) -> str | None:
    """Why TMA cannot address these shapes; None if it can."""
    return unaligned(("I", call.n, 8), ("H", call.k, 8))
