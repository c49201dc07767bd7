"""Measured figures as bars."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tileweave.bench.figures import Figure, is_local
from tileweave.bench.rivals import RIVALS

WIDTH, SHAPES, HEIGHT = 0.8, 8, 3.4  # of a shape's bars; shapes in a row of the picture; inches of a row
KINDS = (".png", ".svg", ".pdf")  # of file
LABELS = {"tflops": "TFLOP/s of a GPU", "gb_per_s": "GB/s of a GPU", "us": "microseconds"}


def draw(figures: Sequence[Figure], path: Path) -> None:
    """Write a picture whose rows are ops: TFLOP/s of a GPU, GB/s where nothing is computed, or microseconds where
    nothing crosses a link either, of each contender over shapes, the spread of its rounds as a line, each value on its
    bar. The kind of file, one of KINDS, goes by the name. ImportError without matplotlib.
    """
    from matplotlib.figure import Figure as Picture

    panels = []
    for op, where in dict.fromkeys((each.op, each.where) for each in figures):
        found = [each for each in figures if (each.op, each.where) == (op, where)]
        shapes = list(dict.fromkeys(each.shape for each in found))
        panels += [(found, shapes[i : i + SHAPES]) for i in range(0, len(shapes), SHAPES)]
    most = max(len(shapes) for _, shapes in panels)
    picture = Picture(figsize=(4 + 1.6 * most, HEIGHT * len(panels)), layout="constrained")
    for axes, (found, shapes) in zip(picture.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        _bars(axes, found, shapes)
        axes.set_xlim(-0.5, most - 0.5)
    picture.savefig(path, dpi=120)


def _bars(axes: Any, found: Sequence[Figure], shapes: list[str]) -> None:
    """One row: of an op, some shapes."""
    op, where = found[0].op, found[0].where
    kind = next(kind for kind in LABELS if getattr(found[0], kind))
    # Ours first, then rivals, then what is a limit.
    names = sorted({each.contender for each in found}, key=lambda name: (is_local(where, name), name in RIVALS, name))
    for i, name in enumerate(names):
        mine = [each for each in found if each.contender == name and each.shape in shapes]
        places = [shapes.index(each.shape) + ((i + 0.5) / len(names) - 0.5) * WIDTH for each in mine]
        values = [getattr(each, kind) for each in mine]
        bars = axes.bar(places, values, WIDTH / len(names), yerr=_spread(mine, kind), ecolor="0.4", label=name)
        axes.bar_label(bars, [f"{value:.{0 if value >= 10 else 2}f}" for value in values], fontsize=5, padding=1)
    axes.set_xticks(range(len(shapes)), shapes, rotation=15, ha="right", fontsize=7)
    axes.set_ylabel(LABELS[kind], fontsize=8)
    axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_title(f"{op}, {where}", fontsize=9)


def _spread(figures: Sequence[Figure], kind: str) -> list[list[float]]:
    """How far below and above each bar its rounds reach."""
    below, above = [], []
    for each in figures:
        value, us, low, high = getattr(each, kind), each.us, each.us_low, each.us_high
        assert us and low and high  # of what was measured
        down, up = (us - low, high - us) if kind == "us" else (value * (1 - us / high), value * (us / low - 1))
        below.append(down)
        above.append(up)
    return [below, above]
