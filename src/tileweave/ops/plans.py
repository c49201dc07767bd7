"""What each op says to a question about a shape: what its own route is, and what that leaves; for `tileweave.plan`."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import torch

from tileweave.ops.all_gather_matmul import check as gather_check
from tileweave.ops.block_scales import KINDS, scales_of
from tileweave.ops.collectives import check as collective_check
from tileweave.ops.collectives.passes import choose as choose_collective
from tileweave.ops.collectives.passes import is_two_shot, passes_in
from tileweave.ops.contract import DTYPES, FP8, Like, Site
from tileweave.ops.grouped_matmul import check as grouped_check
from tileweave.ops.matmul_all_reduce import check as reduce_check
from tileweave.ops.matmul_reduce_scatter import check as scatter_check
from tileweave.ops.moe import check as moe_check
from tileweave.ops.moe.routing import Experts
from tileweave.ops.ring_attention import check as ring_check
from tileweave.ops.route import Route
from tileweave.ops.ulysses_attention import check as ulysses_check
from tileweave.planner import all_gather_matmul, attention, collectives, matmul_all_reduce, moe, moe_combine
from tileweave.planner import plan as matmul_reduce_scatter
from tileweave.planner.cost import Cost
from tileweave.planner.decision import Candidate, Found, best_of_ways, plain_candidate
from tileweave.planner.hardware import H200, Hardware
from tileweave.planner.plan import SLOTS, Plan, in_one_ring, in_other_rings
from tileweave.planner.tiling import Tiling, rings_of, tiling_of, tilings_of

Sizes = dict[str, int]
ENDLESS = 1 << 62  # bytes of memory, more than any plan needs
FIRST, OTHERS = 4, 4  # of the plans that the planner tries, and of those of other ways: how many are measured,
RINGS = 2  # and of the first one's other rings
MATMUL = {"m": 8192, "n": 8192, "k": 8192}
ATTENTION = {"batch": 1, "heads": 32, "kv_heads": 32, "seq": 32768, "dim": 128, "causal": 0}
EXPERTS = {"tokens": 32768, "hidden": 7168, "inner": 2048, "experts": 256, "topk": 8}
LOCAL = ("grouped_matmul",)  # ops in which no other rank takes part
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
FLOAT8 = ("matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce", "all_gather", "all_to_all")  # take it
# The sizes of each op's whole problem, with what they are where they are left out.
SIZES: dict[str, Sizes] = {
    "matmul_reduce_scatter": MATMUL,
    "all_gather_matmul": MATMUL,
    "matmul_all_reduce": MATMUL,
    "ring_attention": ATTENTION,
    "ulysses_attention": ATTENTION,
    "moe_dispatch_matmul": EXPERTS,
    "moe_matmul_combine": EXPERTS,
    "grouped_matmul": {"rows": 32768, "hidden": 7168, "inner": 2048, "experts": 32},
    **{op: {"m": 8192, "n": 8192} for op in COLLECTIVES},
}
# Of these each rank has its share.
SHARED = {
    "matmul_reduce_scatter": ("m", "k"), "all_gather_matmul": ("m", "n"), "matmul_all_reduce": ("k",),
    "ring_attention": ("seq",), "ulysses_attention": ("seq", "heads"), "moe_dispatch_matmul": ("tokens", "experts"),
    "moe_matmul_combine": ("tokens", "experts"), "grouped_matmul": (), "all_gather": ("m",), "reduce_scatter": ("m",),
    "all_reduce": (), "all_to_all": ("m", "n"),
}  # fmt: skip


def check_sizes(caller: str, op: Any, shape: Any, ops: Iterable[str]) -> Sizes:
    """All sizes of the problem, of one of these `ops`; TypeError or ValueError if they are none."""
    if not isinstance(op, str) or not isinstance(shape, Mapping):
        raise TypeError(f"{caller}: expected the name of an op and a mapping of its sizes, got {op!r} and {shape!r}")
    if op not in ops:
        raise ValueError(f"{caller}: no planner for op {op!r}; there is one for {', '.join(ops)}")
    for name, size in shape.items():
        if name not in SIZES[op]:
            raise ValueError(f"{caller}: {op} has the sizes {', '.join(SIZES[op])}, got {name!r}")
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{caller}: {name} must be an int, got {size!r}")
        least, most = (0, 1) if name == "causal" else (1, 2**31 - 1)
        if not least <= size <= most:
            raise ValueError(f"{caller}: {name} must be from {least} to {most}, got {size}")
    sizes = {**SIZES[op], **shape}
    return sizes | ({"kv_heads": sizes["heads"]} if "heads" in shape and "kv_heads" not in shape else {})


def check_dtype(caller: str, op: str, dtype: Any, float8: Iterable[str] = ()) -> None:
    """TypeError or ValueError unless operands of `op` may have it: 16 bits, or float8 of the ops in `float8`."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{caller}: dtype must be a torch.dtype, got {dtype!r}")
    legal = (*DTYPES, FP8) if op in float8 else DTYPES
    if dtype not in legal:
        others = f", which {', '.join(float8)} have" if dtype == FP8 and float8 else ""
        raise ValueError(f"{caller}: dtype must be {' or '.join(map(str, legal))} for {op}, got {dtype}{others}")


def check_topk(caller: str, s: Sizes) -> None:
    """ValueError unless a token can choose so many experts."""
    if s.get("topk", 0) > s.get("experts", 0):
        raise ValueError(f"{caller}: topk={s['topk']} must be at most experts={s['experts']}, each chosen once")


def rounded(op: str, sizes: Sizes, shape: Mapping[str, int], world: int) -> Sizes:
    """The sizes, those that `shape` does not name rounded up so that `world` ranks can have equal shares."""
    left = [name for name in SHARED[op] if name not in shape]
    sizes = sizes | {name: math.ceil(sizes[name] / world) * world for name in left}
    return sizes | ({"kv_heads": sizes["heads"]} if "heads" in left and "kv_heads" not in shape else {})


def check_shares(caller: str, op: str, sizes: Sizes, world: int) -> None:
    """ValueError unless `world` ranks can have equal shares."""
    for name in SHARED[op]:
        if sizes[name] % world:
            below = sizes[name] // world * world
            near = f"{below} or {below + world}" if below else str(world)
            raise ValueError(
                f"{caller}: {name}={sizes[name]} is not divisible by {world} ranks, of which each has its share; "
                f"{near} would be"
            )


def _like(site: Site, dtype: torch.dtype, *shape: int) -> Like:
    return Like(torch.Size(shape), dtype, site.device)


@dataclass(frozen=True)
class _Matmul:
    """A matmul fused with a collective: its planner; the problem and the op's route by site, sizes, dtype and profile;
    the bytes of a rank's shard by sizes, ranks and dtype."""

    planner: ModuleType
    ask: Callable[[Site, Sizes, torch.dtype, Hardware], tuple[Any, Route]]
    shard: Callable[[Sizes, int, torch.dtype], float]

    def every(self, site: Site, sizes: Sizes, dtype: torch.dtype) -> list[Plan]:
        """What the planner chooses from, the fastest by prediction first."""
        problem, _ = self.ask(site, sizes, dtype, H200)
        found = self.planner.candidates(problem, site.on(H200))
        return [replace(plan, predicted_us=round(us, 1)) for us, plan in found]

    def contenders(self, site: Site, sizes: Sizes, dtype: torch.dtype) -> tuple[Any, list[Plan]]:
        """The problem, and the plans that are worth measuring: the first of what the planner tries, the very first also
        in other rings, and the best of each other way, the plain one too. None where no kernel serves it."""
        problem, route = self.ask(site, sizes, dtype, H200)
        if route.verdict not in ("fused", "plain"):
            return problem, []
        hardware = site.on(H200)
        every = self.planner.candidates(problem, hardware)
        found, rings = in_one_ring(every), in_other_rings(every)
        ways: dict[Any, tuple[float, Plan]] = {}
        for us, plan in found[FIRST:] + self.planner.candidates(problem, hardware, self.planner.further_ways(problem)):
            ways.setdefault((plan.mechanism, plan.schedule, plan.comm_sms), (us, plan))
        best = sorted(ways.values(), key=lambda each: each[0])[:OTHERS]
        cost = self.planner.plain(problem) if site.nccl else None
        plain = [plain_candidate(cost).plan] if cost else []
        measured = found[:FIRST] + rings[:RINGS] + best
        return problem, [replace(plan, predicted_us=round(us, 1)) for us, plan in measured] + plain

    def __call__(self, op, site: Site, sizes: Sizes, dtype: torch.dtype, hardware: Hardware) -> Found:
        problem, route = self.ask(site, sizes, dtype, hardware)
        # torch multiplies what has scales in float32, which is not what is predicted of it
        cost = self.planner.plain(problem, hardware) if site.nccl and dtype in DTYPES else None
        plain = plain_candidate(cost) if cost else None
        if route.verdict not in ("fused", "plain"):
            return Found(route.verdict, route.reason, None, [], plain, 0.0)

        def cost_of(plan: Plan) -> Cost:
            return self.planner.cost_of(problem, plan, tiling_of(plan.tile, plan.stages, dtype.itemsize), hardware)

        def best(ways: list[Any], of: Hardware) -> list[Candidate]:
            return best_of_ways(self.planner.candidates(problem, of, ways), cost_of, workspace)

        workspace = partial(self.planner.workspace_bytes, problem)
        tried, further = self.planner.ways(problem), self.planner.further_ways(problem)
        endless = replace(hardware, memory_bytes=ENDLESS)  # also to tell of what does not fit
        every = {
            each.way: each
            for each in (*best([*further, *tried], endless), *best(further, hardware), *best(tried, hardware))
        }
        taken = route.plan or self.planner.plan_for(problem, hardware)
        chosen = Candidate(taken, cost_of(taken), workspace(taken))
        others = [each for way, each in every.items() if way != chosen.way]
        return Found(route.verdict, route.reason, chosen, others, plain, self.shard(sizes, site.world, dtype))


def _scales(site: Site, dtype: torch.dtype) -> tuple[Like, ...]:
    """Those of both operands, one each, if they have some."""
    return (_like(site, torch.float32, 1),) * 2 if dtype == FP8 else ()


def _scatter(site: Site, s: Sizes, dtype: torch.dtype, hardware: Hardware) -> tuple[Any, Route]:
    k = s["k"] // site.world
    a, b = _like(site, dtype, s["m"], k), _like(site, dtype, k, s["n"])
    call = scatter_check.check(site.world, a, b, "sum", None, False, None, 0, *_scales(site, dtype))
    return scatter_check.problem_of(site, call), scatter_check.choose(site, call, a.device, None, hardware)


def _gather(site: Site, s: Sizes, dtype: torch.dtype, hardware: Hardware) -> tuple[Any, Route]:
    a, b = _like(site, dtype, s["m"] // site.world, s["k"]), _like(site, dtype, s["k"], s["n"] // site.world)
    scale_a, *scale_b = _scales(site, dtype) or (None,)
    call = gather_check.check(a, [b], [], False, 0, scale_a, scale_b)
    return gather_check.problem_of(site, call), gather_check.choose(site, call, a.device, None, hardware)


def _reduce(site: Site, s: Sizes, dtype: torch.dtype, hardware: Hardware) -> tuple[Any, Route]:
    k = s["k"] // site.world
    a, b = _like(site, dtype, s["m"], k), _like(site, dtype, k, s["n"])
    kind, scales = KINDS.get(dtype), []
    if kind is not None:  # it has no others than of blocks
        scales = [_like(site, kind.scale, scales_of(rows, k, dtype)) for rows in (s["m"], s["n"])]
    call = reduce_check.check(a, b, None, None, None, reduce_check.Options(False, 0.0, 0), *scales)
    return reduce_check.problem_of(site, call), reduce_check.choose(site, call, a.device, None, hardware)


def _attend(op: str, site: Site, s: Sizes, dtype: torch.dtype, hardware: Hardware) -> tuple[Any, Route]:
    rows, causal = s["seq"] // site.world, bool(s["causal"])
    q, k = (_like(site, dtype, s["batch"], heads, rows, s["dim"]) for heads in (s["heads"], s["kv_heads"]))
    options: tuple[Any, ...] = None, causal, None, "bhsd"
    check: Any = ring_check if op == "ring_attention" else ulysses_check
    if check is ring_check:
        options = *options, "zigzag" if causal and site.world > 1 else "contiguous"
    call = check.check(site.world, q, k, k, *options)
    return check.problem_of(site, call), check.choose(site, call, q.device, None, hardware)


def _attention(op: str, site: Site, s: Sizes, dtype: torch.dtype, hardware: Hardware) -> Found:
    """Ring and Ulysses attention, whose plans differ by how many SMs communicate."""
    problem, route = _attend(op, site, s, dtype, hardware)
    if route.plan is None:
        return Found(route.verdict, route.reason, None, [], None, 0.0)
    others = [
        Candidate(
            replace(each, predicted_us=round(us, 1)),
            attention.cost_of(problem, each, hardware),
            attention.workspace_bytes(problem, each),
        )
        for us, each in attention.candidates(problem, hardware)[:4]
        if each.comm_sms != route.plan.comm_sms
    ]
    workspace = attention.workspace_bytes(problem, route.plan)
    chosen = Candidate(route.plan, attention.cost_of(problem, route.plan, hardware), workspace)
    cost = attention.plain(problem, hardware) if site.nccl else None
    plain = plain_candidate(cost, taken=False) if cost else None
    return Found(route.verdict, route.reason, chosen, others, plain, problem.sent / max(site.world - 1, 1))


def _dispatch(op: str, site: Site, s: Sizes, dtype: torch.dtype, hardware: Hardware) -> Found:
    """A dispatch, whose plan does not depend on how many tokens there are; its prediction does."""
    check_topk("plan", s)
    experts, tokens = Experts(s["experts"], site.world), s["tokens"] // site.world
    w = _like(site, dtype, experts.most, s["hidden"], s["inner"])
    route = moe_check.choose(site, w, False, experts, None, None, hardware)
    problem, rows = moe_check.problem_of(site, w, False, experts), tokens * s["topk"]
    if route.plan is not None and rows > moe_check.most_rows(problem, route.plan):
        route = moe_check.choose(site, w, False, experts, rows, None, hardware)
    if route.plan is None:
        return Found(route.verdict, route.reason, None, [], None, 0.0)
    cost = moe.dispatch_cost(problem, route.plan, tokens, s["topk"], hardware)
    workspace = moe.dispatch_workspace_bytes(problem, route.plan, rows)
    chosen = Candidate(replace(route.plan, predicted_us=round(cost.total_us, 1)), cost, workspace)
    plain = moe.plain_dispatch(problem, route.plan, tokens, s["topk"], hardware) if site.nccl else None
    other = plain_candidate(plain, taken=False) if plain else None
    return Found(route.verdict, route.reason, chosen, [], other, 2.0 * tokens * s["hidden"])


def _combine(op: str, site: Site, s: Sizes, dtype: torch.dtype, hardware: Hardware) -> Found:
    """A grouped matmul whose rows go home, if all experts have as many."""
    check_topk("plan", s)
    tokens, w = s["tokens"] // site.world, _like(site, dtype, s["experts"] // site.world, s["inner"], s["hidden"])
    rows = tokens * s["topk"]
    problem = moe_check.combine_problem_of(site, w, s["experts"], rows, s["topk"])
    route = moe_check.choose_combine(site, rows, w, problem, None, hardware)
    if route.plan is None:
        return Found(route.verdict, route.reason, None, [], None, 0.0)
    taken = route.plan
    cost = partial(moe_combine.cost_of, problem, hardware=hardware)
    every = _by_tiles(taken, cost, moe_combine.workspace_bytes(problem), hardware)
    plain = moe_combine.plain(problem, tiling_of(taken.tile, taken.stages), hardware) if site.nccl else None
    other = plain_candidate(plain, taken=False) if plain else None
    return Found(route.verdict, route.reason, every[0], every[1:], other, 2.0 * rows * s["hidden"])


def _grouped(op: str, site: Site, s: Sizes, dtype: torch.dtype, hardware: Hardware) -> Found:
    """A grouped matmul of one rank."""
    x, w = _like(site, dtype, s["rows"], s["hidden"]), _like(site, dtype, s["experts"], s["hidden"], s["inner"])
    call = grouped_check.check(x, w, _like(site, torch.int32, s["experts"]))
    route = grouped_check.choose(site, call, site.device, None, hardware)
    if route.plan is None:
        return Found(route.verdict, route.reason, None, [], None, 0.0)
    problem = moe.GroupedProblem(call.rows, call.experts, call.n, call.k, site.usable(0), site.cores)
    every = _by_tiles(route.plan, partial(moe.cost_of, problem, hardware=hardware), 0, hardware)
    return Found(route.verdict, route.reason, every[0], every[1:], None, 0.0)


def _by_tiles(plan: Plan, cost: Callable[[Tiling], Cost], workspace: int, hardware: Hardware) -> list[Candidate]:
    """The plan, then the same with each other tile, in the ring that is predicted to be the fastest; all of them have
    so many bytes of workspace."""
    rings = {plan.tile: tiling_of(plan.tile, plan.stages)}
    for tiling in tilings_of(2, plan.core):
        every = tiling, *rings_of(tiling, hardware.shared_bytes, plan.core)
        rings.setdefault(tiling.tile, min(every, key=lambda ring: cost(ring).total_us))
    costs = [(ring, cost(ring)) for ring in rings.values()]
    return [
        Candidate(replace(plan, tile=ring.tile, stages=ring.stages, predicted_us=round(of.total_us, 1)), of, workspace)
        for ring, of in costs
    ]


def _collective(op: str, site: Site, s: Sizes, dtype: torch.dtype, hardware: Hardware) -> Found:
    """A collective along the first dimension; an all-to-all cuts columns and puts rows together."""
    rows = s["m"] // site.world if op in ("all_gather", "all_to_all") else s["m"]
    options: dict[str, tuple[Any, ...]] = {
        "all_gather": (0,), "reduce_scatter": (0, "sum", False), "all_reduce": ("sum", False), "all_to_all": (1, 0),
    }  # fmt: skip
    call = collective_check.CONTRACTS[op](site.world, (rows, s["n"]), dtype, *options[op])
    route = choose_collective(site, call, site.device)

    def problem_in(schedule: str) -> collectives.Problem:
        each = passes_in(call, site.world, schedule)
        grid = max(launch.shares(site.world, site.usable(0)).grid for launch in each)
        return collectives.Problem(op, rows * s["n"] * dtype.itemsize, site.world, grid, site.linked)

    cost = collectives.plain(problem_in("one_shot"), hardware) if site.nccl else None
    plain = plain_candidate(cost, taken=not route.fused) if cost else None
    if not route.fused or route.inside:
        return Found(route.verdict, route.reason, None, [], plain, 0.0)
    taken = "two_shots" if is_two_shot(call, site.world) else "one_shot"
    ways = {
        each: Candidate(
            *collectives.plan_of(problem_in(each), each, hardware),
            SLOTS * max(launch.slot_bytes(site.world) for launch in passes_in(call, site.world, each)),
        )
        for each in collectives.schedules(op)
    }
    chosen = ways.pop(taken)
    return Found(route.verdict, route.reason, chosen, list(ways.values()), plain, rows * s["n"] * float(dtype.itemsize))


FIND: dict[str, Callable[..., Found]] = {
    "matmul_reduce_scatter": _Matmul(
        matmul_reduce_scatter, _scatter, lambda s, world, dtype: 2.0 * s["m"] * s["n"] / world
    ),
    "all_gather_matmul": _Matmul(
        all_gather_matmul, _gather, lambda s, world, dtype: dtype.itemsize * s["m"] * s["k"] / world
    ),
    "matmul_all_reduce": _Matmul(
        matmul_all_reduce, _reduce, lambda s, world, dtype: 2.0 * s["m"] * s["n"] / world
    ),
    "ring_attention": _attention,
    "ulysses_attention": _attention,
    "moe_dispatch_matmul": _dispatch,
    "moe_matmul_combine": _combine,
    "grouped_matmul": _grouped,
    **dict.fromkeys(COLLECTIVES, _collective),
}  # fmt: skip


def every_plan(op: str, site: Site, sizes: Sizes, dtype: torch.dtype) -> list[Plan]:
    """All plans that the planner of a matmul fused with a collective chooses from: the first one is its choice."""
    find = FIND[op]
    assert isinstance(find, _Matmul), op
    return find.every(site, sizes, dtype)


def contenders(op: str, site: Site, sizes: Sizes, dtype: torch.dtype) -> tuple[Any, list[Plan]]:
    """The problem that a call is known by, and the plans that are worth measuring for it; none where no kernel serves
    it."""
    find = FIND[op]
    if isinstance(find, _Matmul):
        return find.contenders(site, sizes, dtype)
    if op in EXPERTS_CONTENDERS:
        found = find(op, site, sizes, dtype, H200)
        return EXPERTS_CONTENDERS[op](site, sizes, dtype, found)
    problem, route = _attend(op, site, sizes, dtype, H200)
    if route.plan is None:
        return problem, []
    return problem, [
        replace(plan, predicted_us=round(us, 1)) for us, plan in attention.candidates(problem, site.on(H200))
    ]


def _first_tiles(found: Found, cost: Callable[[Tiling], Cost]) -> list[Plan]:
    """The chosen plan, then those of its way that are predicted to be the fastest, then the chosen one in other rings,
    which take what `cost` says."""
    if found.verdict != "fused" or found.chosen is None:
        return []
    way, plan = found.chosen.way, found.chosen.plan
    others = sorted((each for each in found.others if each.way == way), key=lambda each: each.cost.total_us)
    return [*(each.plan for each in (found.chosen, *others[: FIRST - 1])), *_other_rings(plan, cost)]


def _other_rings(plan: Plan, cost: Callable[[Tiling], Cost]) -> list[Plan]:
    """The plan in the first few other rings, which take what `cost` says."""
    tiling = next(each for each in tilings_of(2, plan.core) if each.tile == plan.tile)
    every = tiling, *rings_of(tiling, H200.shared_bytes, plan.core)
    rings = [ring for ring in every if ring.stages != plan.stages][:RINGS]
    return [replace(plan, stages=ring.stages, predicted_us=round(cost(ring).total_us, 1)) for ring in rings]


def _grouped_contenders(site: Site, s: Sizes, dtype: torch.dtype, found: Found) -> tuple[Any, list[Plan]]:
    problem = moe.GroupedProblem(s["rows"], s["experts"], s["inner"], s["hidden"], site.usable(0), site.cores)
    return problem, _first_tiles(found, partial(moe.cost_of, problem))


def _combine_contenders(site: Site, s: Sizes, dtype: torch.dtype, found: Found) -> tuple[Any, list[Plan]]:
    """For any number of tokens."""
    w = _like(site, dtype, s["experts"] // site.world, s["inner"], s["hidden"])
    problem = moe_check.combine_problem_of(site, w, s["experts"], s["tokens"] // site.world * s["topk"], s["topk"])
    key = replace(problem, tokens=0)
    if found.chosen is None:
        return key, []
    return key, _first_tiles(found, partial(moe_combine.cost_of, problem))


def _dispatch_contenders(site: Site, s: Sizes, dtype: torch.dtype, found: Found) -> tuple[Any, list[Plan]]:
    """The chosen plan with half and twice as many communicators, then in other rings, then other tiles. For any number
    of tokens, which no rank knows of the others."""
    experts = Experts(s["experts"], site.world)
    w = _like(site, dtype, experts.most, s["hidden"], s["inner"])
    problem = moe_check.problem_of(site, w, False, experts)
    if found.verdict != "fused" or found.chosen is None:
        return problem, []
    taken, plans = found.chosen.plan, []
    tokens, rows = s["tokens"] // site.world, s["tokens"] // site.world * s["topk"]
    cost = partial(moe.dispatch_cost, problem, tokens=tokens, topk=s["topk"])
    rings = _other_rings(taken, lambda ring: cost(replace(taken, stages=ring.stages)))
    tried = taken.comm_sms, taken.comm_sms // 2, 2 * taken.comm_sms
    for comm_sms, tiling in product(tried, tilings_of(2, taken.core)):
        stages = taken.stages if tiling.tile == taken.tile else tiling.stages
        plan = replace(taken, tile=tiling.tile, stages=stages, comm_sms=comm_sms)
        if not moe.unsupported_dispatch(problem, plan) and rows <= moe_check.most_rows(problem, plan):
            plans.append(replace(plan, predicted_us=round(cost(plan).total_us, 1)))
    plans.sort(key=lambda each: (each.tile != taken.tile, each.predicted_us))
    same = sum(each.tile == taken.tile for each in plans)
    return problem, plans[:same] + rings + plans[same : same + FIRST]


EXPERTS_CONTENDERS = {
    "grouped_matmul": _grouped_contenders, "moe_dispatch_matmul": _dispatch_contenders,
    "moe_matmul_combine": _combine_contenders,
}  # fmt: skip
