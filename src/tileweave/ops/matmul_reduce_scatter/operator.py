"""matmul_reduce_scatter as an operator of PyTorch: schema, implementation, shape function, gradients, autocast.

    tileweave::matmul_reduce_scatter(Tensor a, Tensor b, str group_name, str op, Tensor? bias, bool deterministic,
                                     ScalarType? out_dtype, str plan, int max_sms, Tensor? scale_a=None,
                                     Tensor? scale_b=None) -> Tensor

`group_name` is what `tileweave.fabric.group_name` says, `plan` a Plan as JSON or "" for the planner's, `max_sms` 0 for
all. With G [M, N] the gradients of the result of all ranks, gathered, and s = 1 ("sum") or 1 / world ("avg"),

    grad a = s G b^T        grad b = s a^T G        grad bias = the sum of this rank's rows of G

so a backward pass is a collective too, unless only `bias` needs a gradient: all_gather_matmul, which multiplies G by
b^T while it arrives. All ranks run it, and the same inputs need gradients on all. G is gathered in the dtype of a;
products and sums are accumulated in float32.
"""

from functools import partial

import torch

from tileweave.fabric import group_size, named_fabric
from tileweave.ops.contract import DTYPES, Agreement, Like, Site
from tileweave.ops.library import LIBRARY, TAGS, register_shape_of_collective
from tileweave.ops.matmul_reduce_scatter.check import NAME, check, check_kinds, columns_over_nodes, settle
from tileweave.ops.matmul_reduce_scatter.launch import fused, unfused
from tileweave.ops.nodes import scattered, wide_sum
from tileweave.ops.registration import (
    Unfused,
    below_autograd,
    kind,
    read_max_sms,
    read_plan,
    recall,
    refuse_transforms,
    register_autocast,
    remember,
    wants_gradients,
)

LIBRARY.define(
    f"{NAME}(Tensor a, Tensor b, str group_name, str op, Tensor? bias, bool deterministic, ScalarType? out_dtype, "
    "str plan, int max_sms, Tensor? scale_a=None, Tensor? scale_b=None) -> Tensor",
    tags=TAGS,
)
OPERATOR = torch.ops.tileweave.matmul_reduce_scatter.default


@torch.library.impl(LIBRARY, NAME, "CompositeExplicitAutograd")
def _run(a, b, group_name, op, bias, deterministic, out_dtype, plan, max_sms, scale_a=None, scale_b=None):
    """The operator's implementation."""
    options = op, bias, deterministic, out_dtype, read_plan(plan), read_max_sms(NAME, max_sms), scale_a, scale_b
    return run(named_fabric(group_name, a.device), a, b, *options)


def run(fabric, a, b, op, bias, deterministic, out_dtype, plan, max_sms, scale_a=None, scale_b=None):
    """Check, choose the path, compute; or, in the same way as an earlier call of the same kind, just launch.

    The options are those of the public function, `deterministic` resolved.
    """
    scales = None if scale_a is None and scale_b is None else (scale_a, scale_b)
    kinds = kind(a), kind(b), kind(bias), op, deterministic, out_dtype, plan, max_sms
    if scales is not None:
        kinds += kind(scale_a), kind(scale_b)
    prepared = recall(fabric, NAME, kinds, a)
    if prepared is not None:
        return prepared.launch(fabric, a, b, bias, scales)
    check_kinds(a, b, op, bias, deterministic, out_dtype, plan, max_sms, scale_a, scale_b)
    like = Like.of(a), Like.of(b), op, Like.of(bias)
    of_scales = Like.of(scale_a), Like.of(scale_b)
    call, route = settle(Site.of(fabric), *like, deterministic, out_dtype, plan, max_sms or 0, *of_scales)
    agreement = Agreement(NAME, call, route.plan)
    if fabric.compares:
        fabric.agree(agreement)
    if call.rows == 0 or call.n == 0:
        return torch.empty(call.rows, call.n, dtype=call.out_dtype, device=a.device)
    if route.plan is None:
        compute = unfused if route.inside is None else partial(_over_nodes, plan)
        remember(fabric, NAME, kinds, agreement, Unfused(compute, call))
        return compute(fabric, call, a, b, bias, scales)
    out, prepared = fused(fabric, call, a, b, bias, route.plan, scales)
    remember(fabric, NAME, kinds, agreement, prepared)
    return out


def _over_nodes(plan, fabric, call, a, b, bias, scales):
    """A call on a group that is on several nodes: for each of them the sum inside this node of its rows, then the sum
    of what all nodes have for this rank. Rows of a node are neighbours, so nothing is copied."""
    nodes, rows = fabric.nodes, call.m // fabric.nodes.count
    scale_a, scale_b = scales or (None, None)
    options = call.deterministic, call.out_dtype, plan, call.max_sms or None

    def sums_for(node, columns):
        part = slice(node * rows, (node + 1) * rows)
        of_rows = scale_a if scale_a is None or scale_a.numel() == 1 else scale_a[part]
        of_columns = scale_b if scale_b is None or scale_b.numel() == 1 else scale_b[:, columns]
        return run(nodes.inside, a[part], b[:, columns], call.op, None, *options, of_rows, of_columns)

    parts = scattered(nodes, sums_for, columns_over_nodes(call, nodes.count))
    total = wide_sum([torch.cat(part, 1) for part in parts], call.op == "avg")
    return (total if bias is None else total + bias).to(call.out_dtype)


@register_shape_of_collective(NAME)
def _fake(a, b, group_name, op, bias, deterministic, out_dtype, plan, max_sms, scale_a=None, scale_b=None):
    """The result's shape and dtype; the contract is checked here too, the plan is not."""
    like = Like.of(a), Like.of(b), op, Like.of(bias)
    options = deterministic, out_dtype, max_sms, Like.of(scale_a), Like.of(scale_b)
    call = check(group_size(group_name), *like, *options)
    return a.new_empty(call.rows, call.n, dtype=call.out_dtype)


class _Gradients(torch.autograd.Function):
    """A call whose gradients will be asked for."""

    @staticmethod
    def forward(ctx, keys, a, b, group_name, op, bias, *options):
        """Keep what the gradients need, and no more; then compute."""
        _, needs_a, needs_b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        ctx.group_name, ctx.op, ctx.dtype = group_name, op, a.dtype
        ctx.max_sms, ctx.others = options[3], len(options)
        return below_autograd(OPERATOR, keys, a, b, group_name, op, bias, *options)

    @staticmethod
    def backward(ctx, grad):
        """The gradients of a, b and bias; None for whatever needs none."""
        a, b = ctx.saved_tensors
        _, needs_a, needs_b, _, _, needs_bias, *_ = ctx.needs_input_grad
        grad_a = grad_b = grad_bias = None
        if needs_bias:
            grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.dtype)
        if needs_a or needs_b:
            scale = 1 / group_size(ctx.group_name) if ctx.op == "avg" else 1
            grad = (grad * scale).to(ctx.dtype)
            if needs_a:
                grad_a, *gathered = torch.ops.tileweave.all_gather_matmul.default(
                    grad, [b.t()], ctx.group_name, [], needs_b, "", ctx.max_sms, False
                )
            else:
                gathered = [torch.ops.tileweave.all_gather.default(grad, ctx.group_name, 0)]
            grad_b = a.t() @ gathered[0] if needs_b else None
        return None, grad_a, grad_b, None, None, grad_bias, *[None] * ctx.others


def _autograd(keys, a, b, group_name, op, bias, *options):
    """As torch.library.register_autograd, which takes 2 microseconds a call more, and 25 where gradients are kept."""
    refuse_transforms(NAME, a, b, bias)
    if wants_gradients(a, b, bias, *options[4:]):
        if a.dtype not in DTYPES:
            raise NotImplementedError(f"{NAME} of {a.dtype} operands has no gradients; detach() them")
        return _Gradients.apply(keys, a, b, group_name, op, bias, *options)
    return below_autograd(OPERATOR, keys, a, b, group_name, op, bias, *options)


LIBRARY.impl(NAME, _autograd, "Autograd", with_keyset=True)
register_autocast(NAME, OPERATOR, 0, 1, 4)
