"""`tileweave check`: an op, or a test of a kernel of one's own, under many hostile schedules of the emulator."""

from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tileweave import checker
from tileweave.checker.cases import Case, function_case
from tileweave.cli.environment import program
from tileweave.cli.problem import LARGEST_SEED, BadUsage
from tileweave.fabric import MAX_RANKS

SCHEDULES, SECONDS = 100, 300.0
MOST_SECONDS = 7 * 24 * 3600
_OFTEN = 0.15  # seconds between two drawings of the bar
_MEETING = (
    "    Ranks of an emulated world run one at a time and meet through the group only: a lock, barrier or queue of\n"
    "    the program's own waits for ever for a rank that cannot run."
)

Op = Annotated[
    str, typer.Argument(metavar="OP", help=f"One of {', '.join(checker.OPS)}; or module:function, a test of your own.")
]
Ranks = Annotated[int, typer.Option(help="Number of emulated ranks.")]
Shape = Annotated[
    str, typer.Option(help="Sizes of the whole problem, m=512,n=512,k=2048, of which each rank has a share.")
]
Schedules = Annotated[int, typer.Option(help="How many schedules to run.")]
Seed = Annotated[int, typer.Option(help="Of the first schedule; the others follow.")]
Seconds = Annotated[float, typer.Option(help="Stop after so many seconds, and say what was covered.")]
Exhaustive = Annotated[
    bool, typer.Option("--exhaustive", help="Small cases: every order that differs, up to --schedules of them.")
]
Processes = Annotated[int | None, typer.Option(help="How many schedules run side by side. Default: one per core.")]


def run_check(
    console: Console | None, op: str, ranks: int, shape: str, schedules: int, seed: int, seconds: float,
    processes: int | None, exhaustive: bool = False,
) -> checker.Report:  # fmt: skip
    """Check what the command line names. With a `console`, a progress bar on it, and the report at the end. An
    interrupt ends it with what has been covered until then; before anything has, it is one.

    Raises BadUsage for arguments that make no sense, naming what would.
    """
    case = case_of(op, ranks, shape)
    for name, value in (("schedules", schedules), ("processes", processes)):
        if value is not None and value < 1:
            raise BadUsage(f"--{name} must be at least 1, got {value}")
    if not 0 <= seconds <= MOST_SECONDS:
        raise BadUsage(f"--seconds must be from 0 to {MOST_SECONDS}, got {seconds:g}")
    if not 0 <= seed <= LARGEST_SEED:
        raise BadUsage(f"--seed must be from 0 to {LARGEST_SEED}, got {seed}")
    seeds = range(seed, seed + schedules)

    def run(progress: Callable[[checker.Report], None]) -> checker.Report:
        so_far: checker.Report | None = None

        def note(report: checker.Report) -> None:
            nonlocal so_far
            so_far = report
            progress(report)

        try:
            if exhaustive:
                return checker.explore(case, schedules, seed=seed, seconds=seconds, progress=note)
            return checker.check(case, seeds, seconds=seconds, processes=processes, progress=note)
        except KeyboardInterrupt:
            if so_far is None:
                raise
            so_far.interrupted = True
            return so_far

    if console is None:
        return run(lambda report: None)
    steps = TextColumn("schedules, {task.fields[steps]:,} steps")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), steps, TimeElapsedColumn()
    screen, title = Console(stderr=True), f"{case.name}, {ranks} rank{'s' * (ranks != 1)}"
    if not screen.is_terminal:  # where no bar is drawn
        screen.print(
            f"{title}: up to {schedules} schedule{'s' * (schedules != 1)}, for up to {seconds:g} s", soft_wrap=True
        )
    # A thread that draws would keep the workers from being forked: new interpreters take seconds to come up.
    with Progress(*columns, console=screen, transient=True, auto_refresh=False) as bar:
        task, drawn = bar.add_task(title, total=schedules, steps=0), 0.0
        bar.refresh()  # the first schedule of many ranks takes long to begin

        def draw(report: checker.Report) -> None:
            nonlocal drawn
            bar.update(task, completed=report.schedules, steps=report.steps)
            if report.seconds - drawn > _OFTEN:
                drawn = report.seconds
                bar.refresh()

        report = run(draw)
    show(console, case, report, seed)
    return report


def case_of(op: str, ranks: int, shape: str) -> Case:
    """What a command line names; BadUsage for what makes no sense."""
    if not 1 <= ranks <= MAX_RANKS:
        raise BadUsage(f"--ranks must be from 1 to {MAX_RANKS}, got {ranks}")
    try:
        if ":" not in op:
            return checker.OpCase(op, ranks, _sizes(shape)).fitted()
        if shape:
            raise BadUsage("--shape belongs to an op; a function of one's own has its sizes in itself")
        return function_case(op, ranks)
    except (ValueError, TypeError, ImportError) as error:
        raise error if isinstance(error, BadUsage) else BadUsage(str(error)) from error


def _sizes(shape: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in filter(None, shape.split(",")):
        name, equals, value = part.strip().partition("=")
        if not equals or not value.isdecimal() or len(value) > 6:
            raise BadUsage(f"--shape takes name=SIZE,... with sizes from 0 to 999999, got {part!r}")
        if name in sizes:
            raise BadUsage(f"--shape names {name} twice: {shape!r}")
        sizes[name] = int(value)
    return sizes


def show(console: Console, case: Case, report: checker.Report, seed: int) -> None:
    """Print a report: what was run, what it exercised, what was found."""
    console.print(f"[bold]{escape(case.name)}[/], {case.ranks} emulated rank{'s' * (case.ranks != 1)}")
    for name, text in _rows(case, report, seed).items():
        console.print(f"  [cyan]{name:<9}[/] {escape(text)}")
    if report.finding is not None:
        console.print()
        console.print(escape(report.story), style="red" if console.is_terminal else None)
        shape = ",".join(f"{name}={size}" for name, size in getattr(case, "shape", {}).items())
        again = f"{program()} check {case.name} --ranks {case.ranks}" + (f" --shape {shape}" if shape else "")
        console.print(f"\nthe same again: {again} --seed {report.seed} --schedules 1", soft_wrap=True)
        return
    if report.stuck:
        console.print(f"  [yellow]stuck[/] when the time was up, at {escape(report.stuck)}", _MEETING, sep="\n")
    for why in report.too_small:
        console.print(f"  [yellow]too small to be a check[/]: {escape(why)}")
    early = report.schedules < report.asked and not report.complete
    verdict = "clean as far as it went" if early else "clean"
    if report.complete:
        verdict = "clean in every order that differs"
    elif report.too_small:
        verdict = "nothing was found, which says little"
    if early:
        verdict += ": interrupted" if report.interrupted else ": the time was up"
    console.print(f"  [cyan]{'result':<9}[/] {verdict}")


def _rows(case: Case, report: checker.Report, seed: int) -> dict[str, str]:
    which = "which are all" if report.complete else f"of {report.asked} (seeds from {seed})"
    cut = f" and {report.cut} cut short" if report.cut else ""
    done = f"{report.schedules} {which}{cut}, {report.steps:,} steps, {report.seconds:.1f} s"
    rows = {"schedules": done}
    if report.schedules:
        rows |= {"orders": _counts(report.orders), "fabric": _counts(report.scenarios)}
    if report.variants:
        rows["variants"] = _counts(report.variants)
    if report.left_out:
        rows["left out"] = "; ".join(f"{name} ({why})" for name, why in report.left_out.items())
    sizes: dict[str, Any] = getattr(case, "sizes", {})
    if sizes:
        problem = " ".join(f"{name}={size}" for name, size in sizes.items())
        rows = {"problem": f"{problem}, {checker.ops.CALLS} calls with new data"} | rows
    if report.rings:
        wrapped = [ring for ring in report.rings.values() if ring["uses"][1] > 1]
        uses = max(ring["uses"][1] for ring in report.rings.values())
        rows["rings"] = f"{len(wrapped)} of {len(report.rings)} wrapped; a slot was used up to {uses} times by a CTA"
    if report.flag_uses is not None:
        rows["flags"] = f"{report.flags}, each raised {report.flag_uses} times or more"
    return rows


def _counts(counter: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items(), key=lambda item: -item[1]))
