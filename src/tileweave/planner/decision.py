"""A choice that can be asked why: the plan, its runner-up, and what was rejected, each with a reason in numbers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from tileweave.planner.cost import ERROR, PLAIN_MARGIN, Cost
from tileweave.planner.hardware import Hardware
from tileweave.planner.plan import Plan, roomless
from tileweave.planner.simulate import Event
from tileweave.planner.timeline import timeline

MEASURED = "9.0"  # capability of the GPUs on which kernels have been timed
NEVER = "the op never goes this way"
NEVER_RUN = {"multimem": "no kernel has summed or copied in the fabric on a GPU yet; it is compiled and emulated"}
PLAIN = "nccl"  # the mechanism of the plain way, which is no plan of a kernel


@dataclass(frozen=True)
class Candidate:
    """The best plan of one way, mechanism and schedule, with the terms of its prediction. workspace_bytes: of the slots
    on a rank, None of the plain way, which has NCCL's."""

    plan: Plan
    cost: Cost
    workspace_bytes: int | None = None

    @property
    def way(self) -> tuple[str, str]:
        """Mechanism and schedule."""
        return self.plan.mechanism, self.plan.schedule


@dataclass(frozen=True)
class Decision:
    """What `tileweave.plan` answers. verdict: as that of a `Route`; reason: why; plan: None in a fallback that no
    figure is known of; cost: the terms of its prediction; runner_up: None where there is one way; simulated_us, events:
    of a simulation of the plan's tiles and messages, what rank 0 does in it; unmeasured: why the times rest on no
    measurement of a kernel, None if they do; untried: the decision if kernels that have never run
    on such a GPU were to be tried, None where these are all there is, or none are; workspace_bytes: of the plan's
    slots on each rank, None where it is no kernel's."""

    op: str
    gpu: str
    ranks: int
    shape: dict[str, int]
    dtype: str
    verdict: str
    reason: str
    plan: Plan | None
    cost: Cost | None
    runner_up: Plan | None
    rejected: tuple[Plan, ...]
    simulated_us: float | None
    events: tuple[Event, ...]
    unmeasured: str | None
    untried: "Decision | None" = None
    workspace_bytes: int | None = None

    @property
    def fused(self) -> bool:
        """Whether a kernel of ours computes it."""
        return self.verdict == "fused"

    def to_dict(self) -> dict[str, Any]:
        """The decision as plain values, for JSON."""
        terms = None
        if self.cost is not None:
            terms = {name: round(us, 2) for name, us in vars(self.cost).items() if name.endswith("_us")}
            terms |= {"bound": self.cost.bound}
        return {
            "op": self.op, "gpu": self.gpu, "ranks": self.ranks, "shape": self.shape, "dtype": self.dtype,
            "fused": self.fused, "verdict": self.verdict, "reason": self.reason,
            "plan": self.plan.to_dict() if self.plan else None, "terms": terms,
            "workspace_bytes": self.workspace_bytes,
            "simulated_us": None if self.simulated_us is None else round(self.simulated_us, 1),
            "runner_up": self.runner_up.to_dict() if self.runner_up else None,
            "rejected": [plan.to_dict() for plan in self.rejected], "unmeasured": self.unmeasured,
            "untried": self.untried.to_dict() if self.untried else None,
        }  # fmt: skip


def best_of_ways(
    found: Iterable[tuple[float, Plan]], cost: Callable[[Plan], Cost], workspace: Callable[[Plan], int]
) -> list[Candidate]:
    """Of predictions, the fastest first, the first of each way."""
    best: dict[tuple[str, str], Plan] = {}
    for us, plan in found:
        best.setdefault((plan.mechanism, plan.schedule), replace(plan, predicted_us=round(us, 1)))
    return [Candidate(plan, cost(plan), workspace(plan)) for plan in best.values()]


def plain_candidate(cost: Cost, taken: bool = True) -> Candidate:
    """The plain way, and whether the op takes it where it is faster."""
    reason = "torch's product and NCCL's collective, one after the other" + ("" if taken else f"; {NEVER}")
    plan = Plan(PLAIN, "none", (128, 256, 64), 4, 1, 0, round(cost.total_us, 1), reason)
    return Candidate(plan, cost)


def faster_plain(fused_us: float, plain: Cost | None) -> str | None:
    """Why the plain way is taken instead of a fused one; None if it is not predicted to be faster by more than the
    model can tell."""
    if plain is None or fused_us <= PLAIN_MARGIN * plain.total_us:
        return None
    return (
        f"torch's product and NCCL's collective are predicted to take {plain.total_us:.0f} us, the fused kernel "
        f"{fused_us:.0f} us"
    )


@dataclass(frozen=True)
class Question:
    """What is asked: an op on so many ranks of a GPU, sizes by name, the SMs that a rank's kernels may use. bound:
    bytes of workspace that the user allows, None for all."""

    op: str
    hardware: Hardware
    ranks: int
    shape: dict[str, int]
    dtype: str
    sms: int
    bound: int | None = None


@dataclass(frozen=True)
class Found:
    """What an op says to it. verdict, reason: of its route; chosen: the best of its kernels, None where none can serve
    it; others: its other ways; plain: the plain way, None where nothing is known of it; shard_bytes: of a rank."""

    verdict: str
    reason: str
    chosen: Candidate | None
    others: list[Candidate]
    plain: Candidate | None
    shard_bytes: float


def settle(asked: Question, found: Found) -> Decision:
    """The decision that the op makes, beside what it leaves."""
    of = asked.op, asked.hardware.name, asked.ranks, asked.shape, asked.dtype, found.verdict, found.reason
    taken = found.chosen if found.verdict == "fused" else found.plain
    if taken is None:
        return Decision(*of, None, None, None, (), None, (), None)
    rest: list[Candidate] = []
    if found.verdict != "fallback":
        every = found.chosen, *found.others, found.plain
        rest = [each for each in every if each and each is not taken]
        rest.sort(key=lambda each: (crowded(each, asked) is not None, each.cost.total_us))
    told = tuple(replace(each.plan, reason=objection(each, taken, asked, found.shard_bytes)) for each in rest)
    crowd = f"; but {why}" if (why := crowded(taken, asked)) else ""
    plan = replace(taken.plan, reason=f"{found.reason}; {terms(taken.cost)}{crowd}")
    simulated = timeline(asked.op, asked.ranks, asked.shape, plan, taken.cost, asked.sms, asked.hardware)
    capability = asked.hardware.capability
    unmeasured = f"no kernel has run on a GPU of compute capability {capability}; times are an H200's, scaled by rates"
    why = NEVER_RUN.get(plan.mechanism) if capability == MEASURED else unmeasured
    runner_up = told[0] if told and crowded(rest[0], asked) is None else None
    rejected = told[1:] if runner_up else told
    of_plan = taken.workspace_bytes
    return Decision(*of, plan, taken.cost, runner_up, rejected, *simulated, why, workspace_bytes=of_plan)


def crowded(each: Candidate, asked: Question) -> str | None:
    """Why a call could not have its workspace; None if it can."""
    nbytes = each.workspace_bytes or 0
    if (why := roomless(nbytes, asked.hardware)) or asked.bound is None or nbytes <= asked.bound:
        return why
    return f"the plan's workspace takes {nbytes} bytes on each rank, and TILEWEAVE_WORKSPACE allows {asked.bound}"


def terms(cost: Cost) -> str:
    """A prediction's terms in words."""
    parts = [f"{'product' if cost.compute_us else 'own memory'} {max(cost.compute_us, cost.memory_us):.0f} us"]
    if cost.communicate_us:
        parts.append(f"transfer beside it {cost.communicate_us:.0f} us")
    if cost.exposed_us + cost.sync_us:
        parts.append(f"behind them {cost.exposed_us + cost.sync_us:.0f} us")
    return ", ".join(parts)


def objection(each: Candidate, chosen: Candidate, asked: Question, shard_bytes: float) -> str:
    """Why a candidate was not chosen, in numbers."""
    if crowd := crowded(each, asked):
        return crowd
    more = each.cost.total_us / chosen.cost.total_us - 1
    head = f"{each.cost.total_us:.0f} us, {abs(more):.0%} {'more' if more >= 0 else 'less'} than what is taken"
    if 0 > more > -ERROR and each.plan.mechanism != PLAIN:
        head += ", which is within the model's error"
        head += "" if each.way == chosen.way else ", and was never measured to be faster"
    return f"{head}: {_way_says(each, chosen, asked.hardware, asked.sms, shard_bytes)}"


def _way_says(each: Candidate, chosen: Candidate, hardware: Hardware, sms: int, shard_bytes: float) -> str:
    plan, cost = each.plan, each.cost
    mechanism, schedule = each.way
    if mechanism == PLAIN:
        never = f"; {NEVER}" if plan.reason.endswith(NEVER) else ""
        product = max(cost.compute_us, cost.memory_us)
        if not product:
            return f"NCCL's collective{never}"
        return f"NCCL's {cost.exposed_us:.0f} us follow a product of {product:.0f} us{never}"
    if not cost.compute_us:
        return terms(cost)
    if mechanism == "copy_engine":
        took = hardware.transfer_us("copy_engine", "put", shard_bytes)
        share = shard_bytes / took / 1e3 / hardware.link_nominal_gb_per_s if took else 0.0
        return f"the shard is {shard_bytes / 1e6:.2g} MB: the copy engine would reach {share:.0%} of the link"
    if schedule == "none":
        return f"{cost.exposed_us:.0f} us of transfers and sums follow the product, and nothing hides them"
    if schedule == "one_shot":
        return (
            f"{cost.communicate_us:.0f} us travel beside the product, {cost.exposed_us:.0f} us before or after it, "
            "as every rank sends all that its peers sum or multiply"
        )
    if schedule == "inter_sm" and plan.comm_sms:
        instead = f"{cost.compute_us:.0f} us instead of {chosen.cost.compute_us:.0f}"
        return (
            f"{plan.comm_sms} of {sms} SMs communicate, so the product takes {instead}, and what they move "
            f"{cost.communicate_us:.0f} us, {cost.exposed_us:.0f} us of other things behind"
        )
    return f"{terms(cost)}, with tiles of {plan.tile[0]} x {plan.tile[1]}"
