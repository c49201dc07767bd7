"""all_gather_matmul: what the protocol costs on virtual ranks. `python -m tileweave.bench.all_gather_matmul`

On virtual ranks W ranks share one GPU, each with 1/W of the SMs, so no link is measured; as a rank pushes the same
bytes with fewer SMs to multiply, N_local is W times what it would be on W GPUs. Contenders, interleaved:

    fused         the op, all ranks; with --comm-sms also `fused, C` for each number C of communicators
    intra_sm, none  its other schedules, with as many communicators
    local         W one-rank grids of the same kernel, tiling and number of multiplying SMs, running at once, whose A is
                  gathered before: same matmul, no peers. fused / local - 1 is the overhead of the protocol
    local, all    the same on all SMs: what communicators take away as well
    cublas        W whole-GPU torch.mm of gathered operands, one after the other

Each contender is checked against a float32 truth first. Prints a table and writes JSON where --json says.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tileweave.bench.harness import Bench, Row, main
from tileweave.bench.matmul_reduce_scatter import label, work
from tileweave.bench.measure import interleaved
from tileweave.bench.recording import Recorder, poisoned, together
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
SHAPES = [dict(world_size=w, m=n, n=n * w // 8, k=n) for n in (4096, 8192, 16384) for w in (2, 4, 8)]


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


def contenders_of(world: VirtualWorld, a: list, b: list, plan: Plan, more_comm_sms: Sequence[int]) -> dict:
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


def measure(world_size: int, m: int, n: int, k: int, rounds: int, comm_sms: Sequence[int] = ()) -> Row:
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
        for name, (launches, outs, streams) in contenders_of(world, a, b, plan, comm_sms).items():
            contenders[name] = together(launches, streams)
            poisoned(contenders[name], outs)
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


def told(row: Row) -> str:
    """A row in a line."""
    rates = "  ".join(f"{name} {rate:.0f}" for name, rate in row["tflops"].items())
    return f"{row['plan']['comm_sms']} communicators: TFLOP/s {rates}  overhead {row['overhead_percent']:+.1f}%"


BENCHES = [Bench("all_gather_matmul", "virtual", SHAPES, measure, label, told, work, quick=(1, 4))]
MORE = {"--comm-sms": dict(type=int, nargs="*", default=[], help="further numbers of communicators")}

if __name__ == "__main__":
    main(__doc__, BENCHES, MORE)
