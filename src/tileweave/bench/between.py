"""All ops between GPUs, beside their rivals. One process per GPU:

    python -m torch.distributed.run --nproc-per-node 2 -m tileweave.bench.between [OP ...]

Contenders, which take turns, in another order each round; the slowest rank counts:

    tileweave            the op
    nccl                 torch.mm and the collective of torch.distributed, one after the other
    async-tp             torch.ops.symm_mem.fused_matmul_reduce_scatter, fused_all_gather_matmul
    one-shot, two-shot   torch.mm into symmetric memory, then torch.ops.symm_mem.{one,two}_shot_all_reduce
    matmul               torch.mm alone: what the transfer would cost nothing beside
    own matmul           the op in a group of this rank alone: its kernel's matmul, with the tiles best for that
    flux, triton-distributed   those libraries' kernels, where they are installed (`bench.adapters`)

Each is checked against a float32 truth on fresh data, then timed as replays of a CUDA graph of CALLS calls in a row, so
that host time does not count; what cannot be captured is called eagerly and marked. `route` says whether tileweave ran
a kernel of its own, or took the plain way.
"""

import math
import random
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric  # also registers the rivals' operators

import tileweave as tw
from tileweave.bench.adapters import EAGER, joined, products
from tileweave.bench.harness import Bench, Row, Shape, Work, main
from tileweave.bench.rivals import RIVALS
from tileweave.bench.tables import ALONE
from tileweave.fabric.gathering import gather_values
from tileweave.ops.matmul_reduce_scatter import relative_error, tolerance
from tileweave.ops.route import Route

CALLS = 4  # in a row, per round
PATIENCE = 30.0  # seconds for a call whose peer may have failed
Runs = dict[str, Callable[[], Any]]  # by contender, what makes its result
MAY_FAIL = RIVALS.keys() - {"nccl"}  # all others must run here and be right

# M, N, K of the whole product: what each rank holds of it depends on the op. The squares are those of figures 10 to 14
# of arXiv 2511.13940; the others layers of Llama-70B, and shapes at which users found fused kernels slower: Flux #90
# (N = K = 8192; N 8192, K 28672), kraken PR 19 (N 4096, K 14336), few rows.
SQUARES = [(n, n, n) for n in (4096, 8192, 16384, 2048, 32768)]
SHAPES = {
    "matmul_reduce_scatter": [
        *SQUARES[:3],
        *((m, 8192, 28672) for m in (16, 64, 256, 1024, 2048, 4096)),
        *((m, 4096, 14336) for m in (512, 1024, 2048)),
        *SQUARES[3:],
    ],
    "all_gather_matmul": [
        *SQUARES[:3],
        *((m, 28672, 8192) for m in (16, 64, 256, 1024, 2048, 4096)),
        *((m, 8192, 8192) for m in (1024, 2048, 4096)),
        *SQUARES[3:],
    ],
    "matmul_all_reduce": [
        *SQUARES[:3],
        *((m, 8192, 28672) for m in (1, 16, 64, 256, 1024, 4096)),
        (1024, 8192, 8192),
        *SQUARES[3:],
    ],
}


def normal(*shape: int) -> torch.Tensor:
    """Fresh random bf16 on this rank's GPU."""
    return torch.randn(*shape, device="cuda").bfloat16()


def summed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The sum over ranks of a @ b in float32."""
    total = a.float() @ b.float()
    dist.all_reduce(total)
    return total


def world_name() -> Any:
    """What PyTorch's operators call the group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group.group_name


@cache
def alone() -> Any:
    """The group of this rank only."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def reduce_scatter(m: int, n: int, k: int) -> tuple[Runs, torch.Tensor, Route]:
    """Contenders for matmul_reduce_scatter, what they should find, and the way that ours takes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    a, b = normal(m, k // world), normal(n, k // world).t()
    product, shard = a.new_empty(m, n), a.new_empty(m // world, n)

    def nccl() -> torch.Tensor:
        torch.mm(a, b, out=product)
        dist.reduce_scatter_tensor(shard, product)
        return shard

    runs: Runs = {
        "tileweave": lambda: tw.matmul_reduce_scatter(a, b),
        "nccl": nccl,
        "async-tp": lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, world_name()),
        "matmul": lambda: torch.mm(a, b, out=product),
        "own matmul": lambda: tw.matmul_reduce_scatter(a, b, alone()),
    }
    truth = summed(a, b).chunk(world)[rank].clone()
    return joined(runs, products("matmul_reduce_scatter", a, b)), truth, tw.explain("matmul_reduce_scatter", a, b)


def all_gather(m: int, n: int, k: int) -> tuple[Runs, torch.Tensor, Route]:
    """Contenders for all_gather_matmul, what they should find, and the way that ours takes."""
    world = dist.get_world_size()
    a, b = normal(m // world, k), normal(n // world, k).t()
    whole, product = a.new_empty(m, k), a.new_empty(m, n // world)

    def nccl() -> torch.Tensor:
        dist.all_gather_into_tensor(whole, a)
        return torch.mm(whole, b, out=product)

    nccl()
    runs: Runs = {
        "tileweave": lambda: tw.all_gather_matmul(a, b),
        "nccl": nccl,
        "async-tp": lambda: torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, world_name())[1][0],
        "matmul": lambda: torch.mm(whole, b, out=product),
        "own matmul": lambda: tw.all_gather_matmul(whole, b, alone()),
    }
    truth = whole.float() @ b.float()
    return joined(runs, products("all_gather_matmul", a, b)), truth, tw.explain("all_gather_matmul", a, b)


def all_reduce(m: int, n: int, k: int) -> tuple[Runs, torch.Tensor, Route]:
    """Contenders for matmul_all_reduce, what they should find, and the way that ours takes."""
    world = dist.get_world_size()
    a, b = normal(m, k // world), normal(n, k // world).t()
    product = a.new_empty(m, n)
    shared = symmetric.empty(m, n, dtype=a.dtype, device=a.device)
    symmetric.rendezvous(shared, world_name())

    def nccl() -> torch.Tensor:
        torch.mm(a, b, out=product)
        dist.all_reduce(product)
        return product

    def one_shot() -> torch.Tensor:
        torch.mm(a, b, out=shared)
        return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", world_name())

    def two_shot() -> torch.Tensor:
        torch.mm(a, b, out=shared)
        return torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", world_name())

    runs: Runs = {
        "tileweave": lambda: tw.matmul_all_reduce(a, b),
        "nccl": nccl,
        "one-shot": one_shot,
        "two-shot": two_shot,
        "matmul": lambda: torch.mm(a, b, out=product),
        "own matmul": lambda: tw.matmul_all_reduce(a, b, alone()),
    }
    return runs, summed(a, b), tw.explain("matmul_all_reduce", a, b)


CONTENDERS = {"matmul_reduce_scatter": reduce_scatter, "all_gather_matmul": all_gather, "matmul_all_reduce": all_reduce}


def slowest(value: float) -> float:
    """The largest of all ranks' values."""
    largest = torch.tensor(value, device="cuda")
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def several(run: Callable[[], Any], calls: int, capture: bool) -> tuple[Callable[[], None], bool]:
    """`calls` calls in a row as one replay of a CUDA graph, and True; eagerly, and False, where that cannot be."""

    def eager() -> None:
        for _ in range(calls):
            run()

    for _ in range(2):
        run()
    torch.cuda.synchronize()
    if not capture:
        return eager, False
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            eager()
    except RuntimeError:
        torch.cuda.synchronize()
        return eager, False
    return graph.replay, True


def checked(runs: Runs, truth: torch.Tensor, bound: float) -> dict[str, float | str]:
    """Each contender's relative error, of the rank where it is largest; a rival that does not run on one, or is wrong,
    is left out of `runs`, and it is said why. AssertionError where ours is wrong, or NCCL's."""
    errors: dict[str, float | str] = {}
    for name, run in list(runs.items()):
        if name in ALONE:
            continue
        out: Any = None
        failure = ""
        try:
            out = run()
        except Exception as raised:  # whatever another library may raise
            if name not in MAY_FAIL:
                raise
            failure = (str(raised) or repr(raised)).splitlines()[0]
        if name in MAY_FAIL and (why := agreed_failure(name, failure)):
            errors[name] = why
            del runs[name]
            continue
        error = relative_error(out, truth) if out.shape == truth.shape else math.inf
        error = slowest(error if error == error else math.inf)  # NaN compares with nothing
        if error <= bound:
            errors[name] = error
            continue
        assert name in MAY_FAIL, (name, error)
        errors[name] = f"wrong: relative error {error:.3g}"
        del runs[name]
    return errors


def agreed_failure(name: str, failure: str) -> str:
    """Why a rival does not run, by what each rank knows of it, "" where it runs on all. The hosts meet, whatever their
    GPUs are at. RuntimeError on every rank where one has failed and another does not come out of the rival's call."""
    try:
        failures = from_all(failure)
        if not any(failures):
            return ""
        stuck = [rank for rank, done in enumerate(from_all(bool(failure) or ended(PATIENCE))) if not done]
    except RuntimeError as error:  # of gloo: a host is in the call, or has gone
        told = failure or "runs here"
        raise RuntimeError(f"{name}: {told}, but the ranks do not meet behind it: {error}") from error
    rank, why = next((rank, why) for rank, why in enumerate(failures) if why)
    if stuck:
        raise RuntimeError(f"{name} does not run on rank {rank} ({why}), for which ranks {stuck} wait in vain")
    return f"does not run: {failure}" if failure else f"does not run on rank {rank}: {why}"


def from_all(value: Any) -> list[Any]:
    """All ranks' values, by a group of the hosts."""
    return gather_values(hosts(), value) if dist.is_initialized() else [value]


@cache
def hosts() -> dist.ProcessGroup:
    """The ranks' hosts, which wait longer for each other than for their GPUs. Collective to make."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * PATIENCE))


def ended(seconds: float) -> bool:
    """Whether this rank's GPU has done, within these seconds, what the current stream was given."""
    if not torch.cuda.is_initialized():
        return True
    event, deadline = torch.cuda.current_stream().record_event(), time.monotonic() + seconds
    while not event.query() and time.monotonic() < deadline:
        time.sleep(0.01)
    return event.query()


def timed(runs: Runs, rounds: int, calls: int = CALLS) -> dict[str, dict]:
    """us: median, lowest, highest microseconds of a call, the slowest rank's; graph: whether a graph was replayed."""
    replays = {name: several(run, calls, name not in EAGER) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    shuffle = random.Random(0)  # the same on all ranks
    for _ in range(rounds):
        for name in shuffle.sample(list(replays), len(replays)):
            replay, _ = replays[name]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            dist.barrier()
            replay()  # pays for the skew of the ranks
            start.record()
            replay()
            end.record()
            end.synchronize()
            times[name].append(slowest(1e3 * start.elapsed_time(end) / calls))
    return {
        "us": {name: [statistics.median(values), min(values), max(values)] for name, values in times.items()},
        "graph": {name: captured for name, (_, captured) in replays.items()},
    }


def measure(op: str, m: int, n: int, k: int, rounds: int) -> Row:
    """One row."""
    world = dist.get_world_size()
    runs, truth, route = CONTENDERS[op](m, n, k)
    errors = checked(runs, truth, 2 * tolerance(torch.bfloat16, world, False))
    del truth
    found = timed(runs, rounds)
    tw.check()
    flop = 2 * m * n * k / world
    rates = {name: flop / us[0] / 1e6 for name, us in found["us"].items()}
    return {
        "op": op, "world": world, "m": m, "n": n, "k": k, "rel_error": errors, **found, "tflops_per_gpu": rates,
        "route": route.to_dict(),
    }  # fmt: skip


def told(row: Row) -> str:
    """A row in a line."""
    eager = {name: "" if captured else " (eager)" for name, captured in row["graph"].items()}
    us = "  ".join(f"{name}{eager[name]} {times[0]:.1f}" for name, times in row["us"].items())
    return f"x{row['world']}: us {us}"


def label(shape: Shape) -> str:
    """A shape by name."""
    return "M={m} N={n} K={k}".format(**shape)


def work(op: str, shape: Shape, world: int) -> Work:
    """Of one of so many GPUs: all but its share of the operand, or of the sums, goes to others, or both ways."""
    m, n, k = (shape[name] for name in "mnk")
    moved = 2 * m * (k if op == "all_gather_matmul" else n) * (world - 1) / world
    return Work(2.0 * m * n * k / world, moved * (2 if op == "matmul_all_reduce" else 1))


def divided(op: str, shape: Shape) -> tuple[int, ...]:
    """Sizes that the GPUs share."""
    names = {"matmul_reduce_scatter": "mk", "all_gather_matmul": "mn", "matmul_all_reduce": "k"}[op]
    return tuple(shape[name] for name in names)


BENCHES = [
    Bench(
        op, "several", [dict(m=m, n=n, k=k) for m, n, k in shapes], partial(measure, op), label, told,
        partial(work, op), quick=(0, 1, 3, 4), divided=partial(divided, op),
    )
    for op, shapes in SHAPES.items()
]  # fmt: skip

if __name__ == "__main__":
    main(__doc__, BENCHES)
