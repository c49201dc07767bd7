"""The catalogue: every mutant of an op's kernel that its checks reach, and after how many schedules it was caught.

    python -m tileweave.checker.catalogue matmul_reduce_scatter --out docs/figures/mutants_matmul_reduce_scatter.json

What survives needs a reason in harmless.json, by its key; `tables.py` makes docs/mutants.md of both.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import tileweave
from tileweave import Plan
from tileweave.checker.mutants import Mutant, mutants, planted, reaching, short
from tileweave.checker.ops import OpCase, Variants
from tileweave.checker.trial import run_trial
from tileweave.ops.collectives import launch, passes

SCHEDULES = 6  # of each case, after which a mutant has survived
_MAX_STEPS = 200_000
_SOURCES = Path(tileweave.__file__).parent


def _plans(*schedules: str, tile: tuple[int, int, int] = (128, 128, 64), **more: Any) -> Variants:
    plans = {s: Plan(schedule=s, tile=tile, stages=2, **more) for s in schedules}
    return {name: {"plan": plan} for name, plan in plans.items()}


_RAGGED = {"m": 3 * 136, "n": 200, "k": 3 * 200}
_DETERMINISTIC = {"deterministic": {**_plans("intra_sm")["intra_sm"], "deterministic": True}}
# With _small_steps: parts of several tiles and steps, and of one; several steps alone would make up for a missing slot.
_PARTS: list[tuple[dict[str, int], int, Variants]] = [({"m": 3 * 70, "n": 24}, 2, {}), ({"m": 3 * 8, "n": 24}, 2, {})]
_CASES: dict[str, list[tuple[dict[str, int], int, Variants]]] = {  # sizes, SMs, variants
    "matmul_reduce_scatter": [
        (_RAGGED, 2, _plans("intra_sm") | _DETERMINISTIC),
        ({"m": 3 * 72, "n": 72, "k": 3 * 200}, 9, _plans("intra_sm", split=3)),
        # Two communicators, who count for each other, and one store for each item, so that waits leave no slack.
        (_RAGGED, 4, _plans("inter_sm", comm_sms=2, tile=(64, 128, 64))),
    ],
    "all_gather_matmul": [(_RAGGED | {"k": 200}, 3, _plans("inter_sm", "intra_sm", comm_sms=1))],
    "matmul_all_reduce": [(_RAGGED, 3, _plans("intra_sm", "one_shot"))],
    "all_gather": _PARTS,
    "reduce_scatter": _PARTS,
    "all_to_all": _PARTS,
}


def cases(op: str) -> list[OpCase]:
    """Small calls that between them reach all of an op's kernel: rings wrap, CTAs have several tiles or share one,
    slots are used again. ValueError for an op that has none."""
    if op not in _CASES:
        raise ValueError(f"op {op!r} has no catalogue: {', '.join(_CASES)} have")
    return [OpCase(op, 3, shape, 3, sms, variants) for shape, sms, variants in _CASES[op]]


@contextmanager
def _small_steps(op: str) -> Iterator[None]:
    """Within it, small tensors have what large ones have: collectives move several tiles, in several steps."""
    if "matmul" in op:
        yield
        return
    before = passes.TILE, passes.STEP_TILES, passes.STEPS, launch.STEPS
    passes.TILE, passes.STEP_TILES, passes.STEPS, launch.STEPS = 64, 1, 4, 4
    try:
        yield
    finally:
        passes.TILE, passes.STEP_TILES, passes.STEPS, launch.STEPS = before


def reached(op: str, schedules: int = 4) -> dict[tuple[str, int], list[int]]:
    """The lines with synchronizing statements that an op's cases come by, and which cases do. RuntimeError if one of
    them is not clean."""
    found: dict[tuple[str, int], list[int]] = {}
    for number, case in enumerate(cases(op)):
        with _small_steps(op), reaching() as lines:
            for seed in range(schedules):
                finding = run_trial(case, seed).finding
                if finding is not None:
                    raise RuntimeError(f"{op} itself, unchanged, is not clean: {finding.text}")
        for line in lines:
            found.setdefault(line, []).append(number)
    return found


def judge(op: str, mutant: Mutant, numbers: list[int], schedules: int = SCHEDULES) -> dict[str, Any]:
    """What became of a mutant in the cases of these numbers: `caught` (race, deadlock, misuse, wrong result, error;
    None: survived), `after` so many schedules, and the first line of what was `said`."""
    told: dict[str, Any] = {**asdict(mutant), "file": short(mutant.file), "key": mutant.key}
    of_op, tried = cases(op), 0
    with _small_steps(op), planted(mutant):
        for seed in range(schedules):
            for number in numbers:
                tried += 1
                finding = run_trial(of_op[number], seed, _MAX_STEPS).finding
                if finding is not None:
                    text = finding.text.strip().splitlines()
                    return {**told, "caught": finding.kind, "after": tried, "said": (text or [""])[0][:160]}
    return {**told, "caught": None, "after": tried, "said": ""}


def _judged(task: tuple[str, Mutant, list[int], int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    try:
        return judge(*task)
    except LookupError:  # planted in a function that this mutant itself keeps from being reached
        mutant = task[1]
        return {**asdict(mutant), "file": short(mutant.file), "key": mutant.key, "caught": None, "after": 0, "said": ""}


def digest(op: str) -> str:
    """A mark of the device code of an op: its kernel, and the tile files and other kernels that its room imports."""
    room = op if (_SOURCES / "ops" / op).is_dir() else "collectives"
    waiting, device = sorted((_SOURCES / "ops" / room).glob("*.py")), set()
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if path.parent.name == "tiles" or path.name.endswith("kernel.py"):
            device.add(path)
        for name in re.findall(r"^\s*from tileweave\.((?:tiles|ops)\.[\w.]+) import", path.read_text(), re.MULTILINE):
            file = _SOURCES / f"{name.replace('.', '/')}.py"
            found = [file] if file.exists() else (_SOURCES / name.replace(".", "/")).glob("*kernel.py")
            waiting += [path for path in found if path not in seen]
            seen.update(found)
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(device))).hexdigest()[:12]


def run(
    op: str, *, processes: int = 1, schedules: int = SCHEDULES, sample: int | None = None, seed: int = 0,
    seconds: float = 3600.0, out: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Judge all mutants of an op, or `sample` of them drawn by `seed`, until the time is up; with `processes` 1, in
    this process. The figures are written to `out` as they come, and go on from what is there of this device code."""
    start, lines = time.monotonic(), reached(op)
    found = mutants(lines)
    chosen = random.Random(seed).sample(found, min(sample, len(found))) if sample else found
    figures: dict[str, Any] = {
        "op": op,
        "device_code": digest(op),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "cases": [
            f"{case.ranks} ranks, {case.sizes}, {case.sms} SMs, {', '.join(case.variants)}" for case in cases(op)
        ],
        "schedules": schedules,
        "of": len(found),
        "seconds": 0,
        "mutants": [],
    }
    if out and out.exists() and (before := json.loads(out.read_text())).get("device_code") == figures["device_code"]:
        figures["mutants"] = before["mutants"]
        start -= before["seconds"]
    judged = {one["key"] for one in figures["mutants"]}
    left = [mutant for mutant in chosen if mutant.key not in judged]
    for one in _each([(op, mutant, lines[mutant.file, mutant.line], schedules) for mutant in left], processes):
        figures["mutants"].append(one)
        figures["seconds"] = round(time.monotonic() - start)
        if out:
            out.write_text(json.dumps(figures, indent=1) + "\n")
        if time.monotonic() - start > seconds:
            break
    return figures


def _each(tasks: list[tuple[str, Mutant, list[int], int]], processes: int) -> Iterator[dict[str, Any]]:
    if processes == 1:
        yield from map(_judged, tasks)
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            yield from pool.map(_judged, tasks)
        finally:
            pool.shutdown(cancel_futures=True)


def main() -> None:
    """Judge an op's mutants and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--schedules", type=int, default=SCHEDULES, help="of each case, for a mutant that survives")
    parser.add_argument("--sample", type=int, help="judge so many mutants, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long")
    options = vars(parser.parse_args())
    figures = run(**options)
    survived = [one["key"] for one in figures["mutants"] if one["caught"] is None]
    print(f"{len(figures['mutants'])} of {figures['of']} mutants, {len(survived)} survived, {figures['seconds']} s")
    print("\n".join(survived))


if __name__ == "__main__":
    main()
