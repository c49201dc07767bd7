"""The column- and the row-parallel linear layer.

Tokens reach the ops as rows with the sequence outermost, [S, ..., features], so that the shards of the ranks follow
each other. Inputs in that order in memory (one sequence, or a batch in an inner dimension) cost no copy, others one;
results are views with the sequence where the input has it.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from tileweave.fabric import group_name
from tileweave.nn.arguments import check_module, check_tensor
from tileweave.nn.shard import ParallelLinear
from tileweave.ops.all_gather_matmul import all_gather_matmul
from tileweave.ops.matmul_all_reduce import matmul_all_reduce
from tileweave.ops.matmul_reduce_scatter import matmul_reduce_scatter


class ColumnParallelLinear(ParallelLinear):
    """A torch.nn.Linear whose output features are split over the ranks: y_r = gather(x) @ W_r^T + b_r.

    Args:
        in_features, out_features, bias, device, dtype: as torch.nn.Linear; sizes are those of the whole layer,
            out_features divisible by the world size.
        group: a ProcessGroup, a 1-D DeviceMesh (`mesh["tp"]` of a larger one), the group that `virtual_world` hands
            out, or None: the thread's virtual world, else torch.distributed's WORLD, else a world of one.
        sequence_parallel: True: the input is this rank's shard of the sequence, gathered by `all_gather_matmul`, whose
            backward pass is a matmul with the reduce-scatter inside. False: the input is the same on all ranks; the
            matmul is a plain one, and the backward pass sums the input's gradient over the ranks.
        sequence_dim: the dimension of the input that is sharded and gathered, by default the last but one: 1 of
            [B, S, features] as torch.distributed.tensor.parallel shards it, 0 of [tokens, features]. Rank r has the
            r-th of equal pieces. Unused without sequence_parallel.
        max_sms: as in the ops, for what runs beside them.
        seed: what the initial weights are drawn from (`reset_parameters`).
        regather: the backward pass gathers the input once more, instead of keeping all of it.

    Shapes, with S in the dimension sequence_dim:
        [..., S / world, ..., in_features] -> [..., S, ..., out_features / world], strided if a batch precedes the
        sequence: use reshape, not view, to merge its dimensions. Without sequence_parallel both have S.

    `weight` is [out_features / world, in_features], `bias` [out_features / world]. state_dict() has this rank's part
    (`full_state_dict` the whole); load_state_dict takes such parts, and the whole weights of a torch.nn.Linear.

    Activations are bfloat16 or float16, or cast by autocast, as the ops take them. In a world of one it is a
    torch.nn.Linear. Forward and backward passes are collective: all ranks make them in the same order.

    Raises:
        TypeError, ValueError: an option is not what it must be; out_features is not divisible; the input's shape is
            wrong. And whatever the ops raise.
    """

    SPLIT: ClassVar = {"weight": 0, "bias": 0}
    SIZE = "out_features"

    def __init__(self, *args: Any, regather: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._check_options(regather=regather)
        self.regather = regather

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return column_parallel(x, self)[0]


class RowParallelLinear(ParallelLinear):
    """A torch.nn.Linear whose input features are split over the ranks: y = the sum over ranks of x_r @ W_r^T, plus b.

    Args: as `ColumnParallelLinear`, but in_features must be divisible by the world size, and:
        sequence_parallel: True: the result is this rank's shard of the sequence, by `matmul_reduce_scatter`. False: it
            is the same on all ranks, by `matmul_all_reduce`.
        sequence_dim: the dimension that is scattered; its size must be divisible by the world size.

    Shapes, with S in the dimension sequence_dim:
        [..., S, ..., in_features / world] -> [..., S / world, ..., out_features], strided as that of the
        column-parallel layer. Without sequence_parallel both have S.

    `weight` is [out_features, in_features / world]; `bias` [out_features], the same on all ranks and added once. With
    sequence_parallel the gradient of `bias` is that of this rank's tokens: see `reduce_gradients`.
    """

    SPLIT: ClassVar = {"weight": 1}
    SIZE = "in_features"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        dim = check_input(self, x, self.in_features // self.world_size)
        if self.world_size == 1:
            return F.linear(x, self.weight, self.bias)
        if not self.sequence_parallel:
            out: Any = matmul_all_reduce(
                x.flatten(0, -2), self.weight.t(), self.group, bias=self.bias, max_sms=self.max_sms
            )
            return out.unflatten(0, x.shape[:-1])
        if x.shape[dim] % self.world_size:
            raise ValueError(
                f"RowParallelLinear: input is {list(x.shape)}; its dimension {dim}, the sequence, must be divisible by "
                f"the world size {self.world_size}"
            )
        rows, (tokens, *others) = to_rows(x, dim)
        out = matmul_reduce_scatter(rows, self.weight.t(), self.group, bias=self.bias, max_sms=self.max_sms)
        return out.unflatten(0, (tokens // self.world_size, *others)).movedim(0, dim)


def column_parallel(x: torch.Tensor, *layers: nn.Module) -> list[torch.Tensor]:
    """`[layer(x) for layer in layers]` with one gather of x: query, key and value, or gate and up projections.

    layers: one to three `ColumnParallelLinear` of one group and the same options. Or modules that none of are
    `ColumnParallelLinear`: these are called one after the other, so that a model's code is the same before and after
    `parallelize`.

    ValueError, TypeError: the layers differ in group or options, or only some are column parallel.
    """
    for layer in layers:
        check_module("column_parallel", "each layer", layer)
    columns = [layer for layer in layers if isinstance(layer, ColumnParallelLinear)]
    if not columns:
        return [layer(x) for layer in layers]
    first = columns[0]
    if len(columns) != len(layers):
        kinds = ", ".join(type(layer).__name__ for layer in layers)
        raise TypeError(f"column_parallel: layers must all be ColumnParallelLinear, or none, got {kinds}")
    for name in ("group", "in_features", "sequence_parallel", "sequence_dim", "max_sms", "regather"):
        if any(getattr(layer, name) != getattr(first, name) for layer in columns):
            values = ", ".join(str(getattr(layer, name)) for layer in columns)
            raise ValueError(f"column_parallel: layers must have the same {name}, got {values}")
    dim = check_input(first, x, first.in_features)
    if first.world_size == 1:
        return [F.linear(x, layer.weight, layer.bias) for layer in columns]
    if not first.sequence_parallel:
        x = _Replicated.apply(x, group_name(first.group))
        return [F.linear(x, layer.weight, layer.bias) for layer in columns]
    rows, (tokens, *others) = to_rows(x, dim)
    biases = [layer.bias for layer in columns if layer.bias is not None]
    fused = len(biases) == len(columns)
    outs: Any = all_gather_matmul(
        rows,
        [layer.weight.t() for layer in columns],
        first.group,
        bias=biases if fused else None,
        max_sms=first.max_sms,
        regather=first.regather,
    )
    if not fused:
        pairs = zip(outs, columns, strict=True)
        outs = [out if layer.bias is None else out + layer.bias for out, layer in pairs]
    return [out.unflatten(0, (tokens * first.world_size, *others)).movedim(0, dim) for out in outs]


def to_rows(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Size]:
    """x [..., features] as [rows, features] with dimension `dim` outermost, and what the rows were before: its size,
    then those of the others."""
    x = x.movedim(dim, 0)
    return x.flatten(0, -2), x.shape[:-1]


def check_input(layer: ParallelLinear, x: torch.Tensor, features: int) -> int:
    """The dimension of x in which the sequence lies, counted from 0; TypeError or ValueError if x is no tensor of the
    layer's shape."""
    check_tensor(layer, x)
    dims, dim, name = x.dim(), layer.sequence_dim, type(layer).__name__
    if dims < 2 or x.shape[-1] != features:
        raise ValueError(f"{name}: input must be [..., tokens, {features}], got {list(x.shape)}")
    place = dim + dims if dim < 0 else dim
    if layer.sequence_parallel and not 0 <= place < dims - 1:
        raise ValueError(
            f"{name}: sequence_dim = {dim} must be a dimension of the input {list(x.shape)} before the last, from 0 to "
            f"{dims - 2} or {-dims} to -2"
        )
    return place


class _Replicated(torch.autograd.Function):
    """A tensor that is the same on all ranks, as input of what each of them computes for itself: the gradient is the
    sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        # the operator itself: torch.compile traces this
        deterministic = torch.are_deterministic_algorithms_enabled()
        return torch.ops.tileweave.all_reduce.default(grad, ctx.name, "sum", deterministic), None
