"""Tiles: the sizes that kernels and planner agree on, and what each configuration was measured to take.

`tilings.json` is made by `python -m tileweave.bench.fit` from a sweep over shapes; TILINGS holds it.
"""

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files

from tileweave.planner.hardware import H200, Hardware

GROUP_ROWS = 8  # tile rows that a wave walks together, so that its operands stay in L2
WARPS = 4  # of a multiplier
STEP_BYTES = 128  # of a row of A and a column of B in a K step: 64 elements of 16 bits, 128 of 8
PART_BYTES = 128  # width of a message: a row of what TMA moves in one piece
BARRIER_BYTES = 1024  # of a CTA's shared memory: mbarriers, and what the compiler keeps for warp partitions
SM_FETCH_GBS = 13.0  # what an SM moves by plain loads and stores behind its tiles; measured on virtual ranks of an H200
MORE_PLACES = 2  # of A's size, beside the operand ring of tcgen05, for what epilogues take in
CORES = ("wgmma", "tcgen05")  # instructions of tensor cores: Hopper's, Blackwell's
CORE_ROWS = 128  # of an accumulator in tensor memory
TENSOR_COLUMNS, SCALE_COLUMNS = 512, 32  # of tensor memory, and of which an operand's scales take a multiple
LANE_COLS = 8  # elements of 16 bits in a 16-byte access
IN_FLIGHT = 16  # such accesses that a thread starts before it uses the first,
LANE_VECTORS = 4  # and how many of them go into sums of their own, which take registers
SLOWING = 0.2  # of what bounds a kernel by what does not,
WAITING = 0.0406  # and of device memory by tensor cores; between two H200s
# By how much a product is faster at first than when power limits the GPU, and how soon that is, as an exponential. The
# sweeps were taken in long runs; between two H200s one of 90 us took 13% less than they say, one of 6 ms as long.
BURST, BURST_US = 0.137, 1310.0
# From the request of a K step's operands until they are there, at least: an H200 that is idle but for it takes as long
# to load a tile of 16 KB and store it to a peer (docs/figures/probe_2xH200.json, 32 KB put by TMA, two SMs at once).
LOAD_US = 0.73
# What an SM gets of operands from L2 where virtual ranks share the GPU, behind a few waves of tiles: CTAs that ask for
# the same lines together are fewer then, and drift apart. A rank with all SMs of its own got 115 (tiles of 64 x 128 in
# docs/figures/sweep_virtual_1xH200.json and matmul_sweep_1xH200.json).
SHARED_L2_GBS, TOGETHER = 79.0, 2
Tile = tuple[int, int, int]


def part_rows(tile: Tile, core: str = "wgmma") -> int:
    """Rows of a multiplier, hence of a message: by wgmma, a tile of more than 64 rows has two multipliers."""
    return tile[0] // 2 if tile[0] > 64 and core == "wgmma" else tile[0]


def ring_bytes(tile: Tile, stages: int, core: str = "wgmma", scales: int = 0) -> int:
    """Shared memory of the operand ring, with so many scales of a row in a K step, and of what a core has beside it."""
    places = MORE_PLACES if core == "tcgen05" else 0
    return stages * (tile[0] + tile[1]) * (STEP_BYTES + scales) + places * tile[0] * STEP_BYTES


def tensor_columns(tile: Tile, scales: int = 0) -> int:
    """Columns of tensor memory: two accumulators, and scales of a K step, as Triton lays them out."""
    of = (math.ceil(rows * scales / CORE_ROWS / SCALE_COLUMNS) * SCALE_COLUMNS for rows in tile[:2])
    return 2 * tile[1] + sum(of)


def part_buffers(
    tile: Tile, stages: int, message_bytes: int, hardware: Hardware = H200, core: str = "wgmma", scales: int = 0
) -> int:
    """Buffers for finished parts of each multiplier: as many as it has parts, or the power of two that fits beside
    the operand ring; 0 if none does."""
    free = hardware.shared_bytes - BARRIER_BYTES - ring_bytes(tile, stages, core, scales)
    fits = min(free // (tile[0] * PART_BYTES), tile[1] * message_bytes // PART_BYTES)
    return 1 << fits.bit_length() - 1 if fits > 0 else 0


def tiles_of(rows: int, n: int, world: int, tile: Tile) -> int:
    """Output tiles that one rank computes: no tile spans the rows of two owners."""
    return math.ceil(rows / tile[0]) * math.ceil(n / tile[1]) * world


def whole_tiles(tiles: int, sms: int, split: int) -> int:
    """How many tiles a CTA each computes alone; the others, the last wave, are shared by `split` CTAs each."""
    return tiles if split == 1 else tiles // sms * sms


def box_rows(m: int, rows: int) -> int:
    """Rows of A that a K step of tiles of `rows` rows loads: no more than the power of two that m rows need, and whole
    swizzled lines."""
    return min(rows, max(8, 1 << (m - 1).bit_length()))


@dataclass(frozen=True)
class Tiling:
    """A tile configuration, and what it takes on a CTA in microseconds: a launch, a K step, a tile's beginning and end,
    the exchange of a tile that several CTAs share. Fitted to long runs on all SMs of an H200; elsewhere: `on`."""

    tile: Tile
    stages: int
    launch_us: float
    step_us: float
    tile_us: float
    share_us: float

    def on(self, hardware: Hardware) -> "Tiling":
        """The same on another GPU: a K step takes as much less as an SM's share of a large product's rate is more."""
        if hardware.matmul_tflops == H200.matmul_tflops and hardware.sms == H200.sms:
            return self
        faster = hardware.matmul_tflops / hardware.sms / (H200.matmul_tflops / H200.sms)
        return replace(self, step_us=self.step_us / faster)

    def among(self, others: bool, waves: float) -> "Tiling":
        """The same where ranks share a GPU, if there are `others`: a K step's operands come no faster from L2."""
        loaded = sum(self.tile[:2]) * STEP_BYTES / (SHARED_L2_GBS * 1e3)
        return replace(self, step_us=max(self.step_us, loaded)) if others and waves > TOGETHER else self

    @property
    def pace_us(self) -> float:
        """A K step in the ring's turn: a stage that has been multiplied is loaded anew while the others are, and has to
        be waited for where they take less than LOAD_US. More stages than that bring nothing."""
        return max(self.step_us, LOAD_US / (self.stages - 1))

    def compute_us(self, tiles: int, k_steps: int, split: int, sms: int) -> float:
        """Predicted time of `tiles` tiles of `k_steps` K steps on `sms` SMs, operands at hand, without exchanges."""
        launch, steps, ends, _ = work_of(tiles, k_steps, split, sms)
        return self.launch_us * launch + self.pace_us * steps + self.tile_us * ends

    def exchange_us(self, tiles: int, split: int, sms: int) -> float:
        """Predicted time of the exchanges of shared tiles, which nothing hides."""
        return self.share_us * work_of(tiles, 1, split, sms)[3]


def ring_says(tiling: Tiling) -> str:
    """Why a ring has its stages, in numbers."""
    behind = (tiling.stages - 1) * tiling.step_us
    return (
        f"of {tiling.stages} stages one is loaded, {LOAD_US:.1f} us at least, while the others are multiplied, "
        f"{behind:.1f} us"
    )


def work_of(tiles: int, k_steps: int, split: int, sms: int) -> tuple[int, int, int, int]:
    """Launches, K steps, tile ends and exchanges of the CTA that has most to do."""
    alone = whole_tiles(tiles, sms, split)
    waves, shared = math.ceil(alone / sms), int(tiles > alone)
    return 1, waves * k_steps + shared * math.ceil(k_steps / split), waves + shared, shared


def operand_bytes(m: int, n: int, k: int, tile: Tile, sms: int, hardware: Hardware = H200) -> float:
    """Bytes of 16-bit operands that a grid on `sms` SMs reads from device memory: a wave of tiles, GROUP_ROWS high,
    reads its rows of A and columns of B once, the next wave again unless all fit in this grid's part of L2."""
    once = 2.0 * k * (m + n)
    if once < 0.6 * hardware.l2_bytes * sms / hardware.sms:
        return once
    rows, columns = math.ceil(m / tile[0]), math.ceil(n / tile[1])
    at_once = min(sms, rows * columns)
    high = min(GROUP_ROWS, rows)
    wide = min(math.ceil(at_once / high), columns)
    return max(once, rows * columns / at_once * 2.0 * k * (high * tile[0] + wide * tile[1]))


def overlapped(compute_us: float, memory_us: float) -> float:
    """Time of a product whose operands come from device memory meanwhile, each of which slows the other a little."""
    slowed = compute_us + SLOWING * memory_us
    return max(slowed * (1 - BURST * math.exp(-slowed / BURST_US)), memory_us + WAITING * compute_us)


def columns_at_once(sources: int, rows: int, n: int, sms: int, whole_rows: bool = False) -> int:
    """Elements of a row that a CTA sums behind its tiles at once, over so many sources: as many as it has loads in
    flight for, and fewer where a row has fewer, or where there would be nothing left for other CTAs to take."""
    sources = min(sources, 8)
    least = 32 * WARPS * LANE_COLS
    columns = min(IN_FLIGHT // (1 << (sources - 1).bit_length()), LANE_VECTORS) * least
    while columns > least and (columns >= 2 * n or (not whole_rows and 2 * rows * math.ceil(n / columns) <= sms)):
        columns //= 2
    return columns


def _load() -> dict[int, tuple[Tiling, ...]]:
    tables = json.loads((files("tileweave.planner") / "tilings.json").read_text())["tilings"]
    return {
        int(size): tuple(Tiling(**{**each, "tile": tuple(each["tile"])}) for each in table)
        for size, table in tables.items()
    }


def tilings_of(operand_bytes: int, core: str, scales: int = 0) -> tuple[Tiling, ...]:
    """The tile configurations of a core. Those of tcgen05, which nobody has measured, are wgmma's with the rows of its
    accumulator, with a stage less, in whose place are the MORE_PLACES, and with scales in blocks another one."""
    table = BY_OPERAND_BYTES[operand_bytes]
    if core == "wgmma":
        return table
    less = 2 if scales else 1
    return tuple(replace(each, stages=each.stages - less) for each in table if each.tile[0] == CORE_ROWS)


def tiling_of(tile: Tile, stages: int, operand_bytes: int = 2) -> Tiling:
    """What the table has of a tile, in a ring of so many stages."""
    return replace(next(each for each in BY_OPERAND_BYTES[operand_bytes] if each.tile == tile), stages=stages)


@lru_cache(maxsize=256)
def rings_of(tiling: Tiling, shared_bytes: int, core: str, scales: int = 0) -> tuple[Tiling, ...]:
    """A configuration in rings of other depths than the table's: of a stage less, and of as many more as fit into a
    CTA's memory beside a buffer for finished parts of each multiplier."""
    stage, behind = (ring_bytes(tiling.tile, stages, core, scales) for stages in (1, 0))
    free = shared_bytes - BARRIER_BYTES - tiling.tile[0] * PART_BYTES - behind
    depths = range(max(tiling.stages - 1, 2), free // (stage - behind) + 1)
    return tuple(replace(tiling, stages=stages) for stages in depths if stages != tiling.stages)


BY_OPERAND_BYTES = _load()  # the table by the size of an element of A and B
TILINGS = BY_OPERAND_BYTES[2]
