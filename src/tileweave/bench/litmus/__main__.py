"""The command: see the package's docstring."""

import argparse
import json
import sys
from pathlib import Path

from tileweave.bench.litmus.cases import CASES
from tileweave.bench.litmus.run import emulated, faults, not_allowed, observed
from tileweave.bench.litmus.table import counted, filled
from tileweave.bench.measure import machine


def on_gpu(launches: int) -> dict:
    """Outcomes counted on the current CUDA device, by test."""
    rows = []
    for case in CASES:
        if case.gpu:
            outcomes = observed(case, launches)
            rows.append({"name": case.name, "outcomes": [[*outcome, n] for outcome, n in sorted(outcomes.items())]})
            wrong = not_allowed(case, outcomes)
            print(f"{case.name:45s} {'; '.join(wrong) or 'as the model says'}: {dict(outcomes)}")
    return {"machine": machine(), "launches": launches, "rows": rows}


def in_emulator() -> int:
    """How many tests go otherwise than they say."""
    failed = 0
    for case in CASES:
        outcomes, findings = emulated(case)
        wrong = faults(case, outcomes, findings)
        failed += bool(wrong)
        print(f"{case.name:45s} {'; '.join(wrong) or 'as it says'}: {dict(outcomes)}, {len(findings)} findings")
    return failed


def main() -> int:
    """Exit status 1 where a test went otherwise than it says."""
    parser = argparse.ArgumentParser(prog="python -m tileweave.bench.litmus", description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="run on the current CUDA device")
    parser.add_argument("--launches", type=int, default=200, help="launches of each test on a GPU (default 200)")
    parser.add_argument("--json", type=Path, help="where to write what a GPU showed")
    parser.add_argument("--table", type=Path, help="a page whose table to make anew")
    args = parser.parse_args()
    if args.table:
        args.table.write_text(filled(args.table.read_text(), args.table.parent))
        return 0
    if not args.gpu:
        return int(in_emulator() > 0)
    figures = on_gpu(args.launches)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    outcomes = counted(figures)
    return int(any(not_allowed(case, outcomes[case.name]) for case in CASES if case.name in outcomes))


if __name__ == "__main__":
    sys.exit(main())
