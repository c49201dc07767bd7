"""Attention to a sharded sequence: keys and values of all ranks pass by while each rank's queries stay."""

from tileweave.ops.ring_attention.op import ring_attention, route
from tileweave.ops.ring_attention.reference import reference

__all__ = ["reference", "ring_attention", "route"]
