"""An attention op as an operator of PyTorch: schema, implementation, shape function, gradients, autocast.

    tileweave::NAME(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, str group_name, OPTIONS, str plan)
        -> (Tensor, Tensor)
    tileweave::NAME_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? cu_seqlens,
        str group_name, OPTIONS) -> (Tensor, Tensor, Tensor)

`cu_seqlens` says where packed sequences end, `group_name` is what `tileweave.fabric.group_name` says, `plan` a Plan as
JSON or "" for the planner's. The results are out, in the layout of q, and the log-sum-exps, through which no gradient
goes. The backward pass keeps q, k, v, out and these, all as they are sharded, and is a collective.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tileweave.fabric import Fabric, group_size, named_fabric
from tileweave.ops.contract import Agreement, Site
from tileweave.ops.library import LIBRARY, TAGS, register_shape_of_collective
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
from tileweave.ops.route import Route
from tileweave.ops.sequence.contract import Call, check_kinds, likes, lse_dtype
from tileweave.ops.sequence.launch import Prepared, fused, nothing
from tileweave.ops.sequence.packed import hold_ends, likeness, read_ends


@dataclass(frozen=True)
class Attention:
    """What an attention op is made of. channels: of all plans, a call has one of them; options: those of its schema,
    the first two causal and scale, without the plan.

    With `options` standing for these: check(world, q, k, v, cu_seqlens, *options) and settle(site, q, k, v, cu_seqlens,
    *options, plan) hold `Like`s to the contract; prepare(fabric, call, q, k, v, plan) makes a launch;
    unfused(fabric, call, q, k, v, ends) and unfused_backward(fabric, call, grad, q, k, v, out, lse, ends), both
    collective, compute (out, lse) and the gradients of q, k and v without it.
    """

    name: str
    channels: tuple[str, ...]
    options: str
    check: Callable[..., Call]
    settle: Callable[..., tuple[Call, Route]]
    prepare: Callable[..., Prepared]
    unfused: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    unfused_backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    def run(self, fabric: Fabric, q, k, v, cu_seqlens, *options) -> tuple[torch.Tensor, torch.Tensor]:
        """Check, choose the path, compute; or, in the same way as an earlier call of the same kind, just launch.

        `options` are those of the schema, then a Plan or None. Returns (out, lse).
        """
        kinds = kind(q), kind(k), kind(v), likeness(cu_seqlens), options
        prepared = next(filter(None, (recall(fabric, each, kinds, q) for each in self.channels)), None)
        if prepared is not None:
            hold_ends(fabric, self.name, cu_seqlens, prepared.call.shape.rows)
            return prepared.launch(fabric, q, k, v, cu_seqlens)
        causal, scale, *_, plan = options
        check_kinds(self.name, q, k, v, cu_seqlens, causal, scale, plan)
        call, route = self.settle(Site.of(fabric), *likes(q, k, v, cu_seqlens), *options)
        agreement = Agreement(self.name, call, route.plan)
        if fabric.compares:
            fabric.agree(agreement)
        hold_ends(fabric, self.name, cu_seqlens, call.shape.rows)
        if call.empty:
            return nothing(call, q)
        if route.plan is None:
            ends = read_ends(self.name, cu_seqlens, call.shape.rows * fabric.world_size)
            return self.unfused(fabric, call, q, k, v, ends)
        results, prepared = fused(self.prepare, fabric, call, q, k, v, route.plan, cu_seqlens)
        remember(fabric, prepared.channel, kinds, agreement, prepared)
        return results

    def run_backward(self, fabric: Fabric, grad, q, k, v, out, lse, cu_seqlens, *options) -> tuple:
        """The gradients of q, k and v. `options` are those of the schema. Collective."""
        call = self.check(fabric.world_size, *likes(q, k, v, cu_seqlens), *options)
        if fabric.compares:
            fabric.agree(Agreement(f"{self.name}_backward", call, False))
        ends = read_ends(self.name, cu_seqlens, call.shape.rows * fabric.world_size)
        return self.unfused_backward(fabric, call, grad, q, k, v, out, lse, ends)


def register(op: Attention) -> Any:
    """Define the operator of an op and that of its backward pass; returns the first."""
    name, tensors = op.name, "Tensor q, Tensor k, Tensor v"
    options = f"Tensor? cu_seqlens, str group_name, {op.options}"
    LIBRARY.define(f"{name}({tensors}, {options}, str plan) -> (Tensor, Tensor)", tags=TAGS)

    @torch.library.impl(LIBRARY, name, "CompositeExplicitAutograd")
    def run(q, k, v, cu_seqlens, group_name, *options):
        *options, plan = options
        return op.run(named_fabric(group_name, q.device), q, k, v, cu_seqlens, *options, read_plan(plan))

    @register_shape_of_collective(name)
    def fake(q, k, v, cu_seqlens, group_name, *options):  # holds to the contract too, but for the plan
        call = op.check(group_size(group_name), *likes(q, k, v, cu_seqlens), *options[:-1])
        return q.new_empty(q.shape), q.new_empty(call.lse_shape, dtype=lse_dtype(q.dtype))

    back = f"{name}_backward"
    LIBRARY.define(
        f"{back}(Tensor grad, {tensors}, Tensor out, Tensor lse, {options}) -> (Tensor, Tensor, Tensor)", tags=TAGS
    )

    @torch.library.impl(LIBRARY, back, "CompositeExplicitAutograd")
    def run_backward(grad, q, k, v, out, lse, cu_seqlens, group_name, *options):
        return op.run_backward(named_fabric(group_name, q.device), grad, q, k, v, out, lse, cu_seqlens, *options)

    @register_shape_of_collective(back)
    def fake_backward(grad, q, k, v, out, lse, *options):
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    operator, backward = (getattr(torch.ops.tileweave, each).default for each in (name, back))
    _register_gradients(name, operator, backward)
    register_backward(back, backward)
    register_autocast(name, operator, 0, 1, 2)
    return operator


def _register_gradients(name: str, operator: Any, backward_operator: Any) -> None:
    """Let the operator's gradients be what the other one computes."""

    class Gradients(torch.autograd.Function):
        """A call whose gradients will be asked for."""

        @staticmethod
        def forward(ctx, keys, q, k, v, cu_seqlens, *options):
            """Compute, and keep what the gradients need."""
            out, lse = below_autograd(operator, keys, q, k, v, cu_seqlens, *options)
            ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
            ctx.mark_non_differentiable(lse)
            ctx.options = options
            return out, lse

        @staticmethod
        def backward(ctx, grad, _):
            """The gradients of q, k and v."""
            grads = backward_operator(grad, *ctx.saved_tensors, *ctx.options[:-1])
            return None, *grads, None, *[None] * len(ctx.options)

    def autograd(keys, q, k, v, *options):  # as torch.library.register_autograd, which costs more on every call
        refuse_transforms(name, q, k, v)
        if wants_gradients(q, k, v):
            return Gradients.apply(keys, q, k, v, *options)
        return below_autograd(operator, keys, q, k, v, *options)

    LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
