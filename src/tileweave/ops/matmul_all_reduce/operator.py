"""matmul_all_reduce as an operator of PyTorch: schema, implementation, shape function, gradients, autocast.

    tileweave::matmul_all_reduce(Tensor a, Tensor b, str group_name, Tensor? bias, bool deterministic, Tensor? residual,
                                 Tensor? norm_weight, float norm_eps, str plan, int max_sms) -> Tensor[]

The results are sum + bias + residual, after its norm if there is a `norm_weight`. `group_name` is what
`tileweave.fabric.group_name` says, `plan` a Plan as JSON or "" for the planner's, `max_sms` 0 for all. With G [M, N]
the gradient of sum + bias + residual, to which that of the norm contributes,

    grad a = G b^T      grad b = a^T G      grad bias = the sum of the rows of G      grad residual = G

G is the same on all ranks as long as they all do the same with the results, which are the same: nothing is
communicated.
"""

from functools import lru_cache

import torch
from torch.autograd import forward_ad

from tileweave.fabric import named_fabric
from tileweave.ops.contract import Like, Site, operand_dtype
from tileweave.ops.library import LIBRARY, TAGS
from tileweave.ops.matmul_all_reduce.check import NAME, Agreement, Options, check, check_kinds, settle
from tileweave.ops.matmul_all_reduce.launch import Extras, fused, unfused
from tileweave.planner import Plan

LIBRARY.define(
    f"{NAME}(Tensor a, Tensor b, str group_name, Tensor? bias, bool deterministic, Tensor? residual, "
    "Tensor? norm_weight, float norm_eps, str plan, int max_sms) -> Tensor[]",
    tags=TAGS,
)
OPERATOR = torch.ops.tileweave.matmul_all_reduce.default
KINDS = 256  # kinds of calls that a channel remembers
_plan = lru_cache(Plan.from_json)


@torch.library.impl(LIBRARY, NAME, "CompositeExplicitAutograd")
def _run(a, b, group_name, bias, deterministic, residual, norm_weight, norm_eps, plan, max_sms):
    """The operator's implementation."""
    plan = _plan(plan) if plan else None
    if max_sms < 0:
        raise ValueError(f"{NAME}: max_sms must be at least 0, which stands for all, got {max_sms}")
    fabric = named_fabric(group_name, a.device)
    return run(fabric, a, b, bias, deterministic, residual, norm_weight, norm_eps, plan, max_sms or None)


def run(fabric, a, b, bias, deterministic, residual, norm_weight, norm_eps, plan, max_sms):
    """Check, choose the path, compute; or, in the same way as an earlier call of the same kind, just launch.

    The options are those of the public function, `deterministic` resolved.
    """
    extras = Extras(bias, residual, norm_weight)
    kinds = _kind(a), _kind(b), *map(_kind, extras), deterministic, norm_eps, plan, max_sms
    remembered = fabric.views(NAME)
    try:
        known = remembered.get(kinds) if remembered else None
    except TypeError:  # an option of a kind that cannot be remembered, nor be right: see check_kinds
        known = None
    if known is not None and not (a.is_cuda and torch.cuda.is_current_stream_capturing()):
        agreement, prepared = known
        if fabric.compares:
            fabric.agree(agreement)
        return prepared.launch(fabric, a, b, extras)
    check_kinds(a, b, *extras[:1], deterministic, *extras[1:], norm_eps, plan, max_sms)
    options = Options(deterministic, float(norm_eps), max_sms or 0)
    call, route = settle(Site.of(fabric), Like.of(a), Like.of(b), *map(Like.of, extras), options, plan)
    agreement = Agreement(call, route.plan)
    if fabric.compares:
        fabric.agree(agreement)
    if call.m == 0 or call.n == 0:
        return [a.new_empty(call.m, call.n) for _ in range(1 + call.norm)]
    if route.plan is None:
        return unfused(fabric, call, a, b, extras)
    results, prepared = fused(fabric, call, a, b, extras, route.plan)
    remembered = fabric.views(NAME)
    if prepared is not None and remembered is not None:
        if len(remembered) == KINDS:
            remembered.clear()
        remembered[kinds] = agreement, prepared
    return results


def _kind(x: torch.Tensor | None) -> tuple | None:
    """All that a prepared launch depends on in a tensor."""
    if x is None:
        return None
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16


@torch.library.register_fake(f"tileweave::{NAME}", lib=LIBRARY)
def _fake(a, b, group_name, bias, deterministic, residual, norm_weight, norm_eps, plan, max_sms):
    """The results' shapes and dtype; the contract is checked here too, the plan is not."""
    options = Options(deterministic, norm_eps, max_sms)
    call = check(*map(Like.of, (a, b, bias, residual, norm_weight)), options)
    return [a.new_empty(call.m, call.n) for _ in range(1 + call.norm)]


class _Gradients(torch.autograd.Function):
    """A call whose gradients will be asked for."""

    @staticmethod
    def forward(ctx, keys, a, b, group_name, bias, deterministic, residual, norm_weight, norm_eps, *options):
        """Keep what the gradients need, and no more; then compute."""
        _, needs_a, needs_b, *_ = ctx.needs_input_grad
        results = _below_autograd(
            keys, a, b, group_name, bias, deterministic, residual, norm_weight, norm_eps, *options
        )
        total = None if norm_weight is None else results[1]
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None, total, norm_weight)
        ctx.norm_eps, ctx.dtype = norm_eps, a.dtype
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
            return (None,) * 11
        grad_a = grad @ b.t() if needs_a else None
        grad_b = a.t() @ grad if needs_b else None
        grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.dtype) if needs_bias else None
        grad_residual = grad if needs_residual else None
        return None, grad_a, grad_b, None, grad_bias, None, grad_residual, grad_weight, None, None, None


def _through_norm(grad, x, weight, eps):
    """Gradients of x [M, N] and weight [N] in RMSNorm(x) * weight, all in float32."""
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed, weighted = x * scale, grad * weight
    grad_x = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    return grad_x, (grad * normed).sum(0)


def _below_autograd(keys, *args):
    """Go on to what comes after autograd: a tracer, or the implementation."""
    with torch._C._AutoDispatchBelowAutograd():
        return OPERATOR.redispatch(keys & torch._C._after_autograd_keyset, *args)


def _autograd(keys, a, b, group_name, bias, deterministic, residual, norm_weight, *options):
    """As matmul_reduce_scatter's; the list of results has to pass through an autograd function as a tuple."""
    tensors = [x for x in (a, b, bias, residual, norm_weight) if x is not None]
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(f"{NAME} has no forward-mode derivative; its gradients are those of backward()")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            f"{NAME} has no rules for torch.func transforms; its gradients are those of backward()"
        )
    args = a, b, group_name, bias, deterministic, residual, norm_weight, *options
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return list(_Gradients.apply(keys, *args))
    return _below_autograd(keys, *args)


LIBRARY.impl(NAME, _autograd, "Autograd", with_keyset=True)


def _register_autocast(device: str) -> None:
    """Under autocast on `device`, cast the operands as torch.matmul's are cast, then call the operator."""
    key = f"Autocast{device.upper()}"
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def as_operand(x):
        return None if x is None else x.to(operand_dtype(x))

    def cast(a, b, group_name, bias, deterministic, residual, norm_weight, *options):
        a, b, bias, residual, norm_weight = map(as_operand, (a, b, bias, residual, norm_weight))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return OPERATOR(a, b, group_name, bias, deterministic, residual, norm_weight, *options)

    LIBRARY.impl(NAME, cast, key)


for _device in ("cpu", "cuda"):
    _register_autocast(_device)
