"""ulysses_attention as an operator of PyTorch: schema, implementation, shape function, gradients, autocast.

    tileweave::ulysses_attention(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, str group_name, bool causal,
                                 float? scale, str layout, str plan) -> (Tensor, Tensor)
    tileweave::ulysses_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
                                 Tensor? cu_seqlens, str group_name, bool causal, float? scale, str layout)
                                 -> (Tensor, Tensor, Tensor)

`cu_seqlens` says where packed sequences end, `group_name` is what `tileweave.fabric.group_name` says, `plan` a Plan as
JSON or "" for the planner's. The results are out, in the layout of q, and for the backward pass the log-sum-exps
[B, H / world, S] of this rank's heads. It keeps these, q, k, v and out, all as they are sharded, and moves them to the
heads again: a collective.
"""

import torch

from tileweave.fabric import group_size, named_fabric
from tileweave.ops.contract import Site
from tileweave.ops.library import LIBRARY, TAGS
from tileweave.ops.registration import (
    below_autograd,
    kind,
    read_plan,
    recall,
    refuse_transforms,
    register_autocast,
    register_backward,
    remember,
    wants_gradients,
)
from tileweave.ops.sequence.contract import likes, lse_dtype
from tileweave.ops.sequence.packed import hold_ends, likeness, read_ends
from tileweave.ops.ulysses_attention.check import NAME, Agreement, check, check_kinds, settle
from tileweave.ops.ulysses_attention.launch import fused, nothing, unfused, unfused_backward

BACKWARD = f"{NAME}_backward"
OPTIONS = "Tensor? cu_seqlens, str group_name, bool causal, float? scale, str layout"
LIBRARY.define(f"{NAME}(Tensor q, Tensor k, Tensor v, {OPTIONS}, str plan) -> (Tensor, Tensor)", tags=TAGS)
LIBRARY.define(
    f"{BACKWARD}(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {OPTIONS}) "
    "-> (Tensor, Tensor, Tensor)",
    tags=TAGS,
)
OPERATOR = torch.ops.tileweave.ulysses_attention.default
OPERATOR_BACKWARD = torch.ops.tileweave.ulysses_attention_backward.default


@torch.library.impl(LIBRARY, NAME, "CompositeExplicitAutograd")
def _run(q, k, v, cu_seqlens, group_name, causal, scale, layout, plan):
    """The operator's implementation."""
    return run(named_fabric(group_name, q.device), q, k, v, cu_seqlens, causal, scale, layout, read_plan(plan))


def run(fabric, q, k, v, cu_seqlens, *options):
    """Check, choose the path, compute; or, in the same way as an earlier call of the same kind, just launch.

    `options` are causal, scale, layout and plan of the public function. Returns (out, lse).
    """
    kinds = kind(q), kind(k), kind(v), likeness(cu_seqlens), options
    prepared = recall(fabric, NAME, kinds, q)
    if prepared is not None:
        hold_ends(fabric, NAME, cu_seqlens, prepared.call.shape.rows)
        return prepared.launch(fabric, q, k, v, cu_seqlens)
    causal, scale, _, plan = options
    check_kinds(q, k, v, cu_seqlens, causal, scale, plan)
    call, route = settle(Site.of(fabric), *likes(q, k, v, cu_seqlens), *options)
    agreement = Agreement(call, route.plan)
    if fabric.compares:
        fabric.agree(agreement)
    hold_ends(fabric, NAME, cu_seqlens, call.shape.rows)
    if call.shape.empty or call.shape.kv_rows == 0:
        return nothing(call, q)
    if route.plan is None:
        return unfused(fabric, call, q, k, v, read_ends(NAME, cu_seqlens, call.shape.rows * fabric.world_size))
    results, prepared = fused(fabric, call, q, k, v, route.plan, cu_seqlens)
    remember(fabric, NAME, kinds, agreement, prepared)
    return results


@torch.library.impl(LIBRARY, BACKWARD, "CompositeExplicitAutograd")
def _run_backward(grad, q, k, v, out, lse, cu_seqlens, group_name, causal, scale, layout):
    """The implementation of the backward pass."""
    fabric = named_fabric(group_name, q.device)
    call = check(fabric.world_size, *likes(q, k, v, cu_seqlens), causal, scale, layout)
    if fabric.compares:
        fabric.agree((BACKWARD, call))
    ends = read_ends(NAME, cu_seqlens, call.shape.rows * fabric.world_size)
    return unfused_backward(fabric, call, grad, q, k, v, out, lse, ends)


@torch.library.register_fake(f"tileweave::{NAME}", lib=LIBRARY)
def _fake(q, k, v, cu_seqlens, group_name, causal, scale, layout, plan):
    """The results' shapes and dtypes; the contract is checked here too, the plan is not."""
    world = group_size(group_name)
    s = check(world, *likes(q, k, v, cu_seqlens), causal, scale, layout).shape
    return q.new_empty(q.shape), q.new_empty(s.batch, s.heads // world, s.rows * world, dtype=lse_dtype(q.dtype))


@torch.library.register_fake(f"tileweave::{BACKWARD}", lib=LIBRARY)
def _fake_backward(grad, q, k, v, out, lse, *options):
    """The gradients' shapes."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _Gradients(torch.autograd.Function):
    """A call whose gradients will be asked for."""

    @staticmethod
    def forward(ctx, keys, q, k, v, cu_seqlens, *options):
        """Compute, and keep what the gradients need."""
        out, lse = below_autograd(OPERATOR, keys, q, k, v, cu_seqlens, *options)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
        ctx.mark_non_differentiable(lse)
        ctx.options = options
        return out, lse

    @staticmethod
    def backward(ctx, grad, _):
        """The gradients of q, k and v."""
        *saved, cu_seqlens = ctx.saved_tensors
        grads = OPERATOR_BACKWARD(grad, *saved, cu_seqlens, *ctx.options[:-1])
        return None, *grads, None, *[None] * len(ctx.options)


def _autograd(keys, q, k, v, *options):
    """As torch.library.register_autograd, which costs more on every call."""
    refuse_transforms(NAME, q, k, v)
    if wants_gradients(q, k, v):
        return _Gradients.apply(keys, q, k, v, *options)
    return below_autograd(OPERATOR, keys, q, k, v, *options)


LIBRARY.impl(NAME, _autograd, "Autograd", with_keyset=True)
register_backward(BACKWARD, OPERATOR_BACKWARD)
register_autocast(NAME, OPERATOR, 0, 1, 2)
