"""Sets of bytes of one storage: what an access touches."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

_CACHED = 1 << 14
_LINE = 6  # bits of a byte's place in a line
_LINED = 1 << 21  # bytes from the first to the last of a region up to which its lines are worth listing


class Region:
    """Sorted disjoint byte intervals. Most are `rows` runs of `run` bytes, `pitch` apart; others list their intervals.

    Equal regions are one object as long as the caches below hold them.
    """

    __slots__ = ("hi", "lo", "pitch", "rows", "run", "_ends", "_lines", "_starts")

    def __init__(self, lo, hi, pitch=0, rows=0, run=0, starts=None, ends=None):
        self.lo, self.hi, self.pitch, self.rows, self.run = lo, hi, pitch, rows, run
        self._starts, self._ends = starts, ends
        self._lines: int | None = None

    @property
    def intervals(self) -> tuple[np.ndarray, np.ndarray]:
        """First bytes, and bytes past the end, of all intervals."""
        if self._starts is None:
            self._starts = self.lo + self.pitch * np.arange(self.rows, dtype=np.int64)
            self._ends = self._starts + self.run
        return self._starts, self._ends

    @property
    def nbytes(self) -> int:
        """The number of bytes in it."""
        return self.rows * self.run if self._starts is None else int((self._ends - self._starts).sum())

    @property
    def lines(self) -> int:
        """A bit for each line of 64 bytes, from that of the first byte on: whether it has bytes there."""
        if self._lines is None:
            first = self.lo >> _LINE
            starts, ends = self.intervals
            changes = np.zeros(((self.hi - 1) >> _LINE) - first + 2, np.int32)
            np.add.at(changes, (starts >> _LINE) - first, 1)
            np.add.at(changes, ((ends - 1) >> _LINE) - first + 1, -1)
            self._lines = int.from_bytes(np.packbits(changes.cumsum() > 0, bitorder="little").tobytes(), "little")
        return self._lines

    def _share_lines(self, other: Region) -> bool:
        """Whether both have bytes in one line: False for nearly all that share no byte, at a twentieth of the cost."""
        if self.hi - self.lo > _LINED or other.hi - other.lo > _LINED:
            return True
        ahead = (other.lo >> _LINE) - (self.lo >> _LINE)
        return bool(self.lines >> ahead & other.lines if ahead >= 0 else self.lines & other.lines >> -ahead)

    def _columns(self, other: Region) -> tuple[int, int, int, int] | None:
        """First row and column of both in a common pitch, or None if there is none."""
        pitch = self.pitch or other.pitch
        if not (self.rows and other.rows) or self.pitch not in (0, pitch) or other.pitch not in (0, pitch):
            return None
        (r0, c0), (r1, c1) = divmod(self.lo, pitch), divmod(other.lo, pitch)
        return (r0, c0, r1, c1) if c0 + self.run <= pitch and c1 + other.run <= pitch else None

    def _reaches(self, lo: int, hi: int) -> bool:
        """Whether one of several runs shares a byte with an interval that begins below the last one's end."""
        row = max((lo - self.lo - self.run) // self.pitch + 1, 0)  # the first that ends behind `lo`
        return self.lo + row * self.pitch < hi

    def overlaps(self, other: Region) -> bool:
        """Whether they share a byte."""
        if self.lo >= other.hi or other.lo >= self.hi:
            return False
        if self is other:
            return True
        if self.rows == 1 and other.rows:
            return other.rows == 1 or other._reaches(self.lo, self.hi)
        if other.rows == 1 and self.rows:
            return self._reaches(other.lo, other.hi)
        place = self._columns(other)
        if place:
            r0, c0, r1, c1 = place
            apart = c0 + self.run <= c1 or c1 + other.run <= c0
            return not apart and r0 < r1 + other.rows and r1 < r0 + self.rows
        if not self._share_lines(other):
            return False
        (starts, ends), (others, other_ends) = self.intervals, other.intervals
        i = np.searchsorted(others, ends) - 1
        return bool(((i >= 0) & (other_ends[i] > starts)).any())

    def covers(self, other: Region) -> bool:
        """Whether every byte of `other` is in this one (False also when a single interval of it spans two of these)."""
        if self is other:
            return True
        if self.lo > other.lo or self.hi < other.hi:
            return False
        if self.rows == 1:
            return True
        place = self._columns(other)
        if place:
            r0, c0, r1, c1 = place
            return c0 <= c1 and c1 + other.run <= c0 + self.run and r0 <= r1 and r1 + other.rows <= r0 + self.rows
        (starts, ends), (others, other_ends) = self.intervals, other.intervals
        i = np.searchsorted(starts, others, "right") - 1
        return bool(((i >= 0) & (ends[i] >= other_ends)).all())

    def moved(self, by: int) -> Region:
        """The same bytes so many bytes further on."""
        if self.lo >= self.hi:
            return self
        if self.rows:
            return box(self.lo + by, self.pitch, self.rows, self.run)
        starts, ends = self.intervals
        return _listed((starts + by).tobytes(), (ends + by).tobytes())

    def contains(self, byte: int) -> bool:
        """Whether one byte is in it."""
        if not self.lo <= byte < self.hi:
            return False
        if self.rows:
            return self.rows == 1 or (byte - self.lo) % self.pitch < self.run
        starts, ends = self.intervals
        return bool(byte < ends[np.searchsorted(starts, byte, "right") - 1])


EMPTY = Region(0, 0)


@lru_cache(_CACHED)
def box(lo: int, pitch: int, rows: int, run: int) -> Region:
    """`rows` runs of `run` bytes, `pitch` bytes apart, from byte `lo` on."""
    return Region(lo, lo + pitch * (rows - 1) + run, pitch if rows > 1 else 0, rows, run)


@lru_cache(_CACHED)
def _listed(starts: bytes, ends: bytes) -> Region:
    first, past = np.frombuffer(starts, np.int64), np.frombuffer(ends, np.int64)
    return Region(int(first[0]), int(past[-1]), starts=first, ends=past)


@lru_cache(_CACHED)
def strided(offset: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> Region:
    """The elements, of `size` bytes, of a strided tensor; offset and strides count elements."""
    if 0 in shape:
        return EMPTY
    dims = sorted((stride, n) for stride, n in zip(strides, shape, strict=True) if n > 1 and stride)
    run = 1
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    if not dims:
        return box(offset * size, 0, 1, run * size)
    while len(dims) > 1 and dims[1][0] == dims[0][0] * dims[0][1]:
        (pitch, inner), (_, outer) = dims.pop(0), dims.pop(0)
        dims.insert(0, (pitch, inner * outer))
    if len(dims) == 1:
        pitch, rows = dims[0]
        return box(offset * size, pitch * size, rows, run * size)
    starts = np.array([offset], np.int64)
    for stride, n in dims:
        starts = (starts[:, None] + stride * np.arange(n)).ravel()
    starts = np.unique(starts) * size
    return _listed(starts.tobytes(), (starts + run * size).tobytes())


def scattered(offsets: np.ndarray, size: int) -> Region:
    """The elements, of `size` bytes, at these offsets (in elements, any order)."""
    if not len(offsets):
        return EMPTY
    gaps = np.diff(offsets)
    if len(gaps) and gaps.min() <= 0:
        offsets = np.sort(offsets)
        gaps = np.diff(offsets)
        if gaps.min() == 0:
            offsets = offsets[np.concatenate(([True], gaps != 0))]
            gaps = gaps[gaps != 0]
    breaks = np.flatnonzero(gaps != 1)
    starts = offsets[np.concatenate(([0], breaks + 1))] * size
    ends = (offsets[np.concatenate((breaks, [len(offsets) - 1]))] + 1) * size
    runs, pitches = ends - starts, np.diff(starts)
    if (runs == runs[0]).all() and (len(pitches) < 2 or (pitches == pitches[0]).all()):
        return box(int(starts[0]), int(pitches[0]) if len(pitches) else 0, len(starts), int(runs[0]))
    return _listed(starts.tobytes(), ends.tobytes())
