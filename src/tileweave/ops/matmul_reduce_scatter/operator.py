"""matmul_reduce_scatter as an operator of PyTorch: schema, implementation, shape function, gradients, autocast.

    tileweave::matmul_reduce_scatter(Tensor a, Tensor b, str group_name, str op, Tensor? bias, bool deterministic,
                                     ScalarType? out_dtype, str plan, int max_sms) -> Tensor

`group_name` is what `tileweave.fabric.group_name` says, `plan` a Plan as JSON or "" for the planner's, `max_sms` 0 for
all. With G [M, N] the gradients of the result of all ranks, gathered, and s = 1 ("sum") or 1 / world ("avg"),

    grad a = s G b^T        grad b = s a^T G        grad bias = the sum of this rank's rows of G

so a backward pass is a collective too, unless only `bias` needs a gradient: all ranks run it, and the same inputs need
gradients on all. G is gathered in the dtype of a; products and sums are accumulated in float32.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from tileweave.fabric import group_size, named_fabric
from tileweave.ops.library import LIBRARY, TAGS, all_gather_rows
from tileweave.ops.matmul_reduce_scatter.check import NAME, Call, check, choose, operand_dtype
from tileweave.ops.matmul_reduce_scatter.launch import fused, unfused
from tileweave.planner import Plan

LIBRARY.define(
    f"{NAME}(Tensor a, Tensor b, str group_name, str op, Tensor? bias, bool deterministic, ScalarType? out_dtype, "
    "str plan, int max_sms) -> Tensor",
    tags=TAGS,
)
OPERATOR = torch.ops.tileweave.matmul_reduce_scatter.default
_plan = lru_cache(Plan.from_json)


class Agreement(NamedTuple):
    """What of a call all ranks must agree on; made on every call, worded only where they do not."""

    call: Call
    dtype: torch.dtype
    bias: bool
    plan: Plan | None

    def __str__(self) -> str:
        c, plan = self.call, "no fused kernel"
        if self.plan is not None:
            tile = "x".join(map(str, self.plan.tile))
            plan = f"plan {self.plan.mechanism} {self.plan.schedule} {tile} {self.plan.stages} stages"
        return (
            f"{NAME} of [{c.m}, {c.k}] @ [{c.k}, {c.n}] {self.dtype} -> {c.out_dtype}, op={c.op!r}, bias={self.bias}, "
            f"deterministic={c.deterministic}, max_sms={c.max_sms or None}, {plan}"
        )


@torch.library.impl(LIBRARY, NAME, "CompositeExplicitAutograd")
def _run(a, b, group_name, op, bias, deterministic, out_dtype, plan, max_sms):
    """Check, choose the path, compute."""
    fabric = named_fabric(group_name, a.device)
    call = check(fabric.world_size, a, b, op, bias, deterministic, out_dtype, max_sms)
    route = choose(fabric, call, a.device, _plan(plan) if plan else None)
    fabric.agree(Agreement(call, a.dtype, bias is not None, route.plan))
    if call.rows == 0 or call.n == 0:
        return torch.empty(call.rows, call.n, dtype=call.out_dtype, device=a.device)
    if route.plan is None:
        return unfused(fabric, call, a, b, bias)
    return fused(fabric, call, a, b, bias, route.plan)


@torch.library.register_fake(f"tileweave::{NAME}", lib=LIBRARY)
def _fake(a, b, group_name, op, bias, deterministic, out_dtype, plan, max_sms):
    """The result's shape and dtype; the contract is checked here too, the plan is not."""
    call = check(group_size(group_name), a, b, op, bias, deterministic, out_dtype, max_sms)
    return a.new_empty(call.rows, call.n, dtype=call.out_dtype)


def _setup_context(ctx, inputs, output):
    """Keep what the gradients need, and no more."""
    a, b, ctx.group_name, ctx.op, *_ = inputs
    ctx.dtype = a.dtype
    ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None)


def _backward(ctx, grad):
    """The gradients of a, b and bias; None for whatever needs none."""
    a, b = ctx.saved_tensors
    needs_a, needs_b, _, _, needs_bias, *_ = ctx.needs_input_grad
    grad_a = grad_b = grad_bias = None
    if needs_bias:
        grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.dtype)
    if needs_a or needs_b:
        scale = 1 / group_size(ctx.group_name) if ctx.op == "avg" else 1
        gathered = all_gather_rows((grad * scale).to(ctx.dtype), ctx.group_name)
        grad_a = gathered @ b.t() if needs_a else None
        grad_b = a.t() @ gathered if needs_b else None
    return grad_a, grad_b, None, None, grad_bias, None, None, None, None


torch.library.register_autograd(f"tileweave::{NAME}", _backward, setup_context=_setup_context, lib=LIBRARY)


def _register_autocast(device: str) -> None:
    """Under autocast on `device`, cast the operands as torch.matmul's are cast, then call the operator."""
    key = f"Autocast{device.upper()}"
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(a, b, group_name, op, bias, *options):
        a, b = a.to(operand_dtype(a)), b.to(operand_dtype(b))
        bias = None if bias is None else bias.to(operand_dtype(bias))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return OPERATOR(a, b, group_name, op, bias, *options)

    LIBRARY.impl(NAME, cast, key)


for _device in ("cpu", "cuda"):
    _register_autocast(_device)
