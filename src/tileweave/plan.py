"""`plan`: what the planner would choose for a shape on a machine, and why, with nothing launched."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from tileweave.fabric import MAX_RANKS, fabric_of
from tileweave.ops.all_gather_matmul import check as gather_check
from tileweave.ops.contract import DTYPES, Like, Site
from tileweave.ops.matmul_all_reduce import check as reduce_check
from tileweave.ops.matmul_reduce_scatter import check as scatter_check
from tileweave.ops.ring_attention import check as ring_check
from tileweave.ops.ulysses_attention import check as ulysses_check
from tileweave.planner import all_gather_matmul, attention, matmul_all_reduce, moe, profile
from tileweave.planner import plan as matmul_reduce_scatter
from tileweave.planner.cost import Cost
from tileweave.planner.decision import Candidate, Decision, best_of_ways, plain_candidate, settle
from tileweave.planner.hardware import SHIPPED, Hardware
from tileweave.planner.plan import Plan
from tileweave.planner.tiling import BY_OPERAND_BYTES
from tileweave.planner.timeline import timeline

META = torch.device("meta")
MATMUL = {"m": 8192, "n": 8192, "k": 8192}
ATTENTION = {"batch": 1, "heads": 32, "kv_heads": 32, "seq": 32768, "dim": 128, "causal": 0}
# The sizes of each op's whole problem, with what they are where they are left out.
SIZES: dict[str, dict[str, int]] = {
    "matmul_reduce_scatter": MATMUL,
    "all_gather_matmul": MATMUL,
    "matmul_all_reduce": MATMUL,
    "ring_attention": ATTENTION,
    "ulysses_attention": ATTENTION,
    "moe_dispatch_matmul": {"tokens": 32768, "hidden": 7168, "inner": 2048, "experts": 256, "topk": 8},
}
# Of these each rank has its share.
SHARED = {
    "matmul_reduce_scatter": ("m", "k"), "all_gather_matmul": ("m", "n"), "matmul_all_reduce": ("k",),
    "ring_attention": ("seq",), "ulysses_attention": ("seq", "heads"), "moe_dispatch_matmul": ("tokens", "experts"),
}  # fmt: skip


def plan(
    op: str,
    shape: Mapping[str, int],
    dtype: torch.dtype = torch.bfloat16,
    group=None,
    *,
    gpu: str | None = None,
    ranks: int | None = None,
) -> Decision:
    """What the planner chooses for a call, what comes next, and what it rejects, each with its reason in numbers.

    Args:
        op: "matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce", "ring_attention", "ulysses_attention" or
            "moe_dispatch_matmul".
        shape: sizes of the whole problem, of which each rank has its share: m, n, k of the whole product; batch, heads,
            kv_heads, seq, dim and causal (0 or 1; a ring then has its pieces in zigzag); tokens, hidden, inner,
            experts, topk. What is left out has a default.
        dtype: torch.bfloat16 or torch.float16, of the operands.
        group: the ranks of a call, as the op takes it: the plan is then that of a call of this rank. Not with `ranks`.
        gpu: a profile that ships, "h100", "h200", "b200" or "gb200-nvl72", or the file of one that `tileweave probe`
            wrote; None: that of this machine's GPU, "h200" where it is no other. Ops themselves plan for an H200.
        ranks: how many, all joined by links; None, without a group: as many as the profile has. If there are more than
            links join, no kernel can run, and the plain way is all there is.

    Returns:
        A `Decision`: `plan`, `runner_up` and `rejected`, plans with `predicted_us` in microseconds and a `reason`;
        `cost`, the terms of the prediction; `fused`; `to_dict()`. The plain way, torch's product and NCCL, is a
        candidate where the profile says what NCCL takes, and has the mechanism "nccl". Nothing is launched.

    Raises:
        ValueError, TypeError: an unknown op, size, dtype or profile, or sizes that break the op's contract.
    """
    sizes = _sizes(op, shape)
    if dtype not in DTYPES:
        raise ValueError(f"plan: dtype must be torch.bfloat16 or torch.float16, got {dtype}")
    if group is not None and ranks is not None:
        raise ValueError(f"plan: ranks={ranks} goes without a group, which has its own")
    hardware = profile(here() if gpu is None else gpu)
    site = _site(group, hardware, ranks)
    for name in SHARED[op]:
        if sizes[name] % site.world:
            below = sizes[name] // site.world * site.world
            near = f"{below} or {below + site.world}" if below else str(site.world)
            raise ValueError(
                f"plan: {name}={sizes[name]} is not divisible by {site.world} ranks, of which each has its share; "
                f"{near} would be"
            )
    name = str(dtype).removeprefix("torch.")
    chosen, others, plain, shard = DECIDE[op](op, site, sizes, dtype, hardware)
    if site.world > hardware.ranks and plain is not None:
        why = f"{site.world} ranks are more than the {hardware.ranks} that links join, so no kernel reaches all"
        cut = Plan(**{**plain.plan.to_dict(), "reason": f"{why}: {plain.plan.reason}"})
        simulated = timeline(op, site.world, sizes, cut, plain.cost, hardware.sms, hardware)
        return Decision(op, hardware.name, site.world, sizes, name, cut, plain.cost, None, (), *simulated)
    return settle(op, hardware, site.world, sizes, name, chosen, others, plain, site.sms or hardware.sms, shard)


def _sizes(op: str, shape: Mapping[str, int]) -> dict[str, int]:
    """All sizes of the problem."""
    if op not in SIZES:
        raise ValueError(f"plan: no planner for op {op!r}; there is one for {', '.join(SIZES)}")
    for name, size in shape.items():
        if name not in SIZES[op]:
            raise ValueError(f"plan: {op} has the sizes {', '.join(SIZES[op])}, got {name!r}")
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"plan: {name} must be an int, got {size!r}")
        least, most = (0, 1) if name == "causal" else (1, 2**31 - 1)
        if not least <= size <= most:
            raise ValueError(f"plan: {name} must be from {least} to {most}, got {size}")
    sizes = {**SIZES[op], **shape}
    return sizes | ({"kv_heads": sizes["heads"]} if "heads" in shape and "kv_heads" not in shape else {})


def here() -> str:
    """The name of the profile of this machine's first GPU; that of an H200 where it is no other that ships."""
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return next((each for each in reversed(SHIPPED) if each.split("-")[0] in name), "h200")


def _site(group: Any, hardware: Hardware, ranks: int | None) -> Site:
    """Where the call would run: in a group, or on so many GPUs of a profile."""
    if group is not None:
        return Site.of(fabric_of(group, "cuda" if torch.cuda.is_available() else "cpu"))
    ranks = hardware.ranks if ranks is None else ranks
    if isinstance(ranks, bool) or not isinstance(ranks, int):
        raise TypeError(f"plan: ranks must be an int, got {ranks!r}")
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"plan: ranks must be from 1 to {MAX_RANKS}, got {ranks}")
    unicast = None if hardware.multicast else "the profile has no multicast"
    return Site("processes", ranks, hardware.sms, META, None, unicast, linked=ranks > 1)


Found = tuple[Candidate, list[Candidate], Candidate | None, float]


@dataclass(frozen=True)
class _Matmul:
    """A matmul fused with a collective: its planner, the problem and the bytes of a rank's shard by site and sizes."""

    planner: ModuleType
    problem: Callable[[Site, dict[str, int], torch.dtype], tuple[Any, str | None]]
    shard: Callable[[dict[str, int], int], float]

    def __call__(self, op, site: Site, sizes: dict[str, int], dtype: torch.dtype, hardware: Hardware) -> Found:
        problem, refusal = self.problem(site, sizes, dtype)
        if refusal:
            raise ValueError(f"plan: {op} has no kernel for this shape: {refusal}")

        def cost(plan: Plan) -> Cost:
            tiling = next(each for each in BY_OPERAND_BYTES[2] if each.tile == plan.tile)
            return self.planner.cost_of(problem, plan, tiling, hardware)

        by_itself = best_of_ways(self.planner.candidates(problem, hardware), cost)
        further = best_of_ways(self.planner.candidates(problem, hardware, self.planner.further_ways(problem)), cost)
        chosen = Candidate(self.planner.plan_for(problem, hardware), by_itself[0].cost)
        plain = self.planner.plain(problem, hardware) if site.linked else None
        found = plain_candidate(plain) if plain else None
        return chosen, by_itself[1:] + further, found, self.shard(sizes, site.world)


def _scatter_problem(site: Site, s: dict[str, int], dtype: torch.dtype) -> tuple[Any, str | None]:
    k = s["k"] // site.world
    call = scatter_check.check(
        site.world, _like(dtype, s["m"], k), _like(dtype, k, s["n"]), "sum", None, False, None, 0
    )  # fmt: skip
    return scatter_check.problem_of(site, call), scatter_check.unaddressable(call)


def _gather_problem(site: Site, s: dict[str, int], dtype: torch.dtype) -> tuple[Any, str | None]:
    a, b = _like(dtype, s["m"] // site.world, s["k"]), _like(dtype, s["k"], s["n"] // site.world)
    call = gather_check.check(a, [b], [], False, 0)
    return gather_check.problem_of(site, call), gather_check.unaddressable(call)


def _reduce_problem(site: Site, s: dict[str, int], dtype: torch.dtype) -> tuple[Any, str | None]:
    k = s["k"] // site.world
    options = reduce_check.Options(False, 0.0, 0)
    call = reduce_check.check(_like(dtype, s["m"], k), _like(dtype, k, s["n"]), None, None, None, options)
    return reduce_check.problem_of(site, call), reduce_check.unaddressable(call)


def _like(dtype: torch.dtype, *shape: int) -> Like:
    return Like(torch.Size(shape), dtype, META)


def _attention(op: str, site: Site, s: dict[str, int], dtype: torch.dtype, hardware: Hardware) -> Found:
    """Ring and Ulysses attention, whose plans differ by how many SMs communicate."""
    rows, causal = s["seq"] // site.world, bool(s["causal"])
    q, k = (_like(dtype, s["batch"], heads, rows, s["dim"]) for heads in (s["heads"], s["kv_heads"]))
    if op == "ring_attention":
        placement = "zigzag" if causal and site.world > 1 else "contiguous"
        call = ring_check.check(site.world, q, k, k, None, causal, None, "bhsd", placement)
        problem = ring_check.problem_of(site, call)
    else:
        problem = ulysses_check.problem_of(
            site, ulysses_check.check(site.world, q, k, k, None, causal, None, "bhsd")
        )  # fmt: skip
    if problem is None:
        raise ValueError(f"plan: {op} has no kernel for heads of dimension {s['dim']}; 128 would do")
    found = attention.candidates(problem, hardware)
    chosen = Candidate(attention.plan_for(problem, hardware), attention.cost_of(problem, found[0][1], hardware))
    plain = attention.plain(problem, hardware) if site.linked else None
    next_best = [
        Candidate(Plan(**{**each.to_dict(), "predicted_us": round(us, 1)}), attention.cost_of(problem, each, hardware))
        for us, each in found[1:4]
    ]
    return chosen, next_best, plain_candidate(plain) if plain else None, problem.sent / max(site.world - 1, 1)


def _dispatch(op: str, site: Site, s: dict[str, int], dtype: torch.dtype, hardware: Hardware) -> Found:
    """A dispatch, whose plan does not depend on how many tokens there are; its prediction does."""
    problem = moe.DispatchProblem(
        site.world, s["experts"] // site.world, s["inner"], s["hidden"], site.sms or hardware.sms
    )  # fmt: skip
    if refusal := moe.unfusable(problem):
        raise ValueError(f"plan: {op} has no kernel for this: {refusal}")
    made, tokens = moe.dispatch_plan_for(problem, hardware), s["tokens"] // site.world
    cost = moe.dispatch_cost(problem, made, tokens, s["topk"], hardware)
    chosen = Candidate(Plan(**{**made.to_dict(), "predicted_us": round(cost.total_us, 1)}), cost)
    plain = moe.plain_dispatch(problem, made, tokens, s["topk"], hardware) if site.linked else None
    return chosen, [], plain_candidate(plain) if plain else None, 2.0 * tokens * s["hidden"]


DECIDE: dict[str, Callable[..., Found]] = {
    "matmul_reduce_scatter": _Matmul(
        matmul_reduce_scatter, _scatter_problem, lambda s, world: 2.0 * s["m"] * s["n"] / world
    ),
    "all_gather_matmul": _Matmul(
        all_gather_matmul, _gather_problem, lambda s, world: 2.0 * s["m"] * s["k"] / world
    ),
    "matmul_all_reduce": _Matmul(
        matmul_all_reduce, _reduce_problem, lambda s, world: 2.0 * s["m"] * s["n"] / world
    ),
    "ring_attention": _attention,
    "ulysses_attention": _attention,
    "moe_dispatch_matmul": _dispatch,
}  # fmt: skip
