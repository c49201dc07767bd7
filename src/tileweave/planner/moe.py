"""Plans of a grouped matmul, alone or behind the dispatch of its rows, by what is known before anything runs: how many
experts, and perhaps how many rows."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from tileweave.planner import plan as core
from tileweave.planner.cost import Cost, collective_us, push_rate
from tileweave.planner.hardware import H200, Hardware
from tileweave.planner.plan import Plan
from tileweave.planner.tiling import Tile, Tiling, part_rows, ring_says, tiling_of, tilings_of

FLAGS = 448  # of a rank: those of the fabric, which the planner does not import
MOST_RANKS, MOST_EXPERTS = 64, 1024  # of a dispatch
ALIKE = 1.04  # costs that the model cannot tell apart
UNEVEN = (64, 256, 64)  # the tile for experts whose rows are no whole tiles of 128, as a router's never are
MANY_EXPERTS, FEW_ROWS, MANY_ROWS, SHARED_BY = 64, 256, 1024, 3  # where it is taken: see plan_for
PLACE_GBS = 30.0  # rows that a communicator of a dispatch writes (docs/figures/dispatch_tma_2xH200.json)
USUAL_ROWS = 1024  # of each expert, for which a dispatch is planned
MOST_COMM = 3  # at most one SM of so many communicates


@dataclass(frozen=True)
class GroupedProblem:
    """One grouped matmul: `rows` of all experts together, [k, n] each expert's matrix, 16-bit; sms: SMs it may use;
    cores: instructions of these SMs' tensor cores."""

    rows: int
    experts: int
    n: int
    k: int
    sms: int
    cores: tuple[str, ...] = ("wgmma",)


def most_row_tiles(rows: int, experts: int, tile: Tile) -> int:
    """Row tiles that there can be, however the rows fall to experts: none spans two."""
    return rows // tile[0] + min(experts, rows)


def unsupported(problem: GroupedProblem, plan: Plan, hardware: Hardware = H200) -> str | None:
    """Why `plan` cannot run `problem`, naming the legal values; None if it can. Planner and launch both ask here."""
    if plan.mechanism != "tma" or plan.schedule != "intra_sm":
        return (
            f"plan.mechanism={plan.mechanism!r}, plan.schedule={plan.schedule!r}: grouped_matmul has 'tma', 'intra_sm'"
        )
    if plan.split != 1 or plan.comm_sms != 0:
        return f"plan.split={plan.split}, plan.comm_sms={plan.comm_sms}: grouped_matmul has 1 and 0"
    return core.untileable(plan, 2, hardware, cores=problem.cores)


def cost_of(problem: GroupedProblem, tiling: Tiling, hardware: Hardware = H200) -> Cost:
    """What a call takes, if experts have as many rows each but for chance: the last rows of an expert are half a
    multiplier's, on average, and a multiplier without rows takes no time."""
    tiling, part = tiling.on(hardware), part_rows(tiling.tile, problem.cores[0])
    row_tiles = (problem.rows / part + min(problem.experts, problem.rows) / 2) * part / tiling.tile[0]
    tiles = math.ceil(row_tiles * math.ceil(problem.n / tiling.tile[1]))
    compute = tiling.compute_us(tiles, max(math.ceil(problem.k / tiling.tile[2]), 1), 1, problem.sms)
    weights = min(problem.experts, problem.rows) * problem.k * problem.n
    moved = 2.0 * (weights + problem.rows * (problem.k + problem.n))
    memory = moved / (hardware.memory_gb_per_s * 1e3 * problem.sms / hardware.sms)
    return Cost(compute, memory, exposed_us=hardware.launch_us)


def tilings_by_cost(problem: GroupedProblem, hardware: Hardware = H200) -> list[tuple[float, Tiling]]:
    """All tiles of the table, in each ring, with their predicted microseconds, the fastest first."""
    of, cost = problem.cores[0], partial(cost_of, problem, hardware=hardware)
    found = [each for tiling in tilings_of(2, of) for each in core.costs_of_rings(tiling, hardware, of, cost)]
    return sorted(found, key=lambda each: each[0])


def candidates(problem: GroupedProblem, hardware: Hardware = H200) -> list[tuple[float, Plan]]:
    """All plans of the table, each with its predicted microseconds, the fastest first."""
    return [(us, _plan(problem, tiling)) for us, tiling in tilings_by_cost(problem, hardware)]


def _plan(problem: GroupedProblem, tiling: Tiling) -> Plan:
    return Plan(tile=tiling.tile, stages=tiling.stages, core=problem.cores[0])


def cheapest(found: list[tuple[float, Tiling]], columns: int = 0) -> tuple[float, Tiling]:
    """Of the tiles that the model does not tell apart, the one that reads least from L2: all SMs read at once. Tiles
    have `columns` at least."""
    wide = [each for each in found if each[1].tile[1] >= columns]
    alike = [each for each in wide if each[0] <= ALIKE * wide[0][0]]
    return min(alike, key=lambda each: 1 / each[1].tile[0] + 1 / each[1].tile[1])


@lru_cache(maxsize=1024)
def plan_for(problem: GroupedProblem, hardware: Hardware = H200) -> Plan:
    """The fastest plan by the cost model, but for experts that have few rows for their number where the SMs are more
    than a third of the GPU's.

    CTAs whose tiles are cut short get ahead of those that share their operands, which L2 does not hold any more then:
    with tiles of 128 x 256 an H200 read 11 GB where 2.8 are needed, of 64 experts with 1024 rows each on average. Tiles
    half as high lost 1 to 3% where all experts had as many rows, and won 5 to 28% where a router had chosen
    (docs/figures/grouped_matmul_1xH200.json, grouped_matmul_drawn_1xH200.json). Behind a dispatch, whose communicators
    take their part of L2, they lose (dispatch_tiles_1xH200.json)."""
    found = tilings_by_cost(problem, hardware)
    cost, tiling = cheapest(found)
    few, many = (each * problem.experts for each in (FEW_ROWS, MANY_ROWS))
    whole, why = SHARED_BY * problem.sms > hardware.sms, "are the cheapest"
    if whole and problem.rows >= few and (problem.experts > MANY_EXPERTS or problem.rows <= many):
        for us, uneven in [each for each in found if each[1].tile == UNEVEN][:1]:  # tcgen05 has none
            cost, tiling, why = us, uneven, "read least from memory"
    plan = _plan(problem, tiling)
    reason = (
        f"tiles of {plan.tile[0]} x {plan.tile[1]} on {problem.sms} SMs {why} for {problem.experts} experts "
        f"of {problem.rows / problem.experts:.0f} rows on average; {ring_says(tiling.on(hardware))}"
    )
    return replace(plan, predicted_us=round(cost, 1), reason=reason)


@dataclass(frozen=True)
class DispatchProblem:
    """One dispatch + grouped matmul as every rank sees it: `experts` of the rank with most, [k, n] each of the
    `products` matrices of an expert, 16-bit, a second one for a gate; sms: SMs the kernel may use on this rank;
    cores: instructions of their tensor cores."""

    world: int
    experts: int
    n: int
    k: int
    sms: int
    products: int = 1
    cores: tuple[str, ...] = ("wgmma",)

    @property
    def columns(self) -> int:
        """Columns of the narrowest tile: 64 of each product."""
        return 64 * self.products


def unfusable(problem: DispatchProblem) -> str | None:
    """Why no plan can run `problem`; None if some can."""
    if problem.world == 1:
        return "a world of one has nobody to send to"
    if problem.world > MOST_RANKS:
        return f"the group has {problem.world} ranks, the kernel has flags for {MOST_RANKS}"
    if problem.sms < 2:
        return f"one SM has to communicate and one to multiply, and a rank has {problem.sms}"
    if problem.experts > MOST_EXPERTS:
        return f"a rank has {problem.experts} experts, the kernel counts up to {MOST_EXPERTS}"
    return None


def unsupported_dispatch(problem: DispatchProblem, plan: Plan, hardware: Hardware = H200) -> str | None:
    """Why `plan` cannot run `problem`, naming the legal values; None if it can, or no plan can."""
    if unfusable(problem) is not None:
        return None
    if plan.mechanism != "tma" or plan.schedule != "inter_sm":
        return (
            f"plan.mechanism={plan.mechanism!r}, plan.schedule={plan.schedule!r}: moe_dispatch_matmul has 'tma' and "
            "'inter_sm'"
        )
    most = min(problem.sms - 1, FLAGS // (problem.world + 1))
    if not 1 <= plan.comm_sms <= most:
        return f"plan.comm_sms={plan.comm_sms}: expected 1 to {most} of {problem.sms} SMs"
    if plan.split != 1:
        return f"plan.split={plan.split}: moe_dispatch_matmul has 1"
    if problem.products > 1 and plan.tile[1:2] == (64,):
        return f"plan.tile={plan.tile}: with a gate half of a tile's columns are the gate's, so it has 128 or 256"
    return core.untileable(plan, 2, hardware, cores=problem.cores)


@lru_cache(maxsize=1024)
def dispatch_plan_for(problem: DispatchProblem, hardware: Hardware = H200) -> Plan:
    """The plan for experts of many rows, as training has them: so many SMs communicate that they place rows as fast as
    all would multiply them."""
    rows = USUAL_ROWS * problem.experts  # of what a rank takes in nothing is known

    def tiles(sms: int) -> tuple[float, Tiling]:
        return cheapest(tilings_by_cost(grouped_of(problem, rows, sms), hardware), problem.columns)

    busy = round(placed_us(problem, rows, 1) / tiles(problem.sms)[0])
    most = min(max(problem.sms // MOST_COMM, 1), FLAGS // (problem.world + 1))
    comm_sms = min(max(busy, 1), most)
    grouped = grouped_of(problem, rows, problem.sms - comm_sms)
    tiling = tiles(grouped.sms)[1]
    chosen = _plan(grouped, tiling)
    reason = (
        "tokens come in an order that depends on data, so SMs that only communicate send and place them (inter-SM, "
        f"{comm_sms} of {problem.sms} SMs); tiles of {chosen.tile[0]} x {chosen.tile[1]} are the cheapest for experts "
        f"of {USUAL_ROWS} rows each, as how many there will be is not known; {ring_says(tiling.on(hardware))}"
    )
    return replace(chosen, schedule="inter_sm", comm_sms=comm_sms, reason=reason)


def placed_us(problem: DispatchProblem, rows: int, comm_sms: int) -> float:
    """What so many communicators take to write as many rows, sent or copied."""
    return rows * 2.0 * problem.k / (PLACE_GBS * 1e3 * comm_sms)


def dispatch_workspace_bytes(problem: DispatchProblem, plan: Plan, rows: int) -> int:
    """Bytes of the one slot of a rank with so many `rows` at most: in whole tiles of each expert, K in whole steps."""
    whole = most_row_tiles(rows, problem.experts, plan.tile) * plan.tile[0]
    return 2 * whole * math.ceil(problem.k / plan.tile[2]) * plan.tile[2]


def dispatch_cost(problem: DispatchProblem, plan: Plan, tokens: int, topk: int, hardware: Hardware = H200) -> Cost:
    """What a dispatch of `tokens` of a rank takes, each to `topk` experts, if all experts get as many: communicators
    write each row once, of which as many cross the link as tokens go to ranks that have one of their experts."""
    product = grouped_us(problem, plan, tokens * topk, problem.sms - plan.comm_sms, hardware)
    sent = sent_tokens(problem, tokens, topk) * 2.0 * problem.k / push_rate("tma", plan.comm_sms, hardware)
    placed = placed_us(problem, tokens * topk, plan.comm_sms)
    return Cost(product, 0.0, hardware.launch_us + max(sent, placed), 0.0, hardware.sync_us)


def plain_dispatch(
    problem: DispatchProblem, plan: Plan, tokens: int, topk: int, hardware: Hardware = H200
) -> Cost | None:
    """What an all-gather of all tokens by NCCL and a grouped matmul take; None if the profile does not say."""
    sent = 2.0 * problem.k * tokens * (problem.world - 1)
    collective = collective_us("all_gather", problem.world, sent, hardware)
    if collective is None:
        return None
    return Cost(grouped_us(problem, plan, tokens * topk, problem.sms, hardware), 0.0, 0.0, collective)


def grouped_us(problem: DispatchProblem, plan: Plan, rows: int, sms: int, hardware: Hardware) -> float:
    """Of the grouped matmul alone, on `sms` SMs."""
    return cost_of(grouped_of(problem, rows, sms), tiling_of(plan.tile, plan.stages), hardware).total_us


def grouped_of(problem: DispatchProblem, rows: int, sms: int) -> GroupedProblem:
    """The grouped matmul of so many `rows` by itself, on `sms` SMs."""
    return GroupedProblem(rows, problem.experts, problem.products * problem.n, problem.k, sms, problem.cores)


def sent_tokens(problem: DispatchProblem, tokens: int, topk: int) -> float:
    """Copies of tokens that leave a rank, expected: to every other rank that some of a token's experts are on."""
    return tokens * (problem.world - 1) * (1 - (1 - 1 / problem.world) ** topk)
