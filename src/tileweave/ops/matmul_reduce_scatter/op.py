"""matmul_reduce_scatter: what users call."""

import torch

from tileweave.fabric import fabric_of, group_name
from tileweave.ops.contract import Like, Site
from tileweave.ops.matmul_reduce_scatter.check import check_kinds, settle
from tileweave.ops.matmul_reduce_scatter.operator import OPERATOR, run
from tileweave.ops.registration import is_plain
from tileweave.ops.route import Route
from tileweave.planner import Plan


def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    group=None,
    *,
    op: str = "sum",
    bias: torch.Tensor | None = None,
    deterministic: bool | None = None,
    out_dtype: torch.dtype | None = None,
    plan: Plan | None = None,
    max_sms: int | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's rows of the sum over ranks of `a @ b`: a matmul with the reduce-scatter inside its tile loop.

    Args:
        a: `[M, K_local]`, bfloat16, float16 or, with scales, float8_e4m3fn or float4_e2m1fn_x2 (`[M, K_local / 2]`),
            any strides; M divisible by the world size, 0 included.
        b: `[K_local, N]`, dtype and device of `a`; a transposed weight (`w.t()`) costs no copy. M, N and K_local are
            the same on every rank.
        group: a ProcessGroup, a 1-D DeviceMesh, the group that `virtual_world` hands out, or None: the thread's
            virtual world, else torch.distributed's WORLD, else a world of one.
        op: "sum", or "avg": each part divided by the world size before it is sent, so that a mean that the dtype can
            hold does not overflow on the way.
        bias: `[N]`, dtype of `a`, the same on all ranks; added once, after the reduction.
        deterministic: True: each source's part is kept apart and summed in a fixed order in float32, so that equal
            inputs give equal bits; always so for two ranks. False: parts are added in the result's dtype in order of
            arrival. None: True under torch.use_deterministic_algorithms.
        out_dtype: dtype of the result and of what travels: that of `a` (default; bfloat16 for float8) or float32.
        plan: a `Plan` to use instead of the planner's, the same on all ranks. Its schedule is "intra_sm": the CTA that
            computed a tile sends it to the rank that owns its rows; "one_shot": tiles have rows of several ranks, each
            of which sums its own behind its tiles, as if deterministic (the planner takes it where ranks own few rows,
            else intra_sm); "inter_sm": computing CTAs leave tiles in this rank's memory, and `comm_sms` others send
            them; or "none": a matmul, then our own reduce-scatter.
        max_sms: the kernel uses at most so many SMs, at least 1, the same on all ranks, and leaves the others to
            whatever runs beside it; None: all that this rank has.
        scale_a, scale_b: for float8_e4m3fn operands, float32: what this rank's product is multiplied with before it is
            summed. One value each, or one for each row of a, `[M, 1]`, and each column of b, `[1, N]`. The tensor
            cores take 8-bit operands with K in one piece: a row-major a and a transposed weight are not copied. They
            sum them with about 14 bits, as torch's scaled_mm with use_fast_accum=True. No gradients.
            Or scales of blocks along K, as torch's scaled_mm takes them: float8_e8m0fnu for 32 float8_e4m3fn (mxfp8),
            float8_e4m3fn for 16 float4_e2m1fn_x2 (nvfp4), those of M x K and N x K in blocks of 128 x 4, what is beyond
            anything. Kernels for them are Blackwell's alone: elsewhere, and where K is no multiple of 128 (nvfp4: 64),
            operands are multiplied with their scales in float32 first.

    Returns:
        `[M / world, N]`, a fresh contiguous tensor, ready on the current stream. Products are accumulated in float32.

    Where the fabric or the shape does not allow the fused kernel (`explain` says why) the same is computed by
    torch.matmul and the group's own reduce-scatter. Over several nodes it is composed of calls inside each.

    It is the registered operator `torch.ops.tileweave.matmul_reduce_scatter` behind a function that resolves defaults:

    - Gradients of a, b and bias exist. The backward pass gathers the gradient from all ranks, so every rank must run it
      and the same inputs must require gradients on all. The gradient of `bias` is that of this rank's rows. They can be
      differentiated again.
    - torch.compile traces it without a graph break, whatever the kind of `group`; M may be dynamic.
    - A CUDA graph can hold it once it has been called with the same arguments but for the data: the workspace has its
      size then, the kernel is loaded. Memory that a graph holds stays until its group goes, also when later calls need
      more.
    - Under torch.autocast float32 operands are cast as those of torch.matmul.

    Raises:
        ValueError, TypeError: the arguments break the rules above; nothing has been launched.
        RuntimeError: the group's world is not running, or the workspace would have to grow while a CUDA graph is
            being captured.
        FabricTimeout: a peer did not take part within the group's timeout. Where nothing is fused, the process group's
            collective waits as long as it does, for instance NCCL's timeout, and fails in its own way.
    """
    options = op, bias, _resolve(deterministic), out_dtype
    if is_plain(a, b, bias, scale_a, scale_b):
        return run(fabric_of(group, a.device), a, b, *options, plan, max_sms, scale_a, scale_b)
    check_kinds(a, b, *options, plan, max_sms, scale_a, scale_b)
    text = "" if plan is None else plan.to_json()
    return OPERATOR(a, b, group_name(group), *options, text, max_sms or 0, scale_a, scale_b)


def route(
    a,
    b,
    group=None,
    *,
    op="sum",
    bias=None,
    deterministic=None,
    out_dtype=None,
    plan=None,
    max_sms=None,
    scale_a=None,
    scale_b=None,
) -> Route:
    """What `matmul_reduce_scatter` would do with these arguments; launches nothing, raises what it would raise."""
    check_kinds(a, b, op, bias, deterministic, out_dtype, plan, max_sms, scale_a, scale_b)
    of_scales = Like.of(scale_a), Like.of(scale_b)
    site, a, b, bias = Site.of(fabric_of(group, a.device)), Like.autocast(a), Like.autocast(b), Like.autocast(bias)
    return settle(site, a, b, op, bias, _resolve(deterministic), out_dtype, plan, max_sms or 0, *of_scales)[1]


def _resolve(deterministic: bool | None) -> bool:
    """The caller's wish, else PyTorch's global setting."""
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
