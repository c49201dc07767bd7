"""The collectives, timed. On virtual ranks of one GPU, or, under torchrun, one process per GPU beside NCCL:

    python -m tileweave.bench.collectives
    python -m torch.distributed.run --nproc-per-node 2 -m tileweave.bench.collectives

Contenders, interleaved, medians over rounds:

    tileweave  the collective
    copy       as many bytes as a rank's result has, copied within its GPU: nothing crosses a link
    nccl       torch.distributed's collective on the same tensors, with the reshaping copies that another dimension than
               the first costs it (one process per GPU only)

All as replays of a CUDA graph of CALLS calls in a row, so host time does not count; the slowest process counts. On
virtual ranks W ranks share one GPU and its memory, each with 1/W of the SMs, so no link is measured: it tells what the
kernel itself costs. Every contender is checked first. GB/s: the bytes that a rank takes from its peers over the time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave.bench.between import CALLS, slowest, timed
from tileweave.bench.harness import Bench, Row, Shape, Work, main
from tileweave.bench.measure import interleaved
from tileweave.fabric import virtual_world
from tileweave.ops.collectives import reference

SIZES = [1 << k for k in (13, 16, 18, 20, 22, 24, 26, 28)]  # bytes of the larger of x and result
CASES: list[tuple[str, dict[str, Any]]] = [
    ("all_gather", dict(dim=0)),
    ("all_gather", dict(dim=1)),
    ("reduce_scatter", dict(dim=0)),
    ("reduce_scatter", dict(dim=1)),
    ("all_reduce", {}),
    ("all_to_all", dict(split_dim=0, concat_dim=0)),
    ("all_to_all", dict(split_dim=1, concat_dim=0)),
]
WORLDS = (2, 4, 8)  # of virtual ranks
Run = Callable[[], Any]


def shape_of(name: str, options: dict[str, Any], nbytes: int, world: int) -> tuple[int, int]:
    """A bf16 matrix for x, with rows of up to 4096 elements, whose larger side of the call has about `nbytes`."""
    elements = nbytes // 2 // (world if name == "all_gather" else 1)
    columns = min(4096, max(elements // world, 8)) // (8 * world) * 8 * world or 8 * world
    rows = max(elements // columns // world, 1) * world
    return rows, columns


def taken(name: str, nbytes: int, world: int) -> float:
    """Bytes that a rank must take from its peers, of an x of so many."""
    return nbytes * {"all_gather": world - 1, "all_reduce": 2 * (world - 1) / world}.get(name, (world - 1) / world)


def nccl(name: str, options: dict[str, Any], x: torch.Tensor) -> Run:
    """torch.distributed's collective on the same tensors, contiguous result."""
    world = dist.get_world_size()

    def all_gather() -> torch.Tensor:
        out = x.new_empty(world * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x)
        return out if options["dim"] == 0 else torch.cat(out.chunk(world), options["dim"])

    def reduce_scatter() -> torch.Tensor:
        rows = x if options["dim"] == 0 else torch.cat(x.chunk(world, options["dim"]))
        out = x.new_empty(rows.shape[0] // world, *rows.shape[1:])
        dist.reduce_scatter_tensor(out, rows)
        return out

    def all_reduce() -> torch.Tensor:
        out = x.clone()
        dist.all_reduce(out)
        return out

    def all_to_all() -> torch.Tensor:
        rows = x if options["split_dim"] == 0 else torch.cat(x.chunk(world, options["split_dim"]))
        out = torch.empty_like(rows)
        dist.all_to_all_single(out, rows)
        return out  # concat_dim is 0

    return {f.__name__: f for f in (all_gather, reduce_scatter, all_reduce, all_to_all)}[name]


def check(name: str, out: torch.Tensor, true: torch.Tensor) -> None:
    """AssertionError unless a result is right, but for roundings."""
    torch.testing.assert_close(out.float(), true.float(), rtol=2**-6, atol=2**-5, msg=lambda said: f"{name}: {said}")


def check_all(name: str, out: torch.Tensor, true: torch.Tensor) -> None:
    """The same, of all ranks' results, on each of them: one that goes on by itself leaves the others waiting."""
    wrong = ""
    try:
        check(name, out, true)
    except AssertionError as failure:
        wrong = str(failure)
    assert slowest(float(bool(wrong))) == 0, wrong or f"{name}: wrong on another rank"


def row(name: str, options: dict[str, Any], x: torch.Tensor, world: int, us: dict[str, list[float]]) -> dict:
    """A row of figures; us: median, lowest and highest microseconds of a call, by contender."""
    gbs = {who: taken(name, x.nbytes, world) / times[0] / 1e3 for who, times in us.items()}
    return {"op": name, **options, "world": world, "shape": list(x.shape), "us": us, "gb_per_s": gbs}


def measure_virtual(name: str, options: dict[str, Any], world_size: int, nbytes: int, rounds: int) -> Row:
    """One row on virtual ranks: all of them at once, each on its stream."""
    shape = shape_of(name, options, nbytes, world_size)
    xs = [torch.randn(shape, device="cuda").bfloat16() for _ in range(world_size)]
    truth = reference(name, xs, **options)
    with virtual_world(world_size, "cuda", timeout=5.0) as world:

        def rank_program(rank, group):
            call = lambda: getattr(tw, name)(xs[rank], group, **options)  # noqa: E731
            out = call()
            source, target = torch.empty_like(out), torch.empty_like(out)
            group.world.fabric(rank).rendezvous()
            replays = {}
            for who, run in (("tileweave", call), ("copy", lambda: target.copy_(source))):
                run()
                torch.cuda.synchronize()
                group.world.fabric(rank).rendezvous()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode="thread_local")
                for _ in range(CALLS):
                    run()
                graph.capture_end()
                replays[who] = graph
                group.world.fabric(rank).rendezvous()
            return out, replays, torch.cuda.current_stream(), (source, target)

        outs, replays, streams, _kept = zip(*world.run(rank_program), strict=True)
        for out, true in zip(outs, truth, strict=True):
            check(name, out, true)

        def together(who: str) -> Callable[[], None]:
            def run() -> None:
                here = torch.cuda.current_stream()
                start = here.record_event()
                for stream, graphs in zip(streams, replays, strict=True):
                    stream.wait_event(start)
                    with torch.cuda.stream(stream):
                        graphs[who].replay()
                for stream in streams:
                    here.wait_stream(stream)

            return run

        times = interleaved({who: together(who) for who in ("tileweave", "copy")}, rounds)
        us = {who: [1e3 * t / CALLS for t in (time.median, time.low, time.high)] for who, time in times.items()}
    return row(name, options, xs[0], world_size, us)


def measure_processes(name: str, options: dict[str, Any], nbytes: int, rounds: int) -> Row:
    """One row between processes; the slowest rank's times."""
    world = dist.get_world_size()
    x = torch.randn(shape_of(name, options, nbytes, world), device="cuda").bfloat16()
    runs: dict[str, Run] = {"tileweave": lambda: getattr(tw, name)(x, **options), "nccl": nccl(name, options, x)}
    check_all(name, runs["tileweave"](), runs["nccl"]())
    source = runs["tileweave"]().clone()
    target = torch.empty_like(source)
    runs["copy"] = lambda: target.copy_(source)
    us = timed(runs, rounds)["us"]
    tw.check()
    return {**row(name, options, x, world, us), "route": tw.explain(name, x, **options).to_dict()}


def label(shape: Shape) -> str:
    """A shape by name."""
    ranks = f"W={shape['world_size']} " if "world_size" in shape else ""
    dims = " ".join(f"{name}={value}" for name, value in shape["options"].items())
    return f"{ranks}{dims} {shape['nbytes']} bytes".strip()


def told(row: Row) -> str:
    """A row in a line."""
    return f"{row['shape']}: " + "  ".join(
        f"{who} {us[0]:.1f} us {row['gb_per_s'][who]:.0f} GB/s" for who, us in row["us"].items()
    )


def work(name: str, shape: Shape, world: int) -> Work:
    """Of one of so many GPUs. Within one nothing crosses a link."""
    if "world_size" in shape:
        return Work(0.0)
    rows, columns = shape_of(name, shape["options"], shape["nbytes"], world)
    return Work(0.0, taken(name, 2 * rows * columns, world))


def bench_of(name: str, several: bool) -> Bench:
    """One collective's."""
    worlds: list[Shape] = [{}] if several else [dict(world_size=world) for world in WORLDS]
    shapes = [
        {**world, "options": options, "nbytes": nbytes}
        for world in worlds
        for op, options in CASES
        if op == name
        for nbytes in SIZES
    ]
    measure = partial(measure_processes if several else measure_virtual, name)
    where = "several" if several else "virtual"
    return Bench(name, where, shapes, measure, label, told, partial(work, name), quick=(0, 4, 7), rounds=15)


BENCHES = [bench_of(name, several) for several in (False, True) for name in dict.fromkeys(name for name, _ in CASES)]

if __name__ == "__main__":
    main(__doc__, BENCHES)
