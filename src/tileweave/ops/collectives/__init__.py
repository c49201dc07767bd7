"""The plain collectives, on the same primitives as the fused ops: one kernel for all four."""

from tileweave.ops.collectives.op import ROUTES, all_gather, all_reduce, all_to_all, reduce_scatter
from tileweave.ops.collectives.reference import reference

__all__ = ["ROUTES", "all_gather", "all_reduce", "all_to_all", "reduce_scatter", "reference"]
