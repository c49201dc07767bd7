"""What NCCL's collectives do between GPUs, for the planner's plain way."""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from tileweave.bench.probe.copies import Copy
from tileweave.bench.probe.sweep import MB, ROUND_US, ROUNDS, Row, row_of
from tileweave.bench.probe.timing import out_of_time, timed
from tileweave.fabric import Fabric

MOST = 64  # calls of a round: so many are enqueued while the GPU sleeps
SENT = [MB >> 6, MB >> 3, MB, 8 * MB, 64 * MB]  # bytes that a rank sends


def measure(fabric: Fabric, until: float) -> list[Row]:
    """Rows of mechanism "nccl" as `sweep.measure` makes them: all_gather, reduce_scatter and all_reduce of bf16 in the
    default group, one after the other. `total` is what a rank sends. Collective."""
    world, device = fabric.world_size, fabric.device
    rows: list[Row] = []
    for sent in SENT:
        part = torch.zeros(sent // 2 // (world - 1), dtype=torch.bfloat16, device=device)
        whole = torch.zeros(world * part.numel(), dtype=torch.bfloat16, device=device)
        half = whole[: world * (part.numel() // 2)]  # an all-reduce sends each part twice
        calls = {
            "all_gather": partial(dist.all_gather_into_tensor, whole, part),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole),
            "all_reduce": partial(dist.all_reduce, half),
        }
        for name, call in calls.items():
            if out_of_time(fabric, time.monotonic() > until):
                return rows

            def enqueue(repeats: int, call: Callable[[], object] = call) -> None:
                for _ in range(repeats):
                    call()

            enqueue(2)
            repeats = min(MOST, Copy("copy_engine", "put", sent, sent, 0).repeats(ROUND_US))
            us = timed(fabric, enqueue, repeats, ROUNDS, world)
            rows.append(row_of(Copy("nccl", name, sent, sent, 0), "link", us))
    return rows
