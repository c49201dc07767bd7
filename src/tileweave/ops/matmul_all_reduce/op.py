"""matmul_all_reduce: what users call."""

import torch

from tileweave.fabric import fabric_of, group_name
from tileweave.ops.contract import Like, Site
from tileweave.ops.matmul_all_reduce.check import Options, check_kinds, settle
from tileweave.ops.matmul_all_reduce.operator import OPERATOR, run
from tileweave.ops.registration import is_plain
from tileweave.ops.route import Route
from tileweave.planner import Plan


def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    group=None,
    *,
    bias: torch.Tensor | None = None,
    deterministic: bool | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    plan: Plan | None = None,
    max_sms: int | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The sum over ranks of `a @ b` on every rank: the row-parallel linear layer of tensor parallelism.

    Args:
        a: `[M, K_local]`, bfloat16, float16 or, with scales, float8_e4m3fn or float4_e2m1fn_x2 (`[M, K_local / 2]`),
            any strides; any M, 0 included.
        b: `[K_local, N]`, dtype and device of `a`; a transposed weight (`w.t()`) costs no copy. M, N and K_local are
            the same on every rank.
        group: a ProcessGroup, a 1-D DeviceMesh, the group that `virtual_world` hands out, or None: the thread's
            virtual world, else torch.distributed's WORLD, else a world of one.
        bias: `[N]`, dtype of the result, the same on all ranks; added once.
        deterministic: whether equal inputs must give equal bits. The kernel's results always do, on all ranks the
            same; True asks the fallback, and calls over several nodes, for a sum in fixed order too. None: True under
            torch.use_deterministic_algorithms.
        residual: `[M, N]`, dtype of the result, the same on all ranks; added once.
        norm_weight: `[N]`, dtype of the result, with `residual` only: also return the normed sum.
        norm_eps: is added to the mean of the squares under the root.
        plan: a `Plan` to use instead of the planner's, the same on all ranks. Schedules: "one_shot", every rank gets
            all ranks' parts and sums them; "intra_sm", every rank sums a share of the columns, which all fetch from it;
            "none", first the matmul, then an `all_reduce`, which is also what a world of one has.
        max_sms: the kernel uses at most so many SMs, at least 1, the same on all ranks; None: all that this rank has.
        scale_a, scale_b: for float8_e4m3fn and float4_e2m1fn_x2, scales of blocks along K (mxfp8, nvfp4) as
            `matmul_reduce_scatter` takes them, and with the same limits. No others, and no gradients.

    Returns:
        `[M, N]`: sum + bias + residual, a fresh contiguous tensor of `a`'s dtype, bfloat16 where operands have scales,
        ready on the current stream. With `norm_weight` a pair of `[M, N]`: RMSNorm(that) * norm_weight, as
        torch.nn.functional.rms_norm has it, and that. Products are accumulated in float32; what travels has the dtype
        of the result, and is summed in float32.

    Where the fabric or the shape does not allow the fused kernel (`explain` says why) the same is computed by
    torch.matmul and the group's own all-reduce. Over several nodes it is composed of calls inside each.

    It is the registered operator `torch.ops.tileweave.matmul_all_reduce` behind a function that resolves defaults:

    - Gradients of all tensors exist. The result is the same on all ranks, and so is its gradient if they go on alike:
      then the backward pass needs no communication. That of `a`, and of what `a` was computed from, is this rank's.
    - torch.compile traces it without a graph break, whatever the kind of `group`; M may be dynamic.
    - A CUDA graph can hold it once it has been called with the same arguments but for the data.
    - Under torch.autocast float32 operands are cast as those of torch.matmul.

    Raises:
        ValueError, TypeError: the arguments break the rules above; nothing has been launched.
        RuntimeError: the group's world is not running, or the workspace would have to grow while a CUDA graph is
            being captured.
        FabricTimeout: a peer did not take part within the group's timeout. Where nothing is fused, the process group's
            collective waits as long as it does, for instance NCCL's timeout, and fails in its own way.
    """
    deterministic = _resolve(deterministic)
    extras = bias, residual, norm_weight
    options = bias, deterministic, residual, norm_weight, norm_eps
    if is_plain(a, b, *extras, scale_a, scale_b):
        results = run(fabric_of(group, a.device), a, b, *options, plan, max_sms, scale_a, scale_b)
    else:
        check_kinds(a, b, *options, plan, max_sms, scale_a, scale_b)
        text = "" if plan is None else plan.to_json()
        results = OPERATOR(a, b, group_name(group), *options, text, max_sms or 0, scale_a, scale_b)
    return results[0] if norm_weight is None else (results[0], results[1])


def route(
    a, b, group=None, *, bias=None, deterministic=None, residual=None, norm_weight=None, norm_eps=1e-6, plan=None,
    max_sms=None, scale_a=None, scale_b=None,
) -> Route:  # fmt: skip
    """What `matmul_all_reduce` would do with these arguments; launches nothing, raises what it would raise."""
    check_kinds(a, b, bias, deterministic, residual, norm_weight, norm_eps, plan, max_sms, scale_a, scale_b)
    options = Options(_resolve(deterministic), norm_eps, max_sms or 0)
    like = map(Like.autocast, (a, b, bias, residual, norm_weight))
    return settle(Site.of(fabric_of(group, a.device)), *like, options, plan, Like.of(scale_a), Like.of(scale_b))[1]


def _resolve(deterministic: bool | None) -> bool:
    """The caller's wish, else PyTorch's global setting."""
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
