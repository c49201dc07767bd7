"""Schedules that an op has passed: a committed file in which seeds add up, run after run.

    python -m tileweave.checker.ledger docs/figures/schedules.json matmul_reduce_scatter --seconds 300

goes on from the first seed that has not been run. Seeds of other device code count no more: a change of an op's kernel
or of a tile file in it begins anew.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tileweave.checker.catalogue import digest
from tileweave.checker.ops import OPS, OpCase
from tileweave.checker.session import check

RANKS = 4


def passed(book: dict[str, Any], op: str) -> int:
    """How many schedules, from seed 0 on, an op has passed with the device code as it is."""
    entry = book.get(op, {})
    return entry.get("schedules", 0) if entry.get("device_code") == digest(op) else 0


def advance(book: dict[str, Any], op: str, seconds: float, processes: int | None = None) -> str:
    """Run an op's default check on from where its entry ends, and enter what passed; returns the story of a finding."""
    first = passed(book, op)
    report = check(OpCase(op, RANKS), range(first, first + 10_000), seconds=seconds, processes=processes)
    if not report.ok:
        return report.story
    sizes = OpCase(op, RANKS).sizes
    book[op] = {
        "schedules": first + report.schedules,
        "device_code": digest(op),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "ranks": RANKS,
        "sizes": sizes,
    }
    return ""


def main() -> int:
    """Advance the ops named, by so many seconds each; 1 if one of them is not clean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("ops", nargs="*", default=list(OPS))
    parser.add_argument("--seconds", type=float, default=60.0, help="for each op")
    parser.add_argument("--processes", type=int)
    options = parser.parse_args()
    book = json.loads(options.file.read_text()) if options.file.exists() else {}
    for op in options.ops:
        found = advance(book, op, options.seconds, options.processes)
        if found:
            print(found, file=sys.stderr)
            return 1
        print(f"{op}: {book[op]['schedules']} schedules passed")
        options.file.write_text(json.dumps(book, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
