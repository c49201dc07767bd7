"""ring_attention: its contract, the path of a call, and what each rank's queries see of each rank's keys."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from tileweave.fabric.base import FLAGS
from tileweave.ops.contract import Like, Site
from tileweave.ops.route import Route
from tileweave.ops.sequence import contract
from tileweave.ops.sequence.contract import BLOCKS, check_packed, check_shape, decide, unfusable
from tileweave.ops.sequence.packed import Block, blocks_between
from tileweave.ops.sequence.placement import PLACEMENTS, pieces
from tileweave.planner import H200, Hardware, Plan
from tileweave.planner.attention import TWO_BLOCKS, Problem, padded_dim, unsupported

NAME = "ring_attention"
CHANNELS = NAME, f"{NAME}, two blocks"


@dataclass(frozen=True)
class Call(contract.Call):
    """A call that keeps the contract."""

    placement: str


def channel_name(plan: Plan) -> str:
    """The channel of a call with this plan: with another protocol the slots, flags and epoch are others too."""
    return CHANNELS[plan.schedule == TWO_BLOCKS]


def blocks_at_most(world: int, two_blocks: bool) -> int:
    """Blocks of heads that a call may have: each has a flag from each rank, with two blocks also one for its credit."""
    return min(FLAGS // (2 * world if two_blocks else world), BLOCKS)


def held_heads(heads: int, world: int) -> int:
    """Heads in a block of which a rank holds two, from each peer: together as many keys as two ranks have, unless there
    are fewer `heads` than peers, or more blocks than flags."""
    return max(heads // (world - 1), math.ceil(heads / blocks_at_most(world, True)), 1)


def runs_of(call: Call, world: int, rank: int) -> list[int]:
    """Where the pieces of a rank begin in the whole sequence."""
    if call.placement == "contiguous":
        return [rank * call.shape.rows]
    return [piece * (call.shape.rows // 2) for piece in (rank, 2 * world - 1 - rank)]


def blocks_of(call: Call, world: int, rank: int, source: int, ends: Sequence[int] | None) -> Iterator[Block]:
    """What the queries of `rank` see of the keys of `source`, in blocks; `ends`: the values of cu_seqlens."""
    rows, keys = call.shape.rows, call.shape.kv_rows
    everything = slice(0, rows), slice(0, keys)
    if ends is not None:
        size = rows // pieces(call.placement)
        for i, first in enumerate(runs_of(call, world, rank)):
            for j, keys_first in enumerate(runs_of(call, world, source)):
                for block in blocks_between(ends, first, keys_first, size, call.causal):
                    yield Block(shifted(block.rows, i * size), shifted(block.cols, j * size), block.diagonal)
    elif not call.causal:
        yield Block(*everything, False)
    elif source == rank:
        yield Block(*everything, True)  # a rank's pieces follow each other in the sequence too
    elif call.placement == "contiguous":
        if source < rank:
            yield Block(*everything, False)
    elif source < rank:
        # zigzag: of an earlier rank's keys the first half lies before all queries, the other behind them; those of a
        # later rank lie between the two halves of the queries
        yield Block(slice(0, rows), slice(0, keys // 2), False)
    else:
        yield Block(slice(rows // 2, rows), slice(0, keys), False)


def shifted(part: slice, by: int) -> slice:
    """The slice `by` elements on."""
    return slice(part.start + by, part.stop + by)


def check_kinds(
    q: Any, k: Any, v: Any, cu_seqlens: Any, causal: Any, scale: Any, plan: Any, return_lse: Any = False
) -> None:
    """TypeError or ValueError for values that an operator's schema cannot hold; the rest is for `check`."""
    contract.check_kinds(NAME, q, k, v, cu_seqlens, causal, scale, plan)
    if not isinstance(return_lse, bool):
        raise TypeError(f"{NAME}: return_lse must be True or False, got {return_lse!r}")


def check(
    world: int, q: Like, k: Like, v: Like, cu_seqlens: Like | None, causal: bool, scale: float | None, layout: str,
    placement: str,
) -> Call:  # fmt: skip
    """Hold the operator's arguments to the contract, in a group of `world` ranks; ValueError if they break it."""
    shape = check_shape(NAME, q, k, v, causal, scale, layout)
    if placement not in PLACEMENTS:
        raise ValueError(f"{NAME}: placement must be 'contiguous' or 'zigzag', got {placement!r}")
    if placement == "zigzag" and (shape.rows % 2 or shape.kv_rows % 2):
        raise ValueError(
            f"{NAME}: with placement='zigzag' a rank has two equal pieces of the sequence, but q has {shape.rows} "
            f"tokens and k {shape.kv_rows}; even numbers would do"
        )
    if cu_seqlens is not None:
        check_packed(NAME, cu_seqlens, q, shape)
    scale = shape.dim**-0.5 if scale is None else float(scale)
    return Call(NAME, shape, q.dtype, causal, scale, layout, world, cu_seqlens is not None, placement)


@lru_cache(maxsize=4096)
def settle(
    site: Site, q: Like, k: Like, v: Like, cu_seqlens: Like | None, causal: bool, scale: float | None, layout: str,
    placement: str, plan: Plan | None,
) -> tuple[Call, Route]:  # fmt: skip
    """`check`, then `choose`; remembered."""
    call = check(site.world, q, k, v, cu_seqlens, causal, scale, layout, placement)
    return call, choose(site, call, q.device, plan)


def choose(site: Site, call: Call, device: torch.device, plan: Plan | None, hardware: Hardware = H200) -> Route:
    """The path of a call; ValueError if it cannot follow the plan. hardware: the planner's; memory is the site's."""
    hardware = site.on(hardware)
    problem = problem_of(site, call)
    if plan is not None and problem is not None and (why := unsupported(problem, plan, hardware)):
        raise ValueError(f"{NAME}: {why}")
    way = "PyTorch's attention for each rank's keys in turn, put together in float32"
    return decide(site, call, problem, unfusable(site, call, device), plan, way, hardware)


def problem_of(site: Site, call: Call) -> Problem | None:
    """A call as the planner sees it, on the rank that has most to do; None if no tile has its heads."""
    s, dim = call.shape, padded_dim(call.shape.dim)
    if not dim:
        return None
    zigzag = call.placement == "zigzag"
    keys = s.kv_rows * (site.world if not call.causal else site.world / 2 if zigzag else site.world - 0.5)
    sent = 4 * (site.world - 1) * s.batch * s.kv_heads * s.kv_rows * dim
    rows = s.rows // pieces(call.placement)
    flops = 4.0 * s.batch * s.heads * s.rows * keys * dim
    return Problem(NAME, dim, rows, site.world, site.sms or H200.sms, flops, sent, site.linked, 2 * sent, site.cores)
