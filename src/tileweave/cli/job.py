"""`tileweave run`: one op, twice, on fresh data, checked against float32.

Three ways to run: in the world that torchrun made (one process per rank), in such a world that this process starts
itself (several GPUs), or in this process (emulated or virtual ranks).
"""

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import tileweave
from tileweave.cli.environment import (
    launched_by_torchrun,
    memory_bytes,
    out_of_memory,
    tell_of_waiting,
    world_size,
)
from tileweave.cli.problem import CALLS, DTYPES, BadUsage, Problem
from tileweave.fabric import MAX_RANKS, FabricTimeout
from tileweave.fabric.processes import timeout_seconds
from tileweave.ops.matmul_reduce_scatter import relative_error

SPARE = 60.0  # seconds that a process may be behind the others, in compiling say, besides the kernels' timeout
FEW = 256  # elements of a result whose norm depends on chance, more than by a twentieth or so


def choose_ranks(ranks: int | None, device: str) -> int:
    """The number of ranks: as asked, or torchrun's, or one per GPU where there are several, or 4."""
    if device == "cuda" and not torch.cuda.is_available():
        raise BadUsage("--device cuda needs a CUDA GPU and PyTorch sees none; `tileweave doctor` says what is missing")
    if launched_by_torchrun():
        world = world_size()
        if ranks not in (None, world):
            raise BadUsage(f"--ranks {ranks} differs from the {world} processes that torchrun started; leave it out")
        return world
    if ranks is not None:
        if not 1 <= ranks <= MAX_RANKS:
            raise BadUsage(f"--ranks must be from 1 to {MAX_RANKS}, got {ranks}")
        return ranks
    return _gpus() if device != "cpu" and _gpus() > 1 else 4


def needs_processes(ranks: int, device: str) -> bool:
    """Whether `run` should start a process per rank: on several GPUs, one each."""
    return not launched_by_torchrun() and device != "cpu" and 1 < ranks <= _gpus()


def start_processes(ranks: int, arguments: list[str]) -> int:
    """Run `tileweave ARGUMENTS` in `ranks` processes under torchrun; its exit code, 0 if every rank succeeded."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "tileweave"]
    return subprocess.run([sys.executable, *launcher, *arguments], check=False).returncode


def run_job(problem: Problem, device: str) -> dict[str, Any] | None:
    """Run `problem` on `device` ("auto", "cpu", "cuda") and report; None on the ranks that do not report.

    The report holds version, op, ranks, backend, world, shape, operands and result (shapes of one rank), dtype,
    deterministic, bias, seed, calls, fused, plan, reason, rel_error (the worse call's), tolerance, ok and seconds (of
    all calls together, compilation included).
    """
    if launched_by_torchrun():
        return _run_in_processes(problem, device)
    try:
        made = tileweave.virtual_world(problem.ranks, device=device, seed=problem.seed)
    except (ValueError, RuntimeError) as error:  # too few SMs, no Hopper GPU: the message says what is legal
        raise BadUsage(f"--ranks {problem.ranks} --device {device}: {error}") from error
    with made as world:
        place = world.device
        _check_memory(problem, place, CALLS)
        data = [_Rank(problem, rank, place) for rank in range(problem.ranks)]
        start = time.perf_counter()
        results = world.run(lambda rank, group: data[rank].run(group))
        _synchronize(place)
        seconds = time.perf_counter() - start
    outs = [[result.outs[call] for result in results] for call in range(CALLS)]
    return _report(problem, world.backend, results[0].route, outs, place, seconds)


class _Rank:
    """One rank's inputs for all calls, and what came of them."""

    def __init__(self, problem: Problem, rank: int, device: torch.device):
        self.problem = problem
        self.operands = [problem.operands(call, rank, device) for call in range(CALLS)]
        biases = [problem.biases(call, device) for call in range(CALLS)]
        self.options = [{} if each is None else {"bias": each[rank]} for each in biases]
        self.outs: list[torch.Tensor] = []
        self.route: Any = None

    def run(self, group: Any) -> "_Rank":
        """All calls back to back, as a training step would make them; nothing waits in between."""
        options = dict(self.problem.of_op.fixed)
        if self.problem.deterministic:
            options["deterministic"] = True
        of_op, groups = self.problem.of_op, () if self.problem.of_op.local else (group,)
        self.route = tileweave.explain(self.problem.op, *self.operands[0], *groups, **self.options[0], **options)
        op: Callable[..., Any] = getattr(tileweave, self.problem.op)
        for operands, own in zip(self.operands, self.options, strict=True):
            self.outs.append(of_op.finish(op(*operands, *groups, **own, **options), group))
        return self


def _run_in_processes(problem: Problem, device: str) -> dict[str, Any] | None:
    cuda = device != "cpu" and torch.cuda.is_available()
    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        if place.index >= _gpus():
            raise BadUsage(f"LOCAL_RANK={place.index}: PyTorch sees {_gpus()} GPUs, and each process needs its own")
        torch.cuda.set_device(place)
    _check_memory(problem, place, 1)  # rank 0 checks a call at a time, and then holds the operands of all ranks
    tell_of_waiting()
    limit = timedelta(seconds=timeout_seconds() + SPARE)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=limit)
    try:
        report = _of_all_ranks(problem, place)
    except (FabricTimeout, torch.AcceleratorError):  # of this rank, or told by it
        raise
    except RuntimeError as error:  # of the group, which does not say who has not come
        if out_of_memory(error):  # here: the others are well, and wait for this rank
            raise
        if missing := _missing_ranks():
            ranks = f"rank {missing[0]} has died or is" if len(missing) == 1 else f"ranks {missing} have died or are"
            raise dist.DistError(f"{ranks} stuck: {str(error).splitlines()[0]}") from error
        raise
    dist.destroy_process_group()  # not behind an error: a peer may be in a collective that nobody completes
    return report


def _of_all_ranks(problem: Problem, place: torch.device) -> dict[str, Any] | None:
    """Run in a process of each rank and report, on rank 0."""
    data = _Rank(problem, dist.get_rank(), place)
    start = time.perf_counter()
    data.run(None)
    _synchronize(place)
    tileweave.check(None, place)
    dist.barrier()
    seconds = time.perf_counter() - start
    outs = [_gathered(out, problem) for out in data.outs]
    return _report(problem, "processes", data.route, outs, place, seconds) if dist.get_rank() == 0 else None


def _missing_ranks() -> list[int]:
    """Ranks that do not come here, where who is alive comes when a peer does not.

    Who waits for a rank that has come here instead is told by the end of gloo's connections; NCCL has a watchdog of its
    own. So only those that do not wait yet come later, and they are no more than SPARE behind.
    """
    store, everybody = dist.distributed_c10d._get_default_store(), range(dist.get_world_size())
    keys = [f"tileweave: rank {rank} is alive" for rank in everybody]
    store.set(keys[dist.get_rank()], "")
    if dist.get_backend() == "gloo":
        dist.destroy_process_group()
    with contextlib.suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=SPARE))
    return [rank for rank in everybody if not store.check([keys[rank]])]


def _gathered(out: torch.Tensor, problem: Problem) -> list[torch.Tensor]:
    """Every rank's result, in float32."""
    outs = [torch.empty_like(out, dtype=torch.float32) for _ in range(problem.ranks)]
    dist.all_gather(outs, out.float())
    return outs


def _report(
    problem: Problem, world: str, route: Any, outs: list[list[torch.Tensor]], device: torch.device, seconds: float
) -> dict[str, Any]:
    errors = [_error(problem, call, each, device) for call, each in enumerate(outs)]
    worst = max(errors) if all(map(math.isfinite, errors)) else None
    limit = problem.of_op.limit(DTYPES[problem.dtype], problem.ranks, problem.deterministic)
    operands, result = problem.shapes()
    plan = (route.inside or route).plan
    return {
        "version": tileweave.__version__,
        "op": problem.op,
        "ranks": problem.ranks,
        "backend": route.backend if route.fused or route.inside else "fallback",
        "world": world,
        "shape": problem.sizes,
        "operands": [list(shape) for shape in operands],
        "result": list(result),
        "dtype": problem.dtype,
        "deterministic": problem.deterministic,
        "bias": problem.bias,
        "seed": problem.seed,
        "calls": CALLS,
        "fused": route.fused,
        "plan": plan.to_dict() if plan else None,
        "reason": route.reason,
        "rel_error": worst,
        "tolerance": limit,
        "ok": worst is not None and worst <= limit,
        "seconds": round(seconds, 4),
    }


def _error(problem: Problem, call: int, outs: list[torch.Tensor], device: torch.device) -> float:
    """Relative error of all ranks' results of a call together; infinite if one has another shape.

    What is rounded are the ranks' parts, which in a result of few elements may cancel. So there the error is one of
    the norm that the parts have, if that is larger: the root of the same product of squares is its average over all
    signs of the operands, and a norm of n elements is less than 1 + 2 / sqrt(n) of it, three deviations from that.
    """
    operands = [problem.operands(call, rank, device) for rank in range(problem.ranks)]
    biases = problem.biases(call, device)
    truths = problem.of_op.truth(operands, biases)
    if any(out.shape != truth.shape for out, truth in zip(outs, truths, strict=True)):
        return math.inf
    got, truth = (torch.cat([x.float().flatten() for x in each]) for each in (outs, truths))
    error, n = relative_error(got, truth), truth.numel()
    if not 0 < n <= FEW:
        return error
    squares = problem.of_op.truth([_squared(each) for each in operands], biases and _squared(biases))
    parts = torch.cat([x.flatten() for x in squares]).sum().sqrt().item() * (1 + 2 / math.sqrt(n))
    norm = truth.norm().item()
    return error * (norm or 1.0) / max(norm, parts, torch.finfo(torch.float32).tiny)


def _squared(operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """Squares, in float32, of those that are no indices."""
    return [x.float() ** 2 if x.is_floating_point() else x for x in operands]


def _check_memory(problem: Problem, device: torch.device, calls: int) -> None:
    """Raise BadUsage if the least that `calls` calls need exceeds the memory there is."""
    need, there = problem.least_bytes(calls), memory_bytes(device.type == "cuda")
    if there is not None and need > there:
        where = "GPU" if device.type == "cuda" else "machine"
        raise BadUsage(
            f"--shape {problem.shape_text()} needs at least {need / 2**30:,.1f} GiB of memory, "
            f"and this {where} has {there / 2**30:,.1f} GiB; take smaller sizes"
        )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
