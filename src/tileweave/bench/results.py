"""What a run of measurements has found: figures, rows as measured, what was not measured and why."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tileweave.bench.draw import draw
from tileweave.bench.figures import Figure, csv_text, figures_of, left_out
from tileweave.bench.harness import WHERE, Bench, Row, Shape
from tileweave.bench.rivals import versions
from tileweave.planner.hardware import Hardware


@dataclass
class Results:
    """Of `world` GPUs of a `machine`, as `measure.machine` tells it; hardware: by whose profile limits are told;
    published: what others say of the same ops."""

    machine: dict[str, str]
    world: int
    hardware: Hardware
    published: Sequence[Figure] = ()
    figures: list[Figure] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    missing: list[dict[str, str]] = field(default_factory=list)

    def add(self, bench: Bench, shape: Shape, row: Row | str) -> None:
        """Take what `Bench.row` returned."""
        place = {"op": bench.name, "where": bench.where, "shape": bench.label(shape)}
        self.missing += [{**place, "contender": name, "why": why} for name, why in left_out(row).items()]
        if isinstance(row, str):
            return
        self.rows.append({**place, "caches": bench.caches, "row": row})
        self.figures += figures_of(bench, shape, row, self.hardware, self.world)

    def to_dict(self) -> dict[str, Any]:
        """As plain values: the machine, versions and commit with them."""
        return {
            "machine": self.machine, "rivals": versions(), "world": self.world, "limits_of": self.hardware.name,
            "where": WHERE, "figures": [asdict(each) for each in self.figures],
            "published": [asdict(each) for each in self.published], "left_out": self.missing, "rows": self.rows,
        }  # fmt: skip

    def write(self, json_file: Path | None, csv_file: Path | None, plot: Path | None) -> None:
        """Write what there is so far, where it is asked for; published figures are in a picture never."""
        if json_file:
            json_file.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        if csv_file:
            csv_file.write_text(csv_text([*self.figures, *self.published], self.machine))
        if plot and self.figures:
            draw(self.figures, plot)
