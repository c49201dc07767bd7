"""`tileweave probe`: measure this machine, write its hardware profile, draw the curves."""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from tileweave.bench.measure import machine
from tileweave.bench.probe.sweep import GB, Row, within
from tileweave.bench.probe.sweep import between as copies_between
from tileweave.cli import probe as facts
from tileweave.cli.environment import launched_by_torchrun, speaks, tell_of_waiting
from tileweave.cli.job import choose_ranks
from tileweave.cli.pictures import check_apart
from tileweave.cli.problem import BadUsage
from tileweave.fabric import cuda_refusal

Ranks = Annotated[
    int | None, typer.Option(help="Ranks that copy to each other. Default: one per GPU, or 2 on one GPU's own memory.")
]
File = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Where to write the hardware profile.")]
Seconds = Annotated[float, typer.Option(help="For all measurements; those that tell most come first.")]
Picture = Annotated[Path | None, typer.Option(metavar="FILE", help="Where to draw the curves; needs matplotlib.")]
SECONDS = 120.0
DESCRIBED_SMS = 132  # of a Hopper GPU, where there is none to ask


def choose(ranks: int | None) -> int:
    """How many ranks copy to each other."""
    if ranks is None and not launched_by_torchrun() and torch.cuda.device_count() < 2:
        return 2
    return choose_ranks(ranks, "auto")


def check(seconds: float, path: Path | None, png: Path | None, ranks: int) -> None:
    """BadUsage unless it can be measured here."""
    if not 5 <= seconds <= 3600:
        raise BadUsage(f"--seconds must be from 5 to 3600, got {seconds:g}")
    if ranks < 2:
        raise BadUsage(f"--ranks must be from 2, since a copy has two ends, got {ranks}")
    for name, file in (("json", path), ("png", png)):
        if file and not file.parent.is_dir():
            raise BadUsage(f"--{name} {file}: there is no folder {file.parent}")
    check_apart({"json": path, "png": png})
    if png and not find_spec("matplotlib"):
        raise BadUsage("--png needs matplotlib: pip install matplotlib")
    if refusal := cuda_refusal("cuda"):
        raise BadUsage(f"nothing can be measured here: {refusal}; {what_it_would()}")


def what_it_would() -> str:
    """What a machine with GPUs is asked."""
    between = list(copies_between(DESCRIBED_SMS, GB))
    own = list(within(DESCRIBED_SMS, GB))
    kinds = ", ".join(sorted({copy.mechanism for copy in between}))
    return (
        "on a Hopper GPU it would measure launches, mbarriers, flags between SMs, matmul and attention, "
        f"{len(own)} copies within its memory, then, between GPUs or, on one, between two halves of it, flags and "
        f"{len(between)} copies of 128 bytes to 1 GB ({kinds}), put and get, one way and both"
    )


def probe_here(console: Console, ranks: int, seconds: float) -> dict[str, Any] | None:
    """Measure and return the profile; None on ranks that do not report."""
    console.quiet = not speaks()
    from tileweave.bench.probe import profile, run

    if not launched_by_torchrun():
        with console.status("starting") as status:
            here, found = profile.facts(), run.on_virtual_ranks(ranks, seconds, lambda row: status.update(line(row)))
        return profile.assemble(here, found, machine())
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    here = profile.facts() | links_of(ranks)
    with console.status("starting") as status:
        tell = lambda row: status.update(line(row))  # noqa: E731
        found = run.alone(run.ALONE * seconds, tell)
        tell_of_waiting()
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
        try:
            found = run.merged(found, run.between_processes((1 - run.ALONE) * seconds, tell))
            return profile.assemble(here, found, machine()) if dist.get_rank() == 0 else None
        finally:
            dist.destroy_process_group()


def links_of(ranks: int) -> dict[str, Any]:
    """NVLinks of this GPU and their speed, by the profile's names, as far as nvidia-smi tells."""
    index = torch.cuda.current_device()
    found = facts.links(torch.cuda.device_count())
    links, speeds = found["nvlinks"] or [], found["gb_per_s"] or []
    known = {"links": links[index], "link_nominal_gb_per_s": speeds[index]} if links and links[index] else {}
    return {**known, "ranks": ranks}


def line(row: Row) -> str:
    """A measured copy in a line."""
    ways = ", both ways at once" if row["ways"] == 2 else ""
    size = f"{row['total']} bytes in messages of {row['message']}, {row['sms']} SMs"
    return f"{row['over']}, {row['mechanism']} {row['direction']}{ways}, {size}: {row['gb_per_s']:.1f} GB/s"


def show(console: Console, profile: dict[str, Any]) -> None:
    """Print a probed profile: its numbers, then its curves."""
    over = {row["over"] for row in profile["probe"]["rows"]}
    console.print(f"[bold]{profile['gpu']}[/], {profile['probe']['machine']['date']}")
    if "link" not in over:
        console.print("One GPU: what is measured is its own memory, no link.")
    numbers = Table("figure", "value", "kind")
    for name, number in profile["numbers"].items():
        numbers.add_row(name, f"{number['value']:g}", number["kind"])
    console.print(numbers)
    copies = Table("over", "mechanism", "direction", "bytes", "message", "SMs", "us (lowest to highest)", "GB/s")
    for row in profile["probe"]["rows"]:
        median, low, high = row["us"]
        kind = row["mechanism"] + (f" ({', '.join(row['naive']) or 'plain'})" if row["mechanism"] == "naive" else "")
        if row["spread"] > 1 or row["columns"] != row["width"]:
            kind += f", columns {row['columns']} of {row['width']}, spread {row['spread']}"
        sizes = [str(row[name]) for name in ("total", "message", "sms")]
        ways = row["direction"] + (", both ways" if row["ways"] == 2 else "")
        us = f"{median:.1f} ({low:.1f} to {high:.1f})"
        copies.add_row(row["over"], kind, ways, *sizes, us, f"{row['gb_per_s']:.1f}")
    console.print(copies)


def write(profile: dict[str, Any], path: Path | None, png: Path | None) -> None:
    """Write the profile and draw the curves where asked."""
    if path:
        path.write_text(json.dumps(profile, indent=1) + "\n")
    if png:
        from tileweave.bench.probe.draw import draw

        draw(profile, png)
