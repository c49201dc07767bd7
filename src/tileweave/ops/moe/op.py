"""The ops of expert parallelism: what users call."""

import torch

from tileweave.fabric import fabric_of, group_name
from tileweave.ops.contract import operand_dtype
from tileweave.ops.grouped_matmul import grouped_matmul
from tileweave.ops.moe.check import (
    NAME,
    check_combine,
    check_dispatch,
    check_rows,
    choose,
    choose_combine,
    too_many_rows,
)
from tileweave.ops.moe.combine_operator import OPERATOR as COMBINE_OPERATOR
from tileweave.ops.moe.launch import products
from tileweave.ops.moe.routing import TokenRoute, make_route
from tileweave.ops.moe.unfused import combine, dispatch
from tileweave.ops.route import Route
from tileweave.planner import Plan


def moe_dispatch_matmul(
    x: torch.Tensor,
    topk_index: torch.Tensor,
    w: torch.Tensor,
    group=None,
    *,
    topk_weight: torch.Tensor | None = None,
    capacity: int | None = None,
    activation: str | None = None,
    w_gate: torch.Tensor | None = None,
    experts: int | None = None,
    max_tokens: int | None = None,
    plan: Plan | None = None,
) -> tuple[torch.Tensor, TokenRoute]:
    """All ranks' tokens to the ranks of their experts, and these experts' first matmul.

    Args:
        x: `[T, H]`, bfloat16 or float16, this rank's tokens; T may differ between ranks, 0 included.
        topk_index: `[T, k]`, int32 or int64: the experts of each token by their number in the whole group; -1, or what
            is no expert's number, is dropped. An expert that a token names twice gets two rows of it: both weights
            count.
        w: `[E_local, H, I]`, this rank's experts, as `grouped_matmul` takes them. Experts are divided as
            torch.tensor_split does: consecutive ones, the first ranks one more if they do not divide.
        group: a ProcessGroup, a 1-D DeviceMesh, the group that `virtual_world` hands out, or None: the thread's
            virtual world, else torch.distributed's WORLD, else a world of one.
        topk_weight: `[T, k]`: what `moe_combine` multiplies the rows of a token with; None: 1.
        capacity: rows that every rank takes in, the same on all. Then sizes depend on no data: no host synchronization
            (see max_tokens). Rows beyond it are dropped, the last ones in the order of rows below: they count as 0 on
            the way back, and route.dropped says how many of this rank's choices they were. None: as many rows as there
            are, at the cost of one host synchronization; refused while a CUDA graph is captured.
        activation: None, or "silu" of the product.
        w_gate: as w: the result is silu(x @ w_gate) * (x @ w).
        experts: how many there are in the group; None: E_local on each rank.
        max_tokens: at least T of every rank, the same on all; with a capacity it keeps buffers small.
        plan: a `Plan` to use instead of the planner's, the same on all ranks: tile, stages and communicator SMs, of
            which half send and half place.

    Returns:
        (y, route): y `[R, I]`, R = capacity or what came; rows are sorted by expert (route.offsets has their ends),
        then by the rank that the token comes from, then by token and choice; zeros behind the last. route: a
        `TokenRoute`, for the way back.

    Under torch.autocast x, w and w_gate are cast. A token that several experts of a rank want is sent there once.
    Gradients of x, w, w_gate and, through the way back, topk_weight exist; a backward pass is collective too, and
    the same inputs must require gradients on all ranks.

    Raises:
        ValueError, TypeError: the arguments break the rules above; nothing has been launched. A rank that alone breaks
            one, by more tokens than max_tokens, raises alone, and its peers wait for it in vain.
        RuntimeError: capacity=None while a CUDA graph is captured.
    """
    x, w = (each.to(operand_dtype(each)) if isinstance(each, torch.Tensor) else each for each in (x, w))
    w_gate = w_gate.to(operand_dtype(w_gate)) if isinstance(w_gate, torch.Tensor) else w_gate
    fabric, name = fabric_of(group, getattr(x, "device", None)), group_name(group)
    found = check_dispatch(fabric, x, topk_index, w, topk_weight, capacity, activation, w_gate, experts, max_tokens)
    chosen = choose(fabric, x, w, found, plan)
    if fabric.compares:
        sizes = found.total, w.shape[1], w.shape[2], capacity, max_tokens
        fabric.agree((NAME, x.dtype, sizes, topk_weight is None, w_gate is None, chosen.plan))
    align = chosen.plan.tile[0] if chosen.plan else 1
    route, sends = make_route(fabric, group, name, topk_index, topk_weight, found, capacity, max_tokens, align)
    matrices = [w] if w_gate is None else [w, w_gate]
    if chosen.plan is None or too_many_rows(chosen.plan, sends.most, found):
        rows = dispatch(x, route, name)
        ys = tuple(grouped_matmul(rows, each, route.offsets) for each in matrices)
    else:
        ys = products(fabric, name, x, matrices, route, sends, found.most, chosen.plan)
    if w_gate is not None:
        return torch.nn.functional.silu(ys[1]) * ys[0], route
    return torch.nn.functional.silu(ys[0]) if activation == "silu" else ys[0], route


def moe_combine(y: torch.Tensor, route: TokenRoute, group=None) -> torch.Tensor:
    """The way back: for each of this rank's tokens the sum of its experts' rows, times topk_weight.

    Args:
        y: `[R, I]`, bfloat16 or float16: a row for each row of the dispatch. Rows behind the last are not looked at.
        route: what `moe_dispatch_matmul` returned.
        group: as there; None: that of the route.

    Returns:
        `[T, I]` of y's dtype; zeros for a token all of whose choices were dropped. Rows of one token at one rank are
        summed in float32 and sent once; what arrives is summed in float32.

    Gradients of y and of topk_weight exist; collective, as the backward pass.
    """
    group = group if group is not None or not isinstance(route, TokenRoute) else route.group
    check_rows("moe_combine", "y", y, route, fabric_of(group, getattr(y, "device", None)).world_size)
    return combine(y, route, group_name(group))


def moe_matmul_combine(
    h: torch.Tensor, w: torch.Tensor, route: TokenRoute, group=None, *, plan: Plan | None = None
) -> torch.Tensor:
    """The experts' second matmul and the way back, in one kernel: rows leave for their tokens' ranks as tiles end.

    Args:
        h: `[R, I]`, bfloat16 or float16: a row for each row of the dispatch. Rows behind the last are not looked at.
        w: `[E_local, I, H]`, dtype and device of h, this rank's experts, as `grouped_matmul` takes them.
        route, group: as in `moe_combine`.
        plan: a `Plan` to use instead of the planner's: tile and stages. It may differ between ranks.

    Returns:
        `[T, H]` of h's dtype, on the current stream: `moe_combine(grouped_matmul(h, w, route.offsets), route)`,
        but each row is rounded once and sent by itself, and a token's rows are summed in float32 in the order of its
        choices: the result depends on no timing.

    Under torch.autocast h and w are cast. Gradients of h, w and of topk_weight exist; collective, as the backward pass.
    Where the kernel cannot run (`tileweave.explain` says why), the two ops above follow each other.

    Raises:
        ValueError, TypeError: the arguments break the rules above; nothing has been launched.
    """
    group, h, w = _way_back(h, w, route, group)
    check_combine(h, w, route, fabric_of(group, getattr(h, "device", None)).world_size, plan)
    text = "" if plan is None else plan.to_json()
    return COMBINE_OPERATOR(
        h, w, route.row_weight, route.offsets, route.row_slot, route.row_home, route.token_slot, route.home,
        route.slots, route.homes, group_name(group), text,
    )  # fmt: skip


def _way_back(h, w, route, group):
    """The group of a route unless one is given, and operands as they reach the operator."""
    group = group if group is not None or not isinstance(route, TokenRoute) else route.group
    h, w = (each.to(operand_dtype(each)) if isinstance(each, torch.Tensor) else each for each in (h, w))
    return group, h, w


def explain_combine(h, w, route, group=None, *, plan=None) -> Route:
    """What `moe_matmul_combine` would do with these arguments; launches nothing, raises what it would raise."""
    group, h, w = _way_back(h, w, route, group)
    fabric = fabric_of(group, getattr(h, "device", None))
    check_combine(h, w, route, fabric.world_size, plan)
    return choose_combine(fabric, h, w, plan)


def explain_dispatch(x, topk_index, w, group=None, *, topk_weight=None, capacity=None, activation=None, w_gate=None,
                     experts=None, max_tokens=None, plan=None) -> Route:  # fmt: skip
    """What `moe_dispatch_matmul` would do with these arguments; launches nothing, raises what it would raise."""
    fabric = fabric_of(group, getattr(x, "device", None))
    found = check_dispatch(fabric, x, topk_index, w, topk_weight, capacity, activation, w_gate, experts, max_tokens)
    return choose(fabric, x, w, found, plan)
