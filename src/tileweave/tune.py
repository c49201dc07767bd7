"""`tune`: the plan that is the fastest on this machine, measured once and kept."""

import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tileweave.clock import Clock, gpu_clock
from tileweave.fabric import Fabric, FabricTimeout, fabric_of, local_fabric
from tileweave.ops.all_gather_matmul import all_gather_matmul, places
from tileweave.ops.contract import Site
from tileweave.ops.grouped_matmul import grouped_matmul
from tileweave.ops.matmul_all_reduce import matmul_all_reduce
from tileweave.ops.matmul_reduce_scatter import matmul_reduce_scatter
from tileweave.ops.moe import moe_dispatch_matmul, moe_matmul_combine
from tileweave.ops.plans import LOCAL, check_dtype, check_shares, check_sizes, check_topk, contenders, rounded
from tileweave.ops.ring_attention import check as ring
from tileweave.ops.ring_attention import ring_attention
from tileweave.ops.ulysses_attention import ulysses_attention
from tileweave.planner.plan import Plan
from tileweave.planner.tuned import Times, Tuned, code_hash, read, write

OPS: dict[str, Callable[..., Any]] = {
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "all_gather_matmul": all_gather_matmul,
    "matmul_all_reduce": matmul_all_reduce,
    "ring_attention": ring_attention,
    "ulysses_attention": ulysses_attention,
    "moe_dispatch_matmul": moe_dispatch_matmul,
    "moe_matmul_combine": moe_matmul_combine,
    "grouped_matmul": grouped_matmul,
}
CHANNELS = {"all_gather_matmul": places.CHANNELS, "ring_attention": ring.CHANNELS}  # of plans that have their own
CLOCKS: dict[str, Callable[[Fabric], AbstractContextManager[Clock]]] = {"cuda": gpu_clock}  # the emulator has no time
ROUNDS = 3  # how often each plan has its turn


@dataclass(frozen=True)
class Tuning:
    """What `tune` found. times: plans and the microseconds of a call with each, on the slowest rank, the fastest first;
    cached: whether they were read from the cache."""

    op: str
    times: tuple[tuple[Plan, float], ...]
    cached: bool

    @property
    def plan(self) -> Plan:
        """The fastest; its mechanism is "nccl" where that is torch's product and NCCL's collective."""
        return self.times[0][0]

    @property
    def measured_us(self) -> float:
        """Microseconds of a call with it."""
        return self.times[0][1]


def tune(op: str, shape: Mapping[str, int], dtype: torch.dtype = torch.bfloat16, group=None) -> Tuning | None:
    """Measure which plan is the fastest for a shape on this machine; calls of `op` in this group then use it.

    Collective: all ranks of the group make the same calls, where they make those of `op`. The few plans that the cost
    model puts first are tried on random data, and the plain way where NCCL joins GPUs, by replays of CUDA graphs, in
    which the host has no part. The microseconds are kept in a file of the folder that the environment variable
    TILEWEAVE_CACHE names (`~/.cache/tileweave` if it does not), by op, shape, hardware, versions and the library's
    code; where rank 0 finds them there nothing is measured. The group uses the result as long as it lives, for calls of
    this shape with the options' defaults, but a causal ring with its pieces in zigzag (a bias or another dtype of 16
    bits makes no difference), unless they have a `plan`. `explain` then shows `predicted_us`, `measured_us` and the
    `error` of the first.

    Args:
        op: "matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce", "ring_attention", "ulysses_attention",
            "moe_dispatch_matmul", "moe_matmul_combine", or "grouped_matmul", of which each rank has its own. What is
            found of a dispatch or a way back is for any number of tokens.
        shape: sizes of the whole problem, as `tileweave.plan` takes them.
        dtype: torch.bfloat16 or torch.float16.
        group: as the op takes it. In an emulated world, and where no kernel serves the shape, there is nothing to
            measure.

    Returns:
        A `Tuning`: `plan`, `measured_us`, `times` of all plans that were tried, `cached`; None if there is nothing to
        measure. The host waits for the GPU.

    Raises:
        ValueError, TypeError: an unknown op, size or dtype, or sizes that break the op's contract, or that differ
            between ranks.
        RuntimeError: while a CUDA graph is being captured.
        FabricTimeout: a peer did not take part within the group's timeout.
    """
    sizes = check_sizes("tune", op, shape, OPS)
    check_dtype("tune", op, dtype)
    cuda = torch.cuda.is_available()
    if cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("tune: calls are measured, which no CUDA graph can hold: tune before the capture")
    device = torch.device("cuda" if cuda else "cpu")
    fabric = local_fabric(device) if op in LOCAL else fabric_of(group, device)
    check_topk("tune", sizes)
    sizes = rounded(op, sizes, shape, fabric.world_size)
    check_shares("tune", op, sizes, fabric.world_size)
    site = Site.of(fabric)._replace(tuned=())
    problem, plans = contenders(op, site, sizes, dtype)
    clock = CLOCKS.get(fabric.device.type)
    if not plans or clock is None:
        return None
    key = _key(op, problem, sizes, fabric)
    kept = read(key, plans) if fabric.rank == 0 else None
    found = [[plans.index(plan), us] for plan, us in kept] if kept else None
    every = fabric.gather_values([f"{op} with {sizes}", found])
    for rank, (asked, _) in enumerate(every):
        if asked != every[0][0]:
            raise ValueError(
                f"tune: all ranks ask for the same: rank 0 asks for {every[0][0]}, rank {rank} for {asked}"
            )
    told = every[0][1]
    if told:
        times = [(plans[i], us) for i, us in told]
    else:
        with clock(fabric) as timer:
            times = measured(fabric, op, problem, plans, call_of(op, sizes, dtype, fabric, group), timer)
        if fabric.rank == 0:
            write(key, times)
    plan, us = times[0]
    reason = f"measured: {us:.1f} us, the fastest of {len(times)} plans here; predicted: {plan.predicted_us} us"
    _use(fabric, Tuned(op, problem, replace(plan, reason=reason), us))
    return Tuning(op, tuple(times), bool(told))


def _key(op: str, problem: Any, sizes: dict[str, int], fabric: Fabric) -> dict[str, Any]:
    """What a measurement holds for, as plain values."""
    device, versions = fabric.device, {}
    for name in ("tileweave", "torch", "triton"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "unknown"
    found = None
    if device.type == "cuda":
        of = torch.cuda.get_device_properties(device)
        found = [of.name, of.major, of.minor, of.multi_processor_count, of.total_memory]
    values = {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(problem).items()}
    return {
        "op": op,
        "problem": values,
        "sizes": sizes,
        "backend": fabric.backend,
        "gpu": found,
        "versions": versions,
        "code": code_hash(),
    }


def measured(fabric: Fabric, op: str, problem: Any, plans: list[Plan], call: Callable[[], Any], timer: Clock) -> Times:
    """Microseconds of each plan on the slowest rank, the fastest first: medians of ROUNDS rounds of all plans."""
    before = fabric.tuned

    def each(act: Callable[[], Any]) -> list[Any]:
        found = []
        for plan in plans:
            _use(fabric, Tuned(op, problem, plan, 0.0))
            found.append(act())
        return found

    try:
        with torch.no_grad():
            each(call)  # kernels are compiled, and the workspace has grown, before a graph holds any of it
            fabric.rendezvous()
            timers = each(lambda: timer(call))
            fabric.rendezvous()
            rounds = [[us() for us in timers] for _ in range(ROUNDS)]
            late = _late(fabric)
    finally:
        fabric.tuned = before
        _forget(fabric, op)
    every = fabric.gather_values([late, *(statistics.median(of_a_plan) for of_a_plan in zip(*rounds, strict=True))])
    for told, *_ in every:
        if told:  # perhaps on another rank alone, which would leave the others waiting for it
            raise FabricTimeout(*told)
    slowest = [max(of_a_plan) for of_a_plan in zip(*(us for _, *us in every), strict=True)]
    return sorted(zip(plans, slowest, strict=True), key=lambda found: found[1])


def _late(fabric: Fabric) -> list[Any] | None:
    """What a FabricTimeout of a replay says, which does not tell by itself; None if nobody has waited in vain."""
    try:
        fabric.check()
    except FabricTimeout as e:
        return [e.op, e.rank, e.index, e.expected, e.seen, e.node]
    return None


def _use(fabric: Fabric, found: Tuned) -> None:
    """Let the calls of this rank go by what was found, instead of what was found before."""
    others = [each for each in fabric.tuned if (each.op, each.problem) != (found.op, found.problem)]
    fabric.tuned = (*others, found)
    _forget(fabric, found.op)


def _forget(fabric: Fabric, op: str) -> None:
    """Launches that the op has prepared by other plans."""
    for channel in CHANNELS.get(op, (op,)):
        views = fabric.views(channel)
        if views is not None:
            views.clear()


def call_of(
    op: str, s: dict[str, int], dtype: torch.dtype, fabric: Fabric, group: Any, **options: Any
) -> Callable[[], Any]:
    """A call of `op` on random data of this rank, for a problem of these sizes; `options` go to the op."""
    world = fabric.world_size

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=fabric.device).to(dtype)

    operands: tuple[torch.Tensor, ...]
    if op == "all_gather_matmul":
        operands = random(s["m"] // world, s["k"]), random(s["k"], s["n"] // world)
    elif op in ("ring_attention", "ulysses_attention"):
        each = ("heads", "kv_heads", "kv_heads")
        operands = tuple(random(s["batch"], s[heads], s["seq"] // world, s["dim"]) for heads in each)
        options["causal"] = bool(s["causal"])
        if op == "ring_attention" and s["causal"] and world > 1:
            options["placement"] = "zigzag"
    elif "experts" in s:
        return call_of_experts(op, s, dtype, fabric, group, **options)
    else:
        depth = s["k"] // world
        operands = random(s["m"], depth), random(depth, s["n"])
    return lambda: OPS[op](*operands, group, **options)


def call_of_experts(
    op: str, s: dict[str, int], dtype: torch.dtype, fabric: Fabric, group: Any, **options: Any
) -> Callable[[], Any]:
    """`call_of` the ops of experts, whose rows are drawn evenly: hardly ever whole tiles, as with a router. Collective:
    the way back has a route."""
    device, experts, rows = fabric.device, s["experts"], s.get("rows", 0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device).to(dtype)

    if op == "grouped_matmul":
        x, w = random(rows, s["hidden"]), random(experts, s["hidden"], s["inner"])
        ends = torch.randint(experts, (rows,), device=device).bincount(minlength=experts).cumsum(0)
        return lambda: grouped_matmul(x, w, ends.int(), **options)
    own, tokens, topk = experts // fabric.world_size, s["tokens"] // fabric.world_size, s["topk"]
    index = torch.rand(tokens, experts, device=device).topk(topk).indices
    # So that the host need not wait for what comes: a rank has a quarter more than its share hardly ever.
    capacity = tokens * topk * 5 // 4 + own * topk * fabric.world_size
    dispatch = partial(moe_dispatch_matmul, capacity=capacity, max_tokens=tokens)
    if op == "moe_dispatch_matmul":
        x, w = random(tokens, s["hidden"]), random(own, s["hidden"], s["inner"])
        return lambda: dispatch(x, index, w, group, **options)
    h, w = random(capacity, s["inner"]), random(own, s["inner"], s["hidden"])
    _, route = dispatch(random(tokens, 8), index, random(own, 8, 8), group)
    return lambda: moe_matmul_combine(h, w, route, group, **options)
