"""The collectives as operators of PyTorch: schemas, implementations, shape functions, gradients.

    tileweave::all_gather(Tensor x, str group_name, int dim) -> Tensor
    tileweave::reduce_scatter(Tensor x, str group_name, int dim, str op, bool deterministic) -> Tensor
    tileweave::all_reduce(Tensor x, str group_name, str op, bool deterministic) -> Tensor
    tileweave::all_to_all(Tensor x, str group_name, int split_dim, int concat_dim) -> Tensor

`group_name` is what `tileweave.fabric.group_name` says. A gradient is that of the sum of all ranks' losses, so a
backward pass is a collective too, by the same operators, which can be differentiated again:

| operator | its gradient |
|---|---|
| all_gather | reduce_scatter of the gradient along the same dimension, op="sum" |
| reduce_scatter | all_gather of the gradient, divided by the world size if op="avg" |
| all_reduce | all_reduce of the gradient with the same op |
| all_to_all | all_to_all of the gradient with the dimensions exchanged |
"""

from typing import Any

import torch

from tileweave.fabric import Fabric, group_size, named_fabric
from tileweave.ops.collectives.check import Call, check, check_kinds
from tileweave.ops.collectives.launch import CHANNEL, prepare, unfused
from tileweave.ops.collectives.passes import choose, pieces_over_nodes
from tileweave.ops.contract import Agreement, Site
from tileweave.ops.library import LIBRARY, TAGS, register_shape_of_collective
from tileweave.ops.nodes import gathered, padded, reduced, scattered, wide_sum
from tileweave.ops.registration import recall, remember

OPTIONS = {
    "all_gather": {"dim": "int"},
    "reduce_scatter": {"dim": "int", "op": "str", "deterministic": "bool"},
    "all_reduce": {"op": "str", "deterministic": "bool"},
    "all_to_all": {"split_dim": "int", "concat_dim": "int"},
}


def run(fabric: Fabric, name: str, x: torch.Tensor, *options: Any) -> torch.Tensor:
    """Check, choose the path, compute; or, in the same way as an earlier call of the same kind, just launch.

    `options` are those of the operator, in the order of its schema.
    """
    kinds = name, x.shape, x.dtype, x.device, options
    prepared = recall(fabric, CHANNEL, kinds, x)
    if prepared is not None:
        return prepared.launch(fabric, x)
    check_kinds(name, x, **dict(zip(OPTIONS[name], options, strict=True)))
    call = check(name, fabric.world_size, x, *options)
    route = choose(Site.of(fabric), call, x.device)
    agreement = Agreement(name, call, route.fused and route.inside is None)  # nodes may differ
    if fabric.compares:
        fabric.agree(agreement)
    if route.inside is not None:
        return _over_nodes(fabric, call, x.resolve_conj().resolve_neg())
    if not route.fused:
        return unfused(fabric, call, x)
    prepared = prepare(fabric, call)
    remember(fabric, CHANNEL, kinds, agreement, prepared)
    return prepared.launch(fabric, x)


def _over_nodes(fabric: Fabric, call: Call, x: torch.Tensor) -> torch.Tensor:
    """A call on a group that is on several nodes: the same inside each, overlapped with transfers between them."""
    nodes, name, split = fabric.nodes, call.name, call.split
    assert nodes is not None
    if split is None and call.reduction is not None:
        return _all_reduce_over_nodes(fabric, call, x)
    if split is None and call.concat is not None:
        wholes = [x] * nodes.count

        def whole(node: int, _: slice, shards: list[torch.Tensor]) -> None:
            wholes[node] = run(nodes.inside, name, shards[0], call.concat)

        gathered(nodes, [x], whole)
        return torch.cat(wholes, call.concat)
    assert split is not None
    options = (call.concat,) if call.reduction is None else (call.reduction, call.deterministic)
    size = call.shape[split] // nodes.count

    def part_for(node: int, _: slice) -> torch.Tensor:
        return run(nodes.inside, name, x.narrow(split, node * size, size), split, *options)

    parts = [part for (part,) in scattered(nodes, part_for)]
    if call.concat is not None:
        return torch.cat(parts, call.concat)
    return wide_sum(parts, call.reduction == "avg").to(call.dtype)


def _all_reduce_over_nodes(fabric: Fabric, call: Call, x: torch.Tensor) -> torch.Tensor:
    """Piece by piece a reduce-scatter inside, a sum of the shares between nodes, an all-gather inside."""
    nodes, options = fabric.nodes, (call.reduction, call.deterministic)
    assert nodes is not None
    mean = call.reduction == "avg"
    parts = pieces_over_nodes(call, nodes.each)
    if not parts:
        return reduced(nodes, run(nodes.inside, "all_reduce", x, *options), mean, True)()  # to the same bits everywhere
    flat, shares = x.reshape(-1), []
    for part in parts:
        share = run(nodes.inside, "reduce_scatter", padded(flat[part], nodes.each), 0, *options)
        shares.append(reduced(nodes, share, mean, call.deterministic))
    whole = torch.cat([run(nodes.inside, "all_gather", share(), 0) for share in shares])
    return whole[: flat.numel()].view(call.shape)


def _register(name: str) -> Any:
    """Define an operator with its implementation and shape function."""
    options = ", ".join(f"{kind} {word}" for word, kind in OPTIONS[name].items())
    LIBRARY.define(f"{name}(Tensor x, str group_name, {options}) -> Tensor", tags=TAGS)

    @torch.library.impl(LIBRARY, name, "CompositeExplicitAutograd")
    def implementation(x, group_name, *options):
        return run(named_fabric(group_name, x.device), name, x, *options)

    @register_shape_of_collective(name)
    def shape(x, group_name, *options):
        return x.new_empty(check(name, group_size(group_name), x, *options).out_shape)

    return getattr(torch.ops.tileweave, name).default


OPERATORS = {name: _register(name) for name in OPTIONS}


def _remember(ctx, inputs, output) -> None:
    _, ctx.group_name, *ctx.options = inputs


def _all_gather_backward(ctx, grad):
    (dim,) = ctx.options
    deterministic = torch.are_deterministic_algorithms_enabled()
    return OPERATORS["reduce_scatter"](grad, ctx.group_name, dim, "sum", deterministic), None, None


def _reduce_scatter_backward(ctx, grad):
    dim, op, _ = ctx.options
    if op == "avg":
        grad = grad / group_size(ctx.group_name)
    return OPERATORS["all_gather"](grad, ctx.group_name, dim), None, None, None, None


def _all_reduce_backward(ctx, grad):
    return OPERATORS["all_reduce"](grad, ctx.group_name, *ctx.options), None, None, None


def _all_to_all_backward(ctx, grad):
    split_dim, concat_dim = ctx.options
    return OPERATORS["all_to_all"](grad, ctx.group_name, concat_dim, split_dim), None, None, None


for _name, _backward in (
    ("all_gather", _all_gather_backward),
    ("reduce_scatter", _reduce_scatter_backward),
    ("all_reduce", _all_reduce_backward),
    ("all_to_all", _all_to_all_backward),
):
    torch.library.register_autograd(f"tileweave::{_name}", _backward, setup_context=_remember, lib=LIBRARY)
