"""Timing of GPU work: interleaved, medians with spread; and what it ran on."""

import random
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

import tileweave


@dataclass(frozen=True)
class Timing:
    """Milliseconds over the rounds of one contender; and each round's."""

    median: float
    low: float
    high: float
    rounds: list[float]


def interleaved(contenders: dict[str, Callable[[], None]], rounds: int = 15, warmup: int = 3) -> dict[str, Timing]:
    """Time each contender once a round, so that clocks and temperature are the same for all, in another order each
    round: what runs after a hot contender finds a slower clock.

    A contender enqueues its work so that the current stream is behind all of it.
    """
    for run in contenders.values():
        for _ in range(warmup):
            run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    shuffle = random.Random(0)
    for _ in range(rounds):
        for name, run in shuffle.sample(list(contenders.items()), len(contenders)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            run()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: Timing(statistics.median(ts), min(ts), max(ts), ts) for name, ts in times.items()}


def machine() -> dict[str, str]:
    """Hardware, versions, date and commit, to be kept with every figure."""
    import triton

    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else ()
    return {
        "gpu": torch.cuda.get_device_name(),
        "tileweave": tileweave.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or "",
        "nccl": ".".join(map(str, nccl)),
        "date": date.today().isoformat(),
        "commit": commit(),
    }


def commit() -> str:
    """That of the source, with "-dirty" where files differ from it; "unknown" outside of a repository."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    except OSError:  # no git
        return "unknown"
    return found.stdout.strip() or "unknown"
