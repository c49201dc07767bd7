"""Plans of a grouped matmul whose rows go home: a row for each choice of a token, or the sum of its rows at each rank.

All ranks go one way, so it is chosen by what all of them know; tiles may differ, and fit the rank's own rows.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from tileweave.planner import moe
from tileweave.planner import plan as core
from tileweave.planner.cost import Cost, collective_us, push_rate
from tileweave.planner.hardware import H200, Hardware
from tileweave.planner.plan import Plan
from tileweave.planner.tiling import SM_FETCH_GBS, Tiling, ring_says, tiling_of, tilings_of

SCHEDULES = ("intra_sm", "inter_sm")  # a row for each choice; sums
CHUNKS = 4  # of columns, as sums have them in device code
SHARES = (8, 4, 2)  # of the SMs one in so many sums and sends
SUM_GBS = 7.4  # what a communicator reads and writes: 4 virtual ranks of an H200 (docs/figures/moe_sums_1xH200.json)
MARGIN = 1.10  # by which sums must be predicted to be faster, as no GPUs with a link between them have timed them


@dataclass(frozen=True)
class Problem:
    """One grouped matmul + combine as all ranks see it: `experts` of the rank with most, [k, n] each expert's matrix,
    16-bit; tokens: of the rank with most, each with `topk` choices; 0: any number; sms: SMs the kernel may use on a
    rank; linked: whether peers are behind a link; cores: instructions of these SMs' tensor cores."""

    world: int
    experts: int
    n: int
    k: int
    tokens: int
    topk: int
    sms: int
    linked: bool = True
    cores: tuple[str, ...] = ("wgmma",)

    @property
    def rows(self) -> int:
        """Of a rank, if experts are chosen evenly."""
        return self.tokens * self.topk

    @property
    def sums(self) -> float:
        """Ranks that have rows of a rank's tokens, of all tokens together: as many sums, expected."""
        return self.tokens * self.world * (1 - (1 - 1 / self.world) ** self.topk)

    def alone(self, sms: int) -> moe.GroupedProblem:
        """The grouped matmul of a rank, on `sms` SMs."""
        return moe.GroupedProblem(self.rows, self.experts, self.n, self.k, sms, self.cores)


def unfusable(problem: Problem) -> str | None:
    """Why no kernel of ours can multiply rows [k] by matrices [k, n] and send the products back; None if one can."""
    if problem.world == 1:
        return "a world of one has nobody to send to"
    for name, size in (("H", problem.n), ("I", problem.k)):
        if size % 8 or size == 0:
            return f"{name} = {size} is no multiple of 8, so rows are not 16-byte aligned as TMA needs"
    return None


def unsupported(problem: Problem, plan: Plan, hardware: Hardware = H200) -> str | None:
    """Why `plan` cannot run `problem`, naming the legal values; None if it can. Planner and launch both ask here."""
    sms = problem.sms
    if plan.mechanism != "register" or plan.schedule not in SCHEDULES:
        return (
            f"plan.mechanism={plan.mechanism!r}, plan.schedule={plan.schedule!r}: moe_matmul_combine has 'register' "
            "and 'intra_sm', a row for each choice, or 'inter_sm', one for each token and rank"
        )
    if plan.schedule == "inter_sm":
        if sms < 2:
            return f"plan.schedule='inter_sm': one SM has to send and one to multiply, and a rank has {sms}"
        if plan.split != 1 or not 1 <= plan.comm_sms < sms:
            return (
                f"plan.split={plan.split}, plan.comm_sms={plan.comm_sms}: moe_matmul_combine has 1 and, with "
                f"'inter_sm', 1 to {sms - 1} of {sms} SMs"
            )
    elif plan.split != 1 or plan.comm_sms != 0:
        return f"plan.split={plan.split}, plan.comm_sms={plan.comm_sms}: moe_matmul_combine has 1 and 0"
    return core.untileable(plan, 2, hardware, cores=problem.cores)


def workspace_bytes(problem: Problem, plan: Plan) -> int:
    """Bytes of a rank's slots: a place for each row of its tokens, or of each rank's sums for each of them."""
    rows = problem.rows if plan.schedule == "intra_sm" else math.ceil(problem.sums)
    return core.SLOTS * 2 * rows * problem.n


def cost_of(problem: Problem, plan: Plan, tiling: Tiling, hardware: Hardware = H200) -> Cost:
    """What a call takes. Of sums, SUM_GBS is measured; else not fitted to measurements.

    Either way a rank sums behind its tiles what has come for its own tokens. Inter-SM, sums are what comes:
    communicators read all rows where they were made and write the sums, at SUM_GBS each, no faster than the link; the
    tiles read rows of the operand again for each chunk of columns, unless L2 keeps them; a chunk is summed behind its
    tiles, so nothing hides the last one's sums, or the first one's tiles.
    """
    product = moe.cost_of(problem.alone(problem.sms - plan.comm_sms), tiling, hardware)
    row, away = 2.0 * problem.n, (problem.world - 1) / problem.world
    memory_rate = hardware.memory_gb_per_s * 1e3 * problem.sms / hardware.sms
    sum_rate = min(memory_rate, SM_FETCH_GBS * problem.sms * 1e3)
    if plan.schedule == "intra_sm":
        rate = push_rate("register", problem.sms, hardware, problem.linked)
        sent, memory = problem.rows * away * row / rate, product.memory_us
        exposed = (problem.rows + problem.tokens) * row / sum_rate
    else:
        rate = push_rate("register", plan.comm_sms, hardware, problem.linked)
        moved = (problem.rows + problem.sums) * row / (SUM_GBS * plan.comm_sms * 1e3)
        sent, operand = max(problem.sums * away * row / rate, moved), 2.0 * problem.rows * problem.k
        chunks = min(CHUNKS, math.ceil(problem.n / plan.tile[1]))
        again = 0.0 if operand < 0.6 * hardware.l2_bytes * problem.sms / hardware.sms else (chunks - 1) * operand
        memory = product.memory_us + (problem.rows * row + again) / memory_rate
        exposed = (problem.sums + problem.tokens) * row / sum_rate + min(sent, product.compute_us) / chunks
    return Cost(product.compute_us, memory, hardware.launch_us + sent, product.exposed_us + exposed, hardware.sync_us)


def plain(problem: Problem, tiling: Tiling, hardware: Hardware = H200) -> Cost | None:
    """What the product and then NCCL take, if its all-to-all is as fast as an all-gather; None if the profile does not
    say."""
    sent = 2.0 * problem.n * problem.rows * (problem.world - 1) / problem.world
    collective = collective_us("all_gather", problem.world, sent, hardware)
    if collective is None:
        return None
    product = moe.cost_of(problem.alone(problem.sms), tiling, hardware)
    return replace(product, exposed_us=product.exposed_us + collective)


def communicators(problem: Problem) -> list[int]:
    """How many SMs may sum and send."""
    return sorted({max(problem.sms // share, 1) for share in SHARES if problem.sms > 1})


def candidates(problem: Problem, schedule: str, hardware: Hardware = H200) -> list[tuple[float, Plan]]:
    """All plans of a schedule, each with its predicted microseconds, the fastest first."""
    of = problem.cores[0]
    found: list[tuple[float, Plan]] = []
    for comm_sms in communicators(problem) if schedule == "inter_sm" else [0]:
        for tiling in tilings_of(2, of):
            plan = Plan("register", schedule, tiling.tile, tiling.stages, comm_sms=comm_sms, core=of)
            cost = partial(cost_of, problem, plan, hardware=hardware)
            found += core.in_each_ring(plan, tiling, hardware, cost)
    return sorted(found, key=lambda each: each[0])


@lru_cache(maxsize=1024)
def summing(problem: Problem, hardware: Hardware = H200) -> Plan | None:
    """The best plan by sums, if that way is to be taken: where it is predicted to be faster by MARGIN than a row for
    each choice, and takes no more workspace, however many slots are counted. It only costs where there is no link."""
    if not problem.linked or problem.sms < 2 or problem.world > problem.topk:
        return None
    (rows, _), *_ = candidates(problem, "intra_sm", hardware)
    (us, plan), *_ = candidates(problem, "inter_sm", hardware)
    if MARGIN * us > rows:
        return None
    reason = (
        f"a token's {problem.topk} rows are on {problem.sums / max(problem.tokens, 1):.1f} ranks, of which each sends "
        f"the sum of its own (inter-SM, by {plan.comm_sms} of {problem.sms} SMs): predicted to take {us:.0f} us, a row "
        f"for each choice {rows:.0f} us; tiles of {plan.tile[0]} x {plan.tile[1]} on {problem.sms - plan.comm_sms} SMs "
        f"are the cheapest; {ring_says(tiling_of(plan.tile, plan.stages).on(hardware))}"
    )
    return replace(plan, reason=reason)


def plan_for(problem: Problem, own: moe.GroupedProblem, hardware: Hardware = H200) -> Plan:
    """The plan of a way back, in the schedule that all ranks choose; `own`: the matmul of this rank alone, which tells
    the tile where each row travels by itself."""
    return summing(problem, hardware) or by_rows(own, hardware)


@lru_cache(maxsize=1024)
def by_rows(own: moe.GroupedProblem, hardware: Hardware = H200) -> Plan:
    """The plan that sends a row for each choice: that of the matmul alone."""
    tiling = moe.cheapest(moe.tilings_by_cost(own, hardware))[1]
    reason = (
        "rows of a tile belong to several ranks, so the CTA that made it sends them row by row (intra-SM, stores from "
        f"registers), and each rank sums its tokens' rows behind its tiles; tiles of {tiling.tile[0]} x "
        f"{tiling.tile[1]} on {own.sms} SMs are the cheapest; {ring_says(tiling.on(hardware))}"
    )
    return Plan("register", "intra_sm", tiling.tile, tiling.stages, reason=reason, core=own.cores[0])
