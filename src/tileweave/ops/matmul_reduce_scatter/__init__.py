"""matmul + reduce-scatter: the row-parallel linear layer of tensor parallelism with a sharded sequence."""

from tileweave.ops.matmul_reduce_scatter.op import matmul_reduce_scatter, route
from tileweave.ops.matmul_reduce_scatter.reference import reference, relative_error, tolerance

__all__ = ["matmul_reduce_scatter", "reference", "relative_error", "route", "tolerance"]
