"""ulysses_attention: its contract, and the path of a call, which is decided before anything is launched."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from tileweave.fabric.base import FLAGS
from tileweave.ops.contract import Like, Site
from tileweave.ops.route import Route
from tileweave.ops.sequence import contract
from tileweave.ops.sequence.contract import BLOCKS, check_packed, check_shape, decide, unfusable
from tileweave.planner import H200, Hardware, Plan
from tileweave.planner.attention import ROWS, Problem, padded_dim, unsupported

NAME = "ulysses_attention"
WIDEST = 128  # head dimension of the kernel


@dataclass(frozen=True)
class Call(contract.Call):
    """A call that keeps the contract."""

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        """Of a rank's log-sum-exps: all rows of its heads."""
        return self.shape.batch, self.shape.heads // self.world, self.shape.rows * self.world

    @property
    def copies(self) -> int:
        """How many ranks each head of k and v goes to."""
        return max(self.world // self.shape.kv_heads, 1)


def check_kinds(
    q: Any, k: Any, v: Any, cu_seqlens: Any, causal: Any, scale: Any, plan: Any, attention: Any = None
) -> None:
    """TypeError or ValueError for values that an operator's schema cannot hold; the rest is for `check`."""
    contract.check_kinds(NAME, q, k, v, cu_seqlens, causal, scale, plan)
    if attention is None:
        return
    if not callable(attention):
        raise TypeError(f"{NAME}: attention must be callable or None, got {type(attention).__name__}")
    if plan is not None:
        raise ValueError(f"{NAME}: plan is for the library's own attention: leave it out where `attention` is given")
    if cu_seqlens is not None:
        raise ValueError(
            f"{NAME}: cu_seqlens is for the library's own attention: let `attention` know of the sequences by itself"
        )
    if not torch.compiler.is_compiling() and (why := _uncallable(attention)):
        raise TypeError(f"{NAME}: attention is called as attention(q, k, v, causal=causal, scale=scale): {why}")


def _uncallable(attention: Callable) -> str | None:
    """Why a callable cannot be called as attention of a rank's heads; None if it can, or does not say what it takes."""
    if attention is scaled_dot_product_attention:
        return (
            "scaled_dot_product_attention has other names for it; lambda q, k, v, causal, scale: "
            "scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale) would do in layout 'bhsd'"
        )
    try:
        takes = inspect.signature(attention)
    except ValueError:  # as some builtins
        return None
    try:
        takes.bind(None, None, None, causal=False, scale=None)
    except TypeError as error:
        return f"the one given takes {takes}: {error}"
    return None


def check(
    world: int, q: Like, k: Like, v: Like, cu_seqlens: Like | None, causal: bool, scale: float | None, layout: str
) -> Call:
    """Hold the operator's arguments to the contract, in a group of `world` ranks; ValueError if they break it."""
    shape = check_shape(NAME, q, k, v, causal, scale, layout)
    if shape.heads % world:
        near = shape.heads - shape.heads % world
        raise ValueError(
            f"{NAME}: q has {shape.heads} heads, not divisible by the world size {world}; "
            f"{f'{near} or ' if near else ''}{near + world} would be"
        )
    if shape.kv_heads % world and world % shape.kv_heads:
        raise ValueError(
            f"{NAME}: k and v have {shape.kv_heads} heads in a world of {world}: one must be a multiple of the other"
        )
    if cu_seqlens is not None:
        check_packed(NAME, cu_seqlens, q, shape)
    scale = shape.dim**-0.5 if scale is None else float(scale)
    return Call(NAME, shape, q.dtype, causal, scale, layout, world, cu_seqlens is not None)


@lru_cache(maxsize=4096)
def settle(
    site: Site,
    q: Like,
    k: Like,
    v: Like,
    cu_seqlens: Like | None,
    causal: bool,
    scale: float | None,
    layout: str,
    plan: Plan | None,
) -> tuple[Call, Route]:
    """`check`, then `choose`; remembered."""
    call = check(site.world, q, k, v, cu_seqlens, causal, scale, layout)
    return call, choose(site, call, q.device, plan)


def choose(site: Site, call: Call, device: torch.device, plan: Plan | None, hardware: Hardware = H200) -> Route:
    """The path of a call; ValueError if it cannot follow the plan. hardware: the planner's; memory is the site's."""
    hardware = site.on(hardware)
    refusal, problem = unfusable(site, call, device, WIDEST), problem_of(site, call)
    if plan is not None and problem is not None and (why := unsupported(problem, plan, hardware) or too_narrow(plan)):
        raise ValueError(f"{NAME}: {why}")
    return decide(site, call, problem, refusal, plan, "all-to-all, PyTorch's attention, all-to-all", hardware)


def too_narrow(plan: Plan) -> str | None:
    """Why the communicators cannot send queries through the ring of keys; None if they can."""
    rows = ROWS[plan.core]
    legal = " or ".join(str(keys) for keys in (64, 128) if keys >= rows)
    return None if plan.tile[1] >= rows else f"plan.tile={plan.tile}: {NAME} has {legal} keys"


def blocks_at_most(world: int) -> int:
    """Blocks of heads that a call may have: each has two flags from each rank, for what comes and what goes back."""
    return min(FLAGS // (2 * world), BLOCKS)


def problem_of(site: Site, call: Call) -> Problem | None:
    """A call as the planner sees it; None if no tile has its heads."""
    s, dim = call.shape, padded_dim(call.shape.dim)
    if not dim or dim > WIDEST:
        return None
    keys = s.kv_rows * (site.world / 2 if call.causal else site.world)
    flops = 4.0 * s.batch * s.heads * s.rows * keys * dim
    moved = 2 * s.heads * s.rows + 2 * max(s.kv_heads, site.world) * s.kv_rows
    sent = 2 * s.batch * moved * dim * (site.world - 1) // site.world
    return Problem(NAME, dim, s.rows, site.world, site.sms or H200.sms, flops, sent, site.linked, cores=site.cores)
