"""Plans of matmul + all-reduce: as those of matmul + reduce-scatter, and how often an element travels."""

import math
from dataclasses import dataclass, replace
from itertools import product

from tileweave.planner import plan as core
from tileweave.planner.hardware import H200, Hardware
from tileweave.planner.plan import SPLITS, Plan
from tileweave.planner.tiling import (
    PART_BYTES,
    SM_FETCH_GBS,
    TILINGS,
    Tiling,
    operand_bytes,
    overlapped,
    part_buffers,
    part_rows,
    tiles_of,
    whole_tiles,
)

SHOTS = {"none": 0, "one_shot": 1, "intra_sm": 2, "inter_sm": 2}  # how often a schedule's kernel moves an element
OWN_FLAGS = 128  # of a rank's: those that an op may use as it likes
MOVES = 2  # buffers of a CTA's mover, a part each
SMALL_TILE = 128 * 128  # elements of an accumulator beside which there are registers for other things
COMM_SM_GBS = 45.0  # what a communicator moves; eight fill a link by TMA (measured), in the fabric it is an estimate
COMM_SMS = (4, 8, 16)  # communicators that the planner considers


@dataclass(frozen=True)
class Problem:
    """One call of matmul + all-reduce as every rank sees it.

    m, n: the product; k: this rank's share of the inner dimension; sms: SMs the kernel may use on this rank; norm:
    whether rows are normalized; linked: whether peers are behind a link (False for virtual and emulated ranks);
    multicast: whether the fabric reaches all of them at once.
    """

    m: int
    n: int
    k: int
    world: int
    sms: int
    norm: bool = False
    linked: bool = True
    multicast: bool = False


def computing(problem: Problem, plan: Plan) -> int:
    """SMs that multiply."""
    return problem.sms - plan.comm_sms


def owners(problem: Problem, plan: Plan) -> int:
    """How many ranks share the columns of the result among them while it is summed: all, or none needs to."""
    return problem.world if SHOTS[plan.schedule] == 2 else 1


def place_of(problem: Problem, plan: Plan) -> tuple[int, int]:
    """Rows and columns of a place in a slot: what an owner has. Where there are several, columns come in whole tiles;
    the last owners have fewer, or none, and multiply what is beyond as if it were there. Rows come in whole tiles where
    communicators sum, as nothing masks the fabric's words."""
    if owners(problem, plan) == 1:
        return problem.m, problem.n
    rows, cols = plan.tile[:2]
    tall = math.ceil(problem.m / rows) * rows if plan.schedule == "inter_sm" else problem.m
    return tall, math.ceil(problem.n / problem.world / cols) * cols


def chunks_of(problem: Problem, plan: Plan) -> tuple[int, int]:
    """Tiles of an owner in a chunk, a wave of them at least, and how many chunks: as many as there are flags for."""
    per, world = count_tiles(problem, plan) // owners(problem, plan), owners(problem, plan)
    if world == 1:
        return per, 1
    tiles = max(min(computing(problem, plan), per), math.ceil(per / (OWN_FLAGS // (2 * world))))
    return tiles, math.ceil(per / tiles)


def result_buffers(plan: Plan, hardware: Hardware = H200) -> int:
    """Buffers for finished parts of each multiplier, beside those of a mover; 0 if none fits."""
    return part_buffers(plan.tile, plan.stages, 2, _less_movers(plan, hardware))


def _less_movers(plan: Plan, hardware: Hardware) -> Hardware:
    """The hardware with the shared memory that is left beside a mover's buffers."""
    taken = MOVES * part_rows(plan.tile) * PART_BYTES if SHOTS[plan.schedule] == 2 else 0
    return replace(hardware, shared_bytes=hardware.shared_bytes - taken)


def slot_bytes(problem: Problem, plan: Plan) -> int:
    """Bytes of one of a rank's two slots: a place for each source, or, inter-SM, for each owner."""
    return 2 * problem.world * math.prod(place_of(problem, plan)) if SHOTS[plan.schedule] else 0


def count_tiles(problem: Problem, plan: Plan) -> int:
    """Output tiles that one rank computes."""
    return owners(problem, plan) * tiles_of(*place_of(problem, plan), 1, plan.tile)


def unsupported(problem: Problem, plan: Plan, hardware: Hardware = H200) -> str | None:
    """Why `plan` cannot run `problem`, naming the legal values; None if it can. Planner and launch both ask here."""
    if plan.schedule not in SHOTS:
        return f"plan.schedule={plan.schedule!r}: matmul_all_reduce has {', '.join(map(repr, SHOTS))}"
    mechanisms = ("tma", "multimem") if plan.schedule == "inter_sm" else ("tma",)
    if plan.mechanism not in mechanisms:
        return (
            f"plan.mechanism={plan.mechanism!r}: matmul_all_reduce has {' and '.join(map(repr, mechanisms))} in the "
            f"{plan.schedule} schedule"
        )
    if plan.schedule == "inter_sm" and not 1 <= plan.comm_sms < problem.sms:
        return (
            f"plan.comm_sms={plan.comm_sms}: the inter_sm schedule has 1 to {problem.sms - 1} of {problem.sms} SMs, "
            "and needs two at least"
        )
    if plan.schedule != "inter_sm" and plan.comm_sms != 0:
        return f"plan.comm_sms={plan.comm_sms}: the {plan.schedule} schedule has 0"
    if problem.world == 1 and plan.schedule != "none":
        return f"plan.schedule={plan.schedule!r}: a world of one has 'none', as there is nobody to send to"
    if SHOTS[plan.schedule] * problem.world > OWN_FLAGS:
        return (
            f"plan.schedule={plan.schedule!r} has two flags for each of {problem.world} ranks, an op has {OWN_FLAGS}; "
            "'one_shot' and 'none' would do"
        )
    if SHOTS[plan.schedule] > 0 and plan.split > 1 and plan.tile[0] * plan.tile[1] > SMALL_TILE:
        return (
            f"plan.tile={plan.tile} with plan.split={plan.split}: "
            f"the {plan.schedule} schedule has registers for tiles of up to {SMALL_TILE} elements then"
        )
    return core.untileable(plan, 2, _less_movers(plan, hardware)) or core.unshareable(_alone(problem, plan), plan)


def _alone(problem: Problem, plan: Plan) -> core.Problem:
    """A reduce-scatter with as many tiles."""
    world, (rows, cols) = owners(problem, plan), place_of(problem, plan)
    return core.Problem(rows * world, cols, problem.k, world, 2, computing(problem, plan), linked=False)


def predict_us(problem: Problem, plan: Plan, tiling: Tiling, hardware: Hardware) -> float:
    """T_launch + max(T_compute, T_memory, T_send) + T_sync, then what comes behind the tile loop, in microseconds.

    One shot's sums take SM_FETCH_GBS on an SM, measured on virtual ranks of an H200 with N = K = 8192.
    """
    tiles, sms = count_tiles(problem, plan), computing(problem, plan)
    compute = tiling.compute_us(tiles, max(-(-problem.k // plan.tile[2]), 1), plan.split, sms)
    memory_rate = hardware.memory_gb_per_s * 1e3 * problem.sms / hardware.sms
    link_rate = hardware.link_gb_per_s * 1e3
    result = 2.0 * problem.m * problem.n
    peers, shots = problem.world - 1, SHOTS[plan.schedule]
    # What a rank sends, and as much comes; two shots: to, and then from, an owner of whole columns. In the fabric
    # everything leaves once to be summed, and comes back once.
    sent = peers * 2.0 * problem.m * min(place_of(problem, plan)[1], problem.n)
    if plan.mechanism == "multimem":
        sent = result * (problem.world + 1) / (2 * problem.world)
    operands = operand_bytes(problem.m, problem.n, problem.k, plan.tile, sms, hardware)
    moved = operands + result + (sent if shots else 0)
    memory = hardware.launch_us + moved / memory_rate
    link = hardware.launch_us + sent / link_rate if problem.linked and shots else 0.0
    loop = overlapped(overlapped(compute, memory), link) + tiling.exchange_us(tiles, plan.split, sms)
    norm = hardware.launch_us + 2 * result / memory_rate if problem.norm else 0.0
    if shots == 0:
        if peers == 0:
            return loop + norm
        two = 2 * hardware.launch_us + 2 * hardware.sync_us + 2 * result * peers / problem.world / link_rate
        one = hardware.launch_us + hardware.sync_us + result * peers / link_rate
        return loop + min(one, two) + norm
    if shots == 1:  # behind the loop the places of all sources are summed, and what is normed is read again and written
        summed = result * (problem.world + (3 if problem.norm else 1))
        return loop + hardware.sync_us + summed / min(memory_rate, SM_FETCH_GBS * problem.sms * 1e3)
    chunks = chunks_of(problem, plan)[1]  # of which the last one travels behind the loop
    tail = 2 * result / chunks / min(memory_rate, SM_FETCH_GBS * sms * 1e3)
    if plan.schedule == "inter_sm":  # communicators read and write the owner's share; each fetches what fills a link
        share = 2 * result / problem.world * (1 if plan.mechanism == "multimem" else problem.world)
        carried = share / (plan.comm_sms * COMM_SM_GBS * 1e3)
        loop, tail = max(loop, hardware.launch_us + carried), tail + carried / chunks
    if problem.linked:
        tail = max(tail, sent / chunks / link_rate)
        loop = max(loop, hardware.launch_us + (2 - 1 / chunks) * sent / link_rate)
    return loop + shots * hardware.sync_us + tail + norm


def candidates(problem: Problem, hardware: Hardware = H200) -> list[tuple[float, Plan]]:
    """All plans that can run `problem` in one kernel, each with its predicted microseconds, the fastest first."""
    found = []
    ways = [("tma", "none", 0)] if problem.world == 1 else [("tma", "one_shot", 0), ("tma", "intra_sm", 0)]
    if problem.world > 1 and problem.multicast:
        ways += [("multimem", "inter_sm", comm_sms) for comm_sms in COMM_SMS]
    for (mechanism, schedule, comm_sms), tiling, split in product(ways, TILINGS, SPLITS):
        plan = Plan(mechanism, schedule, tiling.tile, tiling.stages, split, comm_sms)
        if unsupported(problem, plan, hardware):
            continue
        tiles, sms = count_tiles(problem, plan), computing(problem, plan)
        if split == 1 or (whole_tiles(tiles, sms, split) < tiles and problem.k >= 128 * split):
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
    "inter_sm": (
        "the fabric reduces, so communicators of the rank that owns a tile have it summed and handed to all there "
        "(inter-SM, multimem)"
    ),
}


def plan_for(problem: Problem, hardware: Hardware = H200) -> Plan:
    """The fastest supported plan by the cost model."""
    cost, plan = candidates(problem, hardware)[0]
    tiles = count_tiles(problem, plan)
    count = "1 tile" if tiles == 1 else f"{tiles} tiles"
    last = f", those of the last wave shared by {plan.split} each," if plan.split > 1 else ""
    size = f"{plan.tile[0]} x {plan.tile[1]}"
    sms = f"{computing(problem, plan)} SMs" + (f" beside {plan.comm_sms} communicators" if plan.comm_sms else "")
    reason = f"{WAYS[plan.schedule]}; {count} of {size}{last} on {sms} is the cheapest tiling"
    return replace(plan, predicted_us=round(cost, 1), reason=reason)
