"""Where tokens of a sequence lie: `place_sequence` cuts a rank's shard out of a whole, `unplace_sequence` undoes it.

    contiguous   rank r has the r-th of `world` equal pieces
    zigzag       rank r has the r-th and the r-th last of 2 * world equal pieces, in this order

With a causal mask early tokens see little and late ones much, so contiguous shards give the last rank nearly twice the
average work and make all wait for it. In zigzag order every rank has the same.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tileweave.fabric.arguments import whole_number
from tileweave.ops.contract import check_dense

PLACEMENTS = ("contiguous", "zigzag")


def pieces(placement: str) -> int:
    """Pieces of a rank. ValueError for a placement that there is not."""
    if placement not in PLACEMENTS:
        raise ValueError(f"placement must be 'contiguous' or 'zigzag', got {placement!r}")
    return 2 if placement == "zigzag" else 1


def place_sequence(x: torch.Tensor, world: int, rank: int, dim: int, placement: str = "contiguous") -> torch.Tensor:
    """The shard of `rank` of a whole `x`, along `dim`: tokens, labels, position ids (`torch.arange(n)`), a mask.

    Args:
        x: any tensor, n elements along `dim`; n divisible by `world`, by 2 * `world` in zigzag order.
        world, rank: of how many ranks which one.
        dim: the dimension that the sequence lies in, negative ones counted from the end.
        placement: "contiguous" or "zigzag", as in `ring_attention`.

    Returns:
        n / world along `dim`: a view of x ("contiguous") or a new tensor ("zigzag"). Gradients pass through.

    ValueError for a length that does not divide, naming the nearest that do, for a rank, dimension or placement that
    there is not. No communication: it is the same on every rank, whatever `rank` is.
    """
    check_dense("place_sequence", (("x", x),))
    per = pieces(placement)
    world = whole_number("place_sequence: world", world, 1, "a number of ranks from 1 up")
    rank = whole_number("place_sequence: rank", rank, 0, f"a rank from 0 to {world - 1}", world - 1)
    dim = _dimension("place_sequence", "x", x, dim)
    n, parts = x.shape[dim], per * world
    if n % parts:
        near = f"{n - n % parts} or {n - n % parts + parts}"
        raise ValueError(
            f"place_sequence: x has {n} elements in dim={dim}, not divisible by {parts} ({placement}, {world} ranks); "
            f"{near} would be"
        )
    size = n // parts
    if per == 1:
        return x.narrow(dim, rank * size, size)
    return torch.cat((x.narrow(dim, rank * size, size), x.narrow(dim, (parts - 1 - rank) * size, size)), dim)


def unplace_sequence(shards: Sequence[torch.Tensor], dim: int, placement: str = "contiguous") -> torch.Tensor:
    """The whole of which `shards` are the ranks' shards, in rank order: the inverse of `place_sequence`.

    `shards` may be those that `all_gather` has put together, cut again: `whole.chunk(world, dim)`. A new tensor;
    gradients pass through. TypeError unless they are tensors in a sequence; ValueError if there are none, for a
    dimension that there is not, or for an odd size along `dim` in zigzag order.
    """
    per = pieces(placement)
    if isinstance(shards, torch.Tensor) or not isinstance(shards, Sequence):
        raise TypeError(
            "unplace_sequence: shards must be a list or tuple of all ranks' tensors, whole.chunk(world, dim) for "
            f"instance, got {type(shards).__name__}"
        )
    if not shards:
        raise ValueError("unplace_sequence: shards must be those of all ranks, got none")
    for rank, shard in enumerate(shards):
        if not isinstance(shard, torch.Tensor):
            raise TypeError(f"unplace_sequence: shard {rank} must be a torch.Tensor, got {type(shard).__name__}")
        dim = _dimension("unplace_sequence", f"shard {rank}", shard, dim)
        if shard.shape[dim] % per:
            raise ValueError(
                f"unplace_sequence: shard {rank} has {shard.shape[dim]} elements in dim={dim}, not divisible by {per} "
                f"({placement})"
            )
    if per == 1:
        return torch.cat(list(shards), dim)
    halves = [shard.chunk(2, dim) if shard.shape[dim] else (shard, shard) for shard in shards]
    return torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)], dim)


def _dimension(function: str, name: str, x: torch.Tensor, dim: Any) -> int:
    """`dim` of the tensor `name`, as an int. ValueError if it has no such, TypeError if that is no dimension."""
    if not x.dim():
        raise ValueError(f"{function}: {name} must have a dimension that the sequence lies in, got a scalar")
    last = x.dim() - 1
    return whole_number(f"{function}: dim", dim, -x.dim(), f"a dimension of {name}, {-x.dim()} to {last}", last)
