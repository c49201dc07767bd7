"""Attention to a sharded sequence, as modules: ring, Ulysses, and the two composed over a device mesh.

They have no weights: projections come before and after them, and act on each rank's own tokens.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tileweave.ops.ring_attention import ring_attention
from tileweave.ops.sequence.placement import place_sequence
from tileweave.ops.ulysses_attention import ulysses_attention


class _Attention(nn.Module):
    """What the three have in common: options of a call, kept."""

    def __init__(self, *, causal: bool = False, scale: float | None = None, layout: str = "bhsd"):
        super().__init__()
        self.causal, self.scale, self.layout = causal, scale, layout

    def extra_repr(self) -> str:
        return f"causal={self.causal}, scale={self.scale}, layout={self.layout!r}"


class RingAttention(_Attention):
    """`tileweave.ring_attention` with these options: keys and values pass by, queries stay.

    Args: group, causal, scale, layout, placement, as in `ring_attention`.

    forward(q, k, v, cu_seqlens=None): this rank's tokens, and their attention to those of all ranks, or of the same
    packed sequence. Collective, forward and backward.
    """

    def __init__(self, group: Any = None, *, placement: str = "contiguous", **options: Any):
        super().__init__(**options)
        self.group, self.placement = group, placement

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See the class."""
        options = dict(cu_seqlens=cu_seqlens, causal=self.causal, scale=self.scale, layout=self.layout)
        return _ring(q, k, v, self.group, self.placement, **options)


class UlyssesAttention(_Attention):
    """`tileweave.ulysses_attention` with these options: each rank has all tokens of its share of the heads meanwhile.

    Args: group, causal, scale, layout, as in `ulysses_attention`.

    forward(q, k, v, cu_seqlens=None): this rank's tokens, and their attention to those of all ranks, or of the same
    packed sequence. Collective, forward and backward.
    """

    def __init__(self, group: Any = None, **options: Any):
        super().__init__(**options)
        self.group = group

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See the class."""
        options = dict(cu_seqlens=cu_seqlens, causal=self.causal, scale=self.scale, layout=self.layout)
        return ulysses_attention(q, k, v, self.group, **options)  # type: ignore[arg-type]


class RingUlyssesAttention(_Attention):
    """Ring across, Ulysses within: more ranks than there are heads, and all-to-alls only where links are fast.

    Args:
        mesh: 2-D; the first dimension is the ring's, the second that of Ulysses, whose size the heads must be divisible
            by as in `ulysses_attention`.
        placement: of the sequence over the ring, as in `ring_attention`; a rank of the ring cuts its shard into
            contiguous pieces for Ulysses. `place` does both.
        causal, scale, layout: as in the ops.

    forward(q, k, v, cu_seqlens=None): this rank's tokens, and their attention to those of all ranks, or of the same
    packed sequence. Collective, forward and backward.

    ValueError unless the mesh has two dimensions.
    """

    def __init__(self, mesh: DeviceMesh, *, placement: str = "contiguous", **options: Any):
        super().__init__(**options)
        if mesh.ndim != 2:
            raise ValueError(f"RingUlyssesAttention: mesh must have two dimensions, ring and Ulysses, got {mesh.ndim}")
        self.mesh, self.placement = mesh, placement

    def place(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's shard of a whole `x` along `dim`, as `tileweave.place_sequence`."""
        shard = place_sequence(x, self.mesh.size(0), self.mesh.get_local_rank(0), dim, self.placement)
        return place_sequence(shard, self.mesh.size(1), self.mesh.get_local_rank(1), dim)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See the class."""
        across = functools.partial(
            _ring, group=self.mesh.get_group(0), placement=self.placement, layout=self.layout, cu_seqlens=cu_seqlens
        )
        return ulysses_attention(
            q, k, v, self.mesh.get_group(1), causal=self.causal, scale=self.scale, layout=self.layout, attention=across
        )


def _ring(q, k, v, group: Any, placement: str, **options: Any) -> torch.Tensor:
    """`ring_attention` without its log-sum-exps."""
    out = ring_attention(q, k, v, group, placement=placement, **options)
    assert isinstance(out, torch.Tensor)
    return out
