"""all_gather_matmul: what users call."""

from collections.abc import Sequence

import torch

from tileweave.fabric import fabric_of, group_name
from tileweave.ops.all_gather_matmul.check import NAME, check_kinds, settle
from tileweave.ops.all_gather_matmul.operator import OPERATOR, run
from tileweave.ops.contract import Like, Site
from tileweave.ops.registration import is_plain
from tileweave.ops.route import Route
from tileweave.planner import Plan


def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor | Sequence[torch.Tensor],
    group=None,
    *,
    bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
    return_gathered: bool = False,
    plan: Plan | None = None,
    max_sms: int | None = None,
    regather: bool = False,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor | list[torch.Tensor], torch.Tensor]:
    """The rows of all ranks times this rank's `b`: a matmul that starts with its own rows while the others arrive.

    Args:
        a: `[M / world, K]`, bfloat16, float16 or, with scales, float8_e4m3fn or float4_e2m1fn_x2, two values in an
            element, any strides; rows in one piece cost no copy, or, where the copy engine sends them, rows one behind
            the other. M may be 0.
        b: `[K, N_local]`, dtype and device of `a`; a transposed weight (`w.t()`) costs no copy. Or a list of one to
            three such, of any widths (q, k and v projections), which share the gather and the kernel; they cost no copy
            if they have one stride order. Shapes are the same on every rank.
        group: a ProcessGroup, a 1-D DeviceMesh, the group that `virtual_world` hands out, or None: the thread's
            virtual world, else torch.distributed's WORLD, else a world of one.
        bias: `[N_local]`, dtype of the result, this rank's; for a list of b a list as long.
        return_gathered: also return the gathered rows.
        plan: a `Plan` to use instead of the planner's, the same on all ranks. Schedules: "inter_sm", `comm_sms` SMs
            push this rank's rows to the peers while the others multiply; "one_shot", they push them to all ranks, and
            the rows of all are multiplied as one matrix, which the planner takes where ranks have few (not for float8);
            "intra_sm", they copy them where peers can read, and the peers' multiplying SMs load them from there;
            "none", first the gather, then the matmul. Mechanisms: "tma"; "register", loads and stores of 16 bytes;
            "multimem", stores that reach all ranks, where the fabric has multicast ("inter_sm" and "none"); and with
            "inter_sm" "copy_engine", which takes no SMs between GPUs, so that comm_sms may be 0, for up to 64 ranks
            and rows in one piece, K in whole steps of the tile (copied otherwise). On virtual ranks copies run on SMs,
            of which each rank leaves comm_sms, one at least.
        max_sms: the kernel uses at most so many SMs, at least 1, the same on all ranks; None: all that this rank has.
        regather: what a backward pass needs of the gathered rows, for the gradients of `b`. False: the forward pass
            keeps them, M x K elements; True: it keeps `a`, and the backward pass gathers once more.
        scale_a, scale_b: for float8_e4m3fn operands, float32: what products are multiplied with. One value each, or one
            for each of this rank's rows, `[M / world, 1]`, which are gathered with them, and each column of b,
            `[1, N_local]`; for a list of b a list as long. The tensor cores take 8-bit operands with K in one piece: a
            row-major a and a transposed weight are not copied. They sum them with about 14 bits. No gradients.
            Or scales of blocks along K (mxfp8, nvfp4) as `matmul_reduce_scatter` takes them, and with the same limits:
            those of this rank's rows go along with them. Schedules inter_sm, intra_sm and none, by "tma".

    Returns:
        `[M, N_local]`, the rows in rank order, or a list of such for a list of b; with `return_gathered` a pair of that
        and `[M, K]`. Fresh contiguous tensors of `a`'s dtype, results of operands with scales of bfloat16, ready
        on the current stream. Products are accumulated in float32.

    Where the fabric or the shape does not allow the fused kernel (`explain` says why) the same is computed by the
    group's own all-gather and torch.matmul. Over several nodes it is composed of calls inside each.

    It is the registered operator `torch.ops.tileweave.all_gather_matmul` behind a function that resolves defaults:

    - Gradients of a, b, bias exist, also through the gathered rows. That of `a` is matmul_reduce_scatter of the
      results' gradients with b^T: a collective, so every rank must run the backward pass, the same inputs must require
      gradients on all, and the same results take part in the loss. Gradients can be differentiated again.
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
    many = isinstance(b, (list, tuple))
    bs, (biases, scales) = _lists(b, bias=bias, scale_b=scale_b)
    if isinstance(regather, bool) and is_plain(a, *bs, *biases, scale_a, *scales):
        results = run(fabric_of(group, a.device), a, bs, biases, return_gathered, plan, max_sms, scale_a, scales)
    else:
        check_kinds(a, bs, biases, return_gathered, plan, max_sms, regather, scale_a, scales)
        options = return_gathered, "" if plan is None else plan.to_json(), max_sms or 0, regather
        results = OPERATOR(a, bs, group_name(group), biases, *options, scale_a, scales)
    outs = results[: len(bs)] if many else results[0]
    return (outs, results[-1]) if return_gathered else outs


def route(
    a,
    b,
    group=None,
    *,
    bias=None,
    return_gathered=False,
    plan=None,
    max_sms=None,
    regather=False,
    scale_a=None,
    scale_b=None,
) -> Route:
    """What `all_gather_matmul` would do with these arguments; launches nothing, raises what it would raise."""
    bs, (biases, scales) = _lists(b, bias=bias, scale_b=scale_b)
    check_kinds(a, bs, biases, return_gathered, plan, max_sms, regather, scale_a, scales)
    like = Like.autocast(a), tuple(map(Like.autocast, bs)), tuple(map(Like.autocast, biases))
    of_scales = Like.of(scale_a), tuple(map(Like.of, scales))
    return settle(Site.of(fabric_of(group, a.device)), *like, return_gathered, plan, max_sms or 0, *of_scales)[1]


def _lists(b, **each) -> tuple[list, list[list]]:
    """b, and what there is one of for each b, as lists. TypeError where one is a list and the other is not."""
    many = isinstance(b, (list, tuple))
    for name, given in each.items():
        if given is not None and many != isinstance(given, (list, tuple)):
            expected, got = ("a list, as b is", "a single one") if many else ("a single one, as b is", "a list")
            raise TypeError(f"{NAME}: {name} must be {expected}, got {got}")
    if many:
        return list(b), [[] if given is None else list(given) for given in each.values()]
    return [b], [[] if given is None else [given] for given in each.values()]
