"""`tileweave plan`: what the planner would choose for a shape on a machine, why, and when what would happen."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tileweave.cli import pictures, problem
from tileweave.cli.problem import BadUsage
from tileweave.fabric.capability import EXPERIMENTAL, TRIED
from tileweave.ops.plans import SIZES
from tileweave.plan import plan
from tileweave.planner.decision import Decision

Op = Annotated[str, typer.Argument(metavar="OP", help=f"One of: {', '.join(SIZES)}.")]
Shape = Annotated[
    str, typer.Option(help="Sizes of the whole problem: m=..,n=..,k=..; batch, heads, seq, ..; tokens, hidden, ..")
]
Gpu = Annotated[
    str | None,
    typer.Option(help="h100, h200, b200, gb200-nvl72 or a file that probe wrote. Default: this machine's, else h200."),
]
Ranks = Annotated[int | None, typer.Option(help="Number of ranks. Default: as many as the profile has.")]
Dtype = Annotated[str, typer.Option(help="bf16, fp16 or, of ops that take it, fp8 (float8_e4m3fn).")]
Picture = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw a rank's timeline; needs matplotlib.")]
DTYPES = {**problem.DTYPES, "fp8": torch.float8_e4m3fn}
COLORS = {"SMs": "tab:blue", "link": "tab:orange", "waits": "tab:red"}


def decide(op: str, shape: str, gpu: str | None, ranks: int | None, dtype: str, picture: Path | None) -> Decision:
    """The planner's answer to a command line; BadUsage for one that makes no sense."""
    if picture is not None:
        pictures.check("timeline", picture)
    if dtype not in DTYPES:
        raise BadUsage(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    try:
        return plan(op, _sizes(shape), DTYPES[dtype], gpu=gpu, ranks=ranks)
    except (ValueError, TypeError) as error:
        raise BadUsage(str(error)) from error


def _sizes(shape: str) -> dict[str, int]:
    """What --shape says."""
    sizes: dict[str, int] = {}
    for part in filter(None, shape.split(",")):
        name, equals, value = part.strip().partition("=")
        if not equals or not value.isdecimal() or len(value) > 10:
            raise BadUsage(f"--shape takes sizes as name=number,name=number up to {2**31 - 1}, got {part!r}")
        if name in sizes:
            raise BadUsage(f"--shape names {name} twice: {shape!r}")
        sizes[name] = int(value)
    return sizes


def show(console: Console, decision: Decision) -> None:
    """Print a decision as a table."""
    sizes = " ".join(f"{name}={size}" for name, size in decision.shape.items())
    ranks = f"{decision.ranks} rank" + "s" * (decision.ranks != 1)
    console.print(f"[bold]{decision.op}[/], {ranks} of {escape(decision.gpu)}, {decision.dtype}: {sizes}")
    _show_answer(console, decision)
    if decision.untried is not None:
        console.print(f"\nWith {EXPERIMENTAL}={TRIED} instead:")
        _show_answer(console, decision.untried)


def _show_answer(console: Console, decision: Decision) -> None:
    console.print(f"[bold]{decision.verdict}[/]: {escape(decision.reason)}")
    if decision.plan is None:
        return
    table = Table(box=None, pad_edge=False, show_edge=False)
    for head in ("", "mechanism", "schedule", "tile", "stages", "SMs that communicate", "us"):
        table.add_column(head, justify="right" if head.endswith(("stages", "communicate", "us")) else "left")
    runner_up = [("runner-up", decision.runner_up)] if decision.runner_up else []
    rows = [("plan", decision.plan), *runner_up, *(("rejected", each) for each in decision.rejected)]
    for name, each in rows:
        tiled = each.mechanism != "nccl" and each.tile[0]
        tile, stages = ("x".join(map(str, each.tile)), str(each.stages)) if tiled else ("-", "-")
        cells = each.mechanism, each.schedule, tile, stages, str(each.comm_sms), f"{each.predicted_us:.1f}"
        table.add_row(f"[cyan]{name}[/]", *cells)
    console.print(table)
    for _, each in rows:
        console.print(f"  [cyan]{each.mechanism} {each.schedule}[/]: {escape(each.reason)}")
    console.print(f"  [cyan]simulated[/]: {decision.simulated_us:.1f} us")
    if decision.unmeasured:
        console.print(f"  [cyan]not measured[/]: {escape(decision.unmeasured)}")


def draw(decision: Decision, path: Path) -> None:
    """Write the timeline of rank 0 as a picture, its kind by the name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 3), layout="constrained")
    axes = figure.subplots()
    events = decision.events
    pictures.bars(axes, list(COLORS), [(e.lane, e.start_us, e.end_us, COLORS[e.lane]) for e in events])
    axes.set_xlabel("microseconds, simulated")
    way = f"{decision.plan.mechanism} {decision.plan.schedule}" if decision.plan else decision.verdict
    axes.set_title(f"{decision.op}, rank 0 of {decision.ranks} on {decision.gpu}: {way}")
    pictures.save(figure, "timeline", path)
