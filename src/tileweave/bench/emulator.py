"""How long a schedule of matmul_reduce_scatter takes in the emulator, on one core. `python -m tileweave.bench.emulator`

A schedule is two calls with fresh data, the second on the workspace that the first left. Prints a row per problem: the
median and the range of the wall time over schedules of different seeds.
"""

import argparse
import platform
import statistics
import time

import torch

from tileweave.fabric import virtual_world
from tileweave.ops.matmul_reduce_scatter import matmul_reduce_scatter
from tileweave.planner import Plan

# (ranks, CTAs per rank, m, n, k, deterministic). With 16 CTAs smaller tiles are used, so that each has four.
PROBLEMS = (
    (4, 4, 512, 512, 2048, False),
    (4, 4, 512, 512, 2048, True),
    (8, 16, 1024, 512, 2048, False),
)


def one_schedule(ranks: int, sms: int, m: int, n: int, k: int, deterministic: bool, seed: int) -> float:
    """Seconds for two calls under the schedule of `seed`."""
    calls = [
        (torch.randn(ranks, m, k // ranks).bfloat16(), torch.randn(ranks, k // ranks, n).bfloat16()) for _ in range(2)
    ]
    plan = Plan(tile=(128, 64, 64), stages=3) if sms > 4 else None

    def both(rank, group):
        for a, b in calls:
            matmul_reduce_scatter(a[rank], b[rank], group, deterministic=deterministic, plan=plan)

    with virtual_world(ranks, device="cpu", seed=seed, sms=sms) as world:
        start = time.perf_counter()
        world.run(both)
        return time.perf_counter() - start


def main() -> None:
    """Measure all problems."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=5)
    schedules = parser.parse_args().schedules
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, one thread")
    print("| ranks | CTAs | m, n, k | deterministic | s per schedule, median | range |")
    print("|---|---|---|---|---|---|")
    for problem in PROBLEMS:
        ranks, sms, m, n, k, deterministic = problem
        times = [one_schedule(*problem, seed) for seed in range(schedules)]
        median = statistics.median(times)
        print(
            f"| {ranks} | {sms} | {m}, {n}, {k} | {deterministic} | {median:.2f} | {min(times):.2f}-{max(times):.2f} |"
        )


if __name__ == "__main__":
    main()
