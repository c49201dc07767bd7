"""The curves of a probed profile as a picture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tileweave.bench.probe.sweep import BULK, TILE, Row

Key = Callable[[Row], int]


def panels(rows: list[Row]) -> list[tuple[str, Key, list[Row]]]:
    """Title, horizontal axis and rows of each panel."""
    plain = [row for row in rows if row["columns"] == row["width"] and row["spread"] == 1 and not row["naive"]]
    most = max((row["sms"] for row in plain), default=0)

    def sized(row: Row) -> bool:
        return row["sms"] in (0, most) and row["mechanism"] != "naive"

    return [
        ("size of a copy, bytes; all SMs", lambda row: row["total"], list(filter(sized, plain))),
        (
            "SMs; 16 KB tiles, 16-byte accesses",
            lambda row: row["sms"],
            [row for row in plain if row["sms"] and row["total"] >= BULK and row["message"] in (16, TILE)],
        ),
        (
            "TMA tile, bytes; one number of SMs",
            lambda row: row["message"],
            [row for row in plain if row["mechanism"] == "tma" and row["total"] == BULK and row["sms"] < most],
        ),
    ]


def lines(rows: list[Row], along: Key) -> dict[str, list[tuple[int, float]]]:
    """Points of each line by its label, along the axis."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        ways = ", both ways" if row["ways"] == 2 else ""
        points = found.setdefault(f"{row['mechanism']} {row['direction']}{ways} ({row['over']})", {})
        points[along(row)] = max(row["gb_per_s"], points.get(along(row), 0.0))
    return {label: sorted(points.items()) for label, points in found.items()}


def draw(profile: dict[str, Any], path: Path) -> None:
    """Write the curves of what `profile.assemble` made as a picture, its kind by the name. ImportError without
    matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(18, 6), layout="constrained")
    for axes, (title, along, rows) in zip(figure.subplots(1, 3), panels(profile["probe"]["rows"]), strict=True):
        for label, points in lines(rows, along).items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xlabel(title)
        axes.set_ylabel("GB/s, one direction")
        axes.grid(alpha=0.3)
        if rows:
            axes.legend(fontsize=7)
    figure.suptitle(f"{profile['gpu']}, {profile['probe']['machine']['date']}")
    figure.savefig(path, dpi=120)
