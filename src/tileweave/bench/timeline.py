"""Where the time of a call between GPUs goes: when rank 0's kernels run, and what their roles wait for, by timestamps
in them. One process per GPU:

    python -m torch.distributed.run --nproc-per-node 2 -m tileweave.bench.timeline [OP ...]

Of each launch of a call: its kernel, when it is on the GPU, in microseconds from the first one's start, and the mean
shares of that time in which each of its roles is busy, waits for flags, and waits for something else. Between launches
PyTorch's operators run, as those that make a route. The sizes are some of `bench.between` and `bench.between_moe` at
which a call takes at least a quarter longer than what transfers nothing.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tileweave.bench.harness import ranks, write
from tileweave.emulator.timeline import roles_of
from tileweave.fabric import Fabric, fabric_of
from tileweave.fabric.stamping import RESIDENT, Timeline, stamping
from tileweave.tune import call_of

EXPERTS = {"hidden": 7168, "inner": 2048, "experts": 256, "topk": 8}
SHAPES: list[tuple[str, dict[str, int]]] = [
    ("moe_dispatch_matmul", {"tokens": 8192, **EXPERTS}),
    ("moe_dispatch_matmul", {"tokens": 32768, **EXPERTS}),
    ("moe_matmul_combine", {"tokens": 8192, **EXPERTS}),
    ("matmul_reduce_scatter", {"m": 4096, "n": 4096, "k": 4096}),
    ("all_gather_matmul", {"m": 2048, "n": 2048, "k": 2048}),
    ("matmul_all_reduce", {"m": 4096, "n": 4096, "k": 4096}),
]
CALLS = 3  # of which the last one is told of: the first compiles


def row(op: str, sizes: dict[str, int], fabric: Fabric) -> dict[str, Any]:
    """What this rank's kernels do in a call. Collective."""
    call = call_of(op, sizes, torch.bfloat16, fabric, None)
    with torch.no_grad(), stamping() as stamps:
        for _ in range(CALLS):
            stamps.again()
            dist.barrier()
            torch.cuda.synchronize()
            call()
        timeline = stamps.timeline()
    return {"op": op, "ranks": fabric.world_size, **sizes, "launches": launches(timeline), "lost": timeline.lost}


def launches(timeline: Timeline) -> list[dict[str, Any]]:
    """The launches of a timeline, the first one first, with their roles."""
    found = []
    for (rank, number), kernel in timeline.kernels.items():
        spans = [span for span in timeline.spans if (span.rank, span.launch) == (rank, number)]
        on = [span for span in spans if span.kind == RESIDENT] or spans
        start, end = min(span.start for span in on), max(span.end for span in on)
        roles = roles_of([span for span in spans if span.kind != RESIDENT], max(end - start, 1e-3))
        found.append({"kernel": kernel, "start_us": start, "end_us": end, "roles": roles})
    return sorted(found, key=lambda each: each["start_us"])


def told(found: dict[str, Any]) -> str:
    """A row in lines: of the longest launch each role too."""
    sizes = " ".join(f"{name}={x}" for name, x in found.items() if isinstance(x, int) and name not in ("ranks", "lost"))
    longest = max(found["launches"], key=lambda each: each["end_us"] - each["start_us"])
    lines = [f"{found['op']} {sizes}:"]
    for each in found["launches"]:
        lines.append(f"  {each['start_us']:9.1f} to {each['end_us']:9.1f} us  {each['kernel']}")
    for role in longest["roles"]:
        shares = (f"{name.replace('_', ' ')} {role[name]:.0%}" for name in ("busy", "waits_for_flags", "other_waits"))
        lines.append(f"    {role['role']} on {role['ctas']} CTAs: " + ", ".join(shares))
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(op for op, _ in SHAPES))
    parser.add_argument("ops", nargs="*", metavar="OP", help=", ".join(names))
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    asked = parser.parse_args()
    if unknown := set(asked.ops) - set(names):
        parser.error(f"unknown OP {', '.join(sorted(unknown))}: expected some of {', '.join(names)}")
    found: list[dict[str, Any]] = []
    with ranks(True) as speaks:
        fabric = fabric_of(None, "cuda")
        for op, sizes in SHAPES:
            if not asked.ops or op in asked.ops:
                found.append(row(op, sizes, fabric))
                if speaks:
                    print(told(found[-1]), flush=True)
                    write(asked.json, found)


if __name__ == "__main__":
    main()
