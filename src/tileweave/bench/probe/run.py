"""What `tileweave probe` measures, in the order of what tells most."""

import time
from collections.abc import Callable
from typing import Any

import torch

from tileweave.bench.probe import nccl, rates
from tileweave.bench.probe.copies import Arena
from tileweave.bench.probe.latency import flag_us, launch_us, mbarrier_us
from tileweave.bench.probe.sweep import GB, Row, between, measure, within
from tileweave.fabric import Fabric, fabric_of, virtual_world

ALONE = 0.3  # of the time, at most, goes to what needs no peer
MEMORY = 0.3  # of that, at most, to device memory
Tell = Callable[[Row], None]


def alone(seconds: float, tell: Tell) -> dict[str, Any]:
    """What this GPU does by itself: launches, barriers, device memory, rates of compute. In no process group.

    `launch_us`, `launch_host_us`, `flag_cta_us`, `flag_gpu_us`: [median, lowest, highest]; `rows` of
    `sweep.measure`; `matmul_tflops` by size, `attention_tflops`, as far as the time reaches.
    """
    start = time.monotonic()
    found: dict[str, Any] = {}
    found["launch_us"], found["launch_host_us"] = launch_us()
    with virtual_world(1, "cuda") as world:

        def program(rank: int, group: Any) -> dict[str, Any]:
            fabric = group.world.fabric(rank)
            times = {"flag_cta_us": mbarrier_us(fabric), "flag_gpu_us": flag_us(fabric, False)}
            until = time.monotonic() + MEMORY * seconds  # what was compiled so far took its own time
            return {**times, "rows": measure(Arena(fabric, GB), within(fabric.sms, GB), "memory", until, tell)}

        found |= world.run(program)[0]
    torch.cuda.empty_cache()
    found["matmul_tflops"] = {}
    for n in rates.SQUARES:
        if time.monotonic() - start < seconds:
            found["matmul_tflops"][n] = rates.matmul_tflops(n)
        if "attention_tflops" not in found and time.monotonic() - start < seconds:
            found["attention_tflops"] = rates.attention_tflops()
    torch.cuda.empty_cache()
    return found


def together(fabric: Fabric, seconds: float, tell: Tell) -> dict[str, Any]:
    """What ranks do with each other: flags, then `rows` of copies, of a link or, where ranks share a GPU, of its
    memory; in process groups of NCCL those of its collectives, too. Collective."""
    until = time.monotonic() + seconds
    found: dict[str, Any] = {"sync_us" if fabric.linked else "virtual_sync_us": flag_us(fabric, True)}
    found["rows"] = []
    if fabric.linked:
        found["rows"] += nccl.measure(fabric, time.monotonic() + seconds / 10)
    over = "link" if fabric.linked else "memory"
    found["rows"] += measure(Arena(fabric, GB), between(fabric.sms, GB), over, until, tell)
    return found


def on_virtual_ranks(ranks: int, seconds: float, tell: Tell) -> dict[str, Any]:
    """`alone`, then `together` on virtual ranks of the current GPU."""
    found = alone(ALONE * seconds, tell)
    with virtual_world(ranks, "cuda") as world:

        def program(rank: int, group: Any) -> dict[str, Any]:
            nothing: Tell = lambda row: None  # noqa: E731
            return together(group.world.fabric(rank), (1 - ALONE) * seconds, nothing if rank else tell)

        return merged(found, world.run(program)[0])


def merged(alone: dict[str, Any], together: dict[str, Any]) -> dict[str, Any]:
    """Both, with the rows of both."""
    return {**alone, **together, "rows": alone["rows"] + together["rows"]}


def between_processes(seconds: float, tell: Tell) -> dict[str, Any]:
    """`together` in the default process group, a GPU for each rank. RuntimeError where they reach no peer's memory."""
    fabric = fabric_of(None, torch.device("cuda", torch.cuda.current_device()))
    if refusal := fabric.refusal():
        raise RuntimeError(f"the ranks do not reach each other's memory: {refusal}")
    return together(fabric, seconds, tell)
