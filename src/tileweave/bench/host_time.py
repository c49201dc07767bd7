"""Host time of one warm call: how long it keeps Python, not the GPU. `python -m tileweave.bench.host_time`

The problem is tiny and the calls of a batch are fewer than a stream's queue holds, so nothing waits for the GPU.
Contenders, interleaved: torch.mm; an empty result, which no call can do without; the op in a group of one process.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave.bench.measure import machine

BATCH = 100


def microseconds(calls: dict, rounds: int) -> dict[str, float]:
    """Median over rounds of the host's microseconds per call, contenders in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(BATCH):
                call()
            times[name].append((time.perf_counter() - start) / BATCH * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=0, world_size=1)
        a = torch.randn(128, 256, device="cuda").bfloat16()
        b = torch.randn(128, 256, device="cuda").bfloat16().t()
        product = torch.empty(128, 128, device="cuda", dtype=torch.bfloat16)
        calls = {
            "torch.mm": lambda: torch.mm(a, b, out=product),
            "empty": lambda: torch.empty(128, 128, device="cuda", dtype=torch.bfloat16),
            "matmul_reduce_scatter": lambda: tw.matmul_reduce_scatter(a, b),
        }
        for call in calls.values():
            call()
        with torch.no_grad():
            found = microseconds(calls, options.rounds)
        tw.check()
        dist.destroy_process_group()
    print("host time of a call, microseconds:", {name: round(value, 1) for name, value in found.items()}, flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "us": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
