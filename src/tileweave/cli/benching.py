"""`tileweave bench`: every op beside its rivals, on what the machine has; tables, files, a picture."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tileweave.bench.draw import KINDS
from tileweave.bench.figures import Figure
from tileweave.bench.harness import WHERE, Bench, Row, Shape, ranks
from tileweave.bench.measure import machine
from tileweave.bench.published import published
from tileweave.bench.registry import chosen
from tileweave.bench.results import Results
from tileweave.bench.rivals import RIVALS
from tileweave.cli.environment import launched_by_torchrun
from tileweave.cli.pictures import check_apart
from tileweave.cli.problem import BadUsage
from tileweave.fabric import cuda_refusal
from tileweave.plan import here
from tileweave.planner.hardware import profile

Ops = Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="What to measure; default: all.")]
Quick = Annotated[bool, typer.Option("--quick", help="A few shapes of each op.")]
Only = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="Shapes whose name contains it; may be given several times.")
]
Listing = Annotated[bool, typer.Option("--list", help="Say what would be measured; measure nothing.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Where to write figures and rows.")]
CsvFile = Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Where to write the figures.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Where to draw them; needs matplotlib.")]
Rounds = Annotated[int | None, typer.Option(help="Times that each contender is timed. Default: 7 to 15, by op.")]
WIDE = 400  # columns
Task = tuple[Bench, Shape]
HEAD = (
    "shape", "contender", "us (lowest to highest)", "TFLOP/s", "GB/s", "of the limit", "exposed", "vs best rival", "",
)  # fmt: skip


def tasks_of(several: bool | None, ops: Sequence[str], quick: bool, only: Sequence[str]) -> list[Task]:
    """What a command line asks for, between GPUs, within one, or, with None, wherever; BadUsage if that is nothing."""
    try:
        found = [(bench, shape) for bench in chosen(several, ops) for shape in bench.chosen(quick, only)]
    except ValueError as error:
        raise BadUsage(str(error)) from error
    if not found:
        raise BadUsage(f"no shape's name contains what --only says: {', '.join(map(repr, only))}; --list names them")
    return found


def check_listing(rounds: int | None, files: dict[str, Path | None]) -> None:
    """BadUsage for options of a measurement beside --list."""
    if given := [f"--{name}" for name, value in {**files, "rounds": rounds}.items() if value is not None]:
        raise BadUsage(f"--list measures nothing and writes no file; leave out {' and '.join(given)}")


def check(tasks: Sequence[Task], rounds: int | None, files: dict[str, Path | None]) -> None:
    """BadUsage unless it can be measured here, and written there."""
    if rounds is not None and not 1 <= rounds <= 1000:
        raise BadUsage(f"--rounds must be from 1 to 1000, got {rounds}")
    for name, file in files.items():
        if file and (file.is_dir() or not file.parent.is_dir()):
            raise BadUsage(f"--{name} {file}: " + ("is a folder" if file.is_dir() else f"no folder {file.parent}"))
    check_apart(files)
    if files["plot"] and files["plot"].suffix not in KINDS:
        raise BadUsage(f"--plot {files['plot']}: the name must end with one of {', '.join(KINDS)}")
    if files["plot"] and not find_spec("matplotlib"):
        raise BadUsage("--plot needs matplotlib: pip install matplotlib")
    if refusal := cuda_refusal("cuda"):
        ops = dict.fromkeys(bench.name for bench, _ in tasks)
        raise BadUsage(
            f"nothing can be measured here: {refusal}; on Hopper GPUs it would measure {len(tasks)} shapes of "
            f"{', '.join(ops)}: --list names them"
        )


def show_list(console: Console, tasks: Sequence[Task], only: Sequence[str]) -> None:
    """Print what would be measured, beside what, and which figures others publish of it."""
    benches = list(dict.fromkeys(bench for bench, _ in tasks))
    for bench in benches:
        labels = [bench.label(shape) for of, shape in tasks if of is bench]
        console.print(f"[bold]{bench.name}[/], {WHERE[bench.where]}; L2 cache: {bench.caches}")
        console.print(f"  {len(labels)} shapes, {bench.rounds} rounds: {escape('; '.join(labels))}")
    console.print("[bold]rivals[/], as far as an op has them")
    for name, rival in RIVALS.items():
        there = f"{rival.package} {rival.version}" if rival.version else f"not here: {rival.package} is not installed"
        console.print(f"  [cyan]{name:<13}[/] {escape(rival.what)} ({there})")
    show_published(console, published([bench.name for bench in benches], only))


def show_published(console: Console, figures: Sequence[Figure]) -> None:
    """Print what others publish; nothing where that is nothing."""
    if not figures:
        return
    table = Table("op", "on", "shape", "contender", "us", "TFLOP/s", "", "published in", box=None, pad_edge=False)
    for each in figures:
        cells = each.op, each.where, each.shape, each.contender, _number(each.us, "{:.0f}"), _number(each.tflops)
        table.add_row(*cells, each.note, each.source)
    console.print("[bold]published[/] by others, not measured here")
    _print(console, table)


def measure(
    console: Console, tasks: Sequence[Task], rounds: int | None, only: Sequence[str], files: dict[str, Path | None]
) -> tuple[Results, bool]:
    """Measure, print and write as it goes, so that a run that is cut short leaves what it has; and whether all results
    were right. Collective under torchrun, where rank 0 speaks."""
    right = True
    with ranks(launched_by_torchrun()) as speaks:
        console.quiet = not speaks
        world = dist.get_world_size() if dist.is_initialized() else 1
        others = published([bench.name for bench, _ in tasks], only)
        results = Results(machine(), world, profile(here()), others)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("", total=len(tasks))
            for i, (bench, shape) in enumerate(tasks):
                progress.update(bar, description=escape(f"{bench.name} {bench.label(shape)}"))
                row: Row | str
                try:
                    row = bench.row(shape, rounds or bench.rounds)
                except AssertionError as failure:
                    row, right = f"a result was wrong: {failure}", False
                results.add(bench, shape, row)
                progress.advance(bar)
                last = i + 1 == len(tasks) or tasks[i + 1][0] is not bench
                if speaks:
                    results.write(files["json"], files["csv"], files["plot"] if last else None)
                if last:
                    show(console, results, bench)
        show_published(console, others)
    return results, right


def show(console: Console, results: Results, bench: Bench) -> None:
    """Print an op's figures."""
    where = WHERE[bench.where] + (f": {results.world}" if bench.where == "several" else "")
    console.print(f"[bold]{bench.name}[/], {where}; L2 cache: {bench.caches}; limits of {results.hardware.name}")
    table = Table(*HEAD, box=None, pad_edge=False)
    for column in table.columns[2:-1]:
        column.justify = "right"
    last = ""
    for each in results.figures:
        if (each.op, each.where) == (bench.name, bench.where):
            table.add_row("" if each.shape == last else escape(each.shape), *map(escape, cells(each)))
            last = each.shape
    if last:
        _print(console, table)
    for gap in results.missing:
        if (gap["op"], gap["where"]) == (bench.name, bench.where):
            who = f"{gap['contender']}: " if gap["contender"] else ""
            console.print(f"  [yellow]left out[/] {escape(gap['shape'])}: {who}{escape(gap['why'])}")


def cells(each: Figure) -> list[str]:
    """A figure as a line of a table, without its shape."""
    us = f"{each.us:.1f} ({each.us_low:.1f} to {each.us_high:.1f})"
    versus = "" if each.vs_best_rival is None else f"{each.vs_best_rival:.2f} ({each.best_rival})"
    share = None if each.of_limit is None else 100 * each.of_limit
    rates = _number(each.tflops), _number(each.gb_per_s), _number(share, "{:.0f}%")
    return [each.contender, us, *rates, _number(each.exposed_percent, "{:.1f}%"), versus, each.note]


def _print(console: Console, table: Table) -> None:
    """In lines that may be longer than the terminal, as all that the command prints: what is cut says nothing."""
    table.width = console.measure(table, options=console.options.update_width(WIDE)).maximum
    console.print(table)


def _number(value: float | None, form: str = "{:.0f}") -> str:
    return "" if value is None else form.format(value)
