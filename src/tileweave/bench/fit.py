"""From sweeps to the planner's table. `python -m tileweave.bench.fit docs/figures/matmul_sweep*_1xH200.json`

Writes planner/tilings.json: for operands of 16 and of 8 bits, for each tile configuration of their sweeps, what a
launch, a K step, a tile's ends and an exchange take, by least squares of relative errors. Calls that device memory
bounds say nothing of these and are left out. Few calls of a sweep are bound by exchanges, so one is taken to be near
EXCHANGE_US unless they say otherwise.
"""

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
import torch

from tileweave.planner.hardware import H200
from tileweave.planner.tiling import SLOWING, STEP_BYTES, Tiling, operand_bytes, tiles_of, work_of

EXCHANGE_US = 6.0  # an estimate, near what was once seen at 1024^3, two CTAs to a tile of 128 x 128
FEWEST = 3  # points that a configuration needs
TABLE = Path(__file__).parents[1] / "planner/tilings.json"


def element_bytes(row: dict) -> int:
    """Bytes of an element of the operands."""
    return getattr(torch, row.get("dtype", "bfloat16")).itemsize


def points(row: dict) -> list[tuple[str, int, tuple, float, float]]:
    """Of one shape: tiling, split, work of a CTA, microseconds, and microseconds that device memory takes at least."""
    m, n, k = row["m"], row["n"], row["k"]
    size_of = element_bytes(row)
    found = []
    for name, (median, _, _) in row["us"].items():
        if name == "cublas":
            continue
        size, stages, split = name.split("/")
        bm, bn = map(int, size.split("x"))
        tile = (bm, bn, STEP_BYTES // size_of)
        work = work_of(tiles_of(m, n, 1, tile), -(-k // tile[2]), int(split), H200.sms)
        moved = operand_bytes(m, n, k, tile, H200.sms) * size_of / 2 + 2 * m * n
        memory = H200.launch_us + moved / (H200.memory_gb_per_s * 1e3)
        found.append((f"{size}/{stages}", int(split), work, median, memory))
    return found


def nonnegative(rows: np.ndarray) -> np.ndarray:
    """x >= 0 with rows @ x near 1, by least squares: coefficients that come out negative are taken to be 0."""
    used = list(range(rows.shape[1]))
    while True:
        x, *_ = np.linalg.lstsq(rows[:, used], np.ones(len(rows)), rcond=None)
        if (x >= 0).all():
            full = np.zeros(rows.shape[1])
            full[used] = x
            return full
        used.pop(int(np.argmin(x)))


def fitted(rows: list[dict], step: int) -> list[Tiling]:
    """The table of the sweeps' rows, whose K steps have so many elements."""
    by_tiling: dict[str, list] = {}
    for row in rows:
        for name, _, work, us, memory in points(row):
            compute = us - SLOWING * memory
            if memory < 0.8 * compute:
                by_tiling.setdefault(name, []).append(np.array(work) / compute)
    found = []
    for name, relative in by_tiling.items():
        if len(relative) < FEWEST:
            print(f"{name}: left out, {len(relative)} points")
            continue
        size, stages = name.split("/")
        bm, bn = map(int, size.split("x"))
        prior = np.array([0.0, 0.0, 0.0, 1.0 / EXCHANGE_US])
        costs = [round(float(c), 4) for c in nonnegative(np.array([*relative, prior]))]
        error = statistics.median(abs(np.array(relative) @ costs - 1))
        print(f"{name}: launch, step, tile, share = {costs} us; median error {100 * error:.1f}% of {len(relative)}")
        found.append(Tiling((bm, bn, step), int(stages), *costs))
    return found


def main() -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", type=Path, nargs="+")
    options = parser.parse_args()
    sweeps = [json.loads(sweep.read_text()) for sweep in options.sweeps]
    by_size: dict[int, list[dict]] = {}
    for row in [row for sweep in sweeps for row in sweep["rows"]]:
        by_size.setdefault(element_bytes(row), []).append(row)
    tables = {
        bytes_: [{**vars(each), "tile": list(each.tile)} for each in fitted(rows, STEP_BYTES // bytes_)]
        for bytes_, rows in sorted(by_size.items())
    }
    made = {
        "from": [sweep.name for sweep in options.sweeps],
        "machine": sweeps[-1]["machine"],
        "tilings": tables,
    }
    TABLE.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
