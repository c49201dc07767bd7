"""What a row of times means: rates, shares of what the hardware allows, how much of the transfer shows, who leads."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

from tileweave.bench.harness import Bench, Row, Shape, Work
from tileweave.bench.rivals import RIVALS
from tileweave.bench.tables import ALONE
from tileweave.planner.hardware import Hardware

MEASURED = "measured"
LOCAL = (*ALONE, "local", "local, all", "open", "open, all", "copy")  # contenders whose data are all there before
LOCAL_WITHIN = ("cublas", "grouped_mm")  # the same, on virtual ranks


@dataclass(frozen=True)
class Figure:
    """One contender at one shape.

    us: median, us_low, us_high of the rounds, of the slowest rank; None where only a ratio is published; tflops and
    gb_per_s of a GPU, the latter of what it must send, None where nothing crosses a link; of_limit: the part of the
    time that max(T_compute, T_link) would take by the data sheet; exposed_percent: of the time, what it takes
    longer than the fastest contender whose data are all there before, below 0 where it is the faster one; None where
    there is none; vs_best_rival: how many times as fast as the fastest of other libraries, below 1 where that is
    faster, and best_rival who that is; None of theirs; note: what else is to be known of the time; source: "measured",
    or where it is published.
    """

    op: str
    where: str
    shape: str
    contender: str
    us: float | None
    us_low: float | None = None
    us_high: float | None = None
    tflops: float | None = None
    gb_per_s: float | None = None
    of_limit: float | None = None
    exposed_percent: float | None = None
    vs_best_rival: float | None = None
    best_rival: str = ""
    note: str = ""
    source: str = MEASURED


HEAD = tuple(each.name for each in fields(Figure))


def times_us(row: Row) -> dict[str, list[float]]:
    """Median, lowest and highest microseconds of each contender."""
    if "us" in row:
        return row["us"]
    return {name: [1e3 * ms for ms in times] for name, times in row["ms"].items()}


def limit_us(work: Work, hardware: Hardware) -> float:
    """max(T_compute, T_link) in microseconds, by the data sheet: sustained rates depend on power, and are exceeded."""
    compute = work.flop / (hardware.matmul_peak_tflops * 1e6)
    return max(compute, work.link_bytes / (hardware.link_nominal_gb_per_s * 1e3))


def is_local(where: str, contender: str) -> bool:
    """Whether a contender's data are all there before."""
    return contender in LOCAL or (where == "virtual" and contender in LOCAL_WITHIN)


def figures_of(bench: Bench, shape: Shape, row: Row, hardware: Hardware, world: int) -> list[Figure]:
    """A row's contenders, the fastest first."""
    work, times = bench.work(shape, world), times_us(row)
    limit = limit_us(work, hardware)
    local = min((us[0] for name, us in times.items() if is_local(bench.where, name)), default=None)
    rivals = [name for name in times if name in RIVALS and not is_local(bench.where, name)]
    best = min(rivals, key=lambda name: times[name][0], default=None)
    found = []
    for name, (us, low, high) in sorted(times.items(), key=lambda each: each[1][0]):
        others = is_local(bench.where, name) or name in RIVALS
        exposed = None if local is None or is_local(bench.where, name) else 100 * (us - local) / us
        found.append(
            Figure(
                bench.name, bench.where, bench.label(shape), name, us, low, high,
                tflops=work.flop / us / 1e6 if work.flop else None,
                gb_per_s=work.link_bytes / us / 1e3 if work.link_bytes else None,
                of_limit=limit / us if limit else None,
                exposed_percent=exposed,
                vs_best_rival=None if others or best is None else times[best][0] / us,
                best_rival="" if others or best is None else best,
                note="; ".join(notes(row, name)),
            )
        )  # fmt: skip
    return found


def notes(row: Row, contender: str) -> list[str]:
    """What is to be known of a contender's time: host time counts in what no graph could hold; a call of ours that took
    the plain way ran no kernel of ours."""
    found = [] if row.get("graph", {}).get(contender, True) else ["called eagerly"]
    route = row.get("route")
    if contender == "tileweave" and route and not route["fused"]:
        found.append(f"the plain way, no kernel of ours: {route['reason']}")
    return found


def left_out(row: Row | str) -> dict[str, str]:
    """By contender, "" for all of them, why it has no figures."""
    if isinstance(row, str):
        return {"": row}
    return {name: error for name, error in row.get("rel_error", {}).items() if isinstance(error, str)}


def csv_text(figures: Iterable[Figure], machine: Mapping[str, str]) -> str:
    """A line for each figure, with a head; numbers in full, what there is not as nothing. In its last columns what was
    measured has the machine that it was measured on."""
    lines: list[Sequence[Any]] = [(*HEAD, *machine)]
    for each in figures:
        of = machine.values() if each.source == MEASURED else [""] * len(machine)
        lines.append((*astuple(each), *of))
    return "".join(",".join(map(_cell, line)) + "\n" for line in lines)


def _cell(value: Any) -> str:
    text = "" if value is None else str(value)
    return '"{}"'.format(text.replace('"', '""')) if set(text) & set(',"\n') else text
