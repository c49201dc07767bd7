"""Where the command's files go; pictures of timelines, by matplotlib, which is an extra."""

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tileweave.cli.problem import BadUsage

KINDS = (".png", ".svg", ".pdf")


def check(option: str, path: Path) -> None:
    """Raise BadUsage unless a picture can go to `path`, which `--option` names."""
    if not find_spec("matplotlib"):
        raise BadUsage(f"--{option} needs matplotlib: pip install matplotlib")
    if path.suffix not in KINDS or path.is_dir():
        raise BadUsage(f"--{option} {path}: expected a file whose name ends in {', '.join(KINDS)}")
    check_folder(option, path)


def check_folder(option: str, path: Path) -> None:
    """Raise BadUsage unless the folder of `path`, which `--option` names, is there."""
    if not path.parent.is_dir():
        raise BadUsage(f"--{option} {path}: there is no folder {path.parent}")


def check_apart(files: Mapping[str, Path | None]) -> None:
    """Raise BadUsage if two options name one file, which the later one would write over."""
    given = [(option, path) for option, path in files.items() if path]
    for i, (option, path) in enumerate(given):
        for other, before in given[:i]:
            if path.resolve() == before.resolve():
                raise BadUsage(f"--{option} {path}: --{other} goes to that file; each needs one of its own")


def bars(axes: Any, lanes: Sequence[str], spans: Iterable[tuple[str, float, float, str]]) -> None:
    """Draw spans (lane, start, end, colour), a row for each lane, the first one at the top."""
    rows: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for lane, start, end, color in spans:
        rows.setdefault((lane, color), []).append((start, end - start))
    for (lane, color), ranges in rows.items():
        axes.broken_barh(ranges, (lanes.index(lane) - 0.4, 0.8), facecolors=color, edgecolor="white", linewidth=0.2)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.5)


def save(figure: Any, option: str, path: Path) -> None:
    """Write a figure, its kind by the name; BadUsage if that is not possible."""
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise BadUsage(f"--{option} {path}: cannot be written: {error}") from error
