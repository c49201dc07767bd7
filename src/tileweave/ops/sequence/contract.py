"""What the attention ops ask of q, k and v, held before anything is launched."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from tileweave.ops.contract import DTYPES, Like, Site, check_dense, check_plan, out_of_reach
from tileweave.ops.route import Route, by_plan, fallback
from tileweave.planner import H200, Hardware, Plan
from tileweave.planner import attention as planner
from tileweave.planner.attention import DIMS, ROWS, Problem

LAYOUTS = ("bhsd", "bshd")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
BLOCKS = 56  # of heads at most. What waits for the first of them grows with its size; telling of each takes time too


@dataclass(frozen=True)
class Shape:
    """Sizes of one rank's q, k and v: rows and kv_rows are those of its shard of the sequence."""

    batch: int
    heads: int
    kv_heads: int
    rows: int
    kv_rows: int
    dim: int


@dataclass(frozen=True)
class Call:
    """A call that keeps the contract of `op`, in a group of `world` ranks; `shape` is that of this rank's shards."""

    op: str
    shape: Shape
    dtype: torch.dtype
    causal: bool
    scale: float
    layout: str
    world: int
    packed: bool

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        """Of a rank's log-sum-exps: here those of its own rows."""
        return self.shape.batch, self.shape.heads, self.shape.rows

    @property
    def empty(self) -> bool:
        """Whether no query has anything to attend to."""
        return 0 in (self.shape.batch, self.shape.rows, self.shape.kv_rows)


def heads_first(x: torch.Tensor, layout: str) -> torch.Tensor:
    """`x` as [B, H, S, D], a view; and the same once more gives it back in `layout`."""
    return x if layout == "bhsd" else x.transpose(1, 2)


def dims_of(layout: str) -> tuple[int, int]:
    """The dimensions of the heads and of the sequence."""
    return (1, 2) if layout == "bhsd" else (2, 1)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which log-sum-exps, outputs and gradients are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def likes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None = None
) -> tuple[Like, Like, Like, Like | None]:
    """What the contract says of the operands."""
    q_like, k_like, v_like = (Like(x.shape, x.dtype, x.device) for x in (q, k, v))
    return q_like, k_like, v_like, Like.of(cu_seqlens)


def check_kinds(name: str, q: Any, k: Any, v: Any, cu_seqlens: Any, causal: Any, scale: Any, plan: Any) -> None:
    """TypeError or ValueError for values that an operator's schema cannot hold; the rest is for `check_shape`."""
    check_dense(name, (("q", q), ("k", k), ("v", v)))
    if cu_seqlens is not None and not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(f"{name}: cu_seqlens must be a torch.Tensor or None, got {type(cu_seqlens).__name__}")
    if cu_seqlens is not None:
        check_dense(name, (("cu_seqlens", cu_seqlens),))
    if not isinstance(causal, bool):
        raise TypeError(f"{name}: causal must be True or False, got {causal!r}")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(f"{name}: scale must be a float or None, got {scale!r}")
    check_plan(name, plan)


def check_words(name: str, **words: Any) -> None:
    """TypeError unless all of these arguments are text."""
    for word, value in words.items():
        if not isinstance(value, str):
            raise TypeError(f"{name}: {word} must be a string, got {value!r}")


def check_packed(name: str, cu_seqlens: Like, q: Like, shape: Shape) -> None:
    """ValueError unless q, k and v of this shape may be packed sequences whose ends `cu_seqlens` says."""
    if cu_seqlens.dtype != torch.int32 or len(cu_seqlens.shape) != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"{name}: cu_seqlens must be int32 with one element more than there are sequences, two at least, got "
            f"{cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(
            f"{name}: q is on {q.device} and cu_seqlens on {cu_seqlens.device}: they must be on one device"
        )
    if shape.batch != 1:
        raise ValueError(f"{name}: with cu_seqlens all sequences lie in one batch, got {shape.batch}")
    if shape.rows != shape.kv_rows:
        raise ValueError(
            f"{name}: with cu_seqlens q and k must have equally many tokens, got {shape.rows} and {shape.kv_rows}"
        )


def check_shape(name: str, q: Like, k: Like, v: Like, causal: bool, scale: float | None, layout: str) -> Shape:
    """The sizes of a call that keeps the contract; ValueError if it breaks it."""
    if layout not in LAYOUTS:
        raise ValueError(f"{name}: layout must be 'bhsd' or 'bshd', got {layout!r}")
    for word, x in (("q", q), ("k", k), ("v", v)):
        if len(x.shape) != 4:
            raise ValueError(f"{name}: {word} must have the dimensions {layout}, got shape {list(x.shape)}")
        if x.dtype != q.dtype or x.dtype not in FLOATS:
            raise ValueError(
                f"{name}: q, k and v must all be bfloat16, float16, float32 or float64, got {q.dtype}, {k.dtype} and "
                f"{v.dtype}"
            )
        if x.device != q.device:
            raise ValueError(f"{name}: q is on {q.device} and {word} on {x.device}: they must be on one device")
    if k.shape != v.shape:
        raise ValueError(f"{name}: k and v must have one shape, got {list(k.shape)} and {list(v.shape)}")
    head, row = dims_of(layout)
    shape = Shape(q.shape[0], q.shape[head], k.shape[head], q.shape[row], k.shape[row], q.shape[3])
    if k.shape[0] != shape.batch or k.shape[3] != shape.dim:
        raise ValueError(
            f"{name}: q and k must have one batch and one head dimension, got shapes {list(q.shape)} and "
            f"{list(k.shape)} ({layout})"
        )
    if min(shape.heads, shape.kv_heads, shape.dim) < 1 or shape.heads % shape.kv_heads:
        raise ValueError(
            f"{name}: the heads of q must be a multiple of those of k and v, at least one, and have elements; got "
            f"{shape.heads}, {shape.kv_heads} and a head dimension of {shape.dim}"
        )
    if causal and shape.rows != shape.kv_rows:
        raise ValueError(
            f"{name}: with causal=True q and k must have equally many tokens, got {shape.rows} and {shape.kv_rows}"
        )
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"{name}: scale must be finite, or None for 1 / sqrt({shape.dim}), got {scale}")
    return shape


def unfusable(site: Site, call: Call, device: torch.device, most: int = max(DIMS["wgmma"])) -> str | None:
    """Why no fused kernel computes a call; None if one does. most: the head dimension that the op has at most."""
    dim, scale = call.shape.dim, call.scale
    if refusal := out_of_reach(site, device, "q", tuple(ROWS)):
        return refusal
    widest = min(most, DIMS[site.cores[0]][-1])
    if call.dtype not in DTYPES:
        return f"the kernel takes bfloat16 and float16, not {call.dtype}"
    if dim % 8 or dim > widest:
        return f"heads have dimension {dim}, the kernel takes multiples of 8 up to {widest}"
    if scale <= 0:
        return f"scale is {scale}, the kernel takes positive ones"
    if site.world > 1 and site.sms < 2:
        return "one SM cannot communicate while it computes"
    return None


def decide(
    site: Site, call: Call, problem: Problem | None, refusal: str | None, plan: Plan | None, way: str,
    hardware: Hardware = H200,
) -> Route:  # fmt: skip
    """The path of a call: by the plan, or the planner's for `problem`, unless there is a `refusal`; then the `way`."""
    if call.empty:
        return Route(call.op, site.backend, False, "no query has anything to attend to: nothing to launch")
    if refusal or problem is None:
        return fallback(call.op, refusal or "no tile has these heads", way, plan)
    return by_plan(call.op, site, problem, planner, plan, None, hardware)
