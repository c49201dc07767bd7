"""Times of what all ranks enqueue together."""

import statistics
from collections.abc import Callable

import torch

from tileweave.fabric import Fabric

SLEEP_CYCLES = 5_000_000  # about 3 ms: the GPU waits until the host has enqueued all that is timed
Us = list[float]  # microseconds: median, lowest, highest


def spread(times: list[float]) -> Us:
    """Median, lowest and highest."""
    return [statistics.median(times), min(times), max(times)]


def timed(fabric: Fabric, enqueue: Callable[[int], None], repeats: int, rounds: int, ranks: int) -> Us:
    """Microseconds of one of `repeats` repetitions over rounds, of the slowest of the first `ranks` ranks. Collective.

    `enqueue(n)` enqueues n repetitions on the current stream and has run once before. Each round all ranks meet, let
    their GPU sleep, and enqueue a start event, the repetitions and an end event while it does, so that the host's
    time, and the ranks' coming together for a launch, are not in what is measured.
    """
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(fabric.device)
        fabric.rendezvous()
        torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        enqueue(repeats)
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / repeats)
    by_rank = fabric.all_gather(torch.tensor([times], device=fabric.device))
    return spread(by_rank[:ranks].amax(0).tolist())


def out_of_time(fabric: Fabric, late: bool) -> bool:
    """Whether any rank is late: the same answer on all. Collective."""
    return bool(fabric.all_gather(torch.tensor([late], dtype=torch.int32, device=fabric.device)).any())
