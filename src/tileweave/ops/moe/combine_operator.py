"""moe_matmul_combine as an operator of PyTorch: schema, implementation, shape function, gradients.

    tileweave::moe_matmul_combine(Tensor h, Tensor w, Tensor? row_weight, Tensor offsets, Tensor row_slot,
                                  Tensor row_home, Tensor token_slot, Tensor home, int slots, int homes,
                                  int experts, str group_name, str plan) -> Tensor

What is between w and experts, which is how many the group has, are the fields of a `TokenRoute`; `plan` is a Plan as
JSON, or "" for the planner's. With G [T, H] the gradient of the result, brought to rows [R, H] as the dispatch brings
tokens, p the rows' weights and D = grouped_matmul(G, w^T, offsets),

    grad h = p D        grad p = the sums of the rows of D h        grad w = grouped_outer(p h, G, offsets)

so a backward pass is a collective too, and the products are not computed again.
"""

import torch

from tileweave.fabric import named_fabric
from tileweave.ops.contract import Agreement, Like, Site, asks
from tileweave.ops.library import LIBRARY, TAGS, register_shape_of_collective
from tileweave.ops.moe.check import COMBINE, choose_combine, combine_problem_of
from tileweave.ops.moe.combine_launch import fused
from tileweave.ops.moe.unfused import combine, dispatch
from tileweave.ops.registration import read_plan

LIBRARY.define(
    f"{COMBINE}(Tensor h, Tensor w, Tensor? row_weight, Tensor offsets, Tensor row_slot, Tensor row_home, "
    "Tensor token_slot, Tensor home, int slots, int homes, int experts, str group_name, str plan) -> Tensor",
    tags=TAGS,
)
OPERATOR = torch.ops.tileweave.moe_matmul_combine.default


@torch.library.impl(LIBRARY, COMBINE, "CompositeExplicitAutograd")
def _run(h, w, row_weight, offsets, row_slot, row_home, token_slot, home, slots, homes, experts, group_name, plan):
    """The operator's implementation."""
    fabric = named_fabric(group_name, h.device)
    site, like = Site.of(fabric), Like.of(w)
    problem = combine_problem_of(site, like, experts, homes, home.shape[1])
    chosen = choose_combine(site, h.shape[0], like, problem, read_plan(plan))
    if fabric.compares:
        asked = asks(
            dtype=h.dtype, I=w.shape[1], H=w.shape[2], slots=slots, homes=homes, experts=experts,
            weighted=row_weight is not None,
        )  # fmt: skip
        fabric.agree(Agreement(COMBINE, asked, chosen.fused))
    if chosen.plan is None:
        rows = torch.ops.tileweave.grouped_matmul.default(h, w, offsets, "")
        return combine(rows, row_weight, row_slot, token_slot, slots, group_name)
    way = row_weight, offsets, row_slot, row_home, home, slots, homes
    return fused(fabric, h, w, *way, chosen.plan)


@register_shape_of_collective(COMBINE)
def _fake(h, w, row_weight, offsets, row_slot, row_home, token_slot, home, slots, homes, experts, group_name, plan):
    """The result's shape."""
    return h.new_empty(token_slot.shape[0], w.shape[2])


def _remember(ctx, inputs, output) -> None:
    h, w, row_weight, offsets, row_slot, _, token_slot, _, ctx.slots, _, _, ctx.group_name, _ = inputs
    needs_h, needs_w, needs_weight, *_ = ctx.needs_input_grad
    ctx.save_for_backward(
        h if needs_w or needs_weight else None, w if needs_h or needs_weight else None, row_weight, offsets, row_slot,
        token_slot,
    )  # fmt: skip


def _backward(ctx, grad):
    h, w, weight, offsets, row_slot, token_slot = ctx.saved_tensors
    needs_h, needs_w, needs_weight, *_ = ctx.needs_input_grad
    rows = dispatch(grad, row_slot, token_slot, ctx.slots, ctx.group_name)
    factor = None if weight is None else weight[:, None]
    grad_h = grad_w = grad_weight = None
    if needs_h or needs_weight:
        grad_h = torch.ops.tileweave.grouped_matmul.default(rows, w.transpose(1, 2), offsets, "")
    if needs_weight:
        products = torch.where((row_slot >= 0)[:, None], grad_h.float() * h.float(), 0)
        grad_weight = products.sum(1)
    if needs_h and factor is not None:
        grad_h = (grad_h * factor).to(grad.dtype)
    if needs_w:
        left = h if factor is None else (h * factor).to(h.dtype)
        grad_w = torch.ops.tileweave.grouped_outer.default(left, rows, offsets)
    return grad_h if needs_h else None, grad_w, grad_weight, *[None] * 10


torch.library.register_autograd(f"tileweave::{COMBINE}", _backward, setup_context=_remember, lib=LIBRARY)
