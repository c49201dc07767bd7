"""Predictions of the collectives, which run by registers in one launch, or an all-reduce in two."""

from dataclasses import dataclass

from tileweave.planner.cost import Cost, collective_us, push_rate
from tileweave.planner.hardware import H200, Hardware
from tileweave.planner.plan import Plan

NO_TILE = (0, 0, 0)  # of a plan: nothing is multiplied


@dataclass(frozen=True)
class Problem:
    """One collective as every rank sees it. name: of the op; nbytes: of a rank's x; sms: CTAs of its largest launch, an
    SM each; linked: whether peers are behind a link."""

    name: str
    nbytes: int
    world: int
    sms: int
    linked: bool = True


def schedules(name: str) -> tuple[str, ...]:
    """Of the op: an all-reduce has two."""
    return ("one_shot", "two_shots") if name == "all_reduce" else ("one_shot",)


def plan_of(problem: Problem, schedule: str, hardware: Hardware = H200) -> tuple[Plan, Cost]:
    """A schedule, in which all CTAs communicate, and its prediction."""
    cost = cost_of(problem, schedule, hardware)
    plan = Plan("register", schedule, NO_TILE, 0, 1, problem.sms, round(cost.total_us, 1), "")
    return plan, cost


def cost_of(problem: Problem, schedule: str, hardware: Hardware = H200) -> Cost:
    """What a call takes: in each launch a rank lays its part out in its own memory while it takes what is laid out at
    its peers. Not fitted to measurements."""
    whole, share = float(problem.nbytes), problem.nbytes / problem.world
    of_each: dict[str, tuple[float, float]] = {  # bytes that are laid out, that are taken of each peer
        "all_gather": (whole, whole),
        "all_to_all": (whole, share),
        "reduce_scatter": (whole, share),
        "all_reduce": (whole, whole),
    }
    launches = [(whole, share), (share, share)] if schedule == "two_shots" else [of_each[problem.name]]
    memory_rate = hardware.memory_gb_per_s * 1e3 * problem.sms / hardware.sms
    rate = push_rate("register", problem.sms, hardware, problem.linked)
    memory = link = 0.0
    for laid, taken in launches:
        memory += hardware.launch_us + (2 * laid + 2 * taken * problem.world) / memory_rate
        link += hardware.launch_us + taken * (problem.world - 1) / rate
    return Cost(0.0, memory, link, 0.0, len(launches) * hardware.sync_us)


def plain(problem: Problem, hardware: Hardware = H200) -> Cost | None:
    """What NCCL takes; None if the profile does not say. An all-to-all is taken to be as fast as an all-gather that
    sends as much."""
    away = (problem.world - 1) / problem.world
    sent = problem.nbytes * {"all_gather": problem.world, "all_reduce": 2}.get(problem.name, 1) * away
    kind = "all_gather" if problem.name == "all_to_all" else problem.name
    taken = collective_us(kind, problem.world, sent, hardware)
    return None if taken is None else Cost(0.0, 0.0, 0.0, taken)
