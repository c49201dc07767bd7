"""moe_dispatch_matmul as operators of PyTorch: schemas, implementations, shape functions, gradients.

    tileweave::moe_route(Tensor topk_index, Tensor? topk_weight, int experts, int own, int? capacity, int? max_tokens,
                         str group_name) -> Tensor[]
    tileweave::moe_row_weight(Tensor topk_weight, Tensor row_weight, Tensor rank, Tensor place, int most,
                               str group_name) -> Tensor
    tileweave::moe_dispatch_matmul(Tensor x, Tensor w, Tensor? w_gate, Tensor offsets, Tensor row_slot,
                                   Tensor token_slot, Tensor row_first, Tensor sends, Tensor sent, Tensor bounds,
                                   int experts, int slots, int most, bool silu, str group_name, str plan) -> Tensor

The first returns what `routing.find_route` says, and nothing in it has a gradient. The second returns row_weight as it
is, and carries its gradient to topk_weight; rank is one of the first's. Of the third, offsets, row_slot, token_slot and
slots are fields of a `TokenRoute`, row_first to bounds those of its `Lists`, most is that of its Sizes; `plan` is a
Plan as JSON, or "" for the planner's.
Neither rows nor products are kept for the backward pass: x is sent once more, and what a gate or silu was applied to is
multiplied once more. With X [R, H] the rows, G [R, I] the gradient of a product,

    grad w = grouped_outer(X, G, offsets)        grad x = the sums of a token's rows of grouped_matmul(G, w^T, offsets)

so a backward pass is a collective too.
"""

import torch
from torch.nn.functional import pad

from tileweave.fabric import group_size, named_fabric
from tileweave.ops.contract import Agreement, Like, Site, asks, out_of_reach
from tileweave.ops.library import LIBRARY, TAGS, register_shape_of_collective
from tileweave.ops.moe import routing_launch
from tileweave.ops.moe.check import NAME, check_own, choose, unknown_experts
from tileweave.ops.moe.launch import fused
from tileweave.ops.moe.routing import Experts, Lists, find_route, sizes_of, width_of
from tileweave.ops.moe.routing_launch import fits
from tileweave.ops.moe.unfused import combine, dispatch
from tileweave.ops.registration import read_plan

LIBRARY.define(
    "moe_route(Tensor topk_index, Tensor? topk_weight, int experts, int own, int? capacity, int? max_tokens, "
    "str group_name) -> Tensor[]",
    tags=TAGS,
)
LIBRARY.define(
    "moe_row_weight(Tensor topk_weight, Tensor row_weight, Tensor rank, Tensor place, int most, str group_name) "
    "-> Tensor",
    tags=TAGS,
)
LIBRARY.define(
    f"{NAME}(Tensor x, Tensor w, Tensor? w_gate, Tensor offsets, Tensor row_slot, Tensor token_slot, "
    "Tensor row_first, Tensor sends, Tensor sent, Tensor bounds, int experts, int slots, int most, bool silu, "
    "str group_name, str plan) -> Tensor",
    tags=TAGS,
)
OPERATOR = torch.ops.tileweave.moe_dispatch_matmul.default


@torch.library.impl(LIBRARY, "moe_route", "CompositeExplicitAutograd")
def _run_route(topk_index, topk_weight, experts, own, capacity, max_tokens, group_name):
    """The operator's implementation."""
    fabric = named_fabric(group_name, topk_index.device)
    divided = Experts(experts, fabric.world_size)
    check_own(divided, fabric.rank, own)
    if fabric.compares:
        asked = asks(
            experts=experts, topk=topk_index.shape[1], capacity=capacity, max_tokens=max_tokens,
            weighted=topk_weight is not None,
        )  # fmt: skip
        fabric.agree(Agreement(f"{NAME}, its route,", asked, None))
    if fabric.debug and not (topk_index.is_cuda and torch.cuda.is_current_stream_capturing()):  # the host waits for it
        fabric.hold(unknown_experts(topk_index, experts))
    asked = topk_index, topk_weight, divided, capacity, max_tokens
    if out_of_reach(Site.of(fabric), topk_index.device, "topk_index", ()) or not fits(topk_index.shape[1], divided):
        return find_route(fabric, group_name, *asked)
    return routing_launch.find_route(fabric, *asked)


@register_shape_of_collective("moe_route")
def _fake_route(topk_index, topk_weight, experts, own, capacity, max_tokens, group_name):
    """The results' shapes, which a capacity makes known."""
    if capacity is None:
        raise ValueError(f"{NAME}: capacity=None waits for sizes, which torch.compile cannot trace; give a capacity")
    world, (tokens, k) = group_size(group_name), topk_index.shape
    sizes_of(world, k, capacity, max_tokens)
    most = Experts(experts, world).most

    def empty(*shape, dtype=torch.int32):
        return topk_index.new_empty(shape, dtype=dtype)

    words = 3 if topk_weight is None else 4
    return [
        empty(own), empty(world, tokens).t(), empty(), empty(tokens, k, dtype=torch.int64), empty(tokens, k),
        empty(tokens, k), empty(words, width_of(capacity)), empty(2, world, tokens), empty(world),
        empty(world, most + 1), torch.empty(4, dtype=torch.int64, device="cpu"),
    ]  # fmt: skip


@torch.library.impl(LIBRARY, "moe_row_weight", "CompositeExplicitAutograd")
def _run_row_weight(topk_weight, row_weight, rank, place, most, group_name):
    """The operator's implementation."""
    return row_weight.clone()


@torch.library.register_fake("tileweave::moe_row_weight", lib=LIBRARY)
def _fake_row_weight(topk_weight, row_weight, rank, place, most, group_name):
    """The result's shape."""
    return torch.empty_like(row_weight)


def _remember_weight(ctx, inputs, output) -> None:
    weight, _, rank, place, ctx.most, ctx.group_name = inputs
    ctx.save_for_backward(rank, place)
    ctx.dtype = weight.dtype


def _weight_backward(ctx, grad):
    """Each rank sends the gradients of its rows to all ranks, which take those of their choices."""
    rank, place = ctx.saved_tensors
    rows = pad(grad, (0, ctx.most - grad.shape[0])).repeat(group_size(ctx.group_name), 1)
    got = torch.ops.tileweave.all_to_all.default(rows, ctx.group_name, 0, 0)
    return pad(got, (0, 1, 0, 1))[rank, place].to(ctx.dtype), None, None, None, None, None


torch.library.register_autograd(
    "tileweave::moe_row_weight", _weight_backward, setup_context=_remember_weight, lib=LIBRARY
)


@torch.library.impl(LIBRARY, NAME, "CompositeExplicitAutograd")
def _run(
    x, w, w_gate, offsets, row_slot, token_slot, row_first, sends, sent, bounds, experts, slots, most, silu,
    group_name, plan,
):  # fmt: skip
    """The operator's implementation."""
    fabric = named_fabric(group_name, x.device)
    divided = Experts(experts, fabric.world_size)
    chosen = choose(Site.of(fabric), Like.of(w), w_gate is not None, divided, most, read_plan(plan))
    if fabric.compares:
        sizes = asks(
            dtype=x.dtype, H=w.shape[1], I=w.shape[2], slots=slots, most=most, gated=w_gate is not None, silu=silu
        )
        fabric.agree(Agreement(NAME, sizes, chosen.plan))
    if chosen.plan is not None:
        lists = Lists(row_first, sends, sent, bounds)
        return fused(
            fabric, x, w, w_gate, offsets, row_slot, token_slot, divided, lists, slots, most, silu, chosen.plan
        )
    rows = dispatch(x, row_slot, token_slot, slots, group_name)
    return _activated(*_products(rows, w, w_gate, offsets), silu).to(x.dtype)


def _products(rows, *matrices_and_offsets):
    """Of rows and each matrix that there is, or None."""
    *matrices, offsets = matrices_and_offsets
    return [None if w is None else torch.ops.tileweave.grouped_matmul.default(rows, w, offsets, "") for w in matrices]


def _activated(up, gate, silu):
    """What a product, and that of the gate, become, in float32 if anything is computed."""
    if gate is not None:
        return torch.nn.functional.silu(gate.float()) * up.float()
    return torch.nn.functional.silu(up.float()) if silu else up


@register_shape_of_collective(NAME)
def _fake(
    x, w, w_gate, offsets, row_slot, token_slot, row_first, sends, sent, bounds, experts, slots, most, silu,
    group_name, plan,
):  # fmt: skip
    """The result's shape."""
    return x.new_empty(row_slot.shape[0], w.shape[2])


def _remember(ctx, inputs, output) -> None:
    x, w, w_gate, offsets, row_slot, token_slot, *_, ctx.slots, _, ctx.silu, ctx.group_name, _ = inputs
    ctx.save_for_backward(x, w, w_gate, offsets, row_slot, token_slot)


def _backward(ctx, grad):
    x, w, w_gate, offsets, row_slot, token_slot = ctx.saved_tensors
    needs_x, needs_w, needs_gate, *_ = ctx.needs_input_grad
    way = row_slot, token_slot, ctx.slots, ctx.group_name
    grad, grad_gate = grad.contiguous(), None
    activated = ctx.silu or w_gate is not None
    rows = dispatch(x, *way) if activated or needs_w or needs_gate else None
    if activated:
        up, gate = _products(rows, w, w_gate, offsets)
        grad, grad_gate = _before_activation(grad, up, gate)
    grad_x = grad_w = grad_w_gate = None
    if needs_x:
        pairs = (grad, w), (grad_gate, w_gate)
        parts = [_products(g, each.transpose(1, 2), offsets)[0] for g, each in pairs if g is not None]
        grad_x = combine(parts[0] if len(parts) == 1 else parts[0] + parts[1], None, *way)
    if needs_w:
        grad_w = torch.ops.tileweave.grouped_outer.default(rows, grad, offsets)
    if needs_gate:
        grad_w_gate = torch.ops.tileweave.grouped_outer.default(rows, grad_gate, offsets)
    return grad_x, grad_w, grad_w_gate, *[None] * 13


def _before_activation(grad, up, gate):
    """Gradients of the product and of the gate's, None if there is none, of that of what they became."""
    inner = (up if gate is None else gate).float()
    logistic = inner.sigmoid()
    slope = grad * logistic * (1 + inner * (1 - logistic))
    if gate is None:
        return slope.to(grad.dtype), None
    return (grad * inner * logistic).to(grad.dtype), (slope * up).to(grad.dtype)


torch.library.register_autograd(f"tileweave::{NAME}", _backward, setup_context=_remember, lib=LIBRARY)
