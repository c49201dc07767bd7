"""The ops of expert parallelism: what users call."""

import torch

from tileweave.fabric import fabric_of, group_name, group_size
from tileweave.ops.contract import Like, Site, operand_dtype
from tileweave.ops.moe.check import (
    check_combine,
    check_dispatch,
    check_own,
    check_rows,
    choose,
    choose_combine,
    combine_problem_of,
)
from tileweave.ops.moe.combine_operator import OPERATOR as COMBINE
from tileweave.ops.moe.operator import OPERATOR as DISPATCH
from tileweave.ops.moe.routing import TokenRoute, make_route
from tileweave.ops.moe.unfused import combine
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
            is no expert's number (in debug mode an error on all ranks), is dropped. An expert that a token names twice
            gets two rows of it: both weights count.
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
        w_gate: as w: the result is silu(x @ w_gate) * (x @ w), in float32 until it is rounded.
        experts: how many there are in the group; None: E_local on each rank.
        max_tokens: at least T of every rank, the same on all; with a capacity it keeps buffers small.
        plan: a `Plan` to use instead of the planner's, the same on all ranks: tile, stages and communicator SMs.
            With a gate half of a tile's columns are the gate's.

    Returns:
        (y, route): y `[R, I]`, R = capacity or what came; rows are sorted by expert (route.offsets has their ends),
        then by the rank that the token comes from, then by token and choice; zeros behind the last. route: a
        `TokenRoute`, for the way back.

    Under torch.autocast x, w and w_gate are cast. A token that several experts of a rank want is sent there once.
    Gradients of x, w, w_gate and, through the way back, topk_weight exist; a backward pass is collective too, and
    the same inputs must require gradients on all ranks. It sends x once more, and multiplies once more what a gate or
    activation was applied to, instead of keeping either.

    Raises:
        ValueError, TypeError: the arguments break the rules above; nothing has been launched. A rank that alone breaks
            one, by more tokens than max_tokens, raises alone, and its peers wait for it in vain.
        RuntimeError: capacity=None while a CUDA graph is captured (under torch.compile, which needs a capacity too,
            PyTorch's own error says so).
    """
    x, w, w_gate = _cast(x, w, w_gate)
    name = group_name(group)
    found = check_dispatch(
        group_size(name), x, topk_index, w, topk_weight, capacity, activation, w_gate, experts, max_tokens, plan
    )
    route, lists, most = make_route(name, group, topk_index, topk_weight, found, w.shape[0], capacity, max_tokens)
    y = DISPATCH(
        x, w, w_gate, route.offsets, route.row_slot, route.token_slot, *lists, found.total, route.slots, most,
        activation == "silu", name, "" if plan is None else plan.to_json(),
    )  # fmt: skip
    return y, route


def _cast(*operands):
    """Operands as they reach the operator, under autocast; what is no tensor as it is."""
    return [each.to(operand_dtype(each)) if isinstance(each, torch.Tensor) else each for each in operands]


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
    name = group_name(_group_of(route, group))
    check_rows("moe_combine", "y", y, route, group_size(name))
    return combine(y, route.row_weight, route.row_slot, route.token_slot, route.slots, name)


def _group_of(route, group):
    """The group given, else that of the route."""
    return group if group is not None or not isinstance(route, TokenRoute) else route.group


def moe_matmul_combine(
    h: torch.Tensor, w: torch.Tensor, route: TokenRoute, group=None, *, plan: Plan | None = None
) -> torch.Tensor:
    """The experts' second matmul and the way back, in one kernel: rows leave for their tokens' ranks as tiles end.

    Args:
        h: `[R, I]`, bfloat16 or float16: a row for each row of the dispatch. Rows behind the last are not looked at.
        w: `[E_local, I, H]`, dtype and device of h, this rank's experts, as `grouped_matmul` takes them.
        route, group: as in `moe_combine`.
        plan: a `Plan` to use instead of the planner's: tile and stages, which may differ between ranks.

    Returns:
        `[T, H]` of h's dtype, on the current stream: `moe_combine(grouped_matmul(h, w, route.offsets), route)`,
        but each row is rounded once, and a token's rows are summed in float32 in the order of its choices: the result
        depends on no timing.

    Under torch.autocast h and w are cast. Gradients of h, w and of topk_weight exist; collective, as the backward pass.
    Where the kernel cannot run (`tileweave.explain` says why), the two ops above follow each other. Workspace: two
    slots of route.homes rows `[H]` on each rank: as many as the rank with most choices has, or, with a capacity, k *
    max_tokens or the capacity of all ranks, whichever is less.

    Raises:
        ValueError, TypeError: the arguments break the rules above; nothing has been launched.
    """
    h, w = _cast(h, w)
    name = group_name(_group_of(route, group))
    check_combine(h, w, route, group_size(name), plan)
    return COMBINE(
        h, w, route.row_weight, route.offsets, route.row_slot, route.row_home, route.token_slot, route.home,
        route.slots, route.homes, route.experts.total, name, "" if plan is None else plan.to_json(),
    )  # fmt: skip


def explain_way_back(y, route, group=None) -> Route:
    """What `moe_combine` would do with these arguments; launches nothing, raises what it would raise."""
    fabric = fabric_of(_group_of(route, group), getattr(y, "device", None))
    check_rows("moe_combine", "y", y, route, fabric.world_size)
    why = "torch sums a rank's rows of each token, the group's all_to_all carries the sums: not one kernel"
    return Route("moe_combine", fabric.backend, False, why)


def explain_combine(h, w, route, group=None, *, plan=None) -> Route:
    """What `moe_matmul_combine` would do with these arguments; launches nothing, raises what it would raise."""
    h, w = _cast(h, w)
    fabric = fabric_of(_group_of(route, group), getattr(h, "device", None))
    check_combine(h, w, route, fabric.world_size, plan)
    site, like = Site.of(fabric), Like(w.shape, w.dtype, w.device)
    problem = combine_problem_of(site, like, route.experts.total, route.homes, route.home.shape[1])
    return choose_combine(site, h.shape[0], like, problem, plan)


def explain_dispatch(x, topk_index, w, group=None, *, topk_weight=None, capacity=None, activation=None, w_gate=None,
                     experts=None, max_tokens=None, plan=None) -> Route:  # fmt: skip
    """What `moe_dispatch_matmul` would do with these arguments; launches nothing, raises what it would raise."""
    x, w, w_gate = _cast(x, w, w_gate)
    fabric = fabric_of(group, getattr(x, "device", None))
    found = check_dispatch(
        fabric.world_size, x, topk_index, w, topk_weight, capacity, activation, w_gate, experts, max_tokens, plan
    )
    check_own(found, fabric.rank, w.shape[0])
    return choose(Site.of(fabric), Like(w.shape, w.dtype, w.device), w_gate is not None, found, capacity, plan)
