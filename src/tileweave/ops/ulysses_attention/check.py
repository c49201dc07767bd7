"""ulysses_attention: its contract, and the path of a call, which is decided before anything is launched."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tileweave.ops.contract import Like, Site
from tileweave.ops.route import Route
from tileweave.ops.sequence.contract import Shape, check_shape
from tileweave.ops.sequence.contract import check_kinds as check_tensors
from tileweave.planner import Plan

NAME = "ulysses_attention"


@dataclass(frozen=True)
class Call:
    """A call that keeps the contract; `shape` is that of this rank's shards. copies: ranks that need one head of k."""

    shape: Shape
    dtype: torch.dtype
    causal: bool
    scale: float
    layout: str
    world: int

    @property
    def copies(self) -> int:
        """How many ranks each head of k and v goes to."""
        return max(self.world // self.shape.kv_heads, 1)


class Agreement(NamedTuple):
    """What of a call all ranks must agree on."""

    call: Call
    plan: Plan | None

    def __str__(self) -> str:
        c, plan = self.call, "no fused kernel" if self.plan is None else self.plan.brief()
        return f"{NAME} of {c.shape} {c.dtype}, causal={c.causal}, scale={c.scale}, layout={c.layout!r}, {plan}"


def check_kinds(q: Any, k: Any, v: Any, causal: Any, scale: Any, plan: Any, attention: Any = None) -> None:
    """TypeError or ValueError for values that an operator's schema cannot hold; the rest is for `check`."""
    check_tensors(NAME, q, k, v, causal, scale, plan)
    if attention is None:
        return
    if not callable(attention):
        raise TypeError(f"{NAME}: attention must be callable or None, got {type(attention).__name__}")
    if plan is not None:
        raise ValueError(f"{NAME}: plan is for the library's own attention: leave it out where `attention` is given")


def check(world: int, q: Like, k: Like, v: Like, causal: bool, scale: float | None, layout: str) -> Call:
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
    return Call(shape, q.dtype, causal, shape.dim**-0.5 if scale is None else float(scale), layout, world)


@lru_cache(maxsize=4096)
def settle(
    site: Site, q: Like, k: Like, v: Like, causal: bool, scale: float | None, layout: str, plan: Plan | None
) -> tuple[Call, Route]:
    """`check`, then `choose`; remembered."""
    call = check(site.world, q, k, v, causal, scale, layout)
    return call, choose(site, call, q.device, plan)


def choose(site: Site, call: Call, device: torch.device, plan: Plan | None) -> Route:
    """The path of a call; ValueError if it cannot follow the plan."""
    if plan is not None:
        raise ValueError(f"{NAME}: plan must be None: there is no fused kernel that could follow it")
    refusal = site.refusal or "there is no fused kernel"
    return Route(NAME, "fallback", False, f"{refusal}: all-to-all, PyTorch's attention, all-to-all")
