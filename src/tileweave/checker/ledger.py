"""Schedules that an op has passed: a committed file in which seeds add up, run after run.

    python -m tileweave.checker.ledger docs/figures/schedules.json --seconds 300 --processes 2

goes on from the first seed that has not been run, always with the op that has passed fewest. Seeds of other device code
or of another problem count no more: a change of an op's kernel, or of a tile file in it, begins anew.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tileweave.checker.device_code import digest
from tileweave.checker.ops import OPS, OpCase
from tileweave.checker.session import check

RANKS = 4
SLICES = 2  # of the time that an op would have if all had as much


def passed(book: dict[str, Any], op: str) -> int:
    """How many schedules, from seed 0 on, an op has passed with device code and problem as they are."""
    entry = book.get(op, {})
    same = all(entry.get(name) == value for name, value in _problem(op).items())
    return entry["schedules"] if same else 0


def _problem(op: str) -> dict[str, Any]:
    case = OpCase(op, RANKS)
    return {"device_code": digest(op), "ranks": RANKS, "sizes": case.sizes, "variants": list(case.all_variants)}


def advance(book: dict[str, Any], op: str, seconds: float, processes: int | None = None) -> str:
    """Run an op's default check on from where its entry ends, and enter what passed; returns the story of a finding."""
    first = passed(book, op)
    report = check(OpCase(op, RANKS), range(first, first + 10_000), seconds=seconds, processes=processes)
    if not report.ok:
        return report.story
    ran = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    book[op] = {"schedules": first + report.schedules, **ran, **_problem(op)}
    return ""


def main() -> int:
    """Advance the ops named, until the time is up; 1 if one of them is not clean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("ops", nargs="*", default=list(OPS))
    parser.add_argument("--seconds", type=float, default=300.0, help="for all of them")
    parser.add_argument("--processes", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    book = json.loads(options.file.read_text()) if options.file.exists() else {}
    end = time.monotonic() + options.seconds
    share = options.seconds / (SLICES * len(options.ops))
    while (left := end - time.monotonic()) > 0:
        op = min(options.ops, key=lambda op: passed(book, op))
        found = advance(book, op, min(share, left), options.processes)
        if found:
            print(found, file=sys.stderr)
            return 1
        print(f"{op}: {book[op]['schedules']} schedules passed", flush=True)
        new = options.file.with_name(f"{options.file.name}.new")
        new.write_text(json.dumps(book, indent=1) + "\n")
        new.replace(options.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
