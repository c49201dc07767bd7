"""attention: the contract, and the tiles."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tileweave.fabric import Fabric
from tileweave.ops.contract import DTYPES, coreless
from tileweave.planner.attention import DIMS, ROWS, padded_dim

NAME = "attention"
LAYOUTS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3)}  # where batch, heads, rows and dim stand
SHARED_BYTES = 227 * 1024 - 1024  # of a CTA, less what barriers take


@dataclass(frozen=True)
class Tiling:
    """Sizes of the kernel: `consumers` of ROWS query rows each; `bn` rows of K and V in a block, of which `stages` are
    in shared memory; `q_bufs` query tiles; whether consumers `take_turns` to issue their products, by wgmma; the
    `core`, as that of a Plan."""

    consumers: int = 2
    bn: int = 128
    stages: int = 5
    q_bufs: int = 2
    take_turns: bool = False
    core: str = "wgmma"


class Call(NamedTuple):
    """What of a call decides how it is computed. offset: row i sees the first i + offset + 1 columns; None: all."""

    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    rows: int
    cols: int
    dim: int
    offset: int | None
    scale: float
    return_lse: bool


def check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, offset: int, scale: float | None, layout: str,
    return_lse: bool,
) -> Call:  # fmt: skip
    """Hold the arguments to the contract of `attention`; TypeError or ValueError if they break it."""
    if layout not in LAYOUTS:
        raise ValueError(f"{NAME}: layout must be 'bhsd' or 'bshd', got {layout!r}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{NAME}: {name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{NAME}: {name} must have the four dimensions {layout!r}, got shape {list(x.shape)}")
        if x.dtype not in DTYPES or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{NAME}: q, k and v must all be bfloat16 or all float16, on one device; "
                f"q is {q.dtype} on {q.device}, {name} {x.dtype} on {x.device}"
            )
    (batch, heads, rows, dim), (k_batch, kv_heads, cols, k_dim) = (
        [x.shape[i] for i in LAYOUTS[layout]] for x in (q, k)
    )
    if k.shape != v.shape:
        raise ValueError(f"{NAME}: k and v must have one shape, got {list(k.shape)} and {list(v.shape)}")
    if (k_batch, k_dim) != (batch, dim):
        raise ValueError(
            f"{NAME}: q and k must have the same batch and head dimension, got shapes {list(q.shape)} and "
            f"{list(k.shape)} in layout {layout!r}"
        )
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"{NAME}: the heads of q must be a multiple of those of k and v, got {heads} and {kv_heads}")
    if dim == 0:
        raise ValueError(f"{NAME}: heads must have a dimension of at least 1, got shape {list(q.shape)}")
    if scale is None:
        scale = 1 / math.sqrt(dim)
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"{NAME}: scale must be positive and finite, got {scale}")
    return Call(q.dtype, batch, heads, kv_heads, rows, cols, dim, offset if causal else None, scale, return_lse)


def unsupported(fabric: Fabric, call: Call) -> str | None:
    """Why the kernel cannot compute a call; None if it can."""
    if refusal := fabric.refusal() or coreless(tuple(ROWS), fabric.cores):
        return refusal
    most = DIMS[fabric.cores[0]][-1]
    if call.dim % 8 or call.dim > most:
        return f"heads have dimension {call.dim}: the kernel takes multiples of 8 up to {most}"
    return None


def tiling_for(call: Call, core: str = "wgmma") -> Tiling:
    """The planner's choice for a core, as far as there is one."""
    consumers, dim = 1 if call.rows <= ROWS[core] else 2, padded_dim(call.dim)
    if dim == 64:
        return Tiling(consumers, bn=128, stages=8, core=core)
    if dim == 128:
        return Tiling(consumers, bn=128, stages=5 if core == "wgmma" or consumers == 1 else 3, core=core)
    return Tiling(consumers, bn=64, stages=5, q_bufs=1, core=core)


def check_tiling(call: Call, tiling: Tiling, cores: tuple[str, ...] = tuple(ROWS)) -> None:
    """ValueError unless a tiling can be, where there are these cores."""
    if tiling.core not in ROWS or tiling.core not in cores:
        raise ValueError(f"{NAME}: tiling.core must be {' or '.join(map(repr, cores))} here, got {tiling.core!r}")
    if tiling.consumers not in (1, 2):
        raise ValueError(f"{NAME}: tiling.consumers must be 1 or 2, got {tiling.consumers}")
    if tiling.bn not in (16, 32, 64, 128):
        raise ValueError(f"{NAME}: tiling.bn must be 16, 32, 64 or 128, got {tiling.bn}")
    if tiling.stages < 3 or tiling.q_bufs < 1:
        raise ValueError(
            f"{NAME}: tiling needs at least 3 stages and 1 query buffer, got {tiling.stages} and {tiling.q_bufs}"
        )
    if tiling.core == "tcgen05" and tiling.take_turns:
        raise ValueError(f"{NAME}: tiling.take_turns must be False by 'tcgen05', got {tiling.take_turns}")
    dim = padded_dim(call.dim)
    if dim not in DIMS[tiling.core]:
        raise ValueError(
            f"{NAME}: heads have dimension {call.dim}, by tiling.core={tiling.core!r} it may be up to "
            f"{DIMS[tiling.core][-1]}"
        )
    rows = tiling.q_bufs * tiling.consumers * ROWS[tiling.core] + tiling.stages * tiling.bn
    used = rows * dim * call.dtype.itemsize
    if used > SHARED_BYTES:
        raise ValueError(f"{NAME}: {tiling} takes {used} bytes of shared memory, a CTA has {SHARED_BYTES} for it")
