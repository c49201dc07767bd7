"""Ops on groups whose ranks are on several nodes: calls inside each node, and between nodes transfers that overlap with
them. Rank r has place r % each on node r // each; a transfer is between ranks of one place.
"""

import math
from collections.abc import Callable, Sequence

import torch

from tileweave.fabric.nodes import Nodes, Pending

# An all-reduce sends a rank's whole result to all other nodes or, between a reduce-scatter and an all-gather inside the
# node, about twice its share. Up to this size the former costs less than a launch more; nor is it worth a launch of its
# own to cut off less. Not measured.
DIRECT_BYTES = 512 << 10
PIECES = 4  # into which a call is cut at most, so that one travels while the next is computed
WHOLE = slice(None)

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.complex32: torch.complex64}


def scattered(
    nodes: Nodes, part_for: Callable[[int, slice], torch.Tensor], cut: Sequence[slice] = (WHOLE,)
) -> list[list[torch.Tensor]]:
    """What each node has for this rank, in their order, in pieces. `part_for(node, piece)` computes a piece of what
    this node has for the rank of this place on another one, which travels while the next is computed; this node's own
    part is the last, and whole."""
    pending: dict[int, list[Pending]] = {}
    for step in range(1, nodes.count):
        to, source = (nodes.index + step) % nodes.count, (nodes.index - step) % nodes.count
        pending[source] = [nodes.exchange(part_for(to, piece), to, source) for piece in cut]
    own = part_for(nodes.index, WHOLE)
    return [[arrived() for arrived in pending[node]] if node in pending else [own] for node in range(nodes.count)]


def gathered(
    nodes: Nodes,
    shards: Sequence[torch.Tensor],
    use: Callable[[int, slice, list[torch.Tensor]], None],
    cut: Sequence[slice] = (WHOLE,),
) -> None:
    """Call `use(node, piece, shards)` with the shards, cut along their first dimension, of each node's rank of this
    place: with this node's own, whole, first, while the others arrive."""
    arriving: list[tuple[int, slice, list[Pending]]] = []
    for step in range(1, nodes.count):
        to, source = (nodes.index - step) % nodes.count, (nodes.index + step) % nodes.count
        for piece in cut:
            arriving.append((source, piece, [nodes.exchange(shard[piece], to, source) for shard in shards]))
    use(nodes.index, WHOLE, list(shards))
    for source, piece, pending in arriving:
        use(source, piece, [arrived() for arrived in pending])


def reduced(nodes: Nodes, x: torch.Tensor, mean: bool, ordered: bool) -> Pending:
    """Start to sum `x`, which may be overwritten, over the nodes, or take its mean. ordered: in the order of nodes,
    16-bit floats in float32, as it is always between two; else as the group does it."""
    if x.numel() == 0:
        return lambda: x
    if ordered or nodes.count == 2:
        every = nodes.gather(x.contiguous())
        return lambda: wide_sum(every(), mean).to(x.dtype)
    return nodes.all_reduce((x / nodes.count if mean else x).contiguous())  # before: the sum may overflow


def wide_sum(parts: Sequence[torch.Tensor] | torch.Tensor, mean: bool) -> torch.Tensor:
    """Sum or mean of the parts, in order, 16-bit floats in float32, in which it is left."""
    wide, scale = _WIDE.get(parts[0].dtype, parts[0].dtype), 1 / len(parts) if mean else 1
    total = parts[0].to(wide) * scale
    for part in parts[1:]:
        total += part.to(wide) * scale
    return total


def pieces(size: int, each: int, count: int) -> tuple[slice, ...]:
    """`size` rows, columns or elements in about `count` pieces, at least one, all but the last multiples of `each`."""
    step = math.ceil(size / max(count, 1) / each) * each
    return tuple(slice(start, min(start + step, size)) for start in range(0, size, step))


def cut_for(nodes: int, size: int, nbytes: int) -> tuple[slice, ...]:
    """In which pieces the `nbytes` travel that one node has for a rank of another, cut along a dimension of this size:
    fewer the more nodes there are, whose parts are pieces too."""
    return pieces(size, 8, min(math.ceil(PIECES / nodes), nbytes // DIRECT_BYTES))


def padded(x: torch.Tensor, each: int) -> torch.Tensor:
    """`x` with zeros up to a multiple of `each` in its first dimension."""
    missing = -x.shape[0] % each
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x
