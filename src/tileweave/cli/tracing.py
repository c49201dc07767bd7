"""`tileweave trace`: one call of an op as a timeline: in the emulator, in the order of modelled time, or on a GPU, from
timestamps in the kernels."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import tileweave
from tileweave import checker
from tileweave.checker.problems import PROBLEMS
from tileweave.cli import pictures
from tileweave.cli.check import case_of
from tileweave.cli.environment import launched_by_torchrun
from tileweave.cli.problem import BadUsage
from tileweave.emulator.search import Choice, choosing
from tileweave.emulator.timeline import FLAG, REGISTERS, Flow, Rates, Span, TimeOrder, chrome_trace, roles_of
from tileweave.fabric.stamping import BETWEEN, stamping
from tileweave.lang.stamps import WGMMA
from tileweave.planner.hardware import Hardware, profile

GPU = "h200"
MODELLED = f"modelled by the rates of an {GPU.upper()}, not measured"
DEVICES = ("cpu", "cuda")
PICTURED = 8  # CTAs in a picture
COLORS = {
    BETWEEN: "tab:blue",
    "wgmma": "tab:blue", "TMA load": "tab:cyan", "TMA store": "tab:orange", "TMA reduce-add": "tab:orange",
    "copy-engine copy": "tab:purple", REGISTERS: "tab:olive", FLAG: "tab:red",
    WGMMA: "skyblue",
}  # fmt: skip
OTHER_WAIT = "lightgrey"

Op = Annotated[str, typer.Argument(metavar="OP", help=f"One of: {', '.join(checker.OPS)}.")]
Device = Annotated[str, typer.Option(help="cpu (the emulator) or cuda (virtual ranks on one GPU).")]
Out = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Write Chrome's trace events, which Perfetto shows.")
]
Picture = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw rank 0's timeline; needs matplotlib.")]


@dataclass(frozen=True)
class Traced:
    """A call: what was done when, in microseconds to `now`; `facts` are what the summary says of it besides."""

    spans: Sequence[Span]
    flows: Sequence[Flow]
    now: float
    facts: dict[str, Any]


def trace(op: str, ranks: int, shape: str, device: str, out: Path | None, png: Path | None) -> dict[str, Any]:
    """Run an op, write what is asked for, and return the summary: microseconds and, for each role, the shares of that
    time. BadUsage for arguments that make no sense; AssertionError for a wrong result."""
    if op not in checker.OPS:
        raise BadUsage(f"OP must be one of {', '.join(checker.OPS)}, got {op!r}")
    if device not in DEVICES:
        raise BadUsage(f"--device must be one of {', '.join(DEVICES)}, got {device!r}")
    case = case_of(op, ranks, shape)
    assert isinstance(case, checker.OpCase)
    if png is not None:
        pictures.check("png", png)
    if out is not None:
        pictures.check_folder("out", out)
    pictures.check_apart({"out": out, "png": png})
    traced = _emulated(case) if device == "cpu" else _measured(case)
    facts = {"op": op, "ranks": ranks, "shape": case.sizes, **traced.facts}
    title = _title(facts)
    if out is not None:
        try:
            out.write_text(
                json.dumps(chrome_trace(traced.spans, traced.flows, title, facts["times"])), encoding="utf-8"
            )
        except OSError as error:
            raise BadUsage(f"--out {out}: cannot be written: {error.strerror}") from error
    if png is not None:
        _draw(traced, title, png)
    return {
        **facts, "microseconds": traced.now, "roles": roles_of(traced.spans, traced.now),
        "out": str(out) if out else None, "png": str(png) if png else None, "ok": True,
    }  # fmt: skip


def _emulated(case: checker.OpCase) -> Traced:
    """A call in the emulator, in the first of the case's ways."""
    order = TimeOrder(rates_of(profile(GPU), case.sms))
    with choosing(Choice(lambda seed, index: order)) as worlds:
        replace(case, calls=1).run(0)
    facts = {
        "variant": case.variant(0), "world": "emulated", "sms": case.sms, "times": MODELLED, "steps": worlds.steps
    }  # fmt: skip
    return Traced(order.spans, order.flows, order.now, facts)


def _measured(case: checker.OpCase) -> Traced:
    """A call by virtual ranks on a GPU, as the planner wants it."""
    if launched_by_torchrun():
        raise BadUsage("--device cuda: traced ranks share one process and one GPU; start it without torchrun")
    op, asked = PROBLEMS[case.op], case.all_variants[case.variant(0)]
    options = {name: x for name, x in asked.items() if name not in ("plan", "tiling")}
    operands = op.operands(case.sizes, case.ranks, 0)
    try:
        made = tileweave.virtual_world(case.ranks, device="cuda")
    except (ValueError, RuntimeError) as error:  # too few SMs, no Hopper GPU: the message says what is legal
        raise BadUsage(f"--ranks {case.ranks} --device cuda: {error}") from error
    with made as world:
        mine = [tuple(x.to(world.device) for x in each) for each in operands]
        route = world.run(lambda rank, group: op.route(mine[rank], group, **options))[0]
        if not route.fused:
            raise BadUsage(f"shape: no kernel would run: {route.reason}")
        with stamping() as stamps:
            for _ in range(2):  # the first one compiles, and makes the workspace
                stamps.again()
                results = world.run(lambda rank, group: op.call(mine[rank], group, **options))
            timeline = stamps.timeline()
    limit = op.tolerance(case.ranks, bool(options.get("deterministic")))
    for rank, (outs, truths) in enumerate(zip(results, op.truth(operands, options), strict=True)):
        case.compare(0, rank, tuple(out.cpu() for out in outs), truths, limit)
    times = f"measured on an {torch.cuda.get_device_name(world.device)}, by timestamps in the kernels"
    variant = f"{route.plan.schedule}, {route.plan.mechanism}" if route.plan else ""
    facts = {"variant": variant, "world": "virtual", "sms": world.sms, "times": times, "lost": timeline.lost}
    return Traced(timeline.spans, (), timeline.now, facts)


def _title(facts: dict[str, Any]) -> str:
    """What has run where."""
    ranks, variant = facts["ranks"], f", {facts['variant']}" if facts["variant"] else ""
    return f"{facts['op']}, {ranks} {facts['world']} rank{'s' * (ranks != 1)} of {facts['sms']} SMs{variant}"


def rates_of(hardware: Hardware, sms: int) -> Rates:
    """The rates of a rank of `sms` SMs: of what its SMs share, as much as falls to so many of the GPU's."""
    share, gb_per_s = sms / hardware.sms, 1e3  # bytes per microsecond
    return Rates(
        sm_bytes=hardware.sm_gb_per_s * gb_per_s,
        register_bytes=hardware.register_sm_gb_per_s * gb_per_s,
        sm_flops=hardware.matmul_tflops * 1e6 / hardware.sms,
        memory_bytes=hardware.memory_gb_per_s * gb_per_s * share,
        link_bytes=hardware.link_gb_per_s * gb_per_s * share,
        copy_bytes=hardware.copy_gb_per_s * gb_per_s * share,
        copy_start_us=hardware.copy_start_us,
        launch_us=hardware.launch_us,
        peer_us=hardware.sync_us,
        gpu_us=hardware.flag_gpu_us,
        cta_us=hardware.flag_cta_us,
    )


def show(console: Console, traced: dict[str, Any]) -> None:
    """Print what `trace` returned."""
    sizes = " ".join(f"{name}={size}" for name, size in traced["shape"].items())
    console.print(f"[bold]{escape(_title(traced))}[/]: {sizes}")
    steps = f"; {traced['steps']:,} steps" if "steps" in traced else ""
    console.print(f"  {traced['microseconds']:.1f} us, {traced['times']}{steps}")
    if traced.get("lost"):
        console.print(
            f"  [yellow]CTAs that stored more than there is room for, whose end is missing: {traced['lost']}[/]"
        )
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("role")
    for head in ("CTAs", "busy", "waits for flags", "other waits"):
        table.add_column(head, justify="right")
    for role in traced["roles"]:
        shares = (f"{role[name]:.0%}" for name in ("busy", "waits_for_flags", "other_waits"))
        table.add_row(f"[cyan]{escape(role['role'])}[/]", str(role["ctas"]), *shares)
    console.print(table)
    for name, what in (("out", "open it at https://ui.perfetto.dev"), ("png", "rank 0")):
        if traced[name]:
            console.print(f"  wrote {escape(traced[name])}: {what}")


def _draw(traced: Traced, title: str, path: Path) -> None:
    """Write the timeline of rank 0, a row for each CTA and role; of many CTAs a few, the last one among them."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    spans = [span for span in traced.spans if span.rank == 0 and span.role not in ("host", "SM")]
    ctas = sorted({span.cta for span in spans if span.cta is not None})
    shown = {None, *(ctas[-1 - i * (len(ctas) - 1) // max(PICTURED - 1, 1)] for i in range(PICTURED) if ctas)}
    spans = [span for span in spans if span.cta in shown]
    keys = sorted({(-1 if span.cta is None else span.cta, span.role) for span in spans})
    name = {key: f"CTA {key[0]}, {key[1]}" if key[0] >= 0 else key[1] for key in keys}
    bars = [
        (name[-1 if s.cta is None else s.cta, s.role], s.start, s.end, COLORS.get(s.kind, OTHER_WAIT)) for s in spans
    ]
    figure = Figure(figsize=(14, 1.5 + 0.22 * len(keys)), layout="constrained")
    axes = figure.subplots()
    pictures.bars(axes, list(name.values()), bars)
    kinds = {kind: color for kind, color in COLORS.items() if any(span.kind == kind for span in spans)}
    legend = {**kinds, "other wait": OTHER_WAIT}
    patches = [Patch(color=color, label=kind) for kind, color in legend.items()]
    figure.legend(handles=patches, loc="outside right upper")
    axes.set_xlabel(f"microseconds, {traced.facts['times']}")
    axes.set_title(f"{title}: rank 0")
    pictures.save(figure, "png", path)
