"""The matmul core beside cuBLAS on one GPU. `python -m tileweave.bench.matmul`

The core is matmul_reduce_scatter in a world of one, which is a plain matmul. Contenders are CUDA graphs of several
calls each, interleaved; successive calls take other operands, so that together they exceed the L2 cache several times
over: weights come from device memory, as they do in a model. Before timing, each result is checked against float32.

    --sweep     time all tile configurations, not the planner's choice alone: what planner/tilings.json is made from
    --float8    float8_e4m3fn operands with a scale for each row and column, beside torch._scaled_mm
"""

import math
from collections.abc import Callable
from typing import Any

import torch

import tileweave as tw
from tileweave.bench.harness import Bench, Row, Shape, Work, main
from tileweave.bench.measure import interleaved
from tileweave.ops.matmul_reduce_scatter import relative_error, tolerance
from tileweave.planner import Plan, Problem, candidates, plan_for
from tileweave.planner.plan import in_one_ring

SQUARES = [("square", n, n, n) for n in (1024, 2048, 4096, 8192, 16384)]
# A rank's share of the inner dimension where many share it.
SHORT = [("short", n, n, k) for n in (4096, 8192) for k in (512, 1024, 2048)]
# N and K of a layer's matmuls: q, k and v in one, attention output, gate and up in one, down.
LAYERS = {
    "llama-8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    "llama-70b": [(10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)],
}
TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SIZES = SQUARES + SHORT + [(name, m, n, k) for name, layers in LAYERS.items() for n, k in layers for m in TOKENS]
SHAPES: list[Shape] = [
    dict(name=name, m=m, n=n, k=k, transposed=transposed) for name, m, n, k in SIZES for transposed in (True, False)
]
COLD_BYTES = 256 << 20  # of operands that a graph's calls go through: several times an L2 cache
ROUND_MS = 1.0  # of work per contender and round, at least


def operands(m: int, n: int, k: int, transposed: bool, dtype=torch.bfloat16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random operand pairs, so many that calls find none of theirs in L2. `transposed`: b is a Linear's weight.t()."""
    copies = max(1, min(64, math.ceil(COLD_BYTES / (2 * k * (m + n)))))
    pairs = []
    for _ in range(copies):
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn((n, k) if transposed else (k, n), device="cuda", dtype=torch.bfloat16)
        a, b = a.to(dtype), b.to(dtype)
        pairs.append((a, b.t() if transposed else b))
    return pairs


def captured(call: Callable, pairs: list, calls: int) -> Callable[[], None]:
    """`calls` calls on the operand pairs in turn, as one replay of a CUDA graph."""
    call(*pairs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):  # torch.cuda.graph collects garbage first, which takes long
        graph.capture_begin()
        for i in range(calls):
            call(*pairs[i % len(pairs)])
        graph.capture_end()
    return graph.replay


def timed(replays: dict[str, Callable[[], None]], calls: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of a call: median, lowest and highest over rounds that replay every contender once."""
    times = interleaved(replays, rounds, warmup=1)
    return {name: [1e3 * value / calls for value in (t.median, t.low, t.high)] for name, t in times.items()}


def key(plan: Plan) -> str:
    """A plan's name in the figures."""
    return f"{plan.tile[0]}x{plan.tile[1]}/{plan.stages}/{plan.split}"


def measure(
    name: str, m: int, n: int, k: int, transposed: bool, rounds: int, sweep: bool = False, float8: bool = False
) -> Row | str:
    """One row: the plan's, or with `sweep` many plans', and cuBLAS's times for one shape."""
    if float8 and not transposed:
        return "8-bit operands have the other order only"
    dtype = torch.float8_e4m3fn if float8 else torch.bfloat16
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    problem = Problem(m, n, k, world=1, message_bytes=2, sms=sms, operand_bytes=dtype.itemsize)
    plans = worth_measuring(problem) if sweep else [plan_for(problem)]
    pairs = operands(m, n, k, transposed, dtype)
    product = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    scales: dict[str, Any] = {}
    if float8:
        scales = {"scale_a": torch.ones(m, 1, device="cuda"), "scale_b": torch.ones(1, n, device="cuda")}
    a, b = pairs[0]
    truth = torch.empty(m, n, device="cuda")
    for rows in range(0, m, 2048):
        truth[rows : rows + 2048] = a[rows : rows + 2048].float() @ b.float()
    runs: dict[str, Callable] = {"cublas": lambda a, b: torch.mm(a, b, out=product)}
    if scales:
        wanted = {**scales, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        runs["cublas"] = lambda a, b: torch._scaled_mm(a, b, **wanted)
    for plan in plans:
        runs[key(plan)] = lambda a, b, plan=plan: tw.matmul_reduce_scatter(a, b, plan=plan, **scales)
    for contender, run in runs.items():
        error = relative_error(run(a, b), truth)
        # 8-bit products are summed with about 14 bits.
        assert error <= (4 if scales else 1) * tolerance(torch.bfloat16, 1, False), (contender, m, n, k, error)
    del truth
    estimate = 2e-3 * m * n * k / 600e9 + 2 * k * n / 4e12 * 1e3  # milliseconds, roughly
    calls = max(1, min(64, math.ceil(ROUND_MS / estimate)), len(pairs) if estimate < 0.5 else 1)
    us = timed({contender: captured(run, pairs, calls) for contender, run in runs.items()}, calls, rounds)
    tw.check()
    order = "N x K" if transposed else "K x N"
    return {"shape": name, "m": m, "n": n, "k": k, "b": order, "dtype": str(dtype).removeprefix("torch."), "us": us}


def worth_measuring(problem: Problem) -> list[Plan]:
    """The plans that the cost model does not put far behind the best, each in one ring, as `bench.fit` wants them."""
    found = in_one_ring(candidates(problem))
    return [plan for cost, plan in found if cost < 1.3 * found[0][0]]


def label(shape: Shape) -> str:
    """A shape by name, and the order of b in memory."""
    return "{name} {m}x{n}x{k} b ".format(**shape) + ("NxK" if shape["transposed"] else "KxN")


def told(row: Row) -> str:
    """A row in a line."""
    cublas = row["us"]["cublas"][0]
    ratios = sorted(((cublas / us[0], name) for name, us in row["us"].items() if name != "cublas"), reverse=True)
    figures = "  ".join(f"{name} {ratio:.3f}" for ratio, name in ratios[:4])
    return f"cublas {cublas:.1f} us; speed over it: {figures}"


BENCHES = [
    Bench(
        "matmul", "one", SHAPES, measure, label, told,
        lambda shape, _: Work(2.0 * shape["m"] * shape["n"] * shape["k"]), quick=(0, 4, 6, 8), rounds=9,
        caches="other operands than the call's, whose own come from memory",
    )
]  # fmt: skip
MORE = {"--sweep": dict(action="store_true"), "--float8": dict(action="store_true")}

if __name__ == "__main__":
    main(__doc__, BENCHES, MORE)
