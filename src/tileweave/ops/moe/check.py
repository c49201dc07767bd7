"""The contracts of the ops of experts, held before anything is launched."""

from dataclasses import replace
from typing import Any

import torch

from tileweave.ops.contract import DTYPES, Like, Site, check_dense, out_of_reach
from tileweave.ops.moe.kernel import STEPS
from tileweave.ops.moe.routing import Experts, TokenRoute
from tileweave.ops.route import Route, fallback
from tileweave.planner import H200, Hardware, Plan
from tileweave.planner import moe_combine as combining
from tileweave.planner.moe import (
    DispatchProblem,
    GroupedProblem,
    dispatch_plan_for,
    unfusable,
    unsupported_dispatch,
)

NAME = "moe_dispatch_matmul"
COMBINE = "moe_matmul_combine"
ACTIVATIONS = (None, "silu")
LARGEST = 1 << 29  # rows of a rank: slots and rows are counted in 32 bits


def check_dispatch(
    world: int, x, topk_index, w, topk_weight, capacity, activation, w_gate, experts, max_tokens, plan
) -> Experts:
    """How experts are divided, if the arguments of a dispatch keep the contract, but for `check_own`; TypeError
    or ValueError if they break it."""
    optional = (("topk_weight", topk_weight), ("w_gate", w_gate))
    named = (("x", x), ("topk_index", topk_index), ("w", w), *(each for each in optional if each[1] is not None))
    check_dense(NAME, named)
    for name, value in named:
        if value.device != x.device:
            raise ValueError(f"{NAME}: {name} must be on x's device {x.device}, got {value.device}")
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[1]:
        raise ValueError(f"{NAME}: x must be [T, H] and w [E_local, H, I], got {list(x.shape)} and {list(w.shape)}")
    if x.dtype not in DTYPES or w.dtype != x.dtype:
        raise ValueError(f"{NAME}: x and w must both be bfloat16 or both float16, got {x.dtype} and {w.dtype}")
    if w_gate is not None and (w_gate.shape != w.shape or w_gate.dtype != w.dtype):
        raise ValueError(
            f"{NAME}: w_gate must be as w, {list(w.shape)} of {w.dtype}, got {list(w_gate.shape)} of {w_gate.dtype}"
        )
    if topk_index.dim() != 2 or topk_index.shape[0] != x.shape[0] or topk_index.shape[1] < 1:
        raise ValueError(
            f"{NAME}: topk_index must be [{x.shape[0]}, k] with k of 1 at least, got {list(topk_index.shape)}"
        )
    if topk_index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{NAME}: topk_index must be int32 or int64, got {topk_index.dtype}")
    if topk_weight is not None and (topk_weight.shape != topk_index.shape or not topk_weight.is_floating_point()):
        raise ValueError(
            f"{NAME}: topk_weight must be floating-point numbers of shape {list(topk_index.shape)}, "
            f"got {topk_weight.dtype} of {list(topk_weight.shape)}"
        )
    if not isinstance(activation, str | None) or activation not in ACTIVATIONS:
        raise ValueError(f"{NAME}: activation must be None or 'silu', got {activation!r}")
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"{NAME}: plan must be a tileweave.Plan or None, got {type(plan).__name__}")
    _check_count("capacity", capacity)
    _check_count("max_tokens", max_tokens)
    if max_tokens is not None and x.shape[0] > max_tokens:
        raise ValueError(f"{NAME}: x has {x.shape[0]} rows, max_tokens={max_tokens} must be at least that")
    if capacity is None and x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{NAME}: capacity=None waits for sizes, which cannot be captured in a CUDA graph; give a capacity"
        )
    if experts is not None and (isinstance(experts, bool) or not isinstance(experts, int)):
        raise TypeError(f"{NAME}: experts must be an int or None, got {experts!r}")
    found = Experts(w.shape[0] * world if experts is None else experts, world)
    if found.total < world:
        raise ValueError(f"{NAME}: experts must be at least one for each of {world} ranks, got {found.total}")
    if topk_index.shape[1] > found.total:
        raise ValueError(
            f"{NAME}: topk_index has {topk_index.shape[1]} choices for each token, more than the {found.total} "
            f"experts that there are: {found.total} at most"
        )
    return found


def unknown_experts(topk_index: torch.Tensor, experts: int) -> str | None:
    """What is wrong with choices that are neither -1 nor an expert's number, if there are any. The host waits."""
    unknown = topk_index[(topk_index < -1) | (topk_index >= experts)]
    if unknown.numel() == 0:
        return None
    return (
        f"{NAME}: topk_index must be experts' numbers, 0 to {experts - 1}, or -1 for none, but {unknown.numel()} of "
        f"{topk_index.numel()} are others, the first one {int(unknown[0])}"
    )


def check_own(experts: Experts, rank: int, own: int) -> None:
    """ValueError unless this rank's w has this rank's experts."""
    first, end = experts.of(rank)
    if end - first != own:
        raise ValueError(
            f"{NAME}: of {experts.total} experts rank {rank} of {experts.world} has {end - first}, "
            f"numbers {first} to {end - 1}, but w has {own}"
        )


def choose(
    site: Site, w: Like, gated: bool, experts: Experts, most: int | None, plan: Plan | None, hardware: Hardware = H200
) -> Route:
    """The path of a dispatch, the same on all ranks; ValueError if it cannot follow the plan. most: rows of the rank
    with most of them; None where only the call itself will know; hardware: that of the planner, if not an H200."""
    problem = problem_of(site, w, gated, experts)
    if plan is not None and (why := unsupported_dispatch(problem, plan, hardware)):
        raise ValueError(f"{NAME}: {why}")
    refusal = out_of_reach(site, w.device, "x")
    for name, size in (("H", w.shape[1]), ("I", w.shape[2])):
        if refusal is None and (size % 8 or size == 0):
            refusal = f"{name} = {size} is no multiple of 8, so rows are not 16-byte aligned as TMA needs"
    refusal = refusal or unfusable(problem)
    found = site.measured(NAME, problem) if plan is None and refusal is None else None
    if found and most is not None and most > most_rows(problem, found.plan):
        found = None
    taken = plan or (found.plan if found else dispatch_plan_for(problem, hardware) if refusal is None else None)
    limit = most_rows(problem, taken) if taken else 0
    if refusal is None and most is not None and taken and most > limit:
        refusal = f"a rank may have {most} rows, the flags of {taken.comm_sms} SMs that communicate can count {limit}"
    if refusal or taken is None:
        way = "tokens by the group's all-to-all, then grouped_matmul"
        return fallback(NAME, refusal or "no plan fits", way, plan, site.backend)
    until = "" if most is not None else f"; if a rank comes to have more than {limit} rows, the group's all-to-all"
    measured_us = found.measured_us if found else None
    return Route(NAME, site.backend, True, taken.reason + until, taken, measured_us=measured_us)


def problem_of(site: Site, w: Like, gated: bool, experts: Experts) -> DispatchProblem:
    """A dispatch as the planner sees it."""
    products = 2 if gated else 1
    return DispatchProblem(site.world, experts.most, w.shape[2], w.shape[1], site.usable(0), products, site.cores)


def most_rows(problem: DispatchProblem, plan: Plan) -> int:
    """The most rows that a rank may have, as the kernel's flags count its row tiles."""
    return ((STEPS.value - 2) * plan.comm_sms - problem.experts) * plan.tile[0]


def check_rows(name: str, what: str, y: Any, route: Any, world: int) -> None:
    """TypeError or ValueError unless `y` has the rows of a route."""
    if not isinstance(route, TokenRoute):
        raise TypeError(f"{name}: route must be what moe_dispatch_matmul returned, got {type(route).__name__}")
    check_dense(name, ((what, y),))
    rows = route.row_slot.shape[0]
    if y.dim() != 2 or y.shape[0] != rows or y.dtype not in DTYPES or y.device != route.row_slot.device:
        raise ValueError(
            f"{name}: {what} must be [{rows}, I] of bfloat16 or float16 on {route.row_slot.device}, "
            f"got {list(y.shape)} of {y.dtype} on {y.device}"
        )
    if route.token_slot.shape[1] != world:
        raise ValueError(f"{name}: route is of a group of {route.token_slot.shape[1]} ranks, this one has {world}")


def check_combine(h: Any, w: Any, route: Any, world: int, plan: Any) -> None:
    """TypeError or ValueError unless `h` has the rows of a route and `w` a matrix of each of its experts."""
    check_rows(COMBINE, "h", h, route, world)
    check_dense(COMBINE, (("w", w),))
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"{COMBINE}: plan must be a tileweave.Plan or None, got {type(plan).__name__}")
    experts = route.offsets.shape[0]
    if w.dim() != 3 or tuple(w.shape[:2]) != (experts, h.shape[1]) or w.dtype != h.dtype or w.device != h.device:
        raise ValueError(
            f"{COMBINE}: w must be [{experts}, {h.shape[1]}, H] of {h.dtype} on {h.device}, got {list(w.shape)} of "
            f"{w.dtype} on {w.device}"
        )


def combine_problem_of(site: Site, w: Like, experts: int, homes: int, topk: int) -> combining.Problem:
    """A way back as the planner sees it, the same on all ranks: of so many experts of the group, and with so many homes
    on the rank with most, `topk` for each token."""
    most = Experts(experts, site.world).most
    tokens, sms = -(-homes // topk), site.usable(0)
    return combining.Problem(site.world, most, w.shape[2], w.shape[1], tokens, topk, sms, site.linked, site.cores)


def choose_combine(
    site: Site, rows: int, w: Like, problem: combining.Problem, plan: Plan | None, hardware: Hardware = H200
) -> Route:
    """The path of a matmul of so many rows + combine, the same on all ranks; ValueError if it cannot follow the plan.
    problem: see `combine_problem_of`; hardware: that of the planner, if not an H200."""
    if plan is not None and (why := combining.unsupported(problem, plan, hardware)):
        raise ValueError(f"{COMBINE}: {why}")
    refusal = out_of_reach(site, w.device, "h") or combining.unfusable(problem)
    if refusal:
        return fallback(COMBINE, refusal, "grouped_matmul, then rows by the group's all-to-all", plan, site.backend)
    own = GroupedProblem(rows, w.shape[0], w.shape[2], w.shape[1], problem.sms, site.cores)
    found = site.measured(COMBINE, replace(problem, tokens=0)) if plan is None else None
    made = plan or (found.plan if found else combining.plan_for(own, hardware))
    return Route(COMBINE, site.backend, True, made.reason, made, measured_us=found.measured_us if found else None)


def _check_count(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{NAME}: {name} must be an int or None, got {value!r}")
    if not 1 <= value <= LARGEST:
        raise ValueError(f"{NAME}: {name} must be from 1 to {LARGEST}, or None, got {value}")
