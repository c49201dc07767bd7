"""Plans of matmul + all-reduce: as those of matmul + reduce-scatter, and how often an element travels."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from tileweave.planner import plan as core
from tileweave.planner.cost import Cost
from tileweave.planner.hardware import H200, Hardware
from tileweave.planner.plan import SPLITS, Plan, Way
from tileweave.planner.tiling import (
    PART_BYTES,
    SM_FETCH_GBS,
    Tiling,
    operand_bytes,
    part_buffers,
    part_rows,
    ring_says,
    tiles_of,
    tiling_of,
    tilings_of,
    whole_tiles,
)

SHOTS = {"none": 0, "one_shot": 1, "intra_sm": 2, "inter_sm": 2}  # how often a schedule's kernel moves an element
OWN_FLAGS = 128  # of a rank's: those that an op may use as it likes
MOVES = 2  # buffers of a CTA's mover, a part each
SMALL_TILE = 128 * 128  # elements of an accumulator beside which there are registers for other things
OWN_SHARE = 0.239  # of a product, behind which an owner's sums come: of its last half, a part; between two H200s
BACK_US = 9.0  # two shots within a CTA: until what an owner summed last has come back; between two H200s
COMM_SM_GBS = 27.9  # what a communicator moves that fetches all ranks' tiles itself; measured between two H200s
COMM_SMS = (4, 8, 16)  # communicators that the planner considers


@dataclass(frozen=True)
class Problem:
    """One call of matmul + all-reduce as every rank sees it.

    m, n: the product; k: this rank's share of the inner dimension; sms: SMs the kernel may use on this rank; norm:
    whether rows are normalized; linked: whether peers are behind a link (False for virtual and emulated ranks);
    multicast: whether the fabric reaches all of them at once; cores: those of `Plan.core` that there are;
    operand_bytes: size of an element of a and b; scales: of each row in a K step, 0 if it has none of blocks along K.
    """

    m: int
    n: int
    k: int
    world: int
    sms: int
    norm: bool = False
    linked: bool = True
    multicast: bool = False
    cores: tuple[str, ...] = ("wgmma",)
    operand_bytes: int = 2
    scales: int = 0


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


def result_buffers(problem: Problem, plan: Plan, hardware: Hardware = H200) -> int:
    """Buffers for finished parts of each multiplier, beside those of a mover; 0 if none fits."""
    return part_buffers(plan.tile, plan.stages, 2, _less_movers(plan, hardware), plan.core, problem.scales)


def _less_movers(plan: Plan, hardware: Hardware) -> Hardware:
    """The hardware with the shared memory that is left beside a mover's buffers."""
    taken = MOVES * part_rows(plan.tile, plan.core) * PART_BYTES if SHOTS[plan.schedule] == 2 else 0
    return replace(hardware, shared_bytes=hardware.shared_bytes - taken)


def slot_bytes(problem: Problem, plan: Plan) -> int:
    """Bytes of one of a rank's two slots: a place for each source, or, inter-SM, for each owner."""
    return 2 * problem.world * math.prod(place_of(problem, plan)) if SHOTS[plan.schedule] else 0


def workspace_bytes(problem: Problem, plan: Plan) -> int:
    """Bytes of a rank's slots; in the schedule "none" those of our own all-reduce."""
    behind = 2 * problem.m * problem.n if plan.schedule == "none" and problem.world > 1 else 0
    return core.SLOTS * (behind or slot_bytes(problem, plan))


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
    of = problem.operand_bytes, problem.cores, problem.scales
    tileless = core.untileable(plan, 2, _less_movers(plan, hardware), *of)
    shared = core.unshareable(_alone(problem, plan), plan)
    return tileless or shared or core.roomless(workspace_bytes(problem, plan), hardware)


def _alone(problem: Problem, plan: Plan) -> core.Problem:
    """A reduce-scatter with as many tiles."""
    world, (rows, cols) = owners(problem, plan), place_of(problem, plan)
    return core.Problem(rows * world, cols, problem.k, world, 2, computing(problem, plan), linked=False)


def cost_of(problem: Problem, plan: Plan, tiling: Tiling, hardware: Hardware = H200) -> Cost:
    """What a call takes, compute in whole waves of tiles. One shot, the sums come behind the tiles. Two shots, they are
    made and travel back while tiles are computed, but those of the last chunk, and what OWN_SHARE of the product does
    not hide, as an owner's tiles come last.

    Sums take SM_FETCH_GBS on an SM, measured on virtual ranks of an H200 with N = K = 8192.
    """
    tiles, sms = count_tiles(problem, plan), computing(problem, plan)
    tiling = tiling.on(hardware).among(core.shares_gpu(problem), tiles / sms)
    compute = tiling.compute_us(tiles, max(-(-problem.k // plan.tile[2]), 1), plan.split, sms)
    memory_rate = hardware.memory_gb_per_s * 1e3 * problem.sms / hardware.sms
    sum_rate = min(memory_rate, SM_FETCH_GBS * problem.sms * 1e3)
    result, shots = 2.0 * problem.m * problem.n, SHOTS[plan.schedule]
    sent = sent_bytes(problem, plan)
    operands = operand_bytes(problem.m, problem.n, problem.k, plan.tile, sms, hardware) * problem.operand_bytes / 2
    memory = hardware.launch_us + (operands + result + (sent if shots else 0)) / memory_rate
    linked = problem.linked and shots > 0
    link = hardware.launch_us + sent / (hardware.link_gb_per_s * 1e3) if linked else 0.0
    exposed = tiling.exchange_us(tiles, plan.split, sms)
    if problem.norm and shots != 1:
        exposed += hardware.launch_us + 2 * result / memory_rate
    if shots == 0:
        return Cost(compute, memory, 0.0, exposed + _collective_us(problem, hardware))
    if shots == 1:  # behind the loop the places of all sources are summed, and what is normed is read again and written
        summed = result * (problem.world + (3 if problem.norm else 1))
        return Cost(compute, memory, link, exposed + summed / sum_rate, hardware.sync_us)
    chunks = chunks_of(problem, plan)[1]  # of which the last one travels behind the loop
    tail = 2 * result / chunks / (sum_rate * sms / problem.sms)
    if plan.schedule == "inter_sm":  # communicators read and write the owner's share; each fetches what fills a link
        share = 2 * result / problem.world * (1 if plan.mechanism == "multimem" else problem.world)
        carried = share / (plan.comm_sms * (COMM_SM_GBS if plan.mechanism == "tma" else hardware.sm_gb_per_s) * 1e3)
        link, tail = max(link, hardware.launch_us + carried), tail + carried / chunks
    if not problem.linked and tiles <= sms:  # peers' tiles come when own ones are done: nothing hides that
        tail += hardware.sync_us
    if problem.linked:
        back = sent / (hardware.link_gb_per_s * 1e3)
        tail = max(tail, back / chunks)
        link = max(link, hardware.launch_us + (2 - 1 / chunks) * back)
        if plan.schedule == "intra_sm":
            tail = BACK_US + max(tail, back + 2 * result / sum_rate - OWN_SHARE * compute)
    return Cost(compute, memory, link, exposed + tail, shots * hardware.sync_us)


def plain(problem: Problem, hardware: Hardware = H200) -> Cost | None:
    """What torch.mm and NCCL's all-reduce take, one after the other; None if the profile does not say."""
    sent = 4.0 * problem.m * problem.n * (problem.world - 1) / problem.world
    alone = core.Problem(problem.m, problem.n, problem.k, 1, 2, problem.sms, linked=False, cores=problem.cores)
    return core.plain_way("all_reduce", alone, problem.world, sent, hardware)


def sent_bytes(problem: Problem, plan: Plan) -> float:
    """What a rank sends, and as much comes, once; two shots: to, and then from, an owner of whole columns. In the
    fabric everything leaves once to be summed, and comes back once."""
    if plan.mechanism == "multimem":
        return problem.m * problem.n * (problem.world + 1) / problem.world
    return (problem.world - 1) * 2.0 * problem.m * min(place_of(problem, plan)[1], problem.n)


def _collective_us(problem: Problem, hardware: Hardware) -> float:
    """Of the all-reduce behind the schedule "none", in one shot or two."""
    result, peers, link_rate = 2.0 * problem.m * problem.n, problem.world - 1, hardware.link_gb_per_s * 1e3
    if peers == 0:
        return 0.0
    two = 2 * hardware.launch_us + 2 * hardware.sync_us + 2 * result * peers / problem.world / link_rate
    return min(hardware.launch_us + hardware.sync_us + result * peers / link_rate, two)


def ways(problem: Problem) -> list[Way]:
    """What the planner tries: what runs in one kernel, in the fabric where there is multicast; two where a kernel has
    too few flags for two shots."""
    if problem.world == 1:
        return [("tma", "none", 0)]
    if 2 * problem.world > OWN_FLAGS:
        return [("tma", "one_shot", 0), ("tma", "none", 0)]
    inside = [("multimem", "inter_sm", comm_sms) for comm_sms in COMM_SMS] if problem.multicast else []
    return [("tma", "one_shot", 0), ("tma", "intra_sm", 0), *inside]


def further_ways(problem: Problem) -> list[Way]:
    """What the op has besides, which was never seen to be faster."""
    return [] if problem.world == 1 else [("tma", "none", 0), *(("tma", "inter_sm", sms) for sms in COMM_SMS)]


def candidates(
    problem: Problem, hardware: Hardware = H200, tried: Iterable[Way] | None = None
) -> list[tuple[float, Plan]]:
    """All plans that can run `problem`, each with its predicted microseconds, the fastest first: in the ways that are
    tried, by default `ways`."""
    found: list[tuple[float, Plan]] = []
    for (mechanism, schedule, comm_sms), tiling, split in product(
        ways(problem) if tried is None else tried,
        tilings_of(problem.operand_bytes, problem.cores[0], problem.scales),
        SPLITS,
    ):
        plan = Plan(mechanism, schedule, tiling.tile, tiling.stages, split, comm_sms, core=problem.cores[0])
        if unsupported(problem, plan, hardware):
            continue
        tiles, sms = count_tiles(problem, plan), computing(problem, plan)
        if split == 1 or (whole_tiles(tiles, sms, split) < tiles and problem.k >= 128 * split):
            cost = partial(cost_of, problem, plan, hardware=hardware)
            found += core.in_each_ring(plan, tiling, _less_movers(plan, hardware), cost, problem.scales)
    return sorted(found, key=lambda each: each[0])


ALONE = "one rank, so nothing is summed: a plain matmul"
BEHIND = "more ranks than two shots have flags for: the product, then an all-reduce of our own"
WAYS = {
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
    """The fastest supported plan by the cost model; NoRoom if there is none."""
    shared = (problem.m, problem.n) if core.shares_gpu(problem) else None
    cost, plan = core.first(candidates(problem, hardware), hardware, shared)
    tiles = count_tiles(problem, plan)
    way = WAYS.get(plan.schedule, ALONE if problem.world == 1 else BEHIND)
    count = "1 tile" if tiles == 1 else f"{tiles} tiles"
    last = f", those of the last wave shared by {plan.split} each," if plan.split > 1 else ""
    size = f"{plan.tile[0]} x {plan.tile[1]}"
    sms = f"{computing(problem, plan)} SMs" + (f" beside {plan.comm_sms} communicators" if plan.comm_sms else "")
    reason = f"{way}; {count} of {size}{last} on {sms} is the cheapest tiling"
    reason += f"; {ring_says(tiling_of(plan.tile, plan.stages, problem.operand_bytes).on(hardware))}"
    return replace(plan, predicted_us=round(cost, 1), reason=reason)
