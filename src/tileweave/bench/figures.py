"""What a row of times means: rates, shares of what the hardware allows, how much of the transfer shows."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tileweave.bench.harness import Bench, Row, Shape, Work
from tileweave.bench.tables import ALONE
from tileweave.planner.hardware import Hardware

LOCAL = (*ALONE, "local", "open")  # contenders whose data are all there before
HEAD = (
    "op",
    "where",
    "shape",
    "contender",
    "us",
    "us_low",
    "us_high",
    "tflops",
    "gb_per_s",
    "of_limit",
    "exposed_percent",
)


@dataclass(frozen=True)
class Figure:
    """One contender at one shape.

    us: median, us_low, us_high of the rounds, of the slowest rank; tflops and gb_per_s of a GPU, the latter of what it
    must send, None where nothing crosses a link; of_limit: the part of the time that max(T_compute, T_link) would take
    by the hardware's profile; exposed_percent: of the time, what it takes longer than the fastest contender whose
    data are all there before; None where there is none.
    """

    op: str
    where: str
    shape: str
    contender: str
    us: float
    us_low: float
    us_high: float
    tflops: float | None
    gb_per_s: float | None
    of_limit: float | None
    exposed_percent: float | None


def times_us(row: Row) -> dict[str, list[float]]:
    """Median, lowest and highest microseconds of each contender."""
    if "us" in row:
        return row["us"]
    return {name: [1e3 * ms for ms in times] for name, times in row["ms"].items()}


def limit_us(work: Work, hardware: Hardware, rate: str) -> float:
    """max(T_compute, T_link) in microseconds."""
    return max(work.flop / (getattr(hardware, rate) * 1e6), work.link_bytes / (hardware.link_gb_per_s * 1e3))


def figures_of(bench: Bench, shape: Shape, row: Row, hardware: Hardware, world: int) -> list[Figure]:
    """A row's contenders, the fastest first."""
    work, times = bench.work(shape, world), times_us(row)
    limit = limit_us(work, hardware, bench.rate)
    local = min((us[0] for name, us in times.items() if name in LOCAL), default=None)
    return [
        Figure(
            bench.name, bench.where, bench.label(shape), name, us=us[0], us_low=us[1], us_high=us[2],
            tflops=work.flop / us[0] / 1e6 if work.flop else None,
            gb_per_s=work.link_bytes / us[0] / 1e3 if work.link_bytes else None,
            of_limit=limit / us[0] if limit else None,
            exposed_percent=None if local is None or name in LOCAL else 100 * (us[0] - local) / us[0],
        )
        for name, us in sorted(times.items(), key=lambda each: each[1][0])
    ]  # fmt: skip


def csv_text(figures: Iterable[Figure]) -> str:
    """A line for each figure, with a head; numbers in full, what there is not as nothing."""
    lines = [HEAD, *(tuple(getattr(figure, name) for name in HEAD) for figure in figures)]
    return "".join(",".join(_cell(value) for value in line) + "\n" for line in lines)


def _cell(value: Any) -> str:
    text = "" if value is None else str(value)
    return f'"{text}"' if "," in text else text


def draw(figures: Iterable[Figure], folder: Path) -> list[Path]:
    """A picture for each op: TFLOP/s, or GB/s where nothing is computed, of each contender over shapes. ImportError
    without matplotlib. The files written."""
    from matplotlib.figure import Figure as Picture

    by_op: dict[tuple[str, str], list[Figure]] = {}
    for each in figures:
        by_op.setdefault((each.op, each.where), []).append(each)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for (op, where), found in by_op.items():
        shapes = list(dict.fromkeys(each.shape for each in found))
        names = list(dict.fromkeys(each.contender for each in found))
        picture = Picture(figsize=(3 + 1.2 * len(shapes), 5), layout="constrained")
        axes = picture.subplots()
        for i, name in enumerate(names):
            mine = [each for each in found if each.contender == name]
            places = [shapes.index(each.shape) + (i - len(names) / 2) * 0.8 / len(names) for each in mine]
            axes.bar(places, [each.tflops or each.gb_per_s or 0.0 for each in mine], 0.8 / len(names), label=name)
        axes.set_xticks(range(len(shapes)), shapes, rotation=30, ha="right", fontsize=7)
        axes.set_ylabel("TFLOP/s of a GPU" if found[0].tflops else "GB/s of a GPU")
        axes.legend(fontsize=7)
        axes.set_title(f"{op}, {where}")
        files.append(folder / f"{op}_{where}.png")
        picture.savefig(files[-1], dpi=120)
    return files
