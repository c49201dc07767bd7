"""Which synchronizing statements of the ops' device code no setup comes by: no mutant of them is judged.

    python -m tileweave.checker.reach --processes 8

prints them; the exit code is 1 if there are any.
"""

import argparse
import sys
from collections.abc import Iterable

import torch

from tileweave.checker.catalogue import reached
from tileweave.checker.device_code import files
from tileweave.checker.mutants import mutants, short
from tileweave.checker.ops import OPS


def unreached(ops: Iterable[str] = OPS, processes: int = 1) -> list[str]:
    """The statements of these ops' device code that none of their setups comes by, as file, function and statement."""
    ops = list(ops)
    lines = {line for op in ops for line in reached(op, processes=processes)}
    missed: dict[str, None] = {}
    for file in sorted({path for op in ops for path in files(op)}):
        every = [(str(file), line) for line in range(1, len(file.read_text().splitlines()) + 1)]
        for mutant in mutants(every):
            if (mutant.file, mutant.line) not in lines:
                missed[f"{short(mutant.file)} {mutant.function}: {mutant.source}"] = None
    return list(missed)


def main() -> int:
    """Print what no setup comes by."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    missed = unreached(processes=options.processes)
    print("\n".join(missed) or "every statement has a setup that comes by it")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
