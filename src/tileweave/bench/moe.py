"""Expert parallelism on virtual ranks: what travel costs on top of the matmuls. `python -m tileweave.bench.moe`

H 7168, I 2048, 256 experts of which a token has 8, drawn evenly or, skewed, by weights that are exp of a normal
variable. On virtual ranks W ranks share one GPU, each with 1/W of the SMs and of the tokens, so no link is measured.
Three kinds:

    dispatch    moe_dispatch_matmul's kernels; its route is made before, and timed by itself
    gated       the same with a gate
    combine     moe_matmul_combine's kernels, rows [*, I] back to tokens [*, H]

Contenders, interleaved, all ranks at once unless said otherwise:

    fused       the op
    local       grouped_matmul of rows that are there, same tile (gated: one behind the other, for both matrices), on as
                many SMs as multiply in `fused`: fused / local - 1 is the overhead of travel, sums and gates
    local, all  the same on all SMs: what communicators take away as well
    torch       dispatch: a copy of all tokens for each rank (which stands for a gather), index, torch's grouped_mm on
                the whole GPU, one rank after the other, gated by torch. combine: grouped_mm, a copy of all rows (which
                stands for the all-to-all), index, weighted sum
    grouped_mm  torch's grouped_mm alone

`alone_ms` is the time of `local` of one rank while the others do nothing, which tells what ranks take from each other.
Results are poisoned, then checked against float32, before anything is timed. Bytes between ranks are counted both
ways: a token once to a rank, as the dispatch sends it, and a row for each choice.

    --comm-sms N communicators of the dispatch instead of the planner's
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from tileweave.bench.harness import Bench, Row, Shape, Work, main
from tileweave.bench.measure import interleaved
from tileweave.bench.recording import Recorder, poisoned, together
from tileweave.fabric import group_name, virtual_world
from tileweave.fabric.virtual import VirtualWorld
from tileweave.ops.contract import Like
from tileweave.ops.grouped_matmul.check import check
from tileweave.ops.grouped_matmul.launch import fused as grouped
from tileweave.ops.matmul_reduce_scatter import relative_error
from tileweave.ops.moe import Experts, TokenRoute
from tileweave.ops.moe.combine_launch import fused as combine
from tileweave.ops.moe.launch import fused as dispatch
from tileweave.ops.moe.reference import expert
from tileweave.ops.moe.routing import Lists, make_route
from tileweave.planner import Plan
from tileweave.planner.moe import DispatchProblem, GroupedProblem, dispatch_plan_for
from tileweave.planner.moe_combine import plan_for as combine_plan_for

HIDDEN, INNER, EXPERTS, CHOICES = 7168, 2048, 256, 8
WORLDS = (2, 4, 8)
CASES = [
    *((kind, tokens, False) for kind in ("dispatch", "combine") for tokens in (8, 32, 128)),
    ("gated", 32, False),
    *((kind, 32, True) for kind in ("dispatch", "combine")),
]
SHAPES: list[Shape] = [
    dict(kind=kind, size=size, tokens=tokens << 10, skewed=skewed) for kind, tokens, skewed in CASES for size in WORLDS
]
SAMPLE = 8  # rows or tokens of a rank that are checked
LIMIT = 0.02
ALONE = "local of a rank"


@dataclass
class Rank:
    """A rank's part: what it has, its route, and the rows that come to it: which token, which expert."""

    x: torch.Tensor
    index: torch.Tensor
    weight: torch.Tensor
    matrices: list[torch.Tensor]
    route: TokenRoute
    lists: Lists
    most: int
    route_us: float
    tokens: torch.Tensor
    experts: torch.Tensor
    rows: torch.Tensor


def random(*shape: int) -> torch.Tensor:
    """bfloat16, normal."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def draw(tokens: int, skewed: bool) -> torch.Tensor:
    """Each token's choices."""
    weights = torch.randn(EXPERTS, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).exp()
    weights = weights if skewed else torch.ones_like(weights)
    return torch.multinomial(weights.expand(tokens, EXPERTS), CHOICES)


def prepare(world: VirtualWorld, kind: str, tokens: int, skewed: bool) -> list[Rank]:
    """All ranks' parts."""
    each, experts = tokens // world.size, Experts(EXPERTS, world.size)
    x = [random(each, HIDDEN) for _ in range(world.size)]
    index = [draw(each, skewed) for _ in range(world.size)]
    every = torch.cat(index).reshape(-1)
    order = every.argsort(stable=True)
    shape = (INNER, HIDDEN) if kind == "combine" else (HIDDEN, INNER)

    def rank_program(rank: int, group: Any) -> Rank:
        first, end = experts.of(rank)
        weight = torch.rand(each, CHOICES, device="cuda")
        asked = group_name(group), group, index[rank], weight, experts, end - first, None, None
        make_route(*asked)
        torch.cuda.synchronize()
        start = time.perf_counter()
        route, lists, most = make_route(*asked)
        torch.cuda.synchronize()
        route_us = 1e6 * (time.perf_counter() - start)
        own = order[(every[order] >= first) & (every[order] < end)]
        matrices = [random(end - first, *shape) / shape[0] ** 0.5 for _ in range(2 if kind == "gated" else 1)]
        numbers = own // CHOICES
        rows = random(own.shape[0], INNER) if kind == "combine" else torch.cat(x)[numbers]
        return Rank(
            x[rank], index[rank], weight, matrices, route, lists, most, route_us, numbers, every[own] - first, rows
        )  # fmt: skip

    return world.run(rank_program)


def launches(world: VirtualWorld, kind: str, parts: list[Rank], plan: Plan) -> tuple[dict, dict, Any]:
    """Of each contender made of our kernels all ranks' launches and results; and the ranks' streams."""

    def rank_program(rank: int, group: Any) -> tuple:
        real, p = group.world.fabric(rank), parts[rank]
        r, made = p.route, {"fused": Recorder(group.world.fabric(rank), False)}
        if kind == "combine":
            back = r.row_weight, r.offsets, r.row_slot, r.row_home, r.home, r.slots, r.homes
            outs = {"fused": [combine(made["fused"], p.rows, p.matrices[0], *back, plan)]}
        else:
            gate = p.matrices[1] if kind == "gated" else None
            there = r.offsets, r.row_slot, r.token_slot, Experts(EXPERTS, world.size), p.lists, r.slots, p.most
            outs = {"fused": [dispatch(made["fused"], p.x, p.matrices[0], gate, *there, False, plan)]}
        alone = replace(plan, mechanism="tma", schedule="intra_sm", comm_sms=0)
        for name, sms in (("local", real.sms - plan.comm_sms), ("local, all", real.sms)):
            if name == "local" or plan.comm_sms:
                made[name] = Recorder(real, True)
                made[name].sms = sms
                call = check(*(Like(x.shape, x.dtype, x.device) for x in (p.rows, p.matrices[0], r.offsets)))
                outs[name] = [grouped(made[name], call, p.rows, w, r.offsets, alone) for w in p.matrices]
        return {name: recorder.kept for name, recorder in made.items()}, outs, torch.cuda.current_stream()

    kept, outs, streams = zip(*world.run(rank_program), strict=True)
    by_name = {
        name: [launch for step in zip(*(each[name] for each in kept), strict=True) for launch in step]
        for name in kept[0]
    }
    return by_name, {name: [each[name] for each in outs] for name in kept[0]}, streams


def sampled(count: int) -> torch.Tensor:
    """Some of `count` numbers, the first and the last among them."""
    return torch.linspace(0, count - 1, SAMPLE, device="cuda").long()


def verify(kind: str, name: str, parts: list[Rank], outs: list[list[torch.Tensor]]) -> None:
    """AssertionError unless a contender's results are finite, and right in a sample of rows or tokens of each rank."""
    experts = Experts(EXPERTS, len(parts))
    for p, results in zip(parts, outs, strict=True):
        sample = sampled(results[0].shape[0])
        for i, out in enumerate(results):
            if kind == "combine" and name == "fused":
                truth = torch.zeros(SAMPLE, HIDDEN, device="cuda")
                for row, t in enumerate(sample.tolist()):
                    for e, place, weight in zip(
                        p.index[t].tolist(), p.route.place[t].tolist(), p.weight[t], strict=True
                    ):
                        owner = int(experts.owner(torch.tensor(e)))
                        w = parts[owner].matrices[0][e - experts.of(owner)[0]]
                        truth[row] += weight * (parts[owner].rows[place].float() @ w.float())
            else:
                gate = p.matrices[1] if kind == "gated" and name == "fused" else None
                made = [
                    expert(p.rows[r], p.matrices[i][e], None if gate is None else gate[e], None)
                    for r, e in zip(sample.tolist(), p.experts[sample].tolist(), strict=True)
                ]
                truth = torch.stack(made)
            assert out.isfinite().all() and relative_error(out[sample], truth) <= LIMIT, (kind, name)


def rivals(kind: str, parts: list[Rank]) -> dict[str, Callable[[], None]]:
    """PyTorch's contenders."""

    def grouped_mm() -> list[torch.Tensor]:
        return [F.grouped_mm(p.rows, w, offs=p.route.offsets) for p in parts for w in p.matrices]

    def there() -> None:
        for p in parts:
            rows = torch.cat([each.x for each in parts])[p.tokens]
            ys = [F.grouped_mm(rows, w, offs=p.route.offsets) for w in p.matrices]
            if kind == "gated":
                F.silu(ys[1]) * ys[0]

    experts = Experts(EXPERTS, len(parts))
    starts = torch.tensor([0, *(p.rows.shape[0] for p in parts)], device="cuda").cumsum(0)
    places = [(starts[experts.owner(p.index)] + p.route.place).reshape(-1) for p in parts]
    weights = [p.weight.bfloat16()[:, None] for p in parts]

    def back() -> None:
        rows = torch.cat(grouped_mm())
        for place, weight in zip(places, weights, strict=True):
            torch.bmm(weight, rows[place].view(-1, CHOICES, HIDDEN))

    return {"torch": back if kind == "combine" else there, "grouped_mm": lambda: grouped_mm().clear()}


def planned(kind: str, size: int, sms: int, tokens: int, comm_sms: int | None) -> Plan:
    """The planner's plan; a dispatch with `comm_sms` communicators instead."""
    own = EXPERTS // size
    if kind == "combine":
        return combine_plan_for(GroupedProblem(tokens * CHOICES // size, own, HIDDEN, INNER, sms))
    plan = dispatch_plan_for(DispatchProblem(size, own, INNER, HIDDEN, sms, 2 if kind == "gated" else 1))
    return plan if comm_sms is None else replace(plan, comm_sms=comm_sms)


def crossing(parts: list[Rank]) -> tuple[int, int]:
    """Of the rank that sends most, bytes to others: a token once to each rank, and a row for each choice."""
    found = []
    for rank, p in enumerate(parts):
        first, end = Experts(EXPERTS, len(parts)).of(rank)
        there = p.route.token_slot >= 0
        found.append((int(there.sum() - there[:, rank].sum()), int(((p.index < first) | (p.index >= end)).sum())))
    by_token, by_choice = (2 * HIDDEN * max(each) for each in zip(*found, strict=True))
    return by_token, by_choice


def measure(kind: str, size: int, tokens: int, skewed: bool, rounds: int, comm_sms: int | None = None) -> Row:
    """One row: checks, then times in milliseconds (median, lowest, highest)."""
    with virtual_world(size, "cuda", timeout=20.0) as world:
        assert isinstance(world, VirtualWorld)
        plan = planned(kind, size, world.sms, tokens, comm_sms)
        parts = prepare(world, kind, tokens, skewed)
        made, outs, streams = launches(world, kind, parts, plan)
        contenders = {name: together(each, streams) for name, each in made.items()}
        for name, run in contenders.items():
            poisoned(run, (out for results in outs[name] for out in results))
            verify(kind, name, parts, outs[name])
        contenders[ALONE] = together(made["local"][::size], streams[:1])
        times = interleaved({**contenders, **rivals(kind, parts)}, rounds)
        alone = times.pop(ALONE)
        world.check()
        by_token, by_choice = crossing(parts)
        flop = flop_of(kind, tokens)
        rows = [p.rows.shape[0] for p in parts]
        route_us = max(p.route_us for p in parts)
    return {
        "kind": kind, "world": size, "tokens": tokens, "routing": "skewed" if skewed else "even",
        "plan": plan.to_dict(), "rows": [min(rows), max(rows)], "route_us": route_us,
        "bytes_by_token": by_token, "bytes_by_choice": by_choice,
        "ms": {name: [t.median, t.low, t.high] for name, t in times.items()},
        "tflops": {name: flop / t.median / 1e9 for name, t in times.items()},
        "alone_ms": [alone.median, alone.low, alone.high],
        "overhead_percent": 100 * (times["fused"].median / times["local"].median - 1),
    }  # fmt: skip


def flop_of(kind: str, tokens: int) -> float:
    """Operations of all ranks."""
    return 2.0 * tokens * CHOICES * HIDDEN * INNER * (2 if kind == "gated" else 1)


def needs(shape: Shape) -> int:
    """Bytes of GPU memory, of all ranks: rows [*, HIDDEN] where contenders keep them, products, tokens, weights."""
    wide, narrow = (2 * shape["tokens"] * CHOICES * size for size in (HIDDEN, INNER))
    products = 2 if shape["kind"] == "gated" else 1
    weights = 2 * EXPERTS * HIDDEN * INNER * products
    if shape["kind"] == "combine":  # two slots, local, of torch: products, their copy, and those of a rank
        return 5 * wide + wide // shape["size"] + narrow + weights
    return 2 * wide + wide // shape["size"] + 5 * products * narrow + 3 * wide // CHOICES + weights


def label(shape: Shape) -> str:
    """A shape by name."""
    return "{kind}, W={size}, {tokens} tokens, ".format(**shape) + ("skewed" if shape["skewed"] else "even")


def told(row: Row) -> str:
    """A row in a line."""
    rates = "  ".join(f"{contender} {rate:.0f}" for contender, rate in row["tflops"].items())
    once, each = row["bytes_by_token"] / 1e6, row["bytes_by_choice"] / 1e6
    return (
        f"TFLOP/s {rates}; local {row['ms']['local'][0]:.2f} ms, of a rank alone {row['alone_ms'][0]:.2f}; "
        f"overhead {row['overhead_percent']:+.1f}%, route {row['route_us']:.0f} us, "
        f"{once:.0f} MB by token, {each:.0f} MB by choice"
    )


BENCHES = [
    Bench(
        name, "virtual", [shape for shape in SHAPES if (shape["kind"] == "combine") == combines], measure, label, told,
        lambda shape, _: Work(flop_of(shape["kind"], shape["tokens"])), quick=(1,), rounds=7,
        needs=needs,
    )
    for name, combines in (("moe_dispatch_matmul", False), ("moe_matmul_combine", True))
]  # fmt: skip
MORE = {"--comm-sms": dict(type=int, metavar="N")}

if __name__ == "__main__":
    main(__doc__, BENCHES, MORE)
