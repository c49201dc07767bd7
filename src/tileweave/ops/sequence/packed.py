"""Several sequences packed one behind the other: what `cu_seqlens` says of rows, of blocks, and to all ranks.

cu_seqlens [n + 1], int32: sequence i has the tokens cu_seqlens[i] to cu_seqlens[i + 1] - 1 of the whole, none if both
are equal. A rank holds its shard of the whole, wherever the sequences begin and end.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from tileweave.fabric import Fabric
from tileweave.ops.contract import Agreement, asks


class Block(NamedTuple):
    """A part of the scores that is computed at once: these queries see these keys; `diagonal`: row i of them those up
    to the i-th."""

    rows: slice
    cols: slice
    diagonal: bool


def likeness(cu_seqlens: Any) -> tuple | None:
    """All that a prepared launch depends on in cu_seqlens, of which it is not how many there are."""
    if not isinstance(cu_seqlens, torch.Tensor):
        return cu_seqlens
    return cu_seqlens.dtype, cu_seqlens.device, cu_seqlens.dim(), cu_seqlens.numel() > 1


def read_ends(name: str, cu_seqlens: torch.Tensor | None, total: int) -> list[int] | None:
    """The values, for which the host waits; ValueError unless they divide `total` tokens into sequences."""
    if cu_seqlens is None:
        return None
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != total or any(a > b for a, b in pairwise(ends)):
        raise ValueError(
            f"{name}: cu_seqlens must begin with 0, never decrease and end with the {total} tokens of all ranks, got "
            f"{ends}"
        )
    return ends


def hold_ends(fabric: Fabric, name: str, cu_seqlens: torch.Tensor | None, rows: int) -> None:
    """`read_ends`, of shards of so many rows, and RuntimeError if the ranks disagree: wherever the host need not
    wait for a GPU, and in debug mode."""
    if cu_seqlens is not None and (fabric.debug or not cu_seqlens.is_cuda):
        ends = read_ends(name, cu_seqlens, rows * fabric.world_size)
        if fabric.compares:
            fabric.agree(Agreement(name, asks(cu_seqlens=str(ends)), None))


def in_tiles(firsts: Sequence[int], rows: int, padded: int, device: torch.device) -> torch.Tensor:
    """Positions [len(firsts) * padded] of runs of `rows` tokens each as kernels count them: to whole tiles, whose rows
    behind the end stand for the last token once more."""
    within = torch.arange(padded, device=device, dtype=torch.int32).clamp(max=rows - 1)
    return torch.cat([within + first for first in firsts])


def row_bounds(cu_seqlens: torch.Tensor, positions: torch.Tensor, causal: bool) -> torch.Tensor:
    """[n, 2] int32, on the stream: where what tokens at `positions` [n] of the whole see begins, and where it ends."""
    after = torch.searchsorted(cu_seqlens, positions, right=True, out_int32=True)
    end = positions + 1 if causal else cu_seqlens[after.clamp(max=len(cu_seqlens) - 1)]
    return torch.stack((cu_seqlens[after - 1], end), -1).int()


def blocks_between(ends: Sequence[int], first: int, keys_first: int, size: int, causal: bool) -> Iterator[Block]:
    """What `size` queries from `first` on see of `size` keys from `keys_first` on: a block for each sequence that has
    some of both. The two runs are the same one or have nothing in common."""
    if causal and keys_first > first:
        return
    for begin, end in pairwise(ends):
        rows, cols = (slice(max(begin - at, 0), min(end - at, size)) for at in (first, keys_first))
        if rows.start < rows.stop and cols.start < cols.stop:
            yield Block(rows, cols, causal and first == keys_first)
