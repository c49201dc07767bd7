"""Which overlap scope wins: every mechanism and schedule that an op has, over the number of SMs that communicate.

    python -m tileweave.bench.scopes [OP ...]
    python -m torch.distributed.run --nproc-per-node 2 -m tileweave.bench.scopes [OP ...]

The plans are all those that the op's planner does not refuse, with the planner's own tile where it allows that, so a
new schedule appears here by itself. all_gather_matmul's intra_sm loads peers' rows where they are used, which is to be
held against inter_sm, which fetches them once ahead. A contender's name is mechanism, schedule and communicator SMs.

On virtual ranks W ranks share one GPU, each with 1/W of the SMs, so no link is measured, and copies within a GPU take
SMs; products have W times the compute that they would have on W GPUs, lest transfers count W times as much. Between
GPUs, one process each, the slowest rank counts. Calls are replayed from CUDA graphs, contenders take turns, in another
order each round. Each result is checked against a float32 truth first. Prints a line a shape, the fastest plan of
each schedule first, and writes JSON where --json says. Each plan is a kernel of its own to compile, one after the
other: with --only, a few plans, several such processes beforehand fill Triton's cache side by side.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave.bench.harness import ranks, write
from tileweave.bench.measure import interleaved
from tileweave.bench.recording import poisoned
from tileweave.fabric import fabric_of, virtual_world
from tileweave.ops.all_gather_matmul import reference as gathered_product
from tileweave.ops.matmul_reduce_scatter import reference as product
from tileweave.ops.matmul_reduce_scatter import relative_error, tolerance
from tileweave.planner import Plan, all_gather_matmul, matmul_all_reduce
from tileweave.planner import plan as matmul_reduce_scatter

MECHANISMS = ("tma", "register", "copy_engine", "multimem")  # the last one where the fabric has multicast
SCHEDULES = ("intra_sm", "inter_sm", "one_shot", "none")
COMM_SMS = (0, 1, 2, 4, 8, 16)
SIZES = (4096, 8192)
WORLDS = (2, 4, 8)  # of virtual ranks
TILES = (((128, 128, 64), 4), ((64, 128, 64), 4))  # where the planner's own is refused
CALLS = 4  # of a graph


class Op(NamedTuple):
    """An op's planner, its problem for a rank's a and b, and what each rank should get from all ranks' operands."""

    planner: Any
    problem: Callable[..., Any]
    truth: Callable[[list, list], list[torch.Tensor]]


def of_rows(a: torch.Tensor, b: torch.Tensor, world: int, sms: int, linked: bool) -> Any:
    """The problem of matmul_reduce_scatter; two ranks keep their parts apart."""
    (m, k), n = a.shape, b.shape[1]
    return matmul_reduce_scatter.Problem(m, n, k, world, 2, sms, deterministic=world == 2, linked=linked)


OPS = {
    "matmul_reduce_scatter": Op(
        matmul_reduce_scatter, of_rows, lambda a, b: [x.clone() for x in product(a, b).chunk(len(a))]
    ),
    "matmul_all_reduce": Op(
        matmul_all_reduce,
        lambda a, b, world, sms, linked: matmul_all_reduce.Problem(
            a.shape[0], b.shape[1], a.shape[1], world, sms, linked=linked
        ),
        lambda a, b: [product(a, b)] * len(a),
    ),
    "all_gather_matmul": Op(
        all_gather_matmul,
        lambda a, b, world, sms, linked: all_gather_matmul.Problem(
            a.shape[0], (b.shape[1],), a.shape[1], world, sms, linked=linked
        ),
        lambda a, b: [gathered_product(a, x) for x in b],
    ),
}


def operands(op: str, size: int, share: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's fresh random a and b of a product of `size` rows, and `share` of what the ranks split beside them."""
    a, b = ((size // world, size), (share, size)) if op == "all_gather_matmul" else ((size, share), (size, share))
    x, y = (torch.randn(*shape, device="cuda").bfloat16() for shape in (a, b))
    return x, y.t()


def plans_of(
    op: str, a: torch.Tensor, b: torch.Tensor, world: int, sms: int, linked: bool, multicast: bool, only: Sequence[str]
) -> dict[str, Plan]:
    """All plans that the op has, by name; those whose name starts with one of `only`, if there are any."""
    planner = OPS[op].planner
    problem = OPS[op].problem(a, b, world, sms, linked)
    best = planner.plan_for(problem)
    found = {}
    for mechanism in MECHANISMS if multicast else MECHANISMS[:-1]:
        for schedule in SCHEDULES:
            for comm_sms in COMM_SMS:
                if mechanism == "copy_engine" and not linked and comm_sms == 0:
                    continue  # copies within a GPU run on SMs, which nobody would have left
                for tile, stages in ((best.tile, best.stages), *TILES):
                    plan = Plan(mechanism, schedule, tile, stages, comm_sms=comm_sms)
                    if not planner.unsupported(problem, plan):
                        found[f"{mechanism} {schedule} {comm_sms}"] = plan
                        break
    return {name: plan for name, plan in found.items() if not only or name.startswith(tuple(only))}


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of CALLS calls on the current stream, and the last one's result. Virtual ranks capture at one time."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for _ in range(CALLS):
            out = run()
    finally:
        graph.capture_end()
    return graph, out


def on_virtual_ranks(op: str, world_size: int, size: int, rounds: int, only: Sequence[str]) -> dict:
    """A row of W ranks of one GPU."""
    pairs = [operands(op, size, size // 8 * world_size, world_size) for _ in range(world_size)]
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    truths = OPS[op].truth(a, b)
    contenders: dict[str, Callable[[], None]] = {}
    errors: dict[str, float] = {}
    with virtual_world(world_size, "cuda", timeout=5.0) as world:
        plans = plans_of(op, a[0], b[0], world_size, world.sms, False, False, only)
        for name, plan in plans.items():

            def rank_program(rank, group, plan=plan):
                def run():
                    return getattr(tw, op)(a[rank], b[rank], group, plan=plan)

                run()
                torch.cuda.synchronize()
                fabric_of(group).rendezvous()
                return *captured(run), torch.cuda.current_stream()

            graphs, outs, streams = zip(*world.run(rank_program), strict=True)
            contenders[name] = together(graphs, streams)
            poisoned(contenders[name], outs)
            errors[name] = max(relative_error(out, truth) for out, truth in zip(outs, truths, strict=True))
            assert errors[name] <= 2 * tolerance(torch.bfloat16, world_size, False), (name, errors[name])
        times = interleaved(contenders, rounds)
        world.check()  # type: ignore[attr-defined]
    us = {name: [1e3 * t / CALLS for t in (each.median, each.low, each.high)] for name, each in times.items()}
    return row(op, world_size, size, size // 8 * world_size, plans, errors, us)


def together(graphs: Sequence, streams: Sequence) -> Callable[[], None]:
    """A contender: all ranks' graphs, each on its stream, between two points of the current stream."""

    def run() -> None:
        here = torch.cuda.current_stream()
        start = here.record_event()
        for graph, stream in zip(graphs, streams, strict=True):
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                graph.replay()
        for stream in streams:
            here.wait_stream(stream)

    return run


def between_gpus(op: str, size: int, rounds: int, only: Sequence[str]) -> dict:
    """A row of a process for each GPU."""
    from tileweave.bench.between import checked, timed

    rank, world = dist.get_rank(), dist.get_world_size()
    a, b = operands(op, size, size // world, world)
    all_a, all_b = ([torch.empty_like(x.contiguous()) for _ in range(world)] for x in (a, b))
    dist.all_gather(all_a, a.contiguous())
    dist.all_gather(all_b, b.contiguous())
    truth = OPS[op].truth(all_a, all_b)[rank]
    sms = torch.cuda.get_device_properties(a.device).multi_processor_count
    multicast = fabric_of(None, a.device).multicast_refusal() is None
    plans = plans_of(op, a, b, world, sms, True, multicast, only)
    runs: dict[str, Callable[[], Any]] = {
        name: partial(getattr(tw, op), a, b, plan=plan) for name, plan in plans.items()
    }
    errors = checked(runs, truth, 2 * tolerance(torch.bfloat16, world, False))
    times = timed(runs, rounds)
    tw.check()
    return row(op, world, size, size // world, plans, errors, times["us"])


def row(op: str, world: int, size: int, share: int, plans: dict, errors: dict, us: dict) -> dict:
    """What is kept of a shape."""
    return {
        "op": op, "world": world, "size": size, "share": share, "rel_error": errors, "us": us,
        "plans": {name: plan.to_dict() for name, plan in plans.items()},
    }  # fmt: skip


def told(found: dict) -> str:
    """A row in a line: of each mechanism and schedule the fastest, and the others behind it."""
    groups: dict[str, list[tuple[float, str]]] = {}
    for name, (median, _, _) in found["us"].items():
        way, comm_sms = name.rsplit(" ", 1)
        groups.setdefault(way, []).append((median, comm_sms))
    ways = sorted((sorted(each), way) for way, each in groups.items())
    text = "; ".join(f"{way} " + " ".join(f"{us:.1f} ({comm_sms})" for us, comm_sms in each) for each, way in ways)
    return f"{found['op']} x{found['world']} {found['size']}, share {found['share']}: us (communicators) {text}"


def main() -> None:
    """Measure the ops asked for, by default all, on virtual ranks unless launched by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", metavar="OP", default=list(OPS), help=", ".join(OPS))
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS, help="of virtual ranks")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="TEXT", help="plans whose name starts with one of these"
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    if unknown := set(options.ops) - set(OPS):
        parser.error(f"unknown OP {', '.join(sorted(unknown))}: expected some of {', '.join(OPS)}")
    between = "LOCAL_RANK" in os.environ
    rows = []
    with ranks(between) as speaks:
        worlds = [dist.get_world_size()] if between else options.worlds
        for op, world, size in [(op, world, size) for op in options.ops for world in worlds for size in options.sizes]:
            if between:
                found = between_gpus(op, size, options.rounds, options.only)
            else:
                found = on_virtual_ranks(op, world, size, options.rounds, options.only)
            rows.append(found)
            torch.cuda.empty_cache()
            if speaks:
                print(told(found), flush=True)
                write(options.json, rows)


if __name__ == "__main__":
    main()
