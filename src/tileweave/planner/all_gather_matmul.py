"""Plans of all-gather + matmul: as those of matmul + reduce-scatter, and how many SMs communicate."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from tileweave.planner import plan as core
from tileweave.planner.cost import Cost, push_rate
from tileweave.planner.hardware import H200, Hardware
from tileweave.planner.plan import SPLITS, Plan, Way
from tileweave.planner.tiling import (
    CORE_ROWS,
    GROUP_ROWS,
    SLOWING,
    Tile,
    Tiling,
    operand_bytes,
    ring_says,
    tiling_of,
    tilings_of,
    whole_tiles,
)

SCHEDULES = ("inter_sm", "intra_sm", "one_shot", "none")
# And the schedules of each.
MECHANISMS = {"tma": SCHEDULES, "register": SCHEDULES, "multimem": ("inter_sm", "none"), "copy_engine": ("inter_sm",)}
COPYING_RANKS = 64  # that the copy engine's channel has flags for
# SMs that communicate. Measured: between two H200s eight SMs fill the link with TMA tiles of 16 KB, four half of it; a
# prototype was fastest with 4, 8 or 12, with 2 at large sizes; within one GPU a copy is linear in its SMs.
COMM_SMS = (1, 2, 4, 6, 8, 12, 16)
GATHERING_SMS = 16  # of schedules in which nothing multiplies meanwhile, or each column of tiles loads the rows itself
BESIDE = 0.0241  # as SLOWING, of a product by what communicators or the copy engine move; between two H200s
LAST_SHARE = 0.101  # of a tile, what the last ones wait for their rows; between two H200s
OWN_FASTER = 1.4  # what an SM copies within its GPU over what it pushes; measured on an H200
FIRST_US = 8.0  # what passes until the first rows are gone; between two H200s
WAVE_US = 4.8  # one shot, of each wave behind the first, and of more than one row of tiles; between two H200s


@dataclass(frozen=True)
class Problem:
    """One call of all-gather + matmul as every rank sees it.

    rows, k: this rank's shard of A; ns: columns of each B; sms: SMs the kernel may use on this rank; linked: whether
    peers are behind a link (False for virtual and emulated ranks); operand_bytes: size of an element of A and B;
    cores: those of `Plan.core` that there are; scales: of each row in a K step, 0 if it has none of blocks along K.
    """

    rows: int
    ns: tuple[int, ...]
    k: int
    world: int
    sms: int
    linked: bool = True
    operand_bytes: int = 2
    cores: tuple[str, ...] = ("wgmma",)
    scales: int = 0


def joined(problem: Problem, plan: Plan) -> bool:
    """Whether all ranks' rows are multiplied as one matrix, once they are there."""
    return problem.world > 1 and plan.schedule == "one_shot"


def row_tiles(problem: Problem, plan: Plan) -> int:
    """Output tiles one below the other: none spans the rows of two sources unless these are joined."""
    if joined(problem, plan):
        return math.ceil(problem.rows * problem.world / plan.tile[0])
    return math.ceil(problem.rows / plan.tile[0]) * problem.world


def columns_of(problem: Problem, tile: Tile) -> int:
    """Output tiles side by side: none spans two B."""
    return sum(math.ceil(n / tile[1]) for n in problem.ns)


def tiles_of(problem: Problem, plan: Plan) -> int:
    """Output tiles that one rank computes."""
    return row_tiles(problem, plan) * columns_of(problem, plan.tile)


def computing_sms(problem: Problem, plan: Plan) -> int:
    """SMs that multiply: those that do not communicate meanwhile, or are left to the copies of a copy engine."""
    return problem.sms if plan.schedule == "none" else problem.sms - plan.comm_sms


def item_tiles(plan: Plan) -> int:
    """Tiles that a communicator carries at once, as device code has it."""
    return 1 if plan.mechanism in ("register", "multimem") else 1 + plan.tile[1] // plan.tile[0]


def block_tiles(problem: Problem, plan: Plan, flags: int) -> int:
    """Rows of tiles in a block, for each of which a source has one of `flags` flags. A block has four items for each
    communicator, where the shard is so large, lest counting and telling take longer than pushing."""
    tiles, k_steps = math.ceil(problem.rows / plan.tile[0]), math.ceil(problem.k / plan.tile[2])
    if joined(problem, plan):  # a flag for each source, as a tile may wait for many
        return tiles
    return max(math.ceil(tiles / flags), min(tiles, math.ceil(4 * plan.comm_sms * item_tiles(plan) / k_steps)))


def unsupported(problem: Problem, plan: Plan, hardware: Hardware = H200) -> str | None:
    """Why `plan` cannot run `problem`, naming the legal values; None if it can. Planner and launch both ask here."""
    if plan.mechanism not in MECHANISMS:
        return f"plan.mechanism={plan.mechanism!r}: all_gather_matmul has {', '.join(map(repr, MECHANISMS))}"
    if plan.schedule not in MECHANISMS[plan.mechanism]:
        legal = ", ".join(map(repr, MECHANISMS[plan.mechanism]))
        return f"plan.schedule={plan.schedule!r}: all_gather_matmul has {legal} with {plan.mechanism!r}"
    if joined(problem, plan) and problem.operand_bytes == 1:
        return "plan.schedule='one_shot': rows of 8-bit operands have scales, which stay apart; 'inter_sm' would do"
    if problem.scales and problem.world > 1 and plan.mechanism != "tma":
        return f"plan.mechanism={plan.mechanism!r}: scales in blocks travel with their rows by 'tma' alone"
    most = problem.sms if plan.schedule == "none" else problem.sms - 1
    if problem.world == 1:
        if plan.comm_sms != 0:
            return f"plan.comm_sms={plan.comm_sms}: a world of one has 0, as there is nobody to send to"
    elif plan.mechanism == "copy_engine":
        if problem.world > COPYING_RANKS:
            return f"plan.mechanism='copy_engine': it has up to {COPYING_RANKS} ranks, the group has {problem.world}"
        if not 0 <= plan.comm_sms <= most:
            return f"plan.comm_sms={plan.comm_sms}: copy_engine leaves 0 to {most} of {problem.sms} SMs to the copies"
    elif most < 1:
        return f"plan.schedule={plan.schedule!r} needs an SM to communicate and one to multiply; 'none' would do with 1"
    elif not 1 <= plan.comm_sms <= most:
        return f"plan.comm_sms={plan.comm_sms}: the {plan.schedule} schedule has 1 to {most} with {problem.sms} SMs"
    tileless = core.untileable(plan, 2, hardware, problem.operand_bytes, problem.cores, problem.scales)
    shared = core.unshareable(_alone(problem, plan), plan)
    return tileless or shared or core.roomless(workspace_bytes(problem, plan), hardware)


def workspace_bytes(problem: Problem, plan: Plan) -> int:
    """Bytes of a rank's slots, each with the gathered rows, K in whole steps, and scales of blocks. The copy engine has
    one."""
    if problem.world == 1:
        return 0
    rows = problem.rows
    if plan.mechanism == "multimem":
        rows = math.ceil(rows / plan.tile[0]) * plan.tile[0]
    places = problem.world + (1 if joined(problem, plan) else 0)
    slots = 1 if plan.mechanism == "copy_engine" else core.SLOTS
    scaled = math.ceil(rows / CORE_ROWS) * CORE_ROWS * problem.scales
    steps = math.ceil(problem.k / plan.tile[2])
    return slots * places * steps * (rows * plan.tile[2] * problem.operand_bytes + scaled)


def _alone(problem: Problem, plan: Plan) -> core.Problem:
    """The matmul of one rank with as many tiles, on the SMs that multiply."""
    m = row_tiles(problem, plan) * plan.tile[0]
    n = columns_of(problem, plan.tile) * plan.tile[1]
    return core.Problem(m, n, problem.k, 1, 2, computing_sms(problem, plan), linked=False)


def cost_of(problem: Problem, plan: Plan, tiling: Tiling, hardware: Hardware = H200) -> Cost:
    """What a call takes, compute in whole waves of tiles.

    Inter-SM the product goes on while rows travel, which communicators and the copy engine let it nearly undisturbed,
    and ends with the tiles of the rows that come last. Intra-SM each
    column of tiles loads the peers' rows over the link. In the schedules "none" and "one_shot" communication and
    computation follow one another; one shot, a rank sends its rows to itself too. Unless rows are joined, a source's
    tiles read all of b again where a wave has more than it has rows of tiles. Measured one shot between two
    H200s at N = 28672, K = 8192 (docs/figures/gather_of_few_rows_2xH200.json): 79 us with 32 rows each in one wave of
    tiles; with 128, 123 us in one row of tiles and 140 in two waves, of which the matmul alone takes 68 and 101.
    """
    sms, tiles = computing_sms(problem, plan), tiles_of(problem, plan)
    k_steps = max(-(-problem.k // plan.tile[2]), 1)
    tiling = tiling.on(hardware).among(core.shares_gpu(problem), tiles / sms)
    compute = tiling.compute_us(tiles, k_steps, plan.split, sms)
    exchange = tiling.exchange_us(tiles, plan.split, sms)
    m, n = problem.rows * problem.world, sum(problem.ns)
    moved = operand_bytes(m, n, problem.k, plan.tile, sms, hardware)
    if not joined(problem, plan) and problem.rows < GROUP_ROWS * plan.tile[0]:
        each = operand_bytes(problem.rows, n, problem.k, plan.tile, sms, hardware)
        moved = max(moved, problem.world * each)
    moved = moved * problem.operand_bytes / 2 + 2 * m * n
    reading = sms if core.shares_gpu(problem) else min(sms, tiles)  # of which an SM gets more than its share there
    memory = hardware.launch_us + moved / (hardware.memory_gb_per_s * reading / hardware.sms * 1e3)
    if problem.world == 1:
        return Cost(compute, memory, 0.0, exchange)
    send = send_us(problem, plan, hardware)
    if plan.schedule in ("none", "one_shot"):
        first = FIRST_US if problem.linked else 0.0
        if joined(problem, plan):  # one launch does both
            again = math.ceil(tiles / sms) - 1 + (row_tiles(problem, plan) > 1)
            first = WAVE_US * again - hardware.launch_us
        return Cost(compute, memory, 0.0, exchange + first + send, hardware.sync_us)
    last = tiling.compute_us(1, k_steps, 1, sms)  # of the tiles whose rows come last
    if not problem.linked:  # communicators are in each other's memory
        return Cost(compute, memory, send + last, exchange, hardware.sync_us, BESIDE)
    slowing = SLOWING if plan.schedule == "intra_sm" else BESIDE
    delaying = BESIDE if plan.mechanism == "copy_engine" else SLOWING
    exposed = exchange + LAST_SHARE * last
    return Cost(compute, memory, FIRST_US + send + last, exposed, hardware.sync_us, slowing, delaying)


def plain(problem: Problem, hardware: Hardware = H200) -> Cost | None:
    """What NCCL's all-gather and torch.mm take, one after the other; None if the profile does not say."""
    m, sent = problem.rows * problem.world, problem.operand_bytes * problem.rows * problem.k * (problem.world - 1)
    of = 1, 2, problem.sms, False, False, problem.operand_bytes, problem.cores
    alone = core.Problem(m, sum(problem.ns), problem.k, *of)
    return core.plain_way("all_gather", alone, problem.world, sent, hardware)


def send_us(problem: Problem, plan: Plan, hardware: Hardware = H200) -> float:
    """What the rows take that a rank sends, with the launch before them."""
    shard = problem.operand_bytes * problem.rows * problem.k
    sent = shard * (problem.world - 1)
    if plan.mechanism == "copy_engine":
        return hardware.copy_start_us + sent / (hardware.copy_gb_per_s * 1e3)
    if plan.mechanism == "multimem":  # the fabric copies
        sent = shard
    elif plan.schedule == "intra_sm" and problem.linked:
        return hardware.launch_us + sent * columns_of(problem, plan.tile) / (hardware.link_gb_per_s * 1e3)
    alone = OWN_FASTER * push_rate(plan.mechanism, plan.comm_sms, hardware, False)
    own = shard / alone if joined(problem, plan) else 0.0
    return hardware.launch_us + sent / push_rate(plan.mechanism, plan.comm_sms, hardware, problem.linked) + own


def ways(problem: Problem) -> list[Way]:
    """What the planner tries: inter-SM by TMA, and one shot; over a link, the copy engine, which takes no SM; where
    ranks share a GPU, the gather first, which is soon done there."""
    if problem.world == 1:
        return [("tma", "inter_sm", 0)]
    schedules = ("inter_sm", "one_shot") if problem.sms > 1 else ("none",)
    found = [("tma", schedule, comm_sms) for comm_sms in COMM_SMS for schedule in schedules]
    if problem.linked:
        return [*found, ("copy_engine", "inter_sm", 0)]
    return [*found, ("tma", "none", GATHERING_SMS)] if problem.sms > 1 else found


def further_ways(problem: Problem) -> list[Way]:
    """What the op has besides, which was never seen to be faster."""
    if problem.world == 1:
        return []
    more = [(mechanism, "intra_sm", GATHERING_SMS) for mechanism in ("tma", "register")]
    more += [("register", "none", GATHERING_SMS), *(("register", "inter_sm", comm_sms) for comm_sms in (8, 16))]
    return [*more, ("tma", "none", GATHERING_SMS)] if problem.linked else more


def candidates(
    problem: Problem, hardware: Hardware = H200, tried: Iterable[Way] | None = None
) -> list[tuple[float, Plan]]:
    """All plans that can run `problem`, each with its predicted microseconds, the fastest first; of equals, the one
    with the fewest communicators: in the ways that are tried, by default `ways`; one shot only where rows are few."""
    found: list[tuple[float, Plan]] = []
    tilings = tilings_of(problem.operand_bytes, problem.cores[0], problem.scales)
    for (mechanism, schedule, comm_sms), tiling, split in product(
        ways(problem) if tried is None else tried, tilings, SPLITS
    ):
        if mechanism == "copy_engine" and problem.k % tiling.tile[2]:  # it copies bytes: `a` would be padded first
            continue
        plan = Plan(mechanism, schedule, tiling.tile, tiling.stages, split, comm_sms, core=problem.cores[0])
        tiles, sms = tiles_of(problem, plan), computing_sms(problem, plan)
        idle = split > 1 and (sms < 1 or whole_tiles(tiles, sms, split) == tiles or problem.k < 128 * split)
        many = schedule == "one_shot" and problem.rows >= GROUP_ROWS * tiling.tile[0]
        if not idle and not many and not unsupported(problem, plan, hardware):
            cost = partial(cost_of, problem, plan, hardware=hardware)
            found += core.in_each_ring(plan, tiling, hardware, cost, problem.scales)
    return sorted(found, key=lambda each: each[0])


def plan_for(problem: Problem, hardware: Hardware = H200) -> Plan:
    """The fastest supported plan by the cost model; NoRoom if there is none."""
    shared = (problem.rows, max(problem.ns)) if core.shares_gpu(problem) else None
    cost, plan = core.first(candidates(problem, hardware), hardware, shared)
    if problem.world == 1:
        way = "one rank, so nothing is gathered: a plain matmul"
    elif plan.schedule == "none":
        alone = problem.sms == 1
        why = "one SM cannot communicate while it multiplies" if alone else "ranks that share a GPU soon gather"
        way = f"{why}: the gather first, then the matmul"
    elif plan.mechanism == "copy_engine":
        way = (
            "the shard is large enough for the copy engine, which takes no SM, and a row of tiles starts when its rows "
            "have come (inter-SM, copy engine)"
        )
    else:
        way = (
            "a gathered tile is read by a whole row of tiles, so SMs that only communicate fetch it once "
            f"(inter-SM, TMA push by {plan.comm_sms} of {problem.sms} SMs)"
        )
    if joined(problem, plan):
        way += "; a rank has few rows, so those of all are multiplied as one matrix (one shot)"
    tiles = tiles_of(problem, plan)
    count = "1 tile" if tiles == 1 else f"{tiles} tiles"
    last = f", those of the last wave shared by {plan.split} each," if plan.split > 1 else ""
    on = computing_sms(problem, plan)
    reason = f"{way}; {count} of {plan.tile[0]} x {plan.tile[1]}{last} on {on} SMs is the cheapest tiling"
    reason += f"; {ring_says(tiling_of(plan.tile, plan.stages, problem.operand_bytes).on(hardware))}"
    return replace(plan, predicted_us=round(cost, 1), reason=reason)
