"""all_gather_matmul as an operator of PyTorch: schema, implementation, shape function, gradients, autocast.

    tileweave::all_gather_matmul(Tensor a, Tensor[] b, str group_name, Tensor[] bias, bool return_gathered, str plan,
                                 int max_sms, bool regather, Tensor? scale_a=None, Tensor[]? scale_b=None) -> Tensor[]

`bias` is empty or has one for each b; the results are one for each b and, with `return_gathered`, the gathered rows.
`group_name` is what `tileweave.fabric.group_name` says, `plan` a Plan as JSON or "" for the planner's, `max_sms` 0 for
all. With A [M, K] the gathered rows, G_i [M, N_i] this rank's gradients of its results, and H [M, K] that of the
gathered rows where they were returned,

    grad a = this rank's rows of the sum over ranks of (sum_i G_i b_i^T + H)
    grad b_i = A^T G_i          grad bias_i = the sum of the rows of G_i

so grad a is matmul_reduce_scatter of the G_i side by side, all of which can be differentiated again. The forward pass
keeps A where some b needs a gradient, or, with `regather`, a alone, and the backward pass gathers it again. Passes are
collective: all ranks run them, and the same inputs need gradients on all and the same results take part in the loss.
"""

from functools import partial

import torch

from tileweave.fabric import group_size, named_fabric
from tileweave.ops.all_gather_matmul.check import NAME, check, check_kinds, rows_over_nodes, settle
from tileweave.ops.all_gather_matmul.launch import fused, unfused
from tileweave.ops.all_gather_matmul.places import CHANNELS, channel_name
from tileweave.ops.block_scales import KINDS
from tileweave.ops.contract import Agreement, Like, Site
from tileweave.ops.library import LIBRARY, TAGS, register_shape_of_collective
from tileweave.ops.nodes import gathered
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
    f"{NAME}(Tensor a, Tensor[] b, str group_name, Tensor[] bias, bool return_gathered, str plan, int max_sms, "
    "bool regather, Tensor? scale_a=None, Tensor[]? scale_b=None) -> Tensor[]",
    tags=TAGS,
)
OPERATOR = torch.ops.tileweave.all_gather_matmul.default


@torch.library.impl(LIBRARY, NAME, "CompositeExplicitAutograd")
def _run(a, b, group_name, bias, return_gathered, plan, max_sms, regather, scale_a=None, scale_b=None):
    """The operator's implementation."""
    options = return_gathered, read_plan(plan), read_max_sms(NAME, max_sms), scale_a, scale_b or ()
    return run(named_fabric(group_name, a.device), a, b, bias, *options)


def run(fabric, a, b, bias, return_gathered, plan, max_sms, scale_a=None, scale_b=()):
    """Check, choose the path, compute; or, in the same way as an earlier call of the same kind, just launch.

    The options are those of the public function, `b`, `bias` and `scale_b` sequences.
    """
    kinds = kind(a), *map(kind, b), None, *map(kind, bias), return_gathered, plan, max_sms
    scales = None
    if scale_a is not None or scale_b:
        scales = scale_a, scale_b
        kinds += kind(scale_a), *map(kind, scale_b)
    prepared = next(filter(None, (recall(fabric, each, kinds, a) for each in CHANNELS)), None)
    if prepared is not None:
        return prepared.launch(fabric, a, b, bias, scales)
    check_kinds(a, b, bias, return_gathered, plan, max_sms, False, scale_a, scale_b)
    like = Like.of(a), tuple(map(Like.of, b)), tuple(map(Like.of, bias))
    of_scales = Like.of(scale_a), tuple(map(Like.of, scale_b))
    call, route = settle(Site.of(fabric), *like, return_gathered, plan, max_sms or 0, *of_scales)
    agreement = Agreement(NAME, call, route.plan)
    if fabric.compares:
        fabric.agree(agreement)
    if route.plan is None:
        compute = unfused if route.inside is None else partial(_over_nodes, plan)
        remember(fabric, NAME, kinds, agreement, Unfused(compute, call))
        return compute(fabric, call, a, b, bias, scales)
    results, prepared = fused(fabric, call, a, b, bias, route.plan, scales)
    remember(fabric, channel_name(route.plan), kinds, agreement, prepared)
    return results


def _over_nodes(plan, fabric, call, a, b, bias, scales):
    """A call on a group that is on several nodes: inside each the rows of one node after the other, its own first,
    while the shards of the others' ranks of this place arrive."""
    nodes, m = fabric.nodes, call.rows * fabric.world_size
    of_rows, of_columns = ([], ()) if scales is None else ([scales[0].expand(call.rows, 1).contiguous()], scales[1])
    options = call.return_gathered, plan, call.max_sms or None
    results = [a.new_empty(m, n, dtype=call.out_dtype) for n in call.ns]
    if call.return_gathered:
        results.append(a.new_empty(m, call.k))
    places = [result.view(nodes.count, nodes.each, call.rows, result.shape[1]) for result in results]

    def multiply(node, piece, shards):
        own, scale = shards if of_rows else (*shards, None)
        parts = run(nodes.inside, own, b, bias, *options, scale, of_columns)
        for place, part in zip(places, parts, strict=True):
            place[node, :, piece] = part.unflatten(0, (nodes.each, -1))

    gathered(nodes, [a, *of_rows], multiply, rows_over_nodes(call, nodes.count))
    return results


@register_shape_of_collective(NAME)
def _fake(a, b, group_name, bias, return_gathered, plan, max_sms, regather, scale_a=None, scale_b=None):
    """The results' shapes and dtype; the contract is checked here too, the plan is not."""
    like = Like.of(a), tuple(map(Like.of, b)), tuple(map(Like.of, bias))
    call = check(*like, return_gathered, max_sms, Like.of(scale_a), tuple(map(Like.of, scale_b or ())))
    m = call.rows * group_size(group_name)
    outs = [a.new_empty(m, n, dtype=call.out_dtype) for n in call.ns]
    return [*outs, a.new_empty(m, call.k)] if return_gathered else outs


class _Gradients(torch.autograd.Function):
    """A call whose gradients will be asked for."""

    @staticmethod
    def forward(ctx, keys, count, group_name, gathers, plan, max_sms, regather, a, *tensors):
        """Keep what the gradients need, and no more; then compute. `tensors`: `count` b, then the biases; `gathers`:
        whether the gathered rows are a result. Where they are kept they are one, so that gradients have gradients."""
        b, bias = tensors[:count], tensors[count:]
        needs_a, needs_b = ctx.needs_input_grad[7], any(ctx.needs_input_grad[8 : 8 + count])
        results = below_autograd(OPERATOR, keys, a, list(b), group_name, list(bias), gathers, plan, max_sms, regather)
        kept = (a if regather else results[-1]) if needs_b else None
        ctx.save_for_backward(kept, *(b if needs_a else ()))
        ctx.count, ctx.group_name, ctx.max_sms, ctx.regather, ctx.dtype = count, group_name, max_sms, regather, a.dtype
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx, *grads):
        """The gradients of a, each b and each bias; None for whatever needs none."""
        kept, *b = ctx.saved_tensors
        needs_a, *needs = ctx.needs_input_grad[7:]
        of_outs, of_gathered = grads[: ctx.count], next(iter(grads[ctx.count :]), None)
        grad_a = _grad_a(ctx, b, of_outs, of_gathered) if needs_a else None
        if ctx.regather and kept is not None and any(grad is not None for grad in of_outs):
            kept = torch.ops.tileweave.all_gather.default(kept, ctx.group_name, 0)
        of_b = [
            kept.t() @ grad if need and grad is not None else None for need, grad in zip(needs, of_outs, strict=False)
        ]
        of_bias = [
            grad.sum(0, dtype=torch.float32).to(ctx.dtype) if need and grad is not None else None
            for need, grad in zip(needs[ctx.count :], of_outs, strict=False)
        ]
        return *[None] * 7, grad_a, *of_b, *of_bias


def _grad_a(ctx, b, of_outs, of_gathered):
    """This rank's rows of the sum over ranks of what the rows of A have contributed to; None if that is nothing."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    used = [(grad, x) for grad, x in zip(of_outs, b, strict=True) if grad is not None]
    total = None
    if used:
        grad, x = used[0] if len(used) == 1 else (torch.cat([each[i] for each in used], 1) for i in (0, 1))
        options = "sum", None, deterministic, None, "", ctx.max_sms
        total = torch.ops.tileweave.matmul_reduce_scatter.default(grad, x.t(), ctx.group_name, *options)
    if of_gathered is not None:
        more = torch.ops.tileweave.reduce_scatter.default(of_gathered, ctx.group_name, 0, "sum", deterministic)
        total = more if total is None else total + more
    return total


def _autograd(keys, a, b, group_name, bias, return_gathered, plan, max_sms, regather, scale_a=None, scale_b=None):
    """As matmul_reduce_scatter's; the list of results has to pass through an autograd function as a tuple."""
    tensors = (a, *b, *bias)
    scales = () if scale_a is None else (scale_a, *(scale_b or ()))
    refuse_transforms(NAME, *tensors)
    if wants_gradients(*tensors, *scales):
        if a.dtype in KINDS:
            raise NotImplementedError(f"{NAME} of {a.dtype} operands has no gradients; detach() them")
        gathers = return_gathered or (not regather and any(x.requires_grad for x in b))
        results = _Gradients.apply(keys, len(b), group_name, gathers, plan, max_sms, regather, *tensors)
        return list(results if return_gathered else results[: len(b)])
    options = return_gathered, plan, max_sms, regather, scale_a, scale_b
    return below_autograd(OPERATOR, keys, a, b, group_name, bias, *options)


LIBRARY.impl(NAME, _autograd, "Autograd", with_keyset=True)
register_autocast(NAME, OPERATOR, 0, 1, 3)
