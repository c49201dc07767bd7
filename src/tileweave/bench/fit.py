"""From a sweep to the planner's table. `python -m tileweave.bench.fit docs/figures/matmul_sweep_1xH200.json`

Writes src/tileweave/planner/tilings.json: for each tile configuration of the sweep what a launch, a K step, a tile's ends and an
exchange take, by least squares of relative errors. Calls that device memory bounds say nothing of these and are left out.
Prints how far the fit is from the measurements, and how far the plan it chooses is from the best one measured.
"""

import argparse
import json
import statistics
from pathlib import Path

import numpy as np

from tileweave.planner.hardware import H200
from tileweave.planner.tiling import Tiling, tiles_of, work_of

TABLE = Path(__file__).parents[1] / "planner/tilings.json"


def points(row: dict) -> list[tuple[str, int, tuple, float, float]]:
    """Of one shape: tiling, split, work of a CTA, microseconds, and microseconds that device memory takes at least."""
    m, n, k = row["m"], row["n"], row["k"]
    memory = 2 * (m * k + n * k + m * n) / (H200.memory_gbs * 1e3)
    found = []
    for name, (median, _, _) in row["us"].items():
        if name == "cublas":
            continue
        size, stages, split = name.split("/")
        bm, bn = map(int, size.split("x"))
        work = work_of(tiles_of(m, n, 1, (bm, bn, 64)), -(-k // 64), int(split), H200.sms)
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


def fitted(rows: list[dict]) -> list[Tiling]:
    """The table of a sweep's rows."""
    by_tiling: dict[str, list] = {}
    for row in rows:
        for name, _, work, us, memory in points(row):
            if memory < 0.8 * us:
                by_tiling.setdefault(name, []).append(np.array(work) / us)
    found = []
    for name, relative in by_tiling.items():
        size, stages = name.split("/")
        bm, bn = map(int, size.split("x"))
        costs = [round(float(c), 4) for c in nonnegative(np.array(relative))]
        error = statistics.median(abs(np.array(relative) @ costs - 1))
        print(f"{name}: launch, step, tile, share = {costs} us; median error {100 * error:.1f}% of {len(relative)}")
        found.append(Tiling((bm, bn, 64), int(stages), *costs))
    return found


def main() -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    options = parser.parse_args()
    sweep = json.loads(options.sweep.read_text())
    table = [{**vars(each), "tile": list(each.tile)} for each in fitted(sweep["rows"])]
    made = {"from": options.sweep.name, "machine": sweep["machine"], "tilings": table}
    TABLE.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
