"""The command line: options, exit codes, and what is printed.

Exit code 0: the result was right; 1: it was not, or the op reported a race, a deadlock or a timeout; 2: bad usage, the
environment's variables, a full disk, too little memory and a check that is too small to mean something included; 3: a
fault of tileweave or of what is beneath it; 130: interrupted; 141: whoever reads the output has ended. With --json,
standard output is exactly one JSON object in all these cases, but for bench and probe, whose --json names a file.
"""

import contextlib
import json
import sys
import traceback
from typing import Annotated, Any

import torch.distributed as dist
import typer
from rich.console import Console

from tileweave import FabricTimeout, __version__
from tileweave.cli import benching, planning, probing, show, tracing
from tileweave.cli import check as checking
from tileweave.cli import doctor as machine
from tileweave.cli.environment import check_environment, check_settings, launched_by_torchrun, out_of_memory, speaks
from tileweave.cli.job import choose_ranks, needs_processes, run_job, start_processes
from tileweave.cli.ops import OPS
from tileweave.cli.output import LostOutput, Output
from tileweave.cli.problem import DEVICES, BadUsage, make_problem
from tileweave.emulator import EmulatorError
from tileweave.fabric.bound import WorkspaceExceeded

WRONG, BAD_USAGE, FAULT, INTERRUPTED, CUT_OFF = 1, 2, 3, 130, 141

WRITERS = ("bench", "probe")  # commands whose --json names a file

# Newer releases of typer carry their own copy of click, older ones import it: this is its UsageError in both.
_UsageError: Any = typer.BadParameter.__mro__[1]


class _Interrupted(Exception):
    """What was done until then has been printed."""


app = typer.Typer(
    name="tileweave",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit()


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Tiles of communication woven into tiles of compute, in one kernel."""


@app.command()
def run(
    context: typer.Context,
    op: Annotated[str, typer.Argument(metavar="OP", help=f"One of: {', '.join(OPS)}.")],
    ranks: Annotated[
        int | None, typer.Option(help="Number of ranks. Default: one per GPU where there are several, otherwise 4.")
    ] = None,
    shape: Annotated[
        str,
        typer.Option(help="Sizes of the whole problem, m=512,n=512,k=2048 (collectives: m, n), shared by the ranks."),
    ] = "",
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    device: Annotated[str, typer.Option(help="auto, cpu (the emulator) or cuda.")] = "auto",
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Sums in a fixed order, in float32.")] = False,
    bias: Annotated[bool, typer.Option("--bias", help="Add a bias to the product.")] = False,
    seed: Annotated[int, typer.Option(help="Of the data, and of the emulator's schedule.")] = 0,
    as_json: Json = False,
) -> int:
    """Run OP twice on fresh data and check both results against float32."""
    if device not in DEVICES:
        raise BadUsage(f"--device must be one of {', '.join(DEVICES)}, got {device!r}")
    check_environment()
    ranks = choose_ranks(ranks, device)
    problem = make_problem(op, ranks, shape, dtype, deterministic=deterministic, bias=bias, seed=seed)
    if needs_processes(ranks, device):
        return start_processes(ranks, context.obj)
    report = run_job(problem, device)
    if report is None:
        return 0
    if as_json:
        _print_json(report)
    else:
        show.report(_console(), report)
    return 0 if report["ok"] else WRONG


@app.command()
def check(
    op: checking.Op,
    ranks: checking.Ranks = 4,
    shape: checking.Shape = "",
    schedules: checking.Schedules = checking.SCHEDULES,
    seed: checking.Seed = 0,
    seconds: checking.Seconds = checking.SECONDS,
    processes: checking.Processes = None,
    exhaustive: checking.Exhaustive = False,
    as_json: Json = False,
) -> int:
    """Run OP, or a test of your own, under many hostile schedules in the emulator, and report what goes wrong.

    The exit code is 0 if nothing was found, 1 if something was, and 2 if nothing was found in what is too small to be a
    check: a ring of buffers that never wrapped, a flag that was raised once only, no schedule that came to its end, or
    one that got stuck in code of the test's own. Whoever asks for every order that differs, and gets them all, has a
    small case on purpose. An interrupt ends it with what has been covered, and exit code 130.
    """
    check_environment()
    console = None if as_json else _console()
    # What a test of one's own prints does not belong into the object that standard output is to be.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        report = checking.run_check(console, op, ranks, shape, schedules, seed, seconds, processes, exhaustive)
    if as_json:
        _print_json(report.to_dict())
    if report.interrupted:
        raise _Interrupted
    if report.ok and (report.stuck or (report.too_small and not report.complete)):
        return BAD_USAGE
    return 0 if report.ok else WRONG


@app.command()
def probe(
    context: typer.Context,
    json_file: probing.File = None,
    ranks: probing.Ranks = None,
    seconds: probing.Seconds = probing.SECONDS,
    png: probing.Picture = None,
) -> int:
    """Measure this machine's GPUs and links: a hardware profile for the planner."""
    check_environment()
    ranks = probing.choose(ranks)
    probing.check(seconds, json_file, png, ranks)
    if needs_processes(ranks, "auto"):
        return start_processes(ranks, context.obj)
    profile = probing.probe_here(_console(), ranks, seconds)
    if profile is not None:
        probing.show(_console(), profile)
        probing.write(profile, json_file, png)
    return 0


@app.command()
def bench(
    context: typer.Context,
    ops: benching.Ops = None,
    quick: benching.Quick = False,
    only: benching.Only = None,
    listing: benching.Listing = False,
    json_file: benching.JsonFile = None,
    csv: benching.CsvFile = None,
    plot: benching.Plot = None,
    rounds: benching.Rounds = None,
) -> int:
    """Measure ops beside their rivals: between the GPUs where there are several, else on one, also as virtual ranks.

    Each contender is checked against float32 on fresh random data, then timed in turn with the others.
    """
    check_environment()
    texts = only or [""]
    files = {"json": json_file, "csv": csv, "plot": plot}
    if listing:
        benching.check_listing(rounds, files)
        benching.show_list(_console(), benching.tasks_of(None, ops or [], quick, texts), texts)
        return 0
    processes = not launched_by_torchrun() and needs_processes(count := choose_ranks(None, "auto"), "auto")
    tasks = benching.tasks_of(launched_by_torchrun() or processes, ops or [], quick, texts)
    benching.check(tasks, rounds, files)
    if processes:
        return start_processes(count, context.obj)
    results, right = benching.measure(_console(), tasks, rounds, texts, files)
    if not right:
        return WRONG
    return 0 if results.figures else BAD_USAGE


@app.command()
def plan(
    op: planning.Op,
    shape: planning.Shape = "",
    gpu: planning.Gpu = None,
    ranks: planning.Ranks = None,
    dtype: planning.Dtype = "bf16",
    timeline: planning.Picture = None,
    as_json: Json = False,
) -> int:
    """Say what the planner would choose for OP, what comes next, what it rejects, and why; nothing is launched."""
    decision = planning.decide(op, shape, gpu, ranks, dtype, timeline)
    if timeline is not None:
        planning.draw(decision, timeline)
    if as_json:
        _print_json(decision.to_dict())
    else:
        planning.show(_console(), decision)
    return 0


@app.command()
def trace(
    context: typer.Context,
    op: tracing.Op,
    ranks: checking.Ranks = 4,
    shape: checking.Shape = "",
    device: tracing.Device = "cpu",
    out: tracing.Out = None,
    png: tracing.Picture = None,
    as_json: Json = False,
) -> int:
    """Say who is busy and who waits in a call of OP: modelled in the emulator, or measured on a GPU."""
    check_environment()
    try:
        traced = tracing.trace(op, ranks, shape, device, out, png)
    except AssertionError as error:  # a wrong result
        return _fail(context.obj, str(error), WRONG)
    if as_json:
        _print_json(traced)
    else:
        tracing.show(_console(), traced)
    return 0


@app.command()
def doctor(as_json: Json = False) -> int:
    """Say what this machine can do, what it cannot and why, and what to install."""
    check_settings()
    facts = machine.examine()
    if as_json:
        _print_json(facts)
    else:
        show.facts(_console(), facts)
    return 0


@app.command()
def version() -> int:
    """Print the version."""
    print(__version__)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command with `arguments` (default: the process's) and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if sys.stdout is None:  # closed: nobody wants to know
        return _run(arguments)
    output = Output(sys.stdout)
    try:
        with contextlib.redirect_stdout(output):
            code = _run(arguments)
            output.flush()
            return code
    except LostOutput as error:
        output.give_up()
        if isinstance(error.why, BrokenPipeError):
            return CUT_OFF
        print(f"tileweave: {error}", file=sys.stderr)
        return BAD_USAGE


def _run(arguments: list[str]) -> int:
    """The exit code of a command. LostOutput where standard output cannot be written."""
    try:
        # Without standalone mode typer neither exits nor prints: errors come here, and so does the command's value.
        code = app(arguments or ["--help"], obj=arguments, standalone_mode=False) or 0
        if code == INTERRUPTED:  # so newer releases of typer say it, others by typer.Abort
            return _fail(arguments, "interrupted", INTERRUPTED)
        return code
    except BadUsage as error:
        return _fail(arguments, str(error), BAD_USAGE)
    except _UsageError as error:
        return _fail(arguments, error.format_message(), BAD_USAGE)
    except typer.Abort:
        return _fail(arguments, "interrupted", INTERRUPTED)
    except _Interrupted:
        return INTERRUPTED
    except WorkspaceExceeded as error:
        return _fail(arguments, str(error), BAD_USAGE)
    except (EmulatorError, FabricTimeout) as error:  # findings, which say all
        return _fail(arguments, f"{type(error).__name__}: {error}", WRONG)
    except LostOutput:
        raise
    except Exception as error:
        if out_of_memory(error):
            return _fail(arguments, f"not enough memory, take smaller sizes: {error}", BAD_USAGE)
        if not isinstance(error, dist.DistError):  # ranks that did not find each other are no fault of the code
            traceback.print_exc()
        return _fail(arguments, f"{type(error).__name__}: {error}", FAULT)


def _fail(arguments: list[str], text: str, code: int) -> int:
    if speaks():
        if "--json" in arguments and arguments[0] not in WRITERS:
            _print_json({"error": text, "ok": False})
        else:
            print(f"tileweave: {text}", file=sys.stderr)
    return code


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2))


def _console() -> Console:
    # Lines may be longer than the terminal: a wrapped command cannot be copied.
    return Console(soft_wrap=True, highlight=False)
