"""Every plan that the planner chooses from, measured: how far is its choice from the best?

    python -m tileweave.bench.sweep [OP ...]
    python -m torch.distributed.run --nproc-per-node 2 -m tileweave.bench.sweep --within 1.2 [OP ...]

On virtual ranks of one GPU, which share its SMs and its memory, no link is measured; kernels are compiled first, by as
many processes as --workers says. Between GPUs, one process each, they are compiled as they come, so --within should
leave few. All plans of a shape take turns, and the FINALISTS fastest do once more with the choice. A line for each
shape, then the distance of the choice from the best.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tileweave.bench.harness import ranks
from tileweave.bench.measure import machine
from tileweave.fabric import Fabric, fabric_of, virtual_world
from tileweave.ops.contract import Site
from tileweave.ops.plans import contenders, every_plan
from tileweave.planner.plan import Plan
from tileweave.tune import CLOCKS, call_of, measured

RANKS, FINALISTS = 2, 4
MATMULS = ("matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce")
SHAPES = (  # m, n, k
    (8192, 8192, 8192), (4096, 4096, 4096), (2048, 8192, 8192), (512, 4096, 8192), (128, 8192, 4096),
    (512, 4096, 14336),  # one wave of a reduce-scatter, which one shot is predicted to take as fast
)  # fmt: skip
Task = tuple[str, dict[str, int]]


def tasks(ops: list[str]) -> list[Task]:
    """Ops with the sizes of the whole problem."""
    return [(op, dict(zip("mnk", shape, strict=True))) for op in ops for shape in SHAPES]


def plans_of(site: Site, task: Task, within: float) -> list[Plan]:
    """All that the planner chooses from, its choice first, then the best of the ways that it does not try; but those
    that are predicted to take more than `within` times as long as the choice."""
    every = every_plan(task[0], site, task[1], torch.bfloat16)
    every += contenders(task[0], site, task[1], torch.bfloat16)[1]
    longest = within * (every[0].predicted_us or 0.0)
    return [plan for plan in dict.fromkeys(every) if (plan.predicted_us or 0.0) <= longest]


def variants(site: Site, ops: list[str], within: float) -> Iterator[tuple[Task, Plan]]:
    """A call for each kernel that has to be compiled."""
    seen = set()
    for task in tasks(ops):
        for plan in plans_of(site, task, within):
            kernel = (
                task[0], plan.mechanism, plan.schedule, plan.tile, plan.stages, plan.split > 1, plan.comm_sms,
                task[1]["m"] if plan.schedule in ("one_shot", "none") else 0,
            )  # fmt: skip
            if kernel not in seen:
                seen.add(kernel)
                yield task, plan


def compile_share(ops: list[str], within: float, share: int, of: int, until: float) -> None:
    """Call every `of`-th kernel once, until that time."""
    with virtual_world(RANKS, "cuda") as world:

        def run(rank: int, group: Any) -> None:
            fabric = group.world.fabric(rank)
            for i, ((op, sizes), plan) in enumerate(variants(Site.of(fabric), ops, within)):
                if i % of == share and fabric.gather_values(time.time() < until)[0]:
                    call_of(op, sizes, torch.bfloat16, fabric, group, plan=plan)()
                    torch.cuda.synchronize()

        world.run(run)


def compile_all(ops: list[str], within: float, workers: int, until: float) -> None:
    """Fill Triton's cache by so many processes."""
    command = [sys.executable, "-m", "tileweave.bench.sweep", *ops, "--within", str(within), "--until", str(until)]
    running = [subprocess.Popen([*command, "--share", str(share), str(workers)]) for share in range(workers)]
    if codes := [each.returncode for each in running if each.wait()]:
        raise SystemExit(f"{len(codes)} of {workers} processes that compile have failed")


def row(task: Task, within: float) -> dict[str, Any]:
    """`row_of` virtual ranks."""
    with virtual_world(RANKS, "cuda") as world:
        return world.run(lambda rank, group: row_of(task, within, group.world.fabric(rank), group))[0]


def row_of(task: Task, within: float, fabric: Fabric, group: Any) -> dict[str, Any]:
    """All plans of a shape measured in a group, the slowest rank counts: the choice, the best, and how far they are
    apart. Collective."""
    op, sizes = task
    plans = plans_of(Site.of(fabric), task, within)
    problem = contenders(op, Site.of(fabric), sizes, torch.bfloat16)[0]
    with CLOCKS["cuda"](fabric) as timer:
        call = call_of(op, sizes, torch.bfloat16, fabric, group)
        times = measured(fabric, op, problem, plans, call, timer)
        again = dict.fromkeys([plans[0], *(plan for plan, _ in times[:FINALISTS])])
        finals = dict(measured(fabric, op, problem, list(again), call, timer))
    best = min(finals, key=lambda plan: finals[plan])
    return {
        "op": op, "ranks": fabric.world_size, **sizes, "chosen": plans[0].to_dict(), "chosen_us": finals[plans[0]],
        "best": best.to_dict(), "best_us": finals[best], "distance": finals[plans[0]] / finals[best] - 1,
        "plans": [{**plan.to_dict(), "measured_us": us} for plan, us in times],
    }  # fmt: skip


def told(found: dict[str, Any]) -> str:
    """A row in a line."""

    def name(plan: dict[str, Any]) -> str:
        size = "x".join(map(str, plan["tile"][:2]))
        return f"{plan['mechanism']} {plan['schedule']} {plan['comm_sms']} {size} split {plan['split']}"

    shape = f"{found['op']} {found['m']} x {found['n']} x {found['k']}"
    return (
        f"{shape}: {len(found['plans'])} plans; chosen {name(found['chosen'])} {found['chosen_us']:.1f} us (predicted "
        f"{found['chosen']['predicted_us']}); best {name(found['best'])} {found['best_us']:.1f} us; "
        f"{found['distance']:+.1%}"
    )


def summary(rows: list[dict[str, Any]]) -> str:
    """Distances and errors of predictions, of all rows."""
    apart = [each["distance"] for each in rows]
    errors = [abs(p["predicted_us"] / p["measured_us"] - 1) for each in rows for p in each["plans"]]
    return (
        f"{len(rows)} shapes: the choice is {statistics.median(apart):.1%} from the best in the median, "
        f"{max(apart):.1%} at worst; {len(errors)} predictions are off by {statistics.median(errors):.1%} in the median"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", metavar="OP", help=", ".join(MATMULS))
    parser.add_argument("--workers", type=int, default=1, help="processes that compile")
    parser.add_argument(
        "--within", type=float, default=math.inf, metavar="TIMES",
        help="leave out plans that are predicted to take more than so many times as long as the choice",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=600.0, help="no shape is begun later")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    parser.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    ops = asked.ops or list(MATMULS)
    if unknown := set(ops) - set(MATMULS):
        parser.error(f"unknown OP {', '.join(sorted(unknown))}: expected some of {', '.join(MATMULS)}")
    if asked.share:
        compile_share(ops, asked.within, asked.share[0], asked.share[1], asked.until)
        return
    end, between = time.time() + asked.seconds, "LOCAL_RANK" in os.environ
    if not between:
        compile_all(ops, asked.within, asked.workers, time.time() + 0.7 * asked.seconds)
    with ranks(between) as speaks:
        rows = all_rows(ops, asked.within, end, asked.json if speaks else None, between, speaks)
    if rows and speaks:
        print(summary(rows))


def all_rows(
    ops: list[str], within: float, end: float, path: Path | None, between: bool, speaks: bool
) -> list[dict[str, Any]]:
    """The rows of all shapes that there is time for, told as they come by who `speaks`, and written to `path`."""
    fabric = fabric_of(None, "cuda") if between else None
    rows: list[dict[str, Any]] = []
    for task in sorted(tasks(ops), key=lambda each: SHAPES.index(tuple(each[1].values()))):
        late = time.time() > end
        if fabric.gather_values(late)[0] if fabric else late:
            print("out of time: the other shapes are left out")
            break
        rows.append(row_of(task, within, fabric, None) if fabric else row(task, within))
        if speaks:
            print(told(rows[-1]), flush=True)
        if path:
            path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
