"""Attention of one GPU, not exported: what ring_attention and ulysses_attention are built on and compared with."""

from tileweave.ops.attention.check import Tiling, check, check_tiling, unsupported
from tileweave.ops.attention.launch import attention
from tileweave.ops.attention.reference import reference, tolerance

__all__ = ["Tiling", "attention", "check", "check_tiling", "reference", "tolerance", "unsupported"]
