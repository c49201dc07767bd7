"""Attention to a sharded sequence: each rank has all tokens of its share of the heads meanwhile."""

from tileweave.ops.ring_attention.reference import reference
from tileweave.ops.ulysses_attention.op import route, ulysses_attention

__all__ = ["reference", "route", "ulysses_attention"]
