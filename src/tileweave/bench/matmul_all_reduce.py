"""matmul_all_reduce: what it costs beside the matmul it contains. `python -m tileweave.bench.matmul_all_reduce`

On virtual ranks W ranks share a GPU, each with 1/W of the SMs, so no link is measured. Contenders:

    fused     the op, all ranks
    normed    the op with a residual and an RMSNorm
    local     W one-rank grids of the same kernel, tiling and SM share, running at once, that store all their tiles in
              their own memory: same matmul, no peers. fused / local - 1 is the overhead of the protocol
    matmul    the same with the tiling that is best for a matmul alone

Calls are replayed from CUDA graphs, a few in a row, so that host time does not count; the contenders take turns. Prints
a table and writes JSON where --json says. Each result is checked against a float32 truth first.
"""

from collections.abc import Callable

import torch

from tileweave.bench.harness import Bench, Row, main
from tileweave.bench.matmul_reduce_scatter import label, work
from tileweave.bench.measure import interleaved
from tileweave.bench.recording import Recorder, poisoned, together
from tileweave.fabric import virtual_world
from tileweave.ops.contract import Like, Site
from tileweave.ops.matmul_all_reduce import reference, relative_error, tolerance
from tileweave.ops.matmul_all_reduce.check import Options, settle
from tileweave.ops.matmul_all_reduce.launch import Extras, fused
from tileweave.planner import Plan
from tileweave.planner.matmul_all_reduce import Problem, plan_for

DECODE = [(m, 8192, 8192) for m in (1, 4, 16, 64, 128, 256)]  # M, N, K of a rank
# [N, K] @ [K, N] of a rank whose compute has the ratio to transfers that [N, N / 8] @ [N / 8, N] has on a whole GPU: a
# rank has 1 / W of the SMs, so K is W times as large.
SHAPES = [
    dict(world_size=w, m=m, n=n, k=k)
    for w in (2, 4, 8)
    for m, n, k in [*DECODE, *((n, n, n // 8 * w) for n in (4096, 8192, 16384))]
]


def record(world, a, b, extras: Extras, alone: bool, plan: Plan):
    """All ranks' launches of one call, what they will write, their streams."""

    def rank_program(rank, group):
        fabric = Recorder(group.world.fabric(rank), alone)
        like = Like.of(a[rank]), Like.of(b[rank]), *map(Like.of, extras)
        call, _ = settle(Site.of(fabric), *like, Options(False, 1e-6, 0), plan)
        results, _ = fused(fabric, call, a[rank], b[rank], extras, plan)
        return fabric.kept[0], results, torch.cuda.current_stream()

    return zip(*world.run(rank_program), strict=True)


def measure(world_size: int, m: int, n: int, k: int, rounds: int) -> Row:
    """One row: errors against float32 with poisoned results, then microseconds of a call; k is one rank's share."""
    calls = 8 if (m, n, k) in DECODE else 1
    a = [torch.randn(m, k, device="cuda").bfloat16() for _ in range(world_size)]
    b = [torch.randn(n, k, device="cuda").bfloat16().t() for _ in range(world_size)]
    residual, weight = torch.randn(m, n, device="cuda").bfloat16(), torch.randn(n, device="cuda").bfloat16()
    truth = reference(a, b)
    none, given = Extras(None, None, None), Extras(None, residual, weight)
    with virtual_world(world_size, "cuda", timeout=5.0) as world:
        problem = Problem(m, n, k, world_size, world.sms, linked=False)
        plan, normed = plan_for(problem), plan_for(Problem(m, n, k, world_size, world.sms, True, False))
        same = Plan("tma", "none", plan.tile, plan.stages, plan.split)
        best = plan_for(Problem(m, n, k, 1, world.sms, linked=False))
        contenders: dict[str, Callable[[], None]] = {}
        errors: dict[str, float] = {}
        for name, extras, alone, chosen in (
            ("fused", none, False, plan),
            ("normed", given, False, normed),
            ("local", none, True, same),
            ("matmul", none, True, best),
        ):
            launches, results, streams = record(world, a, b, extras, alone, chosen)
            contenders[name] = together(launches, streams, calls)
            poisoned(contenders[name], (each[-1] for each in results))
            pairs = (
                [(x[-1], a[r].float() @ b[r].float()) for r, x in enumerate(results)]
                if alone
                else [(x[-1], truth if extras is none else truth + residual.float()) for x in (results[0], results[-1])]
            )
            errors[name] = max(relative_error(got, truth) for got, truth in pairs)
            assert errors[name] <= tolerance(torch.bfloat16, world_size), (name, errors[name])
            del pairs
        times = interleaved(contenders, rounds)
        world.check()  # type: ignore[attr-defined]
    us = {name: [1e3 * t / calls for t in (each.median, each.low, each.high)] for name, each in times.items()}
    return {
        "world": world_size, "m": m, "n": n, "k_local": k, "plan": plan.to_dict(), "matmul_plan": best.to_dict(),
        "rel_error": errors, "us": us, "overhead_percent": 100 * (us["fused"][0] / us["local"][0] - 1),
        "over_matmul_us": us["fused"][0] - us["matmul"][0],
    }  # fmt: skip


def told(row: dict) -> str:
    """A row in a line."""
    plan = row["plan"]
    figures = "  ".join(f"{name} {times[0]:.1f}" for name, times in row["us"].items())
    return (
        f"us {figures}  "
        f"{row['overhead_percent']:+.1f}% over local, {row['over_matmul_us']:+.1f} us over matmul; {plan['schedule']} "
        f"{'x'.join(map(str, plan['tile'][:2]))} split {plan['split']}, predicted {plan['predicted_us']}"
    )


BENCHES = [Bench("matmul_all_reduce", "virtual", SHAPES, measure, label, told, work, quick=(0, 4, 7), rounds=15)]

if __name__ == "__main__":
    main(__doc__, BENCHES)
