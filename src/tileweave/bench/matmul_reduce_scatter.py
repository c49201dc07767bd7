"""matmul_reduce_scatter on virtual ranks: what the protocol costs. `python -m tileweave.bench.matmul_reduce_scatter`

W ranks share one GPU, each with 1/W of the SMs, so no link is measured. Contenders, interleaved:

    fused         the op, all ranks
    deterministic the same with deterministic=True
    local         W one-rank grids of the same kernel, tiling and SM share, running at once, that store all their tiles
                  in their own memory: same matmul, no peers. fused / local - 1 is the overhead of the protocol
    cublas        W whole-GPU torch.mm, one after the other; no reduction

Prints a table and writes JSON where --json says.
"""

from collections.abc import Callable

import torch

from tileweave.bench.harness import Bench, Row, Shape, Work, main
from tileweave.bench.measure import interleaved
from tileweave.bench.recording import Recorder, poisoned, together
from tileweave.fabric import virtual_world
from tileweave.fabric.virtual import VirtualWorld
from tileweave.ops.contract import Like, Site
from tileweave.ops.matmul_reduce_scatter import reference, relative_error, tolerance
from tileweave.ops.matmul_reduce_scatter.check import settle
from tileweave.ops.matmul_reduce_scatter.launch import fused
from tileweave.planner import Plan, Problem, plan_for

SHAPES = [
    dict(world_size=w, m=8192, n=8192, k=k)
    for k, worlds in ((8192, [1]), (4096, [2, 4, 8]), (2048, [2, 4, 8]))
    for w in worlds
]


def record(world, a, b, alone: bool, plan: Plan, **options):
    """All ranks' launches of one call, the results they will write, their streams."""

    def rank_program(rank, group):
        fabric = Recorder(group.world.fabric(rank), alone)
        deterministic = options.get("deterministic", False)
        like = Like.of(a[rank]), Like.of(b[rank]), "sum", None
        call, _ = settle(Site.of(fabric), *like, deterministic, None, plan, 0)
        out, _ = fused(fabric, call, a[rank], b[rank], None, plan)
        return fabric.kept[0], out, torch.cuda.current_stream()

    return zip(*world.run(rank_program), strict=True)


def measure(world_size: int, m: int, n: int, k: int, rounds: int) -> dict:
    """One row: errors against float32 on fresh data with poisoned results, then times. k is one rank's share."""
    a = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(world_size)]
    b = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16).t() for _ in range(world_size)]
    product = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    with virtual_world(world_size, "cuda", timeout=5.0) as world:
        contenders: dict[str, Callable[[], None]] = {}
        errors: dict[str, float] = {}
        truth = reference(a, b)
        plan = plan_for(Problem(m, n, k, world_size, product.itemsize, world.sms, linked=False))
        for name, alone, deterministic in (
            ("fused", False, False),
            ("deterministic", False, True),
            ("local", True, False),
        ):
            launches, outs, streams = record(world, a, b, alone, plan, deterministic=deterministic)
            contenders[name] = together(launches, streams)
            poisoned(contenders[name], outs)
            error = max(
                relative_error(out, a[r].float() @ b[r].float()) for r, out in enumerate(outs)
            ) if alone else relative_error(torch.cat(outs), truth)  # fmt: skip
            assert error <= tolerance(torch.bfloat16, world_size, deterministic), (name, error)
            errors[name] = error
        del truth

        def cublas() -> None:
            for x, y in zip(a, b, strict=True):
                torch.mm(x, y, out=product)

        contenders["cublas"] = cublas
        times = interleaved(contenders, rounds)
        assert isinstance(world, VirtualWorld)
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
    figures = "  ".join(f"{name} {rate:.0f}" for name, rate in row["tflops"].items())
    return f"TFLOP/s {figures}  {row['overhead_percent']:+.1f}% over local"


def label(shape: Shape) -> str:
    """A shape by name; K of a rank."""
    return "W={world_size} M={m} N={n} K_local={k}".format(**shape)


def work(shape: Shape, _: int) -> Work:
    """Of all virtual ranks together, as they share the GPU."""
    return Work(2.0 * shape["m"] * shape["n"] * shape["k"] * shape["world_size"])


BENCHES = [Bench("matmul_reduce_scatter", "virtual", SHAPES, measure, label, told, work, quick=(0, 2), rounds=15)]


if __name__ == "__main__":
    main(__doc__, BENCHES)
