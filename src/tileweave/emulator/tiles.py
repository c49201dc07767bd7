"""Tiles in registers, and the arithmetic of scalars as the device does it."""

from __future__ import annotations

import operator

import torch
from greenlet import getcurrent

from tileweave import lang
from tileweave.emulator.places import Place

DTYPES = {
    lang.int1: torch.bool,
    lang.uint8: torch.uint8,
    lang.int32: torch.int32,
    lang.int64: torch.int64,
    lang.float16: torch.float16,
    lang.bfloat16: torch.bfloat16,
    lang.float32: torch.float32,
    lang.float8e4nv: torch.float8_e4m3fn,
}
LANG_DTYPES = {ours: word for word, ours in DTYPES.items()}
_TWO32, _TOP = 1 << 32, 1 << 31


def wrapped(value: int) -> Int32:
    """An integer reduced to 32 bits, signed."""
    return Int32((value + _TOP) % _TWO32 - _TOP)


class Int32(int):
    """A scalar read from 32-bit memory: what is computed from it wraps as on the device."""

    __slots__ = ()
    dtype = lang.int32

    def __add__(self, other):
        return wrapped(int(self) + other) if isinstance(other, int) else NotImplemented

    def __sub__(self, other):
        return wrapped(int(self) - other) if isinstance(other, int) else NotImplemented

    def __rsub__(self, other):
        return wrapped(other - int(self)) if isinstance(other, int) else NotImplemented

    def __mul__(self, other):
        return wrapped(int(self) * other) if isinstance(other, int) else NotImplemented

    def __lshift__(self, other):
        return wrapped(int(self) << other)

    def __neg__(self):
        return wrapped(-int(self))

    __radd__, __rmul__ = __add__, __mul__
    __hash__ = int.__hash__


def raw(x):
    """The tensor of a tile; anything else as it is."""
    return x.t if isinstance(x, Tile) else x


class Tile:
    """A tensor in registers; `op` is the wgmma that may still write it."""

    __slots__ = ("_t", "op")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, t: torch.Tensor, op=None):
        self._t, self.op = t, op

    @property
    def t(self) -> torch.Tensor:
        """The values; a race if a wgmma that writes them has not been waited for."""
        op = self.op
        if op is not None and not op.observed:
            op.world.found(
                "race on registers: read before a wait covers the wgmma that writes them "
                f"(warpgroup_mma_wait is missing, or leaves it in flight)\n    write: {op.place}\n"
                f"    read: {Place(getcurrent(), 'use')}"
            )
        return self._t

    @property
    def shape(self) -> list[int]:
        """Sizes."""
        return list(self._t.shape)

    @property
    def dtype(self):
        """The word of the element type."""
        return LANG_DTYPES[self._t.dtype]

    def to(self, dtype) -> Tile:
        """Converted elements."""
        return Tile(self.t.to(DTYPES[dtype]))

    def reshape(self, *shape) -> Tile:
        """The same elements in another shape."""
        return Tile(self.t.reshape(_flat(shape)))

    def permute(self, *order) -> Tile:
        """Dimensions in another order."""
        return Tile(self.t.permute(_flat(order)))

    def expand_dims(self, axis) -> Tile:
        """A dimension of size one more."""
        return Tile(self.t.unsqueeze(axis))

    def __getitem__(self, index):
        return Tile(self.t[index])

    def __bool__(self):
        return bool(self.t)

    def __int__(self):
        return int(self.t)

    __index__ = __int__

    def __neg__(self):
        return Tile(-self.t)

    def __invert__(self):
        return Tile(~self.t)


def _flat(numbers):
    return tuple(int(n) for n in (numbers[0] if len(numbers) == 1 and not isinstance(numbers[0], int) else numbers))


def _define(name: str, reversible: bool) -> None:
    f = getattr(operator, name)

    def forward(self, other):
        if type(other) is Tile:
            return Tile(f(self.t, other.t))
        return Tile(f(self.t, other)) if isinstance(other, (int, float)) else NotImplemented

    def backward(self, other):
        return Tile(f(other, self.t)) if isinstance(other, (int, float)) else NotImplemented

    setattr(Tile, f"__{name.strip('_')}__", forward)
    if reversible:
        setattr(Tile, f"__r{name.strip('_')}__", backward)


for _name in ("add", "sub", "mul", "truediv", "and_", "or_", "xor", "lshift", "rshift"):
    _define(_name, reversible=True)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _define(_name, reversible=False)


def c_div(a, b):
    """Integer division as the device does it: towards zero."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if (a >= 0) == (b > 0) else -(-a // b)
    if isinstance(a, Tile) or isinstance(b, Tile):
        return Tile(torch.div(raw(a), raw(b), rounding_mode="trunc"))
    return a // b


def c_mod(a, b):
    """The remainder that goes with `c_div`: its sign is that of `a`."""
    if isinstance(a, int) and isinstance(b, int):
        return a % b if a >= 0 and b > 0 else a - c_div(a, b) * b
    if isinstance(a, Tile) or isinstance(b, Tile):
        return Tile(torch.fmod(raw(a), raw(b)))
    return a % b


def inverted(a):
    """`~`, which for a truth value is `not`."""
    return not a if isinstance(a, bool) else ~a


def converted(x, dtype=None, *args, **kwargs):
    """`x.to(dtype)`, also where x is a plain number."""
    if isinstance(x, (int, float)):
        if dtype is lang.int32:
            return wrapped(int(x))
        return int(x) if dtype is lang.int64 else bool(x) if dtype is lang.int1 else float(x)
    return x.to(dtype, *args, **kwargs)


def scalar(value, dtype: torch.dtype):
    """A Python number as the device holds it after a load of `dtype`."""
    return wrapped(value) if dtype is torch.int32 else value
