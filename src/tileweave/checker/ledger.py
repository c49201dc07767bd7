"""Schedules that an op has passed: a committed file in which seeds add up, run after run.

    python -m tileweave.checker.ledger docs/figures/schedules.json --seconds 300 --processes 2 --until 10000

goes on from the first seed that has not been run, always with the op that has passed fewest, until all have passed so
many or the time is up. The calls are those of small.py. Seeds of other device code, or of other calls, count no more: a
change of an op's kernel, or of a tile file in it, begins anew.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tileweave.checker.device_code import digest
from tileweave.checker.ops import OPS
from tileweave.checker.session import check
from tileweave.checker.small import as_if_large, small
from tileweave.checker.trial import Trial

PORTION = 25  # schedules of one op that each process runs before another op has its turn
LIMIT = 600.0  # seconds, of which a portion takes a few: one that does not end is a finding, too


def passed(book: dict[str, Any], op: str) -> int:
    """How many schedules, from seed 0 on, an op has passed with device code and calls as they are."""
    entry = book.get(op, {})
    same = all(entry.get(name) == value for name, value in _problem(op).items())
    return entry["schedules"] if same else 0


def _problem(op: str) -> dict[str, Any]:
    case = small(op)
    variants = {name: ", ".join(f"{key}={x}" for key, x in o.items()) for name, o in case.all_variants.items()}
    calls = {"ranks": case.ranks, "calls": case.calls, "sms": case.sms, "sizes": case.sizes, "variants": variants}
    return {"device_code": digest(op), "scenarios": Trial(0, case.ranks, case.ways).scenarios, **calls}


def advance(book: dict[str, Any], op: str, count: int, processes: int = 1) -> str:
    """Run so many schedules of an op's small calls on from where its entry ends, and enter what passed; returns the
    story of a finding."""
    first, start = passed(book, op), time.process_time() + _of_children()
    with as_if_large(op):
        report = check(small(op), range(first, first + count), seconds=LIMIT, processes=processes)
    if not report.ok or report.too_small or report.schedules < count:
        seeds = f"{op}, seeds from {first}: {report.schedules} of {count} have ended"
        return report.story or "; ".join([seeds, *report.too_small])
    before = book[op]["seconds"] if first else 0.0
    seconds = round(before + time.process_time() + _of_children() - start, 3)
    ran = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    book[op] = {"schedules": first + count, "seconds": seconds, **ran, **_problem(op)}
    return ""


def _of_children() -> float:
    """Processor seconds of processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def main() -> int:
    """Advance the ops named, until the time is up; 1 if one of them is not clean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("ops", nargs="*", default=list(OPS))
    parser.add_argument("--seconds", type=float, default=300.0, help="for all of them; what has begun is ended")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--until", type=int, default=10_000, help="schedules of each op")
    options = parser.parse_args()
    torch.set_num_threads(1)
    book = json.loads(options.file.read_text()) if options.file.exists() else {}
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        op = min(options.ops, key=lambda op: passed(book, op))
        left = options.until - passed(book, op)
        if left <= 0:
            break
        found = advance(book, op, min(PORTION * options.processes, left), options.processes)
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
