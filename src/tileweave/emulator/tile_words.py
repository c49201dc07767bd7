"""Words for tiles in registers, and the structure of a program."""

from __future__ import annotations

import builtins

import torch
from greenlet import getcurrent

from tileweave.emulator.tiles import DTYPES, Tile, c_div, raw, scalar


def program_id(axis):
    """This CTA's position in the grid."""
    return getcurrent().cta.index[axis]


def num_programs(axis):
    """The grid's size."""
    return getcurrent().cta.grid[axis]


def grid_dependency_wait():
    """Learn, all threads, what the stream did before this launch (which is over here: only who knows is modelled)."""
    me = getcurrent()
    me.learn(me.cta.stream)


def num_warps():
    """Warps of the calling partition."""
    return getcurrent().warps


def static_range(*bounds):
    """`range`, unrolled on the device."""
    return range(*bounds)


def static_assert(cond, msg=""):
    """Check at compile time."""
    if not cond:
        raise AssertionError(f"static_assert: {msg}")


def cdiv(x, div):
    """Quotient rounded up, of non-negative integers."""
    return c_div(x + div - 1, div)


def arange(start, end, layout=None):
    """int32 numbers from start to end."""
    return Tile(torch.arange(start, end, dtype=torch.int32))


def zeros(shape, dtype, layout=None):
    """A tile of zeros."""
    return Tile(torch.zeros([int(n) for n in shape], dtype=DTYPES[dtype]))


def full(shape, value, dtype, layout=None):
    """A tile of one value."""
    return Tile(torch.full([int(n) for n in shape], raw(value), dtype=DTYPES[dtype]))


def where(condition, x, y):
    """Elements of x where the condition holds, else of y."""
    if isinstance(condition, Tile) or isinstance(x, Tile) or isinstance(y, Tile):
        like = next((raw(v) for v in (x, y) if isinstance(v, Tile)), None)
        condition = torch.as_tensor(raw(condition))
        x, y = (raw(v) if like is None else torch.as_tensor(raw(v), dtype=like.dtype) for v in (x, y))
        return Tile(torch.where(condition, x, y))
    return x if condition else y


def _pairwise(tiles, scalars):
    def both(x, y):
        if not (isinstance(x, Tile) or isinstance(y, Tile)):
            return scalars(x, y)
        dtype = (x if isinstance(x, Tile) else y).t.dtype
        return Tile(tiles(*(v.t if isinstance(v, Tile) else torch.as_tensor(v, dtype=dtype) for v in (x, y))))

    return both


maximum = _pairwise(torch.maximum, builtins.max)
minimum = _pairwise(torch.minimum, builtins.min)


def _reduction(tiles):
    def reduced(input, axis=None, keep_dims=False):
        t = input.t
        if axis is None:
            t, axis = t.flatten(), 0
        found = tiles(t, axis, keep_dims)
        return Tile(found) if found.dim() else scalar(found.item(), found.dtype)

    return reduced


max = _reduction(lambda t, axis, keep: t.amax(axis, keep))
min = _reduction(lambda t, axis, keep: t.amin(axis, keep))
sum = _reduction(lambda t, axis, keep: t.sum(axis, keep, dtype=torch.int32 if t.dtype is torch.bool else t.dtype))


def cumsum(input, axis=0):
    """Sums along an axis of all elements up to each."""
    return Tile(input.t.cumsum(axis, dtype=input.t.dtype))


def _unary(tiles):
    def of(x):
        return Tile(tiles(x.t)) if isinstance(x, Tile) else tiles(torch.tensor(x, dtype=torch.float32)).item()

    return of


exp2 = _unary(torch.exp2)
log2 = _unary(torch.log2)


def to_tensor(x):
    """A number as the device holds it."""
    return x


def convert_layout(value, layout, assert_trivial=False):
    """Layouts do not matter here."""
    return value


def pack_pairs(x, dtype):
    """A float32 matrix rounded to a 16-bit type, two neighbouring columns in one int32."""
    return Tile(x.t.to(DTYPES[dtype]).view(torch.int32))


def unpack_pairs(x, dtype, layout=None):
    """What `pack_pairs` has packed, as a matrix of `dtype`."""
    return Tile(x.t.view(DTYPES[dtype]))


def columns(x, width):
    """A matrix cut into matrices of `width` columns."""
    return tuple(Tile(part) for part in x.t.split(int(width), 1))
