"""matmul_all_reduce as an operator of PyTorch: schema, implementation, shape function, gradients, autocast.

    tileweave::matmul_all_reduce(Tensor a, Tensor b, str group_name, Tensor? bias, bool deterministic, Tensor? residual,
                                 Tensor? norm_weight, float norm_eps, str plan, int max_sms, Tensor? scale_a=None,
                                 Tensor? scale_b=None) -> Tensor[]

The results are sum + bias + residual, after its norm if there is a `norm_weight`. `group_name` is what
`tileweave.fabric.group_name` says, `plan` a Plan as JSON or "" for the planner's, `max_sms` 0 for all. With G [M, N]
the gradient of sum + bias + residual, to which that of the norm contributes,

    grad a = G b^T      grad b = a^T G      grad bias = the sum of the rows of G      grad residual = G

G is the same on all ranks as long as they all do the same with the results, which are the same: nothing is
communicated.
"""

from functools import partial

import torch

from tileweave.fabric import named_fabric
from tileweave.ops.block_scales import KINDS
from tileweave.ops.collectives.operator import run as run_collective
from tileweave.ops.contract import Agreement, Like, Site
from tileweave.ops.library import LIBRARY, TAGS, register_shape_of_collective
from tileweave.ops.matmul_all_reduce.check import NAME, Options, check, check_kinds, pieces_over_nodes, settle
from tileweave.ops.matmul_all_reduce.launch import Extras, fused, unfused, with_extras
from tileweave.ops.matmul_reduce_scatter.operator import run as run_scatter
from tileweave.ops.nodes import padded, reduced
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
    f"{NAME}(Tensor a, Tensor b, str group_name, Tensor? bias, bool deterministic, Tensor? residual, "
    "Tensor? norm_weight, float norm_eps, str plan, int max_sms, Tensor? scale_a=None, Tensor? scale_b=None) "
    "-> Tensor[]",
    tags=TAGS,
)
OPERATOR = torch.ops.tileweave.matmul_all_reduce.default


@torch.library.impl(LIBRARY, NAME, "CompositeExplicitAutograd")
def _run(
    a, b, group_name, bias, deterministic, residual, norm_weight, norm_eps, plan, max_sms, scale_a=None, scale_b=None
):
    """The operator's implementation."""
    options = read_plan(plan), read_max_sms(NAME, max_sms), scale_a, scale_b
    return run(named_fabric(group_name, a.device), a, b, bias, deterministic, residual, norm_weight, norm_eps, *options)


def run(fabric, a, b, bias, deterministic, residual, norm_weight, norm_eps, plan, max_sms, scale_a=None, scale_b=None):
    """Check, choose the path, compute; or, in the same way as an earlier call of the same kind, just launch.

    The options are those of the public function, `deterministic` resolved.
    """
    extras, scales = Extras(bias, residual, norm_weight), None
    kinds = kind(a), kind(b), *map(kind, extras), deterministic, norm_eps, plan, max_sms
    if scale_a is not None or scale_b is not None:
        scales = scale_a, scale_b
        kinds += kind(scale_a), kind(scale_b)
    prepared = recall(fabric, NAME, kinds, a)
    if prepared is not None:
        return prepared.launch(fabric, a, b, extras, scales)
    check_kinds(a, b, *extras[:1], deterministic, *extras[1:], norm_eps, plan, max_sms, scale_a, scale_b)
    options = Options(deterministic, float(norm_eps), max_sms or 0)
    like = Like.of(a), Like.of(b), *map(Like.of, extras), options, plan, Like.of(scale_a), Like.of(scale_b)
    call, route = settle(Site.of(fabric), *like)
    agreement = Agreement(NAME, call, plan if route.inside else route.plan)  # it decides what goes between nodes
    if fabric.compares:
        fabric.agree(agreement)
    if call.m == 0 or call.n == 0:
        return [a.new_empty(call.m, call.n, dtype=call.out_dtype) for _ in range(1 + call.norm)]
    if route.plan is None:
        compute = unfused if route.inside is None else partial(_over_nodes, plan)
        remember(fabric, NAME, kinds, agreement, Unfused(compute, call))
        return compute(fabric, call, a, b, extras, scales)
    results, prepared = fused(fabric, call, a, b, extras, route.plan, scales)
    remember(fabric, NAME, kinds, agreement, prepared)
    return results


def _over_nodes(plan, fabric, call, a, b, extras, scales):
    """A call on a group that is on several nodes: matmul_reduce_scatter inside, a sum of the shares between nodes while
    the next piece of rows is multiplied, an all-gather inside; of few bytes the sum inside, then between."""
    nodes, ordered, max_sms = fabric.nodes, call.options.deterministic, call.options.max_sms or None
    parts = pieces_over_nodes(call, nodes.each, plan)
    if not parts:
        (total,) = run(nodes.inside, a, b, None, ordered, None, None, call.options.norm_eps, plan, max_sms)
        return with_extras(call, reduced(nodes, total, False, True)(), extras)  # each place sums, to the same bits
    shares = []
    for part in parts:
        rows = padded(a[part], nodes.each)
        share = run_scatter(nodes.inside, rows, b, "sum", None, ordered, None, None, max_sms)
        shares.append(reduced(nodes, share, False, ordered))
    total = torch.cat([run_collective(nodes.inside, "all_gather", share(), 0) for share in shares])
    return with_extras(call, total[: call.m], extras)


@register_shape_of_collective(NAME)
def _fake(
    a, b, group_name, bias, deterministic, residual, norm_weight, norm_eps, plan, max_sms, scale_a=None, scale_b=None
):
    """The results' shapes and dtype; the contract is checked here too, the plan is not."""
    options = Options(deterministic, norm_eps, max_sms)
    call = check(*map(Like.of, (a, b, bias, residual, norm_weight)), options, Like.of(scale_a), Like.of(scale_b))
    return [a.new_empty(call.m, call.n, dtype=call.out_dtype) for _ in range(1 + call.norm)]


class _Gradients(torch.autograd.Function):
    """A call whose gradients will be asked for."""

    @staticmethod
    def forward(ctx, keys, a, b, group_name, bias, deterministic, residual, norm_weight, norm_eps, *options):
        """Keep what the gradients need, and no more; then compute."""
        _, needs_a, needs_b, *_ = ctx.needs_input_grad
        results = below_autograd(
            OPERATOR, keys, a, b, group_name, bias, deterministic, residual, norm_weight, norm_eps, *options
        )
        total = None if norm_weight is None else results[1]
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None, total, norm_weight)
        ctx.norm_eps, ctx.dtype, ctx.inputs = norm_eps, a.dtype, 9 + len(options)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx, *grads):
        """The gradients of a, b, bias, residual and norm_weight; None for whatever needs none."""
        a, b, total, weight = ctx.saved_tensors
        _, needs_a, needs_b, _, needs_bias, _, needs_residual, needs_weight, *_ = ctx.needs_input_grad
        grad, grad_weight = grads[-1], None
        if weight is not None and grads[0] is not None:
            wide, grad_weight = _through_norm(grads[0].float(), total.float(), weight.float(), ctx.norm_eps)
            grad_weight = grad_weight.to(ctx.dtype) if needs_weight else None
            grad = (wide if grad is None else wide + grad).to(ctx.dtype)
        if grad is None:
            return (None,) * ctx.inputs
        grad_a = grad @ b.t() if needs_a else None
        grad_b = a.t() @ grad if needs_b else None
        grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.dtype) if needs_bias else None
        grad_residual = grad if needs_residual else None
        grads = None, grad_a, grad_b, None, grad_bias, None, grad_residual, grad_weight
        return *grads, *[None] * (ctx.inputs - len(grads))


def _through_norm(grad, x, weight, eps):
    """Gradients of x [M, N] and weight [N] in RMSNorm(x) * weight, all in float32."""
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed, weighted = x * scale, grad * weight
    grad_x = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    return grad_x, (grad * normed).sum(0)


def _autograd(keys, a, b, group_name, bias, deterministic, residual, norm_weight, *options):
    """As matmul_reduce_scatter's; the list of results has to pass through an autograd function as a tuple."""
    tensors = a, b, bias, residual, norm_weight
    refuse_transforms(NAME, *tensors)
    args = a, b, group_name, bias, deterministic, residual, norm_weight, *options
    if wants_gradients(*tensors, *options[3:]):
        if a.dtype in KINDS:
            raise NotImplementedError(f"{NAME} of {a.dtype} operands has no gradients; detach() them")
        return list(_Gradients.apply(keys, *args))
    return below_autograd(OPERATOR, keys, *args)


LIBRARY.impl(NAME, _autograd, "Autograd", with_keyset=True)
register_autocast(NAME, OPERATOR, 0, 1, 3, 5, 6)
