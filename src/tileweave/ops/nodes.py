"""Ops on groups whose ranks are on several nodes: calls inside each node, and between nodes transfers that overlap with
them. Rank r has place r % each on node r // each; a transfer is between ranks of one place.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from tileweave.fabric.nodes import Nodes, Pending

# An all-reduce sends 2 (n - 1) / n of what a rank holds to other nodes: all of the result, or, between a reduce-scatter
# and an all-gather inside the node, its share. Up to this size the former costs less than a launch more. Not measured.
DIRECT_BYTES = 512 << 10
PIECES = 4  # of an all-reduce, of which one travels while the next ones are computed

Result = TypeVar("Result")
_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.complex32: torch.complex64}


def scattered(nodes: Nodes, part_for: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """What all nodes have for this rank, in their order. `part_for(node)` computes what this node has for the rank of
    this place on another one, which travels while the next is computed; this node's own is the last."""
    pending: dict[int, Pending] = {}
    for step in range(1, nodes.count):
        to, source = (nodes.index + step) % nodes.count, (nodes.index - step) % nodes.count
        pending[source] = nodes.exchange(part_for(to), to, source)
    own = part_for(nodes.index)
    return [pending[node]() if node in pending else own for node in range(nodes.count)]


def gathered(
    nodes: Nodes, shards: Sequence[torch.Tensor], compute: Callable[[list[torch.Tensor]], Result]
) -> list[Result]:
    """What `compute` makes of the shards of each node's rank of this place, in the order of nodes: of this node's own
    first, while the others arrive."""
    pending: dict[int, list[Pending]] = {}
    for step in range(1, nodes.count):
        to, source = (nodes.index - step) % nodes.count, (nodes.index + step) % nodes.count
        pending[source] = [nodes.exchange(shard, to, source) for shard in shards]
    results = {nodes.index: compute(list(shards))}
    for source, arrivals in pending.items():
        results[source] = compute([arrived() for arrived in arrivals])
    return [results[node] for node in range(nodes.count)]


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


def pieces(size: int, each: int, least: int) -> Iterable[slice]:
    """`size` rows or elements in up to PIECES pieces, each but the last a multiple of `each`, and where there are so
    many of `least` per rank."""
    count = min(max(size // (least * each), 1), PIECES)
    step = math.ceil(size / count / each) * each
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def padded(x: torch.Tensor, each: int) -> torch.Tensor:
    """`x` with zeros up to a multiple of `each` in its first dimension."""
    missing = -x.shape[0] % each
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x
