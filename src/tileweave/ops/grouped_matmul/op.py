"""grouped_matmul: what users call, and the operators behind it.

    tileweave::grouped_matmul(Tensor x, Tensor w, Tensor offsets, str plan) -> Tensor
    tileweave::grouped_outer(Tensor x, Tensor y, Tensor offsets) -> Tensor

`plan` is a Plan as JSON, or "" for the planner's. With G the gradient of the result,

    grad x = grouped_matmul(G, w^T, offsets)        grad w = grouped_outer(x, G, offsets)

and the second, x_e^T G_e for each expert e, is torch's grouped_mm for bfloat16 on a GPU, else a matmul for each expert.
"""

import torch

from tileweave.fabric import local_fabric
from tileweave.ops.contract import Like, Site, operand_dtype
from tileweave.ops.grouped_matmul.check import NAME, check, check_kinds, check_offsets, choose
from tileweave.ops.grouped_matmul.launch import fused, unfused, unfused_outer
from tileweave.ops.library import LIBRARY, TAGS
from tileweave.ops.registration import read_plan
from tileweave.ops.route import Route
from tileweave.planner import Plan

LIBRARY.define(f"{NAME}(Tensor x, Tensor w, Tensor offsets, str plan) -> Tensor", tags=TAGS)
LIBRARY.define("grouped_outer(Tensor x, Tensor y, Tensor offsets) -> Tensor", tags=TAGS)
OPERATOR, OUTER = torch.ops.tileweave.grouped_matmul.default, torch.ops.tileweave.grouped_outer.default


def grouped_matmul(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, *, plan: Plan | None = None
) -> torch.Tensor:
    """Rows offsets[e - 1] to offsets[e] of `x` times `w[e]`, for each expert e, in one kernel.

    As torch.nn.functional.grouped_mm(x, w, offs=offsets). It is local: no other rank takes part.

    Args:
        x: `[T, H]`, bfloat16 or float16, rows sorted by expert; T may be 0.
        w: `[E, H, I]`, dtype and device of x, one of its last two strides 1: a transposed weight costs no copy.
        offsets: `[E]` int32 on the device of x, the end of each expert's rows, none less than the one before. They are
            read on the device: no host synchronization, and a CUDA graph may be replayed with others. What is beyond T
            counts as T, what is below 0 as 0. Decreasing ones raise ValueError where the host knows them: on a CPU, and
            in debug mode. Elsewhere they make the result's rows wrong, but nothing beyond x and the result is touched.
        plan: a `Plan` to use instead of the planner's: tile and stages.

    Returns:
        `[T, I]`, fresh and contiguous, ready on the current stream; zeros in rows from offsets[E - 1] on. Products are
        accumulated in float32.

    Gradients of x and w exist. Without a Hopper GPU, or where H or I is no multiple of 8, a matmul for each expert
    computes it, which waits for the offsets. So does the gradient of w in float16; no CUDA graph can hold that.

    Raises:
        ValueError, TypeError: the arguments break the rules above; nothing has been launched.
    """
    check_kinds(x, w, offsets, plan)
    text = "" if plan is None else plan.to_json()
    return OPERATOR(x.to(operand_dtype(x)), w.to(operand_dtype(w)), offsets, text)


def route(x, w, offsets, *, plan=None) -> Route:
    """What `grouped_matmul` would do with these arguments; launches nothing, raises what it would raise."""
    check_kinds(x, w, offsets, plan)
    of_x, of_w = (Like(each.shape, operand_dtype(each), each.device) for each in (x, w))
    call = check(of_x, of_w, Like(offsets.shape, offsets.dtype, offsets.device))
    return choose(Site.of(local_fabric(x.device)), call, x.device, plan)


@torch.library.impl(LIBRARY, NAME, "CompositeExplicitAutograd")
def _run(x, w, offsets, plan):
    """The operator's implementation."""
    call = check(Like.of(x), Like.of(w), Like.of(offsets))
    fabric = local_fabric(x.device)
    chosen = choose(Site.of(fabric), call, x.device, read_plan(plan)).plan
    if not offsets.is_cuda or (fabric.debug and not torch.cuda.is_current_stream_capturing()):
        check_offsets(offsets)
    return unfused(x, w, offsets) if chosen is None else fused(fabric, call, x, w, offsets, chosen)


@torch.library.impl(LIBRARY, "grouped_outer", "CompositeExplicitAutograd")
def _outer(x, y, offsets):
    """x_e^T y_e for each expert e: [E, H, I]."""
    aligned = all(size % 8 == 0 for size in (x.shape[1], y.shape[1]))
    known = x.is_cuda and x.dtype == torch.bfloat16 and hasattr(torch.nn.functional, "grouped_mm")
    if known and aligned and x.shape[0]:
        return torch.nn.functional.grouped_mm(x.t(), y, offs=offsets.clamp(max=x.shape[0]))
    return unfused_outer(x, y, offsets)


@torch.library.register_fake(f"tileweave::{NAME}", lib=LIBRARY)
def _fake(x, w, offsets, plan):
    """The result's shape."""
    call = check(Like.of(x), Like.of(w), Like.of(offsets))
    return x.new_empty(call.rows, call.n)


@torch.library.register_fake("tileweave::grouped_outer", lib=LIBRARY)
def _fake_outer(x, y, offsets):
    """The result's shape."""
    return x.new_empty(offsets.shape[0], x.shape[1], y.shape[1])


def _remember(ctx, inputs, output) -> None:
    x, w, offsets, _ = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w if ctx.needs_input_grad[0] else None, offsets)


def _backward(ctx, grad):
    x, w, offsets = ctx.saved_tensors
    grad = grad.contiguous()
    grad_x = OPERATOR(grad, w.transpose(1, 2), offsets, "") if w is not None else None
    grad_w = OUTER(x, grad, offsets) if x is not None else None
    return grad_x, grad_w, None, None


torch.library.register_autograd(f"tileweave::{NAME}", _backward, setup_context=_remember, lib=LIBRARY)
