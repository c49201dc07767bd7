"""`tileweave trace`: one call of an op in the emulator in the order of modelled time, as a timeline."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tileweave import checker
from tileweave.cli import pictures
from tileweave.cli.check import case_of
from tileweave.cli.problem import BadUsage
from tileweave.emulator.search import Choice, choosing
from tileweave.emulator.timeline import FLAG, REGISTERS, Rates, Span, TimeOrder, chrome_trace
from tileweave.planner.hardware import Hardware, profile

GPU = "h200"
MODELLED = f"modelled by the rates of an {GPU.upper()}, not measured"
COLORS = {
    "wgmma": "tab:blue", "TMA load": "tab:cyan", "TMA store": "tab:orange", "TMA reduce-add": "tab:orange",
    "copy-engine copy": "tab:purple", REGISTERS: "tab:olive", FLAG: "tab:red",
}  # fmt: skip
OTHER_WAIT = "lightgrey"

Op = Annotated[str, typer.Argument(metavar="OP", help=f"One of: {', '.join(checker.OPS)}.")]
Out = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Write Chrome's trace events, which Perfetto shows.")
]
Picture = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw rank 0's timeline; needs matplotlib.")]


def trace(op: str, ranks: int, shape: str, out: Path | None, png: Path | None) -> dict[str, Any]:
    """Run an op once, write what is asked for, and return the summary: modelled microseconds and, for each role, the
    shares of that time. BadUsage for arguments that make no sense; AssertionError for a wrong result."""
    if op not in checker.OPS:
        raise BadUsage(f"OP must be one of {', '.join(checker.OPS)}, got {op!r}")
    case = case_of(op, ranks, shape)
    assert isinstance(case, checker.OpCase)
    if png is not None:
        pictures.check("png", png)
    if out is not None:
        pictures.check_folder("out", out)
    order = TimeOrder(rates_of(profile(GPU), case.sms))
    with choosing(Choice(lambda seed, index: order)) as worlds:
        replace(case, calls=1).run(0)
    variant = case.variant(0)
    title = f"{op}, {ranks} emulated ranks of {case.sms} SMs" + (f", {variant}" if variant else "")
    if out is not None:
        try:
            out.write_text(json.dumps(chrome_trace(order, title, MODELLED)), encoding="utf-8")
        except OSError as error:
            raise BadUsage(f"--out {out}: cannot be written: {error.strerror}") from error
    if png is not None:
        _draw(order, title, png)
    return {
        "op": op, "ranks": ranks, "shape": case.sizes, "variant": variant, "sms": case.sms, "times": MODELLED,
        "microseconds": order.now, "steps": worlds.steps, "roles": roles_of(order),
        "out": str(out) if out else None, "png": str(png) if png else None, "ok": True,
    }  # fmt: skip


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


def roles_of(order: TimeOrder) -> list[dict[str, Any]]:
    """For each role or kind of operation, on how many CTAs it is, and the mean shares of the whole time in which it is
    busy, waits for flags, and waits for something else."""
    agents: dict[str, dict[tuple, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in order.spans:
        if span.role != "host":
            agents[span.role][span.rank, span.cta].append(span)
    return [
        {
            "role": role,
            "ctas": len(ctas),
            "busy": _share(order, ctas, lambda kind: not kind.startswith("wait")),
            "waits_for_flags": _share(order, ctas, lambda kind: kind == FLAG),
            "other_waits": _share(order, ctas, lambda kind: kind.startswith("wait") and kind != FLAG),
        }
        for role, ctas in sorted(agents.items())
    ]


def _share(order: TimeOrder, ctas: dict[tuple, list[Span]], counts: Any) -> float:
    """The mean share of the whole time that the spans of the kinds which count cover; what overlaps counts once."""
    total = 0.0
    for spans in ctas.values():
        until = 0.0
        for start, end in sorted((span.start, span.end) for span in spans if counts(span.kind)):
            total += max(end - max(start, until), 0.0)
            until = max(until, end)
    return total / len(ctas) / order.now


def show(console: Console, traced: dict[str, Any]) -> None:
    """Print what `trace` returned."""
    sizes = " ".join(f"{name}={size}" for name, size in traced["shape"].items())
    ranks, variant = traced["ranks"], f", {traced['variant']}" if traced["variant"] else ""
    emulated = f"{ranks} emulated rank{'s' * (ranks != 1)} of {traced['sms']} SMs"
    console.print(f"[bold]{traced['op']}[/], {emulated}{escape(variant)}: {sizes}")
    console.print(f"  {traced['microseconds']:.1f} us, {traced['times']}; {traced['steps']:,} steps")
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


def _draw(order: TimeOrder, title: str, path: Path) -> None:
    """Write the timeline of rank 0, a row for each CTA and role."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    spans = [span for span in order.spans if span.rank == 0 and span.role != "host"]
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
    axes.set_xlabel(f"microseconds, {MODELLED}")
    axes.set_title(f"{title}: rank 0")
    pictures.save(figure, "png", path)
