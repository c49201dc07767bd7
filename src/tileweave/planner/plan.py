"""Problem -> Plan: which mechanism, schedule and tile a call gets, what it should cost, and why."""

import json
import math
from dataclasses import dataclass, field, fields

from tileweave.planner.hardware import H200, Hardware

GROUP_ROWS = 8  # tile rows that a wave walks together, so that its operands stay in L2


@dataclass(frozen=True)
class Problem:
    """One call of matmul + reduce-scatter as every rank sees it.

    m, n: the full product; k: this rank's share of the inner dimension; message_bytes: size of an element of the
    result, which is also what travels; sms: SMs the kernel may use on this rank; linked: whether peers are behind a
    link (False for virtual and emulated ranks).
    """

    m: int
    n: int
    k: int
    world: int
    message_bytes: int
    sms: int
    deterministic: bool = False
    linked: bool = True


@dataclass(frozen=True)
class Plan:
    """How a fused call runs.

    mechanism: "tma"; schedule: "intra_sm"; tile: (rows, columns, K step) of a CTA; stages: depth of the operand ring;
    split: CTAs that share a tile of the last wave; comm_sms: SMs that only communicate; predicted_us: microseconds by the cost model, None for a plan made by hand.
    """

    mechanism: str = "tma"
    schedule: str = "intra_sm"
    tile: tuple[int, int, int] = (128, 256, 64)
    stages: int = 3
    split: int = 1
    comm_sms: int = 0
    predicted_us: float | None = None
    reason: str = "given by the caller"
    _json: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tile", tuple(self.tile))
        # Written here once, as torch.compile cannot trace the encoder, but it can read, and guard, a string.
        object.__setattr__(self, "_json", json.dumps(self.to_dict()))

    def to_dict(self) -> dict:
        """The plan as plain values, for JSON."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        return {**values, "tile": list(self.tile)}

    def to_json(self) -> str:
        """The plan as text, from which `from_json` makes it again."""
        return self._json

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that `to_json` wrote. ValueError if `text` is no JSON object of a plan's fields."""
        try:
            values = json.loads(text)
            return cls(**{**values, "tile": tuple(values["tile"])})
        except (ValueError, TypeError, KeyError) as error:
            names = ", ".join(each.name for each in fields(cls) if each.init)
            raise ValueError(f"plan: expected a JSON object with {names}, got {text!r}: {error}") from error


@dataclass(frozen=True)
class Tiling:
    """A tile configuration and how near to the hardware's matmul rate its inner loop comes.

    The efficiencies are first figures: 128 x 256 and 128 x 128 measured on an H200 with a draft of this kernel, the
    others estimated between them.
    """

    tile: tuple[int, int, int]
    stages: int
    efficiency: float


MAX_SPLIT = 16
TILINGS = (
    Tiling((128, 256, 64), 4, 1.0),
    Tiling((256, 128, 64), 4, 0.99),
    Tiling((128, 128, 64), 6, 0.98),
    Tiling((128, 128, 64), 4, 0.98),
    Tiling((64, 256, 64), 5, 0.95),
    Tiling((64, 256, 64), 4, 0.95),
    Tiling((128, 64, 64), 8, 0.8),
    Tiling((64, 128, 64), 8, 0.9),
    Tiling((64, 64, 64), 10, 0.7),
    Tiling((64, 64, 64), 8, 0.7),
)
SPLITS = (1, 2, 3, 4)


PART_BYTES = 128  # width of a message: a row of what TMA moves in one piece
BARRIER_BYTES = 1024  # of a CTA's shared memory: mbarriers, and what the compiler keeps for warp partitions


WARPS = 4  # of a multiplier


def part_rows(tile: tuple[int, int, int]) -> int:
    """Rows of a multiplier, hence of a message: a tile of more than 64 rows has two multipliers."""
    return tile[0] // 2 if tile[0] > 64 else tile[0]


def parts(tile: tuple[int, int, int], message_bytes: int) -> int:
    """Messages that an output tile travels in."""
    return tile[1] * message_bytes // PART_BYTES


def part_buffers(plan: "Plan", message_bytes: int, hardware: Hardware = H200) -> int:
    """Buffers for finished parts: as many as a tile has, or as shared memory allows beside the operand ring."""
    free = hardware.shared_bytes - BARRIER_BYTES - ring_bytes(plan)
    fits = free // (plan.tile[0] * PART_BYTES)
    return max(0, 1 << min(fits, parts(plan.tile, message_bytes)).bit_length() - 1) if fits else 0


def tiles_of(rows: int, n: int, world: int, tile: tuple[int, int, int]) -> int:
    """Output tiles that one rank computes: no tile spans the rows of two owners."""
    return -(-rows // tile[0]) * -(-n // tile[1]) * world


def whole_tiles(tiles: int, sms: int, split: int) -> int:
    """How many tiles a CTA each computes alone; the others, the last wave, are shared by `split` CTAs each."""
    return tiles if split == 1 else tiles // sms * sms


def ring_bytes(plan: "Plan") -> int:
    """Shared memory of the operand ring, of 16-bit elements."""
    bm, bn, bk = plan.tile
    return plan.stages * (bm + bn) * bk * 2


def unsupported(problem: Problem, plan: Plan, hardware: Hardware = H200) -> str | None:
    """Why `plan` cannot run `problem`, naming the legal values; None if it can. Planner and launch both ask here."""
    if plan.mechanism != "tma":
        return f"plan.mechanism={plan.mechanism!r}: matmul_reduce_scatter has 'tma'"
    if plan.schedule != "intra_sm":
        return f"plan.schedule={plan.schedule!r}: matmul_reduce_scatter has 'intra_sm'"
    if plan.comm_sms != 0:
        return f"plan.comm_sms={plan.comm_sms}: the intra_sm schedule has 0"
    if plan.tile not in {(rows, columns, 64) for rows in (64, 128, 256) for columns in (64, 128, 256)}:
        return f"plan.tile={plan.tile}: rows and columns are 64, 128 or 256, the K step 64"
    if plan.tile[0] * plan.tile[1] > 128 * 256:
        return f"plan.tile={plan.tile}: the accumulator holds at most {128 * 256} elements"
    if plan.stages < 2:
        return f"plan.stages={plan.stages}: the ring needs at least 2"
    if part_buffers(plan, problem.message_bytes, hardware) < 1:
        need = ring_bytes(plan) + plan.tile[0] * PART_BYTES + BARRIER_BYTES
        return (
            f"plan.tile={plan.tile} with plan.stages={plan.stages} needs {need} bytes of shared memory, "
            f"a CTA has {hardware.shared_bytes}"
        )
    tiles = tiles_of(problem.m // problem.world, problem.n, problem.world, plan.tile)
    k_steps = max(-(-problem.k // plan.tile[2]), 1)  # a share is a step at least
    most = min(MAX_SPLIT, k_steps, problem.sms // max(tiles % problem.sms, 1))
    if not 1 <= plan.split <= most:
        return (
            f"plan.split={plan.split}: 1 to {most} CTAs can share a tile of the last wave "
            f"({tiles} tiles, {problem.sms} SMs, {k_steps} K steps)"
        )
    return None


def predict_us(problem: Problem, tiling: Tiling, hardware: Hardware) -> float:
    """T_launch + max(T_compute, T_memory, T_communicate) + T_sync in microseconds, compute in whole waves of tiles."""
    bm, bn, _ = tiling.tile
    rows = problem.m // problem.world
    tiles = math.ceil(rows / bm) * math.ceil(problem.n / bn) * problem.world
    sm_rate = hardware.matmul_tflops * 1e6 / hardware.sms * tiling.efficiency  # operations a microsecond
    compute = math.ceil(tiles / problem.sms) * 2 * bm * bn * max(problem.k, 64) / sm_rate
    sent = problem.m * problem.n * problem.message_bytes * (problem.world - 1) / problem.world
    operands = (problem.m + problem.n) * problem.k * 2
    share = problem.sms / hardware.sms
    memory = (operands + problem.m * problem.n * problem.message_bytes) / (hardware.memory_gbs * share * 1e3)
    link = sent / (hardware.link_gbs * 1e3) if problem.linked else 0.0
    sync = hardware.sync_us if problem.world > 1 else 0.0
    return hardware.launch_us + max(compute, memory, link) + sync


def plan_for(problem: Problem, hardware: Hardware = H200) -> Plan:
    """The fastest supported plan by the cost model."""
    best = None
    for tiling in TILINGS:
        plan = Plan(tile=tiling.tile, stages=tiling.stages)
        if unsupported(problem, plan, hardware):
            continue
        cost = predict_us(problem, tiling, hardware)
        if best is None or cost < best[0]:
            best = (cost, plan)
    assert best is not None, f"no tiling fits {problem}"  # TILINGS holds one for every message size
    cost, plan = best
    rows = problem.m // problem.world
    tiles = math.ceil(rows / plan.tile[0]) * math.ceil(problem.n / plan.tile[1]) * problem.world
    by = "store to a place per source" if problem.deterministic else "add"
    way = (
        f"an output tile is the message, so the CTA that made it sends it (intra-SM, TMA {by})"
        if problem.world > 1
        else "one rank, so every tile stays: a plain matmul"
    )
    count = "1 tile" if tiles == 1 else f"{tiles} tiles"
    reason = f"{way}; {count} of {plan.tile[0]} x {plan.tile[1]} on {problem.sms} SMs is the cheapest tiling"
    return Plan(tile=plan.tile, stages=plan.stages, predicted_us=round(cost, 1), reason=reason)


def candidates(problem: Problem, hardware: Hardware = H200) -> list[Plan]:
    """Plans worth measuring for a problem."""
    found = []
    for tiling in TILINGS:
        for split in SPLITS:
            plan = Plan(tile=tiling.tile, stages=tiling.stages, split=split)
            if unsupported(problem, plan, hardware):
                continue
            bm, bn, _ = tiling.tile
            tiles = tiles_of(problem.m // problem.world, problem.n, problem.world, tiling.tile)
            alone = whole_tiles(tiles, problem.sms, split)
            if split > 1 and alone == tiles:
                continue
            waves = math.ceil(alone / problem.sms) + (tiles > alone) / split
            step = 2 * bm * bn * 64 / (5.4e6 * tiling.efficiency)
            cost = waves * (math.ceil(problem.k / 64) * step + 1.0) + (4 if split > 1 else 0)
            found.append((cost, plan))
    best = min(cost for cost, _ in found)
    return [plan for cost, plan in found if cost < (2.0 if problem.m <= 256 else 1.35) * best]
