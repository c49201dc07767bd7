"""Modules of tensor parallelism: linear layers split over the ranks of a group, and what a model of them needs.

`ColumnParallelLinear` and `RowParallelLinear` stand in for `torch.nn.Linear`; `parallelize` puts them into an existing
model. Between such a pair activations are split by features, outside of it by tokens (sequence parallel, the default)
or not at all (`sequence_parallel=False`). `MoE` is a layer of experts, divided over the ranks. `RingAttention`,
`UlyssesAttention` and `RingUlyssesAttention` attend to a sequence that is sharded throughout.
"""

from tileweave.nn.attention import RingAttention, RingUlyssesAttention, UlyssesAttention
from tileweave.nn.layers import ColumnParallelLinear, RowParallelLinear, column_parallel
from tileweave.nn.moe import MoE
from tileweave.nn.parallelize import Column, Row, parallelize
from tileweave.nn.states import full_state_dict, reduce_gradients

__all__ = [
    "Column",
    "ColumnParallelLinear",
    "MoE",
    "RingAttention",
    "RingUlyssesAttention",
    "Row",
    "RowParallelLinear",
    "UlyssesAttention",
    "column_parallel",
    "full_state_dict",
    "parallelize",
    "reduce_gradients",
]
