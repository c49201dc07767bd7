"""all-gather + matmul: the column-parallel linear layer of tensor parallelism with a sharded sequence."""

from tileweave.ops.all_gather_matmul.op import all_gather_matmul, route
from tileweave.ops.all_gather_matmul.reference import reference

__all__ = ["all_gather_matmul", "reference", "route"]
