"""ring_attention and ulysses_attention: what the protocol costs on virtual ranks. `python -m tileweave.bench.sequence`

W ranks share one GPU, each with 1/W of the SMs, so no link is measured. Contenders, interleaved, all ranks at once:

    fused         the op: communicators and all
    local         W one-rank grids of the same kernel, tile and number of computing SMs, whose keys, or heads, are there
                  before, a copy for each rank as each has one in its slot: the same attention, no peers
    local, all    the same on all SMs: what communicators take away as well
    open          ring only: the op's computing CTAs as they are, all flags raised before, all keys in the slots, nobody
                  sending. Beside `local` it says what looking for flags takes; for the zigzag order, which no
                  one-rank grid has, it is what `fused` is compared with
    open, all     the same on all SMs

The overhead is fused / local - 1, or fused / open - 1 where there is no local; its spread that of the rounds. Each
contender is checked first, with poisoned results: samples of two heads of each rank against float32, all for NaN.

    --only TEXT   cases whose name contains TEXT
    --comm-sms N  communicators instead of the planner's
    --json FILE   where to write the figures
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from tileweave.bench.measure import Timing, interleaved, machine
from tileweave.bench.recording import Recorder, together
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

DIM, SAMPLE = 128, 64  # of a head; rows of a head that are compared with float32
RAISED = 0xFFFF  # a flag that epochs 1 to 65535 take for reached: a wait looks no further ahead


@dataclass(frozen=True)
class Case:
    """One row: `rows` is the length of the whole sequence."""

    op: str
    world: int
    batch: int
    heads: int
    rows: int
    causal: bool

    @property
    def placement(self) -> str:
        """How the sequence lies."""
        return "zigzag" if self.op == "ring_attention" and self.causal else "contiguous"

    @property
    def name(self) -> str:
        """What --only looks into."""
        mask = f"causal {self.placement}" if self.causal else "full"
        return f"{self.op} W{self.world} B{self.batch} H{self.heads} S{self.rows} {mask}"

    @property
    def bytes_needed(self) -> int:
        """Of GPU memory, about: q, k, v and their shards, results of all contenders, slots, each rank's own keys."""
        slots = 2 * 4 if self.op == "ulysses_attention" else 2 * 2 * self.world
        copies = 2 * self.world if self.op == "ring_attention" and not self.causal else 0
        return 2 * self.batch * self.heads * self.rows * DIM * (3 + 3 + 5 + slots + copies)


CASES = [
    Case(op, world, batch, heads, 768 * world * 2**i, causal)
    for op, batch, heads, causal in (
        ("ring_attention", 16, 16, False),
        ("ring_attention", 16, 16, True),
        ("ulysses_attention", 1, 128, True),
        ("ulysses_attention", 16, 128, True),
    )
    for world in (2, 4, 8)
    for i in (1, 2)
]


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


def ring(case: Case, q, k, v, rank: int, real: VirtualFabric, comm_sms: int | None) -> tuple[dict[str, Made], Plan]:
    """A rank's contenders, of the whole q, k and v."""
    places = torch.arange(case.rows, device=q.device)
    q_own, k_own, v_own = (place_sequence(x, case.world, rank, 2, case.placement) for x in (q, k, v))
    places = place_sequence(places, case.world, rank, 0, case.placement)
    options = case.causal, None, "bhsd", case.placement
    call, route = ring_check.settle(Site.of(real), *likes(q_own, k_own, v_own), *options, None)
    plan = settled(route.plan, comm_sms)
    made = {}

    def keep(name: str, fabric: Recorder, call: ring_check.Call, plan: Plan, k: torch.Tensor, v: torch.Tensor) -> None:
        (out, _), _ = fused(ring_launch.prepare, fabric, call, q_own, k, v, plan)
        made[name] = Made(fabric.kept, out, 0, places)

    keep("fused", Recorder(real, False), call, plan, k_own, v_own)
    alone = replace(plan, comm_sms=0)
    whole = None if case.causal else (k.clone(), v.clone())
    for more, sms in (("", real.sms - plan.comm_sms), (", all", real.sms)):
        if whole is not None:
            all_keys = replace(call, shape=replace(call.shape, kv_rows=case.rows))
            keep("local" + more, kept_sms(Recorder(real, True), sms), all_keys, alone, *whole)
        keep("open" + more, kept_sms(Opened(real), sms), call, alone, k_own, v_own)
    return made, plan


def ulysses(case: Case, q, k, v, rank: int, real: VirtualFabric, comm_sms: int | None) -> tuple[dict[str, Made], Plan]:
    """A rank's contenders, of the whole q, k and v."""
    places, options = torch.arange(case.rows, device=q.device), (case.causal, None, "bhsd")
    q_own, k_own, v_own = (place_sequence(x, case.world, rank, 2) for x in (q, k, v))
    call, route = ulysses_check.settle(Site.of(real), *likes(q_own, k_own, v_own), *options, None)
    plan = settled(route.plan, comm_sms)
    fabric = Recorder(real, False)
    (out, _), _ = fused(ulysses_launch.prepare, fabric, call, q_own, k_own, v_own, plan)
    made = {"fused": Made(fabric.kept, out, 0, place_sequence(places, case.world, rank, 0))}
    q, k, v = (x.chunk(case.world, 1)[rank] for x in (q, k, v))  # all rows of its heads
    call, first = ulysses_check.check(1, *likes(q, k, v), *options), rank * case.heads // case.world
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
    assert worst <= 2 * tolerance(torch.bfloat16), (case.name, name, worst)
    assert all(part.isfinite().all() for part in made.out), (case.name, name)
    return worst


def percent(times: dict[str, Timing], base: str) -> list[float]:
    """Median, lowest and highest of what `fused` takes longer than `base` in a round."""
    ratios = [100 * (mine / other - 1) for mine, other in zip(times["fused"].rounds, times[base].rounds, strict=True)]
    return [statistics.median(ratios), min(ratios), max(ratios)]


def measure(case: Case, rounds: int, comm_sms: int | None) -> dict:
    """One row: errors against float32 on fresh data with poisoned results, then times."""
    q, k, v = (
        torch.randn(case.batch, case.heads, case.rows, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    contenders: dict[str, Callable[[], None]] = {}
    errors: dict[str, float] = {}
    with virtual_world(case.world, "cuda", timeout=20.0) as world:
        assert isinstance(world, VirtualWorld)

        def rank_program(rank, group):
            return *MAKERS[case.op](
                case, q, k, v, rank, group.world.fabric(rank), comm_sms
            ), torch.cuda.current_stream()

        by_rank, plans, streams = zip(*world.run(rank_program), strict=True)
        for name in by_rank[0]:
            launches = [launch for made in by_rank for launch in made[name].kept]
            contenders[name] = together(launches, streams)
            for made in by_rank:
                made[name].out.fill_(float("nan"))
            contenders[name]()
            torch.cuda.synchronize()
            errors[name] = max(check(case, name, made[name], q, k, v) for made in by_rank)
        times = interleaved(contenders, rounds)
        world.check()
    flop = 4 * case.batch * case.heads * case.rows**2 * DIM // (2 if case.causal else 1)
    base = "local" if "local" in times else "open"
    return {
        "case": case.name, **asdict(case), "placement": case.placement, "plan": plans[0].to_dict(), "rel_error": errors,
        "ms": {name: [t.median, t.low, t.high] for name, t in times.items()},
        "tflops": {name: flop / t.median / 1e9 for name, t in times.items()},
        "over": base, "overhead_percent": percent(times, base), "over_all_percent": percent(times, f"{base}, all"),
    }  # fmt: skip


def main() -> None:
    """Measure the cases asked for, by default all that fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--comm-sms", type=int, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found: list[dict] = []
    for case in CASES:
        if options.only not in case.name:
            continue
        torch.cuda.empty_cache()
        if case.bytes_needed > (free := torch.cuda.mem_get_info()[0]):
            print(f"{case.name}: needs {case.bytes_needed / 1e9:.0f} GB, {free / 1e9:.0f} are free", flush=True)
            continue
        found.append(row := measure(case, options.rounds, options.comm_sms))
        rates = "  ".join(f"{name} {rate:.0f}" for name, rate in row["tflops"].items())
        over, over_all = (
            "{:+.1f}% ({:+.1f} to {:+.1f})".format(*row[key]) for key in ("overhead_percent", "over_all_percent")
        )
        print(f"{case.name}, {row['plan']['comm_sms']} communicators: TFLOP/s {rates}", flush=True)
        print(f"    over {row['over']} {over}; over {row['over']}, all {over_all}", flush=True)
        if options.json:
            options.json.write_text(json.dumps({"machine": machine(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
