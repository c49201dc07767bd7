"""What kernels hold of memory: shared-memory views, pointers, TMA descriptors, multicast addresses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from greenlet import getcurrent

from tileweave.emulator.errors import ProtocolError
from tileweave.emulator.mbarrier import MBarrier
from tileweave.emulator.memory import Memory
from tileweave.emulator.places import Place
from tileweave.emulator.regions import EMPTY, Region, scattered, strided
from tileweave.emulator.tiles import DTYPES, LANG_DTYPES, Tile, raw


@dataclass(frozen=True)
class Multicast:
    """Kernel argument: the multicast address of a parallel tensor `[world, *shape]`, for the multimem words."""

    tensor: torch.Tensor


def region_of(t: torch.Tensor) -> Region:
    """The bytes of a tensor within its storage."""
    return strided(t.storage_offset(), tuple(t.shape), t.stride(), t.element_size())


class View:
    """A shared-memory descriptor."""

    __slots__ = ("_derived", "_region", "error", "memory", "tensor")

    def __init__(self, memory: Memory, tensor: torch.Tensor | None, error: str = ""):
        self.memory, self.tensor, self.error = memory, tensor, error
        self._region: Region | None = None
        self._derived: dict[Any, View] = {}

    @property
    def t(self) -> torch.Tensor:
        """The elements. Only their use is an error where an index was out of range, not the address."""
        if self.tensor is None:
            raise ProtocolError(f"{self.error}\n    {Place(getcurrent(), 'use')}")
        return self.tensor

    @property
    def region(self) -> Region:
        """Its bytes."""
        if self._region is None:
            self._region = region_of(self.t)
        return self._region

    @property
    def shape(self) -> list[int]:
        """Sizes."""
        return list(self.t.shape)

    @property
    def dtype(self):
        """The word of the element type."""
        return LANG_DTYPES[self.t.dtype]

    def _derive(self, key, make) -> View:
        view = self._derived.get(key)
        if view is None:
            view = self._derived[key] = type(self)(self.memory, make(self.t))
        return view

    def index(self, index) -> View:
        """The part at one position of the first dimension."""
        i = int(index)
        view = self._derived.get(i)
        if view is not None:
            return view
        n = self.t.shape[0]
        if 0 <= i < n:
            return self._derive(i, lambda t: t[i])
        return type(self)(self.memory, None, f"index {i} of {self.memory.name}: 0 to {n - 1} are legal")

    def permute(self, order) -> View:
        """Dimensions in another order."""
        order = tuple(int(n) for n in order)
        return self._derive(("permute", order), lambda t: t.permute(order))

    def reshape(self, shape) -> View:
        """The same elements in another shape."""
        shape = tuple(int(n) for n in shape)
        return self._derive(("reshape", shape), lambda t: t.view(shape))

    def reinterpret(self, dtype, shape) -> View:
        """The same bytes as another type and shape; of columns of a matrix, another shape alone."""
        shape = tuple(int(n) for n in shape)
        kind = DTYPES[dtype]
        return self._derive(
            (dtype, shape), lambda t: t.view(shape) if t.dtype == kind else t.view(-1).view(kind).view(shape)
        )

    def slice(self, start, length, dim=0) -> View:
        """`length` positions of a dimension."""
        key = int(start), int(length), int(dim)
        return self._derive(("slice", *key), lambda t: t.narrow(key[2], key[0], key[1]))

    def load(self, layout=None) -> Tile:
        """Read it into registers."""
        me = getcurrent()
        me.touch(self.memory, "read")
        self.memory.access("read", self.region, me, Place(me, "load"))
        return Tile(self.t.clone())

    def store(self, value: Tile) -> None:
        """Write it from registers."""
        me = getcurrent()
        me.touch(self.memory, "write")
        if list(value.shape) != self.shape:
            raise ProtocolError(f"store of a tile of {value.shape} into a buffer of {self.shape}: {Place(me, 'store')}")
        self.memory.access("write", self.region, me, Place(me, "store"))
        self.t.copy_(value.t)

    def barrier_for(self, what: str) -> MBarrier:
        """The mbarrier that lives here, for a use by the current partition.

        ProtocolError before mbarrier_init and after mbarrier_invalidate.
        """
        place = Place(getcurrent(), what)
        found = self.memory.barriers.get(int(self.t.storage_offset()))
        if found is None or not found.alive:
            when = "before mbarrier_init" if found is None else "after mbarrier_invalidate"
            raise ProtocolError(f"mbarrier {self.memory.name} used {when}: {place}")
        found.use(place)
        return found


class _Meant(NamedTuple):
    """What a tile of pointers means, relative to its first one. `threads` tells from each other tiles of which threads
    have different elements (None: several threads have one), `all` whether the mask leaves out none."""

    region: Region
    threads: int | None
    all: bool


@lru_cache(1024)
def _meant(offsets: bytes, shape: tuple[int, ...], keep: bytes | None, size: int) -> _Meant:
    offset = used = np.frombuffer(offsets, np.int64)
    if keep is not None:
        used = offset[np.frombuffer(keep, bool)]
    region = scattered(used, size)
    single = region.nbytes == len(used) * size
    return _Meant(region, hash((shape, size, offsets)) if single else None, len(used) == len(offset))


@dataclass(frozen=True)
class PointerType:
    """The type of a pointer."""

    element_ty: object


class Pointer:
    """A pointer, or a tile of pointers, into global memory. Offsets count elements from the start of the storage."""

    __slots__ = ("_dtype", "memory", "offset", "slices")

    def __init__(self, memory: Memory, dtype: torch.dtype, offset, slices: tuple[int, int, int] | None = None):
        self.memory, self._dtype, self.offset = memory, dtype, offset
        self.slices = slices  # of a multicast address: first element, number of slices, their distance in elements

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type in torch."""
        return self._dtype

    @property
    def dtype(self) -> PointerType:
        """The pointer type; `.element_ty` is the word of what it points to."""
        return PointerType(LANG_DTYPES[self._dtype])

    @property
    def shape(self) -> list[int]:
        """Sizes of a tile of pointers."""
        return list(self.offset.shape)

    def __add__(self, by):
        by = by.t.long() if isinstance(by, Tile) else by
        return Pointer(self.memory, self._dtype, self.offset + by, self.slices)

    __radd__ = __add__

    def __sub__(self, by):
        by = by.t.long() if isinstance(by, Tile) else by
        return Pointer(self.memory, self._dtype, self.offset - by, self.slices)

    def __getitem__(self, index):
        return Pointer(self.memory, self._dtype, self.offset[index], self.slices)

    @property
    def flat(self) -> torch.Tensor:
        """The storage as a vector of elements."""
        return self.memory.flat(self._dtype)

    def elements(self, mask, what: str) -> tuple[torch.Tensor, torch.Tensor | None, Region, int | None]:
        """Offsets, mask (None: all), the bytes meant, and the pattern: which thread touches which element.

        Patterns of two tiles are equal where their shapes and offsets are: then a thread has the same elements in both
        (layouts, which could differ, are not modelled). None for a single element, and where several threads have one.
        ProtocolError where some elements lie outside of the storage.
        """
        size = self._dtype.itemsize
        if not isinstance(self.offset, torch.Tensor):
            offset, keep = torch.tensor(int(self.offset)), None
            if mask is not None and not bool(raw(mask)):
                return offset, torch.tensor(False), EMPTY, None
            self._check_bounds(int(self.offset), int(self.offset), what)
            return offset, keep, strided(int(self.offset), (), (), size), None
        offset = self.offset
        keep = None if mask is None else torch.as_tensor(raw(mask)).expand(offset.shape)
        elements = offset.numpy()
        first = elements.item(0) if elements.size else 0
        kept = None if keep is None else keep.numpy().tobytes()
        meant = _meant((elements - first).tobytes(), elements.shape, kept, size)
        region = meant.region.moved(first * size)
        if region is not EMPTY:
            self._check_bounds(region.lo // size, region.hi // size - 1, what)
        pattern = None if meant.threads is None else hash((first, meant.threads))
        return offset, None if meant.all else keep, region, pattern

    def _check_bounds(self, low: int, high: int, what: str) -> None:
        n = self.flat.numel()
        if low < 0 or high >= n:
            raise ProtocolError(
                f"{what} at elements {low} to {high} of {self.memory.name}, which has {n} (0 to {n - 1} are legal): "
                f"{Place(getcurrent(), what)}"
            )


class Descriptor:
    """A TMA descriptor over a global tensor."""

    def __init__(self, memory: Memory, d):
        self.memory, self.block, self.layout = memory, tuple(d.block_shape), d.layout
        self.padding = getattr(d, "padding", "zero")
        self.t = d.base.detach().as_strided(tuple(d.shape), tuple(d.strides), d.base.storage_offset())
        self.torch_dtype, self.dtype = d.base.dtype, LANG_DTYPES[d.base.dtype]
        self.block_shape = list(d.block_shape)
        self.numel = math.prod(self.block)
        self.nbytes = self.numel * d.base.element_size()
        self._boxes: dict[tuple, tuple] = {}
        size = d.base.element_size()
        if d.strides[-1] != 1 or any(s * size % 16 for s in d.strides[:-1]) or d.base.storage_offset() * size % 16:
            raise ProtocolError(
                f"descriptor of {memory.name}: base and strides must be multiples of 16 bytes and the last stride 1; "
                f"got offset {d.base.storage_offset()} and strides {list(d.strides)} of {size}-byte elements"
            )

    @property
    def shape(self) -> list[int]:
        """Sizes of the tensor."""
        return list(self.t.shape)

    def box(self, coord) -> tuple[torch.Tensor, tuple[slice, ...], bool, Region]:
        """At a block's coordinates: its part inside of the tensor, where in the block that lies, whether it is the
        whole block, and its bytes."""
        key = tuple(map(int, coord))
        found = self._boxes.get(key)
        if found is None:
            found = self._boxes[key] = self._box(key)
        return found

    def _box(self, coord):
        if len(coord) != len(self.block):
            raise ProtocolError(
                f"{len(coord)} coordinates for the descriptor of {self.memory.name}, which has {len(self.block)}: "
                f"{Place(getcurrent(), 'TMA')}"
            )
        inside, outer, whole = [], [], True
        for c, b, n in zip(coord, self.block, self.t.shape, strict=True):
            low, high = min(max(c, 0), n), min(max(c + b, 0), n)
            whole = whole and high - low == b
            outer.append(slice(low, high))
            inside.append(slice(low - c, high - c) if high > low else slice(0, 0))
        part = self.t[tuple(outer)]
        return part, tuple(inside), whole, region_of(part)
