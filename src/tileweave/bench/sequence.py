"""ring_attention and ulysses_attention: what the protocol costs on virtual ranks. `python -m tileweave.bench.sequence`

W ranks share one GPU, each with 1/W of the SMs, so no link is measured. Contenders, interleaved, all ranks at once:

    fused         the op: communicators and all
    local         W one-rank grids of the same kernel, tile and number of computing SMs, whose keys, or heads, are there
                  before, a copy for each rank as each has one in its slot: the same attention, no peers
    local, all    the same on all SMs: what communicators take away as well
    open          instead of `local` for the zigzag order, which no one-rank grid has: the op's computing CTAs as they
                  are, all flags raised before, all keys in the slots, nobody sending
    open, all     the same on all SMs

The overhead is fused / local - 1, or fused / open - 1 where there is no local; its spread that of the rounds. Each
contender is checked first, with poisoned results: samples of two heads of each rank against float32, all for NaN.

    --comm-sms N  communicators instead of the planner's
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import NamedTuple

import torch

from tileweave.bench.attention_case import DIM, SAMPLE, Case
from tileweave.bench.harness import Bench, Row, Shape, Work, main
from tileweave.bench.measure import Timing, interleaved
from tileweave.bench.recording import Recorder, poisoned, together
from tileweave.fabric import virtual_world
from tileweave.fabric.base import HEADER_WORDS, Channel
from tileweave.fabric.virtual import Launch, VirtualFabric, VirtualWorld
from tileweave.ops.attention import reference, tolerance
from tileweave.ops.attention.reference import relative_error
from tileweave.ops.contract import Site
from tileweave.ops.ring_attention import check as ring_check
from tileweave.ops.ring_attention import launch as ring_launch
from tileweave.ops.sequence.contract import likes
from tileweave.ops.sequence.launch import fused
from tileweave.ops.sequence.placement import place_sequence
from tileweave.ops.ulysses_attention import check as ulysses_check
from tileweave.ops.ulysses_attention import launch as ulysses_launch
from tileweave.planner import Plan

RAISED = 0xFFFF  # a flag that epochs 1 to 65535 take for reached: a wait looks no further ahead


SHAPES: list[Shape] = [
    dict(world_size=world, case=Case(op, batch, heads, 768 * world * 2**i, causal))
    for op, batch, heads, causal in (
        ("ring_attention", 16, 16, False),
        ("ring_attention", 16, 16, True),
        ("ulysses_attention", 1, 128, True),
        ("ulysses_attention", 16, 128, True),
    )
    for world in (2, 4, 8)
    for i in (1, 2)
]


def bytes_needed(shape: Shape) -> int:
    """Of GPU memory, about: q, k, v, results of three contenders, two slots, zigzag shards or each rank's own keys."""
    case, world = shape["case"], shape["world_size"]
    if case.op == "ulysses_attention":
        more = 2 * 4
    else:
        more = 2 * 2 * (world - 1) + (3 if case.causal else 2 * world)
    return 2 * case.batch * case.heads * case.rows * DIM * (3 + 3 + more)


class Opened(Recorder):
    """A Recorder whose launches find all flags raised and, once `fused` has run twice, both slots filled."""

    def __init__(self, fabric: VirtualFabric):
        super().__init__(fabric, False)

    def channel(self, op: str, adding_bytes: int, staging_bytes: int) -> Channel:
        real = super().channel(op, adding_bytes, staging_bytes)
        flags, state = torch.zeros_like(real.flags), torch.zeros_like(real.state)
        flags[:, HEADER_WORDS:] = RAISED
        return Channel(op, flags, state, real.adding, real.staging, real.timeout_us)


class Made(NamedTuple):
    """A rank's part of a contender: launches, result [B, heads from `head` on, rows], the places of its rows."""

    kept: list[Launch]
    out: torch.Tensor
    head: int
    places: torch.Tensor


def kept_sms(fabric: Recorder, sms: int) -> Recorder:
    """A recorder of a rank that may use `sms` SMs."""
    fabric.sms = sms
    return fabric


def ring(case: Case, q, k, v, real: VirtualFabric, comm_sms: int | None) -> tuple[dict[str, Made], Plan]:
    """A rank's contenders, of the whole q, k and v."""
    rank, world = real.rank, real.world_size
    places = torch.arange(case.rows, device=q.device)
    q_own, k_own, v_own = (place_sequence(x, world, rank, 2, case.placement) for x in (q, k, v))
    places = place_sequence(places, world, rank, 0, case.placement)
    options = case.causal, None, "bhsd", case.placement
    call, route = ring_check.settle(Site.of(real), *likes(q_own, k_own, v_own), *options, None)
    plan = settled(route.plan, comm_sms)
    made = {}

    def keep(name: str, fabric: Recorder, call: ring_check.Call, plan: Plan, k: torch.Tensor, v: torch.Tensor) -> None:
        (out, _), _ = fused(ring_launch.prepare, fabric, call, q_own, k, v, plan)
        made[name] = Made(fabric.kept, out, 0, places)

    keep("fused", Recorder(real, False), call, plan, k_own, v_own)
    alone = replace(plan, comm_sms=0)
    all_keys = replace(call, shape=replace(call.shape, kv_rows=case.rows))
    whole = None if case.causal else (k.clone(), v.clone())
    for more, sms in (("", real.sms - plan.comm_sms), (", all", real.sms)):
        if whole is None:
            keep("open" + more, kept_sms(Opened(real), sms), call, alone, k_own, v_own)
        else:
            keep("local" + more, kept_sms(Recorder(real, True), sms), all_keys, alone, *whole)
    return made, plan


def ulysses(case: Case, q, k, v, real: VirtualFabric, comm_sms: int | None) -> tuple[dict[str, Made], Plan]:
    """A rank's contenders, of the whole q, k and v."""
    rank, world = real.rank, real.world_size
    places, options = torch.arange(case.rows, device=q.device), (case.causal, None, "bhsd")
    q_own, k_own, v_own = (place_sequence(x, world, rank, 2) for x in (q, k, v))
    call, route = ulysses_check.settle(Site.of(real), *likes(q_own, k_own, v_own), *options, None)
    plan = settled(route.plan, comm_sms)
    fabric = Recorder(real, False)
    (out, _), _ = fused(ulysses_launch.prepare, fabric, call, q_own, k_own, v_own, plan)
    made = {"fused": Made(fabric.kept, out, 0, place_sequence(places, world, rank, 0))}
    q, k, v = (x.chunk(world, 1)[rank] for x in (q, k, v))  # all rows of its heads
    call, first = ulysses_check.check(1, *likes(q, k, v), *options), rank * case.heads // world
    for name, sms in (("local", real.sms - plan.comm_sms), ("local, all", real.sms)):
        fabric = kept_sms(Recorder(real, True), sms)
        (out, _), _ = fused(ulysses_launch.prepare, fabric, call, q, k, v, replace(plan, comm_sms=0))
        made[name] = Made(fabric.kept, out, first, places)
    return made, plan


def settled(plan: Plan | None, comm_sms: int | None) -> Plan:
    """The plan of a call, with other communicators if asked for."""
    assert plan is not None
    return plan if comm_sms is None else replace(plan, comm_sms=comm_sms)


MAKERS = {"ring_attention": ring, "ulysses_attention": ulysses}


def check(case: Case, name: str, made: Made, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """The largest relative error of a rank's result, of some rows of two heads of two batches; AssertionError beyond
    the tolerance, or where something was not written."""
    sample, worst = torch.randperm(made.out.shape[2], device=q.device)[:SAMPLE], 0.0
    places = made.places[sample]
    for b in {0, case.batch - 1}:
        for h in {0, made.out.shape[1] - 1}:
            one = slice(b, b + 1), slice(made.head + h, made.head + h + 1)
            truth, _ = reference(q[one][:, :, places], k[one], v[one], causal=case.causal, positions=places)
            worst = max(worst, relative_error(made.out[b : b + 1, h : h + 1, sample], truth))
    assert worst <= 2 * tolerance(torch.bfloat16), (case, name, worst)
    assert all(part.isfinite().all() for part in made.out), (case, name)
    return worst


def percent(times: dict[str, Timing], base: str) -> list[float]:
    """Median, lowest and highest of what `fused` takes longer than `base` in a round."""
    ratios = [100 * (mine / other - 1) for mine, other in zip(times["fused"].rounds, times[base].rounds, strict=True)]
    return [statistics.median(ratios), min(ratios), max(ratios)]


def measure(world_size: int, case: Case, rounds: int, comm_sms: int | None = None) -> Row:
    """One row: errors against float32 on fresh data with poisoned results, then times."""
    q, k, v = (
        torch.randn(case.batch, case.heads, case.rows, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    contenders: dict[str, Callable[[], None]] = {}
    errors: dict[str, float] = {}
    with virtual_world(world_size, "cuda", timeout=20.0) as world:
        assert isinstance(world, VirtualWorld)

        def rank_program(rank, group):
            made, plan = MAKERS[case.op](case, q, k, v, group.world.fabric(rank), comm_sms)
            return made, plan, torch.cuda.current_stream()

        by_rank, plans, streams = zip(*world.run(rank_program), strict=True)
        for name in by_rank[0]:
            launches = [launch for made in by_rank for launch in made[name].kept]
            contenders[name] = together(launches, streams)
            poisoned(contenders[name], (made[name].out for made in by_rank))
            errors[name] = max(check(case, name, made[name], q, k, v) for made in by_rank)
        times = interleaved(contenders, rounds)
        world.check()
    base = "local" if "local" in times else "open"
    return {
        "case": case.shape, **asdict(case), "world": world_size, "placement": case.placement,
        "plan": plans[0].to_dict(), "rel_error": errors,
        "ms": {name: [t.median, t.low, t.high] for name, t in times.items()},
        "tflops": {name: case.flop / t.median / 1e9 for name, t in times.items()},
        "over": base, "overhead_percent": percent(times, base), "over_all_percent": percent(times, f"{base}, all"),
    }  # fmt: skip


def told(row: Row) -> str:
    """A row in a line."""
    rates = "  ".join(f"{name} {rate:.0f}" for name, rate in row["tflops"].items())
    over, over_all = (
        "{:+.1f}% ({:+.1f} to {:+.1f})".format(*row[key]) for key in ("overhead_percent", "over_all_percent")
    )
    told = f"{row['plan']['comm_sms']} communicators: TFLOP/s {rates}"
    return f"{told}; over {row['over']} {over}; over {row['over']}, all {over_all}"


def label(shape: Shape) -> str:
    """A shape by name."""
    return f"W{shape['world_size']} {shape['case'].shape}"


def work(shape: Shape, _: int) -> Work:
    """Of all virtual ranks together, as they share the GPU."""
    return Work(shape["case"].flop)


BENCHES = [
    Bench(
        op, "virtual", [shape for shape in SHAPES if shape["case"].op == op], measure, label, told, work,
        needs=bytes_needed,
    )
    for op in MAKERS
]  # fmt: skip
MORE = {"--comm-sms": dict(type=int, metavar="N")}

if __name__ == "__main__":
    main(__doc__, BENCHES, MORE)
