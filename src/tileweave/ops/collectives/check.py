"""The collectives: their contracts, held before anything is launched."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tileweave.ops.contract import check_dense

REDUCTIONS = ("sum", "avg")
# What a group of torch.distributed can sum, so that a call is right in every world or in none.
SUMMABLE = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.complex32, torch.complex64, torch.complex128,
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A call that keeps the contract. What it does is told by three fields, whatever its name:

    `split`      the dimension of x of which each destination gets a part; None: every destination gets all of x
    `concat`     the dimension along which what arrives is put together
    `reduction`  "sum" or "avg": instead, what arrives is summed
    """

    name: str
    shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    dtype: torch.dtype
    split: int | None = None
    concat: int | None = None
    reduction: str | None = None
    deterministic: bool = False


def check_kinds(name: str, x: Any, **options: Any) -> None:
    """TypeError or ValueError for values that an operator's schema cannot hold; the rest is for `check`."""
    check_dense(name, (("x", x),))
    for word, value in options.items():
        if word == "op":
            if value not in REDUCTIONS:
                raise ValueError(f"{name}: op must be 'sum' or 'avg', got {value!r}")
        elif word == "deterministic":
            if not isinstance(value, bool | None):
                raise TypeError(f"{name}: deterministic must be True, False or None, got {value!r}")
        elif isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            raise TypeError(f"{name}: {word} must be an int, got {value!r}")


def check(name: str, world: int, x: torch.Tensor, *options: Any) -> Call:
    """Hold an operator's arguments to its contract, in a group of `world` ranks; ValueError if they break it."""
    return CONTRACTS[name](world, tuple(x.shape), x.dtype, *options)


def _all_gather(world, shape, dtype, dim) -> Call:
    dim = _dimension("all_gather", "dim", dim, shape)
    return Call("all_gather", shape, _resized(shape, dim, shape[dim] * world), dtype, concat=dim)


def _reduce_scatter(world, shape, dtype, dim, op, deterministic) -> Call:
    dim = _dimension("reduce_scatter", "dim", dim, shape)
    _check_reduction("reduce_scatter", dtype, op)
    out_shape = _resized(shape, dim, _share("reduce_scatter", "dim", dim, shape, world))
    return Call("reduce_scatter", shape, out_shape, dtype, dim, None, op, deterministic)


def _all_reduce(world, shape, dtype, op, deterministic) -> Call:
    _check_reduction("all_reduce", dtype, op)
    return Call("all_reduce", shape, shape, dtype, None, None, op, deterministic)


def _all_to_all(world, shape, dtype, split_dim, concat_dim) -> Call:
    split = _dimension("all_to_all", "split_dim", split_dim, shape)
    concat = _dimension("all_to_all", "concat_dim", concat_dim, shape)
    part = _resized(shape, split, _share("all_to_all", "split_dim", split, shape, world))
    return Call("all_to_all", shape, _resized(part, concat, part[concat] * world), dtype, split, concat)


CONTRACTS: dict[str, Callable[..., Call]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
}


def _dimension(name, word, dim, shape) -> int:
    """A dimension, counted from the front."""
    if not shape:
        raise ValueError(f"{name}: x must have at least one dimension, got a tensor of shape []")
    if not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"{name}: {word} must be from {-len(shape)} to {len(shape) - 1} for x of shape {list(shape)}, got {dim}"
        )
    return dim % len(shape)


def _share(name, word, dim, shape, world) -> int:
    """A rank's share of a dimension."""
    size = shape[dim]
    if size % world:
        near = f"{size - size % world} or {size - size % world + world}"
        raise ValueError(
            f"{name}: x of shape {list(shape)} has {size} in {word}={dim}, not divisible by the world size {world}; "
            f"{near} would be"
        )
    return size // world


def _resized(shape, dim, size) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _check_reduction(name, dtype, op) -> None:
    if op not in REDUCTIONS:
        raise ValueError(f"{name}: op must be 'sum' or 'avg', got {op!r}")
    if dtype not in SUMMABLE:
        legal = ", ".join(str(each).removeprefix("torch.") for each in SUMMABLE)
        raise ValueError(f"{name}: x must be of a dtype that can be summed, {legal}; got {dtype}: x.to(one of them)")
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"{name}: op='avg' needs a floating-point x, got {dtype}; op='sum' would do")
