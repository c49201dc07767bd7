"""grouped_matmul beside torch.nn.functional.grouped_mm on one GPU. `python -m tileweave.bench.grouped_matmul`

H 7168, I 2048, as in DeepSeek's layers. Balanced: each expert has as many rows. Drawn: each row draws its expert, all
alike, so hardly any has a multiple of a tile. Skewed: by weights that are exp of a normal variable, so the largest has
several times the mean.
Contenders are CUDA graphs of one call each, interleaved in random order; before timing each result is checked
against float32.

    --sweep      time all tile configurations, not the planner's choice alone
    --transposed w stored E x I x H, as a layer's weight
"""

from collections.abc import Callable

import torch

import tileweave as tw
from tileweave.bench.harness import Bench, Row, Shape, Work, main
from tileweave.bench.matmul import key
from tileweave.bench.measure import interleaved
from tileweave.ops.grouped_matmul import reference
from tileweave.ops.matmul_reduce_scatter import relative_error, tolerance
from tileweave.planner.moe import GroupedProblem, candidates, plan_for

HIDDEN, INNER = 7168, 2048
SHAPES = [
    dict(rows=rows << 10, experts=experts, routing=routing)
    for experts, most in ((32, 128), (128, 256))
    for rows in (32, 64, 128, 256)
    if rows <= most
    for routing in ("balanced", "drawn", "skewed")
]


def sizes(rows: int, experts: int, routing: str) -> list[int]:
    """How many rows each expert has."""
    if routing == "balanced":
        return [rows // experts] * experts
    g = torch.Generator().manual_seed(0)
    weights = torch.randn(experts, generator=g).exp() if routing == "skewed" else torch.ones(experts)
    return torch.multinomial(weights, rows, True, generator=g).bincount(minlength=experts).tolist()


def captured(call: Callable) -> Callable[[], None]:
    """One call as a replay of a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(rows: int, experts: int, routing: str, rounds: int, sweep: bool = False, transposed: bool = False) -> Row:
    """One row: TFLOP/s of torch and of the plans (median, lowest, highest)."""
    x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    w = (
        torch.randn(experts, *((INNER, HIDDEN) if transposed else (HIDDEN, INNER)), device="cuda", dtype=torch.bfloat16)
        / HIDDEN**0.5
    )
    w = w.transpose(1, 2) if transposed else w
    counts = sizes(rows, experts, routing)
    offsets = torch.tensor(counts, device="cuda").cumsum(0).int()
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    problem = GroupedProblem(rows, experts, INNER, HIDDEN, sms)
    planned = plan_for(problem)
    plans = [plan for _, plan in candidates(problem)] if sweep else [planned]
    runs: dict[str, Callable] = {"torch": lambda: torch.nn.functional.grouped_mm(x, w, offs=offsets)}
    for plan in plans:
        runs[key(plan)] = lambda plan=plan: tw.grouped_matmul(x, w, offsets, plan=plan)
    check(runs, x, w, offsets)
    times = interleaved({name: captured(run) for name, run in runs.items()}, rounds, warmup=2)
    flops = 2e-9 * rows * HIDDEN * INNER
    return {
        "rows": rows, "experts": experts, "routing": routing, "largest": max(counts),
        "w": "E x I x H" if transposed else "E x H x I", "planned": key(planned),
        "ms": {name: [t.median, t.low, t.high] for name, t in times.items()},
        "tflops": {name: [flops / ms for ms in (t.median, t.high, t.low)] for name, t in times.items()},
    }  # fmt: skip


def check(runs: dict[str, Callable], x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> None:
    """AssertionError unless every contender is right in the rows of some experts."""
    some = min(4, offsets.shape[0])
    end = int(offsets[some - 1])
    truth = reference(x[:end], w[:some], offsets[:some])
    for name, run in runs.items():
        error = relative_error(run()[:end], truth)
        assert error <= tolerance(torch.bfloat16, 1, True), (name, error)


def label(shape: Shape) -> str:
    """A shape by name."""
    return f"{shape['rows']} rows, {shape['experts']} experts, {shape['routing']}"


def told(row: Row) -> str:
    """A row in a line."""
    rival = row["tflops"]["torch"][0]
    ours = sorted(((t[0], key) for key, t in row["tflops"].items() if key != "torch"), reverse=True)
    figures = "  ".join(f"{key} {t:.0f} ({t / rival:.3f})" for t, key in ours)
    return f"torch {rival:.0f} TFLOP/s; {figures}; planned {row['planned']}"


BENCHES = [
    Bench(
        "grouped_matmul", "one", SHAPES, measure, label, told,
        lambda shape, _: Work(2.0 * shape["rows"] * HIDDEN * INNER), quick=(0, 2), rounds=9,
    )
]  # fmt: skip
MORE = {"--sweep": dict(action="store_true"), "--transposed": dict(action="store_true")}

if __name__ == "__main__":
    main(__doc__, BENCHES, MORE)
