"""Modules of tensor parallelism: linear layers split over the ranks of a group, and what a model of them needs.

`ColumnParallelLinear` and `RowParallelLinear` stand in for `torch.nn.Linear`; `parallelize` puts them into an existing
model. Between such a pair activations are split by features, outside of it by tokens (sequence parallel, the default)
or not at all (`sequence_parallel=False`). `MoE` is a layer of experts, divided over the ranks.
"""

from tileweave.nn.layers import ColumnParallelLinear, RowParallelLinear, column_parallel
from tileweave.nn.moe import MoE
from tileweave.nn.parallelize import Column, Row, parallelize
from tileweave.nn.states import full_state_dict, reduce_gradients

__all__ = [
    "Column",
    "ColumnParallelLinear",
    "MoE",
    "Row",
    "RowParallelLinear",
    "column_parallel",
    "full_state_dict",
    "parallelize",
    "reduce_gradients",
]
