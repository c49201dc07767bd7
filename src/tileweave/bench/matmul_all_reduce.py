"""matmul_all_reduce: what it costs beside the matmul it contains, and beside its rivals.

    python -m tileweave.bench.matmul_all_reduce                                            virtual ranks, one GPU
    python -m torch.distributed.run --nproc-per-node 2 -m tileweave.bench.matmul_all_reduce     one process per GPU

On virtual ranks W ranks share a GPU, each with 1/W of the SMs, so no link is measured. Contenders:

    fused     the op, all ranks
    normed    the op with a residual and an RMSNorm
    local     W one-rank grids of the same kernel, tiling and SM share, running at once, that store all their tiles in
              their own memory: same matmul, no peers. fused / local - 1 is the overhead of the protocol
    matmul    the same with the tiling that is best for a matmul alone

Between processes:

    fused     tileweave
    nccl      torch.mm, then dist.all_reduce
    one-shot, two-shot    torch.mm into symmetric memory, then torch.ops.symm_mem.{one,two}_shot_all_reduce
    matmul    torch.mm alone

Calls are replayed from CUDA graphs, a few in a row, so that host time does not count; the contenders take turns. Prints
a table and writes JSON where --json says. Each result is checked against a float32 truth first.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tileweave.bench.matmul_reduce_scatter import Recorder
from tileweave.bench.measure import interleaved, machine
from tileweave.fabric import virtual_world
from tileweave.fabric.virtual import Launch, launch_all
from tileweave.ops.contract import Like, Site
from tileweave.ops.matmul_all_reduce import reference, relative_error, tolerance
from tileweave.ops.matmul_all_reduce.check import Options, settle
from tileweave.ops.matmul_all_reduce.launch import Extras, fused
from tileweave.planner import Plan
from tileweave.planner.matmul_all_reduce import Problem, plan_for

DECODE = [(m, 8192, 8192) for m in (1, 4, 16, 64, 128, 256)]  # M, N, K of a rank
SQUARES = [4096, 8192, 16384]
WORLDS = (2, 4, 8)


def squares(world: int) -> list[tuple[int, int, int]]:
    """Products [N, K] @ [K, N] of a rank whose compute has the ratio to transfers that [N, N / 8] @ [N / 8, N] has on a
    whole GPU: a rank has 1 / W of the SMs, so K is W times as large."""
    return [(n, n, n // 8 * world) for n in SQUARES]


def record(world, a, b, extras: Extras, alone: bool, plan: Plan):
    """All ranks' launches of one call, what they will write, their streams."""

    def rank_program(rank, group):
        fabric = Recorder(group.world.fabric(rank), alone)
        like = Like.of(a[rank]), Like.of(b[rank]), *map(Like.of, extras)
        call, _ = settle(Site.of(fabric), *like, Options(False, 1e-6, 0), plan)
        results, _ = fused(fabric, call, a[rank], b[rank], extras, plan)
        return fabric.kept[0], results, torch.cuda.current_stream()

    return zip(*world.run(rank_program), strict=True)


def together(launches: Sequence[Launch], streams: Sequence[torch.cuda.Stream], calls: int) -> Callable[[], None]:
    """A contender: all ranks' launches on their streams, `calls` times in a row, as one replay of a graph."""

    def enqueue() -> None:
        here = torch.cuda.current_stream()
        start = here.record_event()
        for stream in streams:
            stream.wait_event(start)
        for _ in range(calls):
            launch_all(launches)
        for stream in streams:
            here.wait_stream(stream)

    enqueue()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        enqueue()
    return graph.replay


def measure(world_size: int, m: int, n: int, k: int, rounds: int, calls: int) -> dict:
    """One row: errors against float32 with poisoned results, then microseconds of a call; k is one rank's share."""
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
        kept = []  # what the graphs read and write
        for name, extras, alone, chosen in (
            ("fused", none, False, plan),
            ("normed", given, False, normed),
            ("local", none, True, same),
            ("matmul", none, True, best),
        ):
            launches, results, streams = record(world, a, b, extras, alone, chosen)
            kept.append(launches)
            contenders[name] = together(launches, streams, calls)
            for each in results:
                each[-1].fill_(float("nan"))
            contenders[name]()
            torch.cuda.synchronize()
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


def on_virtual_ranks(options: argparse.Namespace) -> list[dict]:
    """All rows of one GPU."""
    rows = []
    for world in WORLDS:
        for shape in [*DECODE, *squares(world)]:
            row = measure(world, *shape, options.rounds, 8 if shape in DECODE else 1)
            rows.append(row)
            plan, us = row["plan"], row["us"]
            tile = "x".join(map(str, plan["tile"][:2]))
            figures = "  ".join(f"{name} {times[0]:.1f}" for name, times in us.items())
            print(
                f"W={world} M={shape[0]} N={shape[1]} K_local={shape[2]}: us {figures}  "
                f"{row['overhead_percent']:+.1f}% over local, {row['over_matmul_us']:+.1f} us over matmul; "
                f"{plan['schedule']} {tile} split {plan['split']}, predicted {plan['predicted_us']}",
                flush=True,
            )
            torch.cuda.empty_cache()
    return rows


def rivals(a: torch.Tensor, b: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Everybody who computes the sum between processes."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    import tileweave as tw

    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    product = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    shared = symmetric.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    symmetric.rendezvous(shared, name)

    def fused_call() -> torch.Tensor:
        result = tw.matmul_all_reduce(a, b)
        assert isinstance(result, torch.Tensor)
        return result

    def nccl() -> torch.Tensor:
        torch.mm(a, b, out=product)
        dist.all_reduce(product)
        return product

    def one_shot() -> torch.Tensor:
        torch.mm(a, b, out=shared)
        return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", name)

    def two_shot() -> torch.Tensor:
        torch.mm(a, b, out=shared)
        return torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", name)

    return {
        "fused": fused_call,
        "nccl": nccl,
        "one-shot": one_shot,
        "two-shot": two_shot,
        "matmul": lambda: torch.mm(a, b, out=product),
    }


def measure_process(m: int, n: int, k: int, rounds: int) -> dict:
    """One row: errors, then medians over rounds of the slowest rank's microseconds; k is one rank's share."""
    import statistics

    import torch.distributed as dist

    import tileweave as tw
    from tileweave.bench.processes import CALLS, several, slowest

    world = dist.get_world_size()
    a, b = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16().t()
    truth = a.float() @ b.float()
    dist.all_reduce(truth)
    runs = rivals(a, b)
    errors: dict[str, float | str] = {}
    for name, run in list(runs.items()):
        if name == "matmul":
            continue
        try:
            error = slowest(relative_error(run(), truth))
        except (AttributeError, RuntimeError) as failure:  # a rival that does not run here is left out, and said so
            errors[name] = f"does not run: {str(failure).splitlines()[0]}"
            del runs[name]
            continue
        assert error <= 2 * tolerance(torch.bfloat16, world), (name, error)
        errors[name] = error
    del truth
    timed = {name: several(run) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, (replay, _) in timed.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            dist.barrier()
            replay()  # pays for the skew of the ranks
            start.record()
            replay()
            end.record()
            end.synchronize()
            times[name].append(slowest(1e3 * start.elapsed_time(end) / CALLS))
    tw.check()
    us = {name: [statistics.median(values), min(values), max(values)] for name, values in times.items()}
    graph = {name: captured for name, (_, captured) in timed.items()}
    plan = tw.explain("matmul_all_reduce", a, b).plan
    return {
        "world": world, "m": m, "n": n, "k_local": k, "rel_error": errors, "us": us, "graph": graph,
        "plan": plan.to_dict() if plan else None,
    }  # fmt: skip


def between_processes(options: argparse.Namespace) -> list[dict]:
    """All rows of this process's group."""
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    world, rows = dist.get_world_size(), []
    llama = [(m, 8192, 28672 // world) for m in (1, 16, 64, 256, 1024, 4096)]
    for shape in [*DECODE, *llama, *((n, n, n // world) for n in SQUARES)]:
        rows.append(row := measure_process(*shape, options.rounds))
        if dist.get_rank() == 0:
            us = "  ".join(
                f"{name}{'' if row['graph'][name] else ' (eager)'} {t[0]:.1f}" for name, t in row["us"].items()
            )
            schedule = row["plan"]["schedule"] if row["plan"] else "fallback"
            print("M={} N={} K_local={}".format(*shape), f"x{world}: us {us}  {schedule}", flush=True)
    if dist.get_rank() != 0:
        options.json = None
    dist.destroy_process_group()
    return rows


def main() -> None:
    """Measure all shapes, where this was started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    rows = between_processes(options) if "LOCAL_RANK" in os.environ else on_virtual_ranks(options)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
