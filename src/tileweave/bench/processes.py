"""matmul_reduce_scatter between GPUs, beside its rivals. One process per GPU:

    python -m torch.distributed.run --nproc-per-node 2 -m tileweave.bench.processes

Contenders, interleaved, a few calls in a row each round; the slowest rank counts:

    fused       tileweave
    nccl        torch.mm, then dist.reduce_scatter_tensor
    async-tp    torch.ops.symm_mem.fused_matmul_reduce_scatter
    matmul      torch.mm alone: what the transfer would cost nothing beside

Each is checked against a float32 truth first, then timed as replays of a CUDA graph of a few calls, so that host time
does not count; what cannot be captured is called eagerly and marked. Rank 0 prints a table and writes JSON where
--json says.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # registers the rival's operators

import tileweave as tw
from tileweave.bench.measure import machine
from tileweave.ops.matmul_reduce_scatter import relative_error, tolerance

# M, N, K of the whole product; K is shared among the ranks.
SHAPES = [
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16384, 16384, 16384),
    (64, 8192, 28672),
    (256, 8192, 28672),
    (1024, 8192, 28672),
    (2048, 8192, 28672),
    (4096, 8192, 28672),
]
CALLS = 4  # in a row, per round


def contenders(a: torch.Tensor, b: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Everybody who computes this rank's rows from its operands."""
    world = dist.get_world_size()
    product = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    shard = torch.empty(a.shape[0] // world, b.shape[1], dtype=a.dtype, device=a.device)

    def nccl() -> torch.Tensor:
        torch.mm(a, b, out=product)
        dist.reduce_scatter_tensor(shard, product)
        return shard

    found: dict[str, Callable[[], torch.Tensor]] = {"fused": lambda: tw.matmul_reduce_scatter(a, b), "nccl": nccl}
    world_group = dist.group.WORLD
    assert world_group is not None
    name = world_group.group_name
    found["async-tp"] = lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, name)
    found["matmul"] = lambda: torch.mm(a, b, out=product)
    return found


def slowest(milliseconds: float) -> float:
    """The largest of all ranks' values."""
    value = torch.tensor(milliseconds, device="cuda")
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def several(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], bool]:
    """CALLS calls in a row as one replay of a CUDA graph, and True; eagerly, and False, where that cannot be."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                run()
    except RuntimeError:
        torch.cuda.synchronize()

        def eager() -> None:
            for _ in range(CALLS):
                run()

        return eager, False
    return graph.replay, True


def measure(m: int, n: int, k: int, rounds: int) -> dict:
    """One row: errors, then medians over rounds of the slowest rank's milliseconds per call."""
    rank, world = dist.get_rank(), dist.get_world_size()
    a = torch.randn(m, k // world, device="cuda").bfloat16()
    b = torch.randn(n, k // world, device="cuda").bfloat16().t()
    truth = a.float() @ b.float()
    dist.all_reduce(truth)
    truth = truth.chunk(world)[rank].clone()
    runs = contenders(a, b)
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
        assert error <= 2 * tolerance(torch.bfloat16, world, False), (name, error)
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
            times[name].append(slowest(start.elapsed_time(end) / CALLS))
    tw.check()
    flop = 2 * m * n * k / world
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "world": world, "m": m, "n": n, "k": k, "rel_error": errors,
        "ms": {name: [medians[name], min(values), max(values)] for name, values in times.items()},
        "graph": {name: captured for name, (_, captured) in timed.items()},
        "tflops_per_gpu": {name: flop / median / 1e9 for name, median in medians.items()},
    }  # fmt: skip


def main() -> None:
    """Measure all shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="where rank 0 writes the figures")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    rows = []
    for m, n, k in SHAPES:
        rows.append(row := measure(m, n, k, options.rounds))
        if dist.get_rank() == 0:
            rates = "  ".join(
                f"{name}{'' if row['graph'][name] else ' (eager)'} {rate:.0f}"
                for name, rate in row["tflops_per_gpu"].items()
            )
            ms = "  ".join(f"{name} {1e3 * times[0]:.1f}" for name, times in row["ms"].items())
            print(f"M={m} N={n} K={k} x{row['world']}: TFLOP/s per GPU {rates} | us {ms}", flush=True)
    if options.json and dist.get_rank() == 0:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
