"""Which copies are measured, the most telling first, until the time is up."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from tileweave.bench.probe.copies import NAIVE, SMALLEST_TILE, Arena, Copy
from tileweave.bench.probe.timing import out_of_time, timed

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
TILE, ACCESS = 16 * KB, 16  # of the ops' messages; of a thread's widest access
BULK, NAIVE_BULK = 64 * MB, 4 * MB  # of a copy whose size is not what is looked at
SIZES = [128 * 4**i for i in range(12)] + [GB]  # 128 bytes to 512 MB, 1 GB
SMS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 132)
FEW = 16
ROUND_US, ROUNDS = 2000.0, 5
WAYS = [("put", 1), ("get", 1), ("put", 2), ("get", 2)]
Row = dict[str, Any]


def tile_of(total: int) -> int:
    """The TMA tile of a copy of so many bytes."""
    return min(total, TILE)


def grids(most: int) -> list[int]:
    """Numbers of SMs up to what a rank has."""
    return sorted({sms for sms in SMS if sms < most} | {most})


def between(most: int, largest: int) -> Iterator[Copy]:
    """Copies between ranks of `most` SMs each and of up to `largest` bytes."""
    sizes = [size for size in SIZES if size <= largest]
    bulk, few = min(BULK, largest), min(FEW, most)
    for direction, ways in WAYS[:2]:
        yield from (Copy("tma", direction, bulk, TILE, sms, ways) for sms in grids(most))
    for direction, ways in WAYS[:2]:
        yield from (Copy("copy_engine", direction, size, size, 0, ways) for size in sizes)
    for direction, ways in WAYS[:2]:
        yield from (Copy("register", direction, bulk, ACCESS, sms, ways) for sms in grids(most))
    for direction, ways in WAYS[:2]:
        yield from (Copy("tma", direction, size, tile_of(size), most, ways) for size in sizes if size >= SMALLEST_TILE)
        yield from (Copy("register", direction, size, ACCESS, most, ways) for size in sizes)
    for direction, ways in WAYS[2:]:
        for sms in (few, most):
            yield Copy("tma", direction, bulk, TILE, sms, ways)
            yield Copy("register", direction, bulk, ACCESS, sms, ways)
        yield from (Copy("copy_engine", direction, size, size, 0, ways) for size in sizes if size >= MB)
    yield from shapes(bulk, few)
    yield from naive(min(NAIVE_BULK, largest), few)


def shapes(bulk: int, sms: int) -> Iterator[Copy]:
    """How a tile's size and shape, and which addresses neighbouring threads have, change the bandwidth of a put."""
    yield from (Copy("tma", "put", bulk, tile, sms) for tile in (KB, 2 * KB, 4 * KB, 8 * KB, 32 * KB))
    for columns in (64, 128, 256):  # 16 KB out of a matrix whose rows are 8 KB
        yield Copy("tma", "put", bulk, TILE, sms, columns=columns, width=4096)
    yield from (Copy("register", "put", bulk, access, sms) for access in (4, 8))
    yield from (Copy("register", "put", bulk, access, sms, spread=32) for access in (4, ACCESS))


def naive(total: int, sms: int) -> Iterator[Copy]:
    """A put the naive way, with each thing alone that makes it so, and without any."""
    plain = Copy("naive", "put", total, 4, sms)
    yield from (replace(plain, naive=each) for each in (NAIVE, *((name,) for name in NAIVE), ()))


def within(most: int, largest: int) -> Iterator[Copy]:
    """Copies within a GPU's own memory."""
    yield from (Copy("tma", "put", largest, TILE, sms) for sms in (most, *grids(most)[:-1:3]))
    yield from (Copy("register", "put", largest, ACCESS, sms) for sms in (min(FEW, most), most))
    yield Copy("copy_engine", "put", largest, largest, 0)


def measure(
    arena: Arena, copies: Iterator[Copy], over: str, until: float, tell: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """Verify and time copies in turn until `time.monotonic()` is `until` on some rank. Collective.

    A row: the copy's fields, `over` ("link", "memory"), `us` (median, lowest, highest of a copy, of the slowest rank)
    and `gb_per_s` of one direction. `tell` gets each.
    """
    rows = []
    arena.fill()
    for copy in copies:
        if out_of_time(arena.fabric, time.monotonic() > until):
            break
        arena.verify(copy)
        world = arena.fabric.world_size

        def enqueue(repeats: int, copy: Copy = copy) -> None:
            arena.enqueue(copy, repeats)

        us = timed(arena.fabric, enqueue, copy.repeats(ROUND_US), ROUNDS, world if copy.ways == 2 else 1)
        rows.append(row_of(copy, over, us))
        tell(rows[-1])
    return rows


def row_of(copy: Copy, over: str, us: list[float]) -> Row:
    """A row of `measure`."""
    return {**asdict(copy), "over": over, "us": us, "gb_per_s": copy.total / (us[0] * 1e3)}


def plan_of(most: int, largest: int) -> dict[str, int]:
    """How many points of each mechanism and direction `between` has."""
    found: dict[str, int] = {}
    for copy in between(most, largest):
        name = f"{copy.mechanism} {copy.direction}" + (", both ways at once" if copy.ways == 2 else "")
        found[name] = found.get(name, 0) + 1
    return found
