"""Random calls for a while, every result checked. `python -m tileweave.checker.stress --seconds 60 --world emulated`

A round is some calls back to back in one world, of which a rank may be late; then, at times, a fault: a rank that makes
no call, another one than its peers, or none as it has raised. What a round does depends on its seed alone, the
first one's and one more for each next round, so `--seed S --seconds 0` runs the round of seed S again.

On a GPU nearly all of the first minutes is spent on compiling: some 800 kernels, some 40 minutes of a core. So several
processes, which share Triton's cache and the GPU, make rounds at once, each from a seed of its own on.
"""

import argparse
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch

import tileweave as tw
from tileweave.checker.draw import FEW, MANY, RANKS, VERSIONS, Call
from tileweave.checker.problems import PROBLEMS, Results
from tileweave.fabric import VirtualGroup, World

HANG_SECONDS = 300.0  # that a round may take: waits are bounded by far less
FAULTS = ("a rank makes no call", "a rank makes another call", "a rank raises")
KINDS, SHAPES = 16, 4  # of calls in a virtual world of so many ranks, and of each: so that kernels are compiled once
MOST = 64  # processes
SEEDS = 1_000_000  # between the first seeds of two processes
CYCLES = 200_000  # that a late rank's stream spins before a call


@dataclass
class Tally:
    """What a stress run came to; `to_dict` has its fields. by_op: calls, an op's by all ranks of a world counting as
    one; faults: injected, by kind; untold: faults that no rank was told of; wrong: what was wrong, with the round's
    seed; hangs: rounds that did not end."""

    world: str
    device: str
    seed: int
    seconds: float = 0.0
    rounds: int = 0
    calls: int = 0
    by_op: Counter[str] = field(default_factory=Counter)
    by_ranks: Counter[int] = field(default_factory=Counter)
    late: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    untold: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    hangs: int = 0
    distinct: set[Call] = field(default_factory=set)

    @property
    def ok(self) -> bool:
        """Whether all was right, or told."""
        return not (self.wrong or self.untold or self.hangs)

    def add(self, other: "Tally") -> None:
        """Count what another process has come to at the same time."""
        for name in ("rounds", "calls", "by_op", "by_ranks", "late", "faults", "untold", "wrong", "hangs"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.seconds, self.distinct = max(self.seconds, other.seconds), self.distinct | other.distinct

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        versions = {"tileweave": tw.__version__, "torch": torch.__version__}
        return {**vars(self), **versions, "distinct": len(self.distinct), "seconds": round(self.seconds, 1)}


class Stress:
    """Rounds in worlds of one kind, "emulated" or "virtual". RuntimeError where there is none of these."""

    def __init__(self, world: str, seed: int):
        self.virtual = world == "virtual"
        self.worlds: dict[int, World] = {}
        self.data = lru_cache(maxsize=4096 if self.virtual else 16)(Call.problem)
        device = torch.cuda.get_device_name() if self.virtual else "CPU"
        self.tally = Tally(world, device, seed)

    def round(self, seed: int) -> None:
        """The calls of a round, then its fault, if it has one. What is wrong is noted, with the seed."""
        rng, tally = Random(seed), self.tally
        ranks = rng.choice(RANKS)
        calls = [self._draw(rng, ranks) for _ in range(rng.randint(10, 30) if self.virtual else rng.randint(1, 3))]
        late = rng.randrange(ranks) if rng.random() < 0.5 else None
        world = self._world(ranks, seed, late)
        for call, version in calls:
            self.data(call, version, world.device)  # before any rank waits for another
        try:
            errors = world.run(lambda rank, group: self._calls(calls, rank, group, late))
        except Exception as error:
            tally.wrong.append(
                f"seed {seed}: {type(error).__name__}: {error}; of {'; '.join(str(c) for c, _ in calls)}"
            )
            traceback.print_exc()
        else:
            for i, of_ranks in enumerate(zip(*(each.tolist() for each in errors), strict=True)):
                self._judge(seed, calls[i][0], of_ranks)
        tally.rounds, tally.late = tally.rounds + 1, tally.late + (late is not None)
        tally.by_ranks[ranks] += len(calls)
        if ranks > 1 and rng.random() < (0.1 if self.virtual else 0.3):
            self._fault(seed, world, rng.choice(FAULTS), rng.randrange(ranks))

    def close(self) -> None:
        """Close all worlds."""
        for world in self.worlds.values():
            world.close()

    def _draw(self, rng: Random, ranks: int) -> tuple[Call, int]:
        kind, shape = (rng.randrange(KINDS), rng.randrange(SHAPES)) if self.virtual else (rng.getrandbits(32), 0)
        call = Call.drawn(ranks, kind, shape, MANY if self.virtual else FEW, unicast=self.virtual)
        return call, rng.randrange(VERSIONS)

    def _world(self, ranks: int, seed: int, late: int | None) -> World:
        """A world of so many ranks: on a GPU always the same one, with what earlier rounds left in its memory."""
        if not self.virtual:
            return tw.virtual_world(ranks, device="cpu", seed=seed, delayed=() if late is None else (late,))
        if ranks not in self.worlds:
            self.worlds[ranks] = tw.virtual_world(ranks, device="cuda", timeout=20.0)
        return self.worlds[ranks]

    def _calls(self, calls: list[tuple[Call, int]], rank: int, group: VirtualGroup, late: int | None) -> torch.Tensor:
        """A rank's calls, and the relative error of each, on its device."""
        errors = []
        for call, version in calls:
            operands, truth = self.data(call, version, group.world.device)
            if self.virtual and rank == late:
                torch.cuda._sleep(CYCLES)
            results = PROBLEMS[call.op].call(operands[rank], group, **call.options())
            errors.append(_error(results, truth[rank]))
        return torch.stack(errors)

    def _judge(self, seed: int, call: Call, errors: tuple[float, ...]) -> None:
        self.tally.calls += 1
        self.tally.by_op[call.op] += 1
        self.tally.distinct.add(call)
        for rank, error in enumerate(errors):
            if not error <= call.limit:
                self.tally.wrong.append(f"seed {seed}: {call}: relative error {error:.1e} on rank {rank}")

    def _fault(self, seed: int, world: World, fault: str, culprit: int) -> None:
        """Make one rank err; somebody has to be told."""

        def erring(rank: int, group: VirtualGroup) -> None:
            x = torch.ones(8, 8, device=group.world.device)
            if rank != culprit:
                tw.all_reduce(x, group)
            elif fault == "a rank makes another call":
                tw.all_gather(x, group)
            elif fault == "a rank raises":
                raise KeyError(fault)

        self.tally.faults[fault] += 1
        try:
            world.run(erring)
        except (RuntimeError, KeyError):  # what emulated ranks are told is one, too
            return
        self.tally.untold.append(f"seed {seed}: {fault}, rank {culprit} of {world.size}")


def _error(results: Results, truths: Results) -> torch.Tensor:
    """The largest relative error of a call's results, on their device; infinite if one has another shape."""
    worst = truths[0].new_zeros((), dtype=torch.float32)
    for out, truth in zip(results, truths, strict=True):
        if out.shape != truth.shape:
            return torch.full_like(worst, float("inf"))
        if truth.numel():
            scale = truth.float().norm()
            error = (out.float() - truth).norm() / torch.where(scale > 0, scale, 1.0)
            worst = torch.maximum(worst, error.nan_to_num(nan=float("inf")))
    return worst


def run(world: str, seconds: float, seed: int, report: Callable[[Tally], None]) -> None:
    """Rounds for so many seconds, one at least; what they came to is reported, also when a round hangs."""
    torch.set_num_threads(1)
    stress, start = Stress(world, seed), time.monotonic()

    def finish() -> None:
        stress.tally.seconds = time.monotonic() - start
        report(stress.tally)

    def hung() -> None:
        stress.tally.hangs += 1
        stress.tally.wrong.append(f"seed {seed + stress.tally.rounds}: the round has not ended in {HANG_SECONDS:g} s")
        finish()
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)  # threads that hang can be ended in no other way

    while stress.tally.rounds == 0 or time.monotonic() - start < seconds:
        watch = threading.Timer(HANG_SECONDS, hung)
        watch.daemon = True
        watch.start()
        try:
            stress.round(seed + stress.tally.rounds)
        finally:
            watch.cancel()
    stress.close()
    finish()


def run_together(world: str, seconds: float, seed: int, processes: int) -> Tally:
    """`run` in so many processes; what they came to together. One that ends without a word is wrong."""
    context, parts = get_context("spawn"), []
    for i in range(processes):
        receiving, sending = context.Pipe(duplex=False)
        first = seed + i * SEEDS
        process = context.Process(target=run, args=(world, seconds, first, sending.send), daemon=True)
        process.start()
        sending.close()  # so that the end of the process is the end of the pipe
        parts.append((first, receiving))
    total: Tally | None = None
    for first, receiving in parts:
        try:
            tally = receiving.recv()
        except EOFError:
            tally = Tally(
                world, "", first, wrong=[f"the process of the seeds from {first} on has ended without a word"]
            )
        if total is None:
            total = tally
        else:
            total.add(tally)
    assert total is not None
    return total


def main(arguments: list[str] | None = None) -> int:
    """Run and print; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--world", choices=("emulated", "virtual"), default="emulated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--processes", type=int, default=1, help="that make rounds at once; on a GPU, one for each core"
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args(arguments)
    if not 1 <= options.processes <= MOST:
        parser.error(f"--processes must be from 1 to {MOST}, got {options.processes}")
    told: list[Tally] = []

    def report(tally: Tally) -> None:
        told.append(tally)
        if options.json is not None:
            options.json.write_text(json.dumps(tally.to_dict(), indent=1) + "\n")

    if options.processes == 1:
        run(options.world, options.seconds, options.seed, report)
    else:
        report(run_together(options.world, options.seconds, options.seed, options.processes))
    print(json.dumps(told[0].to_dict(), indent=1))
    return 0 if told[0].ok else 1


if __name__ == "__main__":
    sys.exit(main())
