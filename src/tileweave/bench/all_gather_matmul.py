"""all_gather_matmul: what the protocol costs on virtual ranks, or, one process per GPU, beside its rivals.

    python -m tileweave.bench.all_gather_matmul
    python -m torch.distributed.run --nproc-per-node 2 -m tileweave.bench.all_gather_matmul

On virtual ranks W ranks share one GPU, each with 1/W of the SMs, so no link is measured; as a rank pushes the same
bytes with fewer SMs to multiply, N_local is W times what it would be on W GPUs. Contenders, interleaved:

    fused         the op, all ranks; with --comm-sms also `fused, C` for each number C of communicators
    intra_sm, none  its other schedules, with as many communicators
    local         W one-rank grids of the same kernel, tiling and number of multiplying SMs, running at once, whose A is
                  gathered before: same matmul, no peers. fused / local - 1 is the overhead of the protocol
    local, all    the same on all SMs: what communicators take away as well
    cublas        W whole-GPU torch.mm of gathered operands, one after the other

Between GPUs, where the slowest rank counts, and replays of CUDA graphs are timed where they can be:

    fused         the op
    nccl          dist.all_gather_into_tensor, then torch.mm
    async-tp      torch.ops.symm_mem.fused_all_gather_matmul
    matmul        torch.mm of gathered operands alone: what the transfer would cost nothing beside

Each contender is checked against a float32 truth first. Prints a table and writes JSON where --json says.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave.bench.matmul_reduce_scatter import Recorder, together
from tileweave.bench.measure import interleaved, machine
from tileweave.bench.processes import CALLS, several, slowest
from tileweave.fabric import virtual_world
from tileweave.fabric.virtual import VirtualWorld
from tileweave.ops.all_gather_matmul import reference
from tileweave.ops.all_gather_matmul.check import settle
from tileweave.ops.all_gather_matmul.launch import fused
from tileweave.ops.contract import Like, Site
from tileweave.ops.matmul_reduce_scatter import relative_error, tolerance
from tileweave.planner import Plan
from tileweave.planner.all_gather_matmul import Problem, plan_for

# W, M, N_local, K: the paper's (N, N / 8, N) with N_local times W.
VIRTUAL_SHAPES = [(w, n, n * w // 8, n) for n in (4096, 8192, 16384) for w in (2, 4, 8)]
# M, N of the whole product, K; N is shared among the ranks.
SHAPES = [(n, n, n) for n in (4096, 8192, 16384)] + [(m, 28672, 8192) for m in (64, 256, 1024, 2048, 4096, 8192)]


def record(world, a: list, b: list, alone: bool, plan: Plan, max_sms: int = 0):
    """All ranks' launches of one call, the results they will write, their streams; `alone`: `a` is gathered already."""

    def rank_program(rank, group):
        fabric = Recorder(group.world.fabric(rank), alone)
        site = Site.of(fabric)
        call, _ = settle(site, Like.of(a[rank]), (Like.of(b[rank]),), (), False, plan, max_sms)
        (out,), _ = fused(fabric, call, a[rank], [b[rank]], [], plan)
        return fabric.kept, out, torch.cuda.current_stream()

    kept, outs, streams = zip(*world.run(rank_program), strict=True)
    return [launch for step in zip(*kept, strict=True) for launch in step], outs, streams


def contenders_of(world: VirtualWorld, a: list, b: list, plan: Plan, more_comm_sms: list[int]) -> dict:
    """What `record` makes of each contender but cublas."""
    whole = [torch.cat(a) for _ in a]  # a copy for each rank, as each has one in its slot
    alone = replace(plan, comm_sms=0, split=1)
    multiplying = world.sms - plan.comm_sms
    made = {
        "fused": record(world, a, b, False, plan),
        "intra_sm": record(world, a, b, False, replace(plan, schedule="intra_sm")),
        "none": record(world, a, b, False, replace(plan, schedule="none", split=1)),
        "local": record(world, whole, b, True, replace(alone, split=plan.split), multiplying),
        "local, all": record(world, whole, b, True, alone),
    }
    for comm_sms in more_comm_sms:
        if 0 < comm_sms < world.sms:
            made[f"fused, {comm_sms}"] = record(world, a, b, False, replace(plan, comm_sms=comm_sms, split=1))
    return made


def measure_virtual(world_size: int, m: int, n: int, k: int, rounds: int, more_comm_sms: list[int]) -> dict:
    """One row: errors against float32 on fresh data with poisoned results, then times."""
    rows = m // world_size
    a = [torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for _ in range(world_size)]
    b = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16).t() for _ in range(world_size)]
    gathered, product = torch.cat(a), torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    with virtual_world(world_size, "cuda", timeout=5.0) as world:
        assert isinstance(world, VirtualWorld)
        plan = plan_for(Problem(rows, (n,), k, world_size, world.sms, linked=False))
        contenders: dict[str, Callable[[], None]] = {}
        errors: dict[str, float] = {}
        for name, (launches, outs, streams) in contenders_of(world, a, b, plan, more_comm_sms).items():
            contenders[name] = together(launches, streams)
            for out in outs:
                out.fill_(float("nan"))
            contenders[name]()
            torch.cuda.synchronize()
            errors[name] = max(relative_error(out, reference(a, y)) for out, y in zip(outs, b, strict=True))
            assert errors[name] <= tolerance(torch.bfloat16, 1, True), (name, errors[name])

        def cublas() -> None:
            for y in b:
                torch.mm(gathered, y, out=product)

        times = interleaved({**contenders, "cublas": cublas}, rounds)
        world.check()
    flop = 2 * m * n * k * world_size
    return {
        "world": world_size, "m": m, "n": n, "k_local": k, "plan": plan.to_dict(), "rel_error": errors,
        "ms": {name: [t.median, t.low, t.high] for name, t in times.items()},
        "tflops": {name: flop / t.median / 1e9 for name, t in times.items()},
        "overhead_percent": 100 * (times["fused"].median / times["local"].median - 1),
    }  # fmt: skip


def rivals(a: torch.Tensor, b: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Everybody who computes all rows of this rank's columns."""
    import torch.distributed._symmetric_memory  # registers the rival's operators

    world, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    gathered = torch.empty(world * a.shape[0], a.shape[1], dtype=a.dtype, device=a.device)
    product = torch.empty(gathered.shape[0], b.shape[1], dtype=a.dtype, device=a.device)

    def nccl() -> torch.Tensor:
        dist.all_gather_into_tensor(gathered, a)
        return torch.mm(gathered, b, out=product)

    def async_tp() -> torch.Tensor:
        return torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, group.group_name)[1][0]

    return {
        "fused": lambda: tw.all_gather_matmul(a, b),
        "nccl": nccl,
        "async-tp": async_tp,
        "matmul": lambda: torch.mm(gathered, b, out=product),
    }


def measure_between(m: int, n: int, k: int, rounds: int) -> dict:
    """One row: errors, then medians over rounds of the slowest rank's milliseconds per call."""
    world = dist.get_world_size()
    a = torch.randn(m // world, k, device="cuda").bfloat16()
    b = torch.randn(n // world, k, device="cuda").bfloat16().t()
    whole = torch.empty(m, k, dtype=a.dtype, device="cuda")
    dist.all_gather_into_tensor(whole, a)
    truth = whole.float() @ b.float()
    runs = rivals(a, b)
    errors: dict[str, float | str] = {}
    for name, run in list(runs.items()):
        if name == "matmul":
            continue
        try:
            errors[name] = error = slowest(relative_error(run(), truth))
        except (AttributeError, RuntimeError) as failure:  # a rival that does not run here is left out, and said so
            errors[name] = f"does not run: {str(failure).splitlines()[0]}"
            del runs[name]
            continue
        assert error <= 2 * tolerance(torch.bfloat16, 1, True), (name, error)
    del truth, whole
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
            times[name].append(slowest(start.elapsed_time(end) / CALLS))
    tw.check()
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "world": world, "m": m, "n": n, "k": k, "rel_error": errors,
        "plan": tw.explain("all_gather_matmul", a, b).to_dict()["plan"],
        "ms": {name: [medians[name], min(values), max(values)] for name, values in times.items()},
        "graph": {name: captured for name, (_, captured) in timed.items()},
        "tflops_per_gpu": {name: 2 * m * n * k / world / median / 1e9 for name, median in medians.items()},
    }  # fmt: skip


def main() -> None:
    """Measure all shapes, on virtual ranks unless launched by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--comm-sms", type=int, nargs="*", default=[], help="further numbers of communicators")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    between = "LOCAL_RANK" in os.environ
    if between:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    speaks = not between or dist.get_rank() == 0
    rows: list[dict] = []
    for world, m, n, k in [(0, *shape) for shape in SHAPES] if between else VIRTUAL_SHAPES:
        if between:
            rows.append(row := measure_between(m, n, k, options.rounds))
            told = "M={m} N={n} K={k} x{world}, {plan[comm_sms]} communicators, TFLOP/s per GPU:".format(**row)
            rates, end = row["tflops_per_gpu"], ""
        else:
            rows.append(row := measure_virtual(world, m, n, k, options.rounds, options.comm_sms))
            told = "W={world} M={m} N_local={n} K={k_local}, {plan[comm_sms]} communicators:".format(**row)
            rates, end = row["tflops"], f"  overhead {row['overhead_percent']:+.1f}%"
        if speaks:
            print(told, "  ".join(f"{name} {rate:.0f}" for name, rate in rates.items()) + end, flush=True)
    if speaks and options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    if between:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
