"""Grouped matmul: rows sorted by expert, each times its expert's matrix."""

from tileweave.ops.grouped_matmul.op import grouped_matmul, route
from tileweave.ops.grouped_matmul.reference import reference

__all__ = ["grouped_matmul", "reference", "route"]
