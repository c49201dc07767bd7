"""The catalogue: every mutant of an op's kernel that its setups reach, and after how many schedules it was caught.

    python -m tileweave.checker.catalogue matmul_reduce_scatter --out docs/figures/mutants_matmul_reduce_scatter.json

What survives needs a reason in harmless.json, by its key; `tables.py` makes docs/mutants.md of both.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tileweave.checker.device_code import digest, own_files
from tileweave.checker.mutants import Mutant, mutants, planted, reaching
from tileweave.checker.setups import setups, small_constants
from tileweave.checker.trial import run_trial
from tileweave.checker.workers import each

SCHEDULES = 6  # of each setup, after which a mutant has survived
_MAX_STEPS = 200_000
_REACHING = 3  # schedules of each setup that show what it comes by

Lines = dict[tuple[str, int], list[int]]


def reached(op: str, schedules: int = _REACHING, processes: int = 1) -> Lines:
    """The lines (file, line) with synchronizing statements that an op's setups come by, in its own kernels and in tile
    files, and which setups do. RuntimeError if one of them is not clean."""
    found: Lines = {}
    own = set(map(str, own_files(op)))
    for number, lines in each(partial(_reached, op, schedules), range(len(setups(op))), processes):
        for line in (line for line in lines if line[0] in own):
            found.setdefault(line, []).append(number)
    return {line: sorted(numbers) for line, numbers in sorted(found.items())}


def _reached(op: str, schedules: int, number: int) -> tuple[int, set[tuple[str, int]]]:
    with small_constants(op), reaching() as lines:
        for seed in range(schedules):
            finding = run_trial(setups(op)[number], seed).finding
            if finding is not None:
                raise RuntimeError(f"{op} itself, unchanged, is not clean: {finding.text}")
    return number, lines


def judge(op: str, mutant: Mutant, numbers: list[int], schedules: int = SCHEDULES) -> dict[str, Any]:
    """What became of a mutant in the setups of these numbers: `caught` (race, deadlock, misuse, wrong result, error;
    None: survived), `after` so many schedules, the first line of what was `said`, and processor `seconds`."""
    start, tried, caught, said = time.process_time(), 0, None, ""
    of_op = setups(op)
    try:
        with small_constants(op), planted(mutant):
            for seed, number in ((seed, number) for seed in range(schedules) for number in numbers):
                tried += 1
                finding = run_trial(of_op[number], seed, _MAX_STEPS).finding
                if finding is not None:
                    caught, said = finding.kind, (finding.text.strip().splitlines() or [""])[0][:160]
                    break
    except LookupError:  # planted in a function that this mutant itself keeps from being reached
        tried = 0
    seconds = round(time.process_time() - start, 2)
    told = {"key": mutant.key, "operator": mutant.operator, "caught": caught, "after": tried, "said": said}
    return {**told, "seconds": seconds}


def run(
    op: str, *, processes: int = 1, schedules: int = SCHEDULES, sample: int | None = None, seed: int = 0,
    seconds: float = 3600.0, out: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Judge all mutants of an op, or `sample` of them drawn by `seed`, until the time is up; with `processes` 1, in
    this process. What comes of a mutant depends on nothing but itself. The figures are written to `out` as they come,
    and go on from what is there, if that is of this device code, these setups and as many schedules."""
    end, lines = time.monotonic() + seconds, reached(op, processes=processes)
    found = mutants(lines)
    order = {mutant.key: i for i, mutant in enumerate(found)}
    figures: dict[str, Any] = {
        "op": op,
        "device_code": digest(op),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "setups": [
            f"{', '.join(case.variants)}: {case.ranks} ranks, {case.sizes}, {case.sms} SMs" for case in setups(op)
        ],
        "schedules": schedules,
        "of": len(found),
        "mutants": [],
    }
    figures["mutants"] = _judged_before(figures, out)
    judged = {one["key"] for one in figures["mutants"]}
    chosen = random.Random(seed).sample(found, min(sample, len(found))) if sample else found
    tasks = [(m, lines[m.file, m.line]) for m in chosen if m.key not in judged]
    for one in each(partial(_judge, op, schedules), tasks, processes, lambda: time.monotonic() < end):
        figures["mutants"].append(one)
        figures["mutants"].sort(key=lambda one: order[one["key"]])
        if out:
            _write(figures, out)
    return figures


def _judge(op: str, schedules: int, task: tuple[Mutant, list[int]]) -> dict[str, Any]:
    return judge(op, *task, schedules)


def _judged_before(figures: dict[str, Any], out: Path | None) -> list[dict[str, Any]]:
    if not out or not out.exists():
        return []
    before = json.loads(out.read_text())
    same = all(before.get(name) == figures[name] for name in ("device_code", "setups", "schedules"))
    return before["mutants"] if same else []


def _write(figures: dict[str, Any], out: Path) -> None:
    """A line for each mutant; whoever is stopped meanwhile leaves the file as it was."""
    head = json.dumps({name: value for name, value in figures.items() if name != "mutants"}, indent=1)
    lines = ",\n".join(f"  {json.dumps(one)}" for one in figures["mutants"])
    new = out.with_name(f"{out.name}.new")
    new.write_text(f'{head[:-2]},\n "mutants": [\n{lines}\n ]\n}}\n')
    new.replace(out)


def main() -> None:
    """Judge an op's mutants and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--schedules", type=int, default=SCHEDULES, help="of each setup, for a mutant that survives")
    parser.add_argument("--sample", type=int, help="judge so many mutants, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long")
    options = vars(parser.parse_args())
    torch.set_num_threads(1)
    figures = run(**options)
    survived = [one["key"] for one in figures["mutants"] if one["caught"] is None]
    seconds = sum(one["seconds"] for one in figures["mutants"])
    judged = f"{len(figures['mutants'])} of {figures['of']} mutants, {len(survived)} survived"
    print(f"{judged}, {seconds:.0f} s of processor time")
    print("\n".join(survived))


if __name__ == "__main__":
    main()
