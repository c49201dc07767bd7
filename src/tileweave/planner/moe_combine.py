"""Plans of a grouped matmul whose rows go home, one for each choice of a token. Tiles fit the rank's own rows, and may
differ between ranks."""

from dataclasses import dataclass, replace
from functools import lru_cache

from tileweave.planner import moe
from tileweave.planner import plan as core
from tileweave.planner.cost import Cost, collective_us, push_rate
from tileweave.planner.hardware import H200, Hardware
from tileweave.planner.plan import Plan
from tileweave.planner.tiling import SM_FETCH_GBS, Tiling, ring_says


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
    def alone(self) -> moe.GroupedProblem:
        """The grouped matmul of a rank."""
        return moe.GroupedProblem(self.rows, self.experts, self.n, self.k, self.sms, self.cores)


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
    if plan.mechanism != "register" or plan.schedule != "intra_sm":
        return (
            f"plan.mechanism={plan.mechanism!r}, plan.schedule={plan.schedule!r}: moe_matmul_combine has 'register' "
            "and 'intra_sm'"
        )
    if plan.split != 1 or plan.comm_sms != 0:
        return f"plan.split={plan.split}, plan.comm_sms={plan.comm_sms}: moe_matmul_combine has 1 and 0"
    return core.untileable(plan, 2, hardware, cores=problem.cores)


def workspace_bytes(problem: Problem) -> int:
    """Bytes of a rank's slots: a place for each row of its tokens."""
    return core.SLOTS * 2 * problem.rows * problem.n


def cost_of(problem: Problem, tiling: Tiling, hardware: Hardware = H200) -> Cost:
    """What a call takes, not fitted to measurements: rows travel beside the tiles, and behind them a rank sums what has
    come for its own tokens."""
    product = moe.cost_of(problem.alone, tiling, hardware)
    row, away = 2.0 * problem.n, (problem.world - 1) / problem.world
    memory_rate = hardware.memory_gb_per_s * 1e3 * problem.sms / hardware.sms
    sum_rate = min(memory_rate, SM_FETCH_GBS * problem.sms * 1e3)
    sent = problem.rows * away * row / push_rate("register", problem.sms, hardware, problem.linked)
    exposed = product.exposed_us + (problem.rows + problem.tokens) * row / sum_rate
    return Cost(product.compute_us, product.memory_us, hardware.launch_us + sent, exposed, hardware.sync_us)


def plain(problem: Problem, tiling: Tiling, hardware: Hardware = H200) -> Cost | None:
    """What the product and then NCCL take, if its all-to-all is as fast as an all-gather; None if the profile does not
    say."""
    sent = 2.0 * problem.n * problem.rows * (problem.world - 1) / problem.world
    collective = collective_us("all_gather", problem.world, sent, hardware)
    if collective is None:
        return None
    product = moe.cost_of(problem.alone, tiling, hardware)
    return replace(product, exposed_us=product.exposed_us + collective)


@lru_cache(maxsize=1024)
def plan_for(own: moe.GroupedProblem, hardware: Hardware = H200) -> Plan:
    """The plan of a way back: that of this rank's matmul alone."""
    tiling = moe.cheapest(moe.tilings_by_cost(own, hardware))[1]
    reason = (
        "rows of a tile belong to several ranks, so the CTA that made it sends them row by row (intra-SM, stores from "
        f"registers), and each rank sums its tokens' rows behind its tiles; tiles of {tiling.tile[0]} x "
        f"{tiling.tile[1]} on {own.sms} SMs are the cheapest; {ring_says(tiling.on(hardware))}"
    )
    return Plan("register", "intra_sm", tiling.tile, tiling.stages, reason=reason, core=own.cores[0])
