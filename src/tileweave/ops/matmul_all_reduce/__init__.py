"""matmul + all-reduce: the row-parallel linear layer of tensor parallelism with replicated activations."""

from tileweave.ops.matmul_all_reduce.op import matmul_all_reduce, route
from tileweave.ops.matmul_all_reduce.reference import reference, relative_error, tolerance

__all__ = ["matmul_all_reduce", "reference", "relative_error", "route", "tolerance"]
