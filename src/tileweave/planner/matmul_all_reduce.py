"""Plans of matmul + all-reduce: as those of matmul + reduce-scatter, and how often an element travels."""

import math
from dataclasses import dataclass, replace

from tileweave.planner import plan as core
from tileweave.planner.hardware import H200, Hardware
from tileweave.planner.plan import SPLITS, Plan
from tileweave.planner.tiling import (
    PART_BYTES,
    TILINGS,
    Tiling,
    operand_bytes,
    overlapped,
    part_buffers,
    part_rows,
    tiles_of,
    whole_tiles,
)

SHOTS = {"none": 0, "one_shot": 1, "intra_sm": 2}  # how often the kernel of a schedule moves an element
OWN_FLAGS = 128  # of a rank's: those that an op may use as it likes
MOVES = 2  # buffers of a CTA's mover, a part each
SMALL_TILE = 128 * 128  # elements of an accumulator beside which there are registers for other things
SM_FETCH_GBS = 15.0  # what an SM fetches by plain loads behind its tiles, an estimate


@dataclass(frozen=True)
class Problem:
    """One call of matmul + all-reduce as every rank sees it.

    m, n: the product; k: this rank's share of the inner dimension; sms: SMs the kernel may use on this rank; norm:
    whether rows are normalized; linked: whether peers are behind a link (False for virtual and emulated ranks).
    """

    m: int
    n: int
    k: int
    world: int
    sms: int
    norm: bool = False
    linked: bool = True


def owners(problem: Problem, plan: Plan) -> int:
    """How many ranks share the rows of the result among them while it is summed: all, or none needs to."""
    return problem.world if SHOTS[plan.schedule] == 2 else 1


def rows_of(problem: Problem, plan: Plan) -> int:
    """Rows of an owner, whole tiles of them where there are several; the last ones have fewer, or none, and multiply
    what is beyond as if it were there."""
    if owners(problem, plan) == 1:
        return problem.m
    return math.ceil(problem.m / problem.world / plan.tile[0]) * plan.tile[0]


def chunks_of(problem: Problem, plan: Plan) -> tuple[int, int]:
    """Tiles of an owner in a chunk, a wave of them at least, and how many chunks: as many as there are flags for."""
    per, world = count_tiles(problem, plan) // owners(problem, plan), owners(problem, plan)
    if world == 1:
        return per, 1
    tiles = max(min(problem.sms, per), math.ceil(per / (OWN_FLAGS // (2 * world))))
    return tiles, math.ceil(per / tiles)


def has_movers(problem: Problem, plan: Plan) -> bool:
    """Whether every CTA has a warp that brings finished tiles to the result."""
    return SHOTS[plan.schedule] == 2 and not problem.norm


def result_buffers(problem: Problem, plan: Plan, hardware: Hardware = H200) -> int:
    """Buffers for finished parts of each multiplier, beside those of a mover; 0 if none fits."""
    return part_buffers(plan.tile, plan.stages, 2, _less_movers(problem, plan, hardware))


def _less_movers(problem: Problem, plan: Plan, hardware: Hardware) -> Hardware:
    """The hardware with the shared memory that is left beside a mover's buffers."""
    taken = MOVES * part_rows(plan.tile) * PART_BYTES if has_movers(problem, plan) else 0
    return replace(hardware, shared_bytes=hardware.shared_bytes - taken)


def slot_bytes(problem: Problem, plan: Plan) -> int:
    """Bytes of one of a rank's two slots: a place for each source."""
    return problem.world * rows_of(problem, plan) * problem.n * 2 if SHOTS[plan.schedule] else 0


def count_tiles(problem: Problem, plan: Plan) -> int:
    """Output tiles that one rank computes."""
    return tiles_of(rows_of(problem, plan), problem.n, owners(problem, plan), plan.tile)


def unsupported(problem: Problem, plan: Plan, hardware: Hardware = H200) -> str | None:
    """Why `plan` cannot run `problem`, naming the legal values; None if it can. Planner and launch both ask here."""
    if plan.mechanism != "tma":
        return f"plan.mechanism={plan.mechanism!r}: matmul_all_reduce has 'tma'"
    if plan.schedule not in SHOTS:
        return f"plan.schedule={plan.schedule!r}: matmul_all_reduce has {', '.join(map(repr, SHOTS))}"
    if plan.comm_sms != 0:
        return f"plan.comm_sms={plan.comm_sms}: the {plan.schedule} schedule has 0"
    if problem.world == 1 and plan.schedule != "none":
        return f"plan.schedule={plan.schedule!r}: a world of one has 'none', as there is nobody to send to"
    if SHOTS[plan.schedule] * problem.world > OWN_FLAGS:
        return (
            f"plan.schedule={plan.schedule!r} has two flags for each of {problem.world} ranks, an op has {OWN_FLAGS}; "
            "'one_shot' and 'none' would do"
        )
    narrow = {f"plan.split={plan.split}": plan.split > 1, "norm_weight": problem.norm and SHOTS[plan.schedule] == 2}
    if SHOTS[plan.schedule] > 0 and any(narrow.values()) and plan.tile[0] * plan.tile[1] > SMALL_TILE:
        return (
            f"plan.tile={plan.tile} with {' and '.join(name for name, holds in narrow.items() if holds)}: "
            f"the {plan.schedule} schedule has registers for tiles of up to {SMALL_TILE} elements then"
        )
    return core.untileable(plan, 2, _less_movers(problem, plan, hardware)) or core.unshareable(
        _alone(problem, plan), plan
    )


def _alone(problem: Problem, plan: Plan) -> core.Problem:
    """A reduce-scatter with as many tiles."""
    world = owners(problem, plan)
    return core.Problem(rows_of(problem, plan) * world, problem.n, problem.k, world, 2, problem.sms, linked=False)


def predict_us(problem: Problem, plan: Plan, tiling: Tiling, hardware: Hardware) -> float:
    """T_launch + max(T_compute, T_memory, T_send) + T_sync, then what comes behind the tile loop, in microseconds."""
    tiles = count_tiles(problem, plan)
    compute = tiling.compute_us(tiles, max(-(-problem.k // plan.tile[2]), 1), plan.split, problem.sms)
    memory_rate = hardware.memory_gbs * 1e3 * problem.sms / hardware.sms
    link_rate = hardware.link_gbs * 1e3
    result = 2.0 * problem.m * problem.n
    operands = operand_bytes(problem.m, problem.n, problem.k, plan.tile, problem.sms, hardware)
    peers, shots = problem.world - 1, SHOTS[plan.schedule]
    # What a rank sends, and as much comes; two shots: to, and then from, an owner who has all his rows.
    sent = peers * 2.0 * problem.n * min(rows_of(problem, plan), problem.m)
    memory = hardware.launch_us + (operands + result + (sent if shots else 0)) / memory_rate
    link = hardware.launch_us + sent / link_rate if problem.linked and shots else 0.0
    loop = overlapped(overlapped(compute, memory), link) + tiling.exchange_us(tiles, plan.split, problem.sms)
    if shots == 0:
        if peers == 0:
            return loop
        two = 2 * hardware.launch_us + 2 * hardware.sync_us + 2 * result * peers / problem.world / link_rate
        one = hardware.launch_us + hardware.sync_us + result * peers / link_rate
        return loop + min(one, two)
    # Behind the loop: one shot sums the places of all sources, two shots bring the last chunk, or, to a norm, all.
    chunks = 1 if problem.norm or shots == 1 else chunks_of(problem, plan)[1]
    moved = result * (1 + (problem.world if shots == 1 else 1)) / chunks
    tail = moved / min(memory_rate, SM_FETCH_GBS * problem.sms * 1e3)
    if shots == 2 and problem.linked:
        tail = max(tail, sent / chunks / link_rate)
        loop = max(loop, hardware.launch_us + (2 - 1 / chunks) * sent / link_rate)
    return loop + shots * hardware.sync_us + tail


def candidates(problem: Problem, hardware: Hardware = H200) -> list[tuple[float, Plan]]:
    """All plans that can run `problem` in one kernel, each with its predicted microseconds, the fastest first."""
    found = []
    for schedule in ("none",) if problem.world == 1 else ("one_shot", "intra_sm"):
        for tiling in TILINGS:
            for split in SPLITS:
                plan = Plan("tma", schedule, tiling.tile, tiling.stages, split)
                tiles = count_tiles(problem, plan)
                idle = split > 1 and (whole_tiles(tiles, problem.sms, split) == tiles or problem.k < 128 * split)
                if not idle and not unsupported(problem, plan, hardware):
                    found.append((predict_us(problem, plan, tiling, hardware), plan))
    return sorted(found, key=lambda each: each[0])


WAYS = {
    "none": "one rank, so nothing is summed: a plain matmul",
    "one_shot": (
        "little to send, so every rank gets all parts and sums them (one shot, TMA store to a place per source)"
    ),
    "intra_sm": (
        "an output tile is the message, so the CTA that made it sends it to the rank that sums it, from which "
        "all fetch the sum (intra-SM, two shots, TMA store to a place per source)"
    ),
}


def plan_for(problem: Problem, hardware: Hardware = H200) -> Plan:
    """The fastest supported plan by the cost model."""
    cost, plan = candidates(problem, hardware)[0]
    tiles = count_tiles(problem, plan)
    count = "1 tile" if tiles == 1 else f"{tiles} tiles"
    last = f", those of the last wave shared by {plan.split} each," if plan.split > 1 else ""
    size = f"{plan.tile[0]} x {plan.tile[1]}"
    reason = f"{WAYS[plan.schedule]}; {count} of {size}{last} on {problem.sms} SMs is the cheapest tiling"
    return replace(plan, predicted_us=round(cost, 1), reason=reason)
