"""docs/mutants.md from the committed figures: what was planted, what was caught, and why what survived is harmless.

    python -m tileweave.checker.tables docs/mutants.md

rewrites what stands between `<!-- mutants -->` and `<!-- end -->`, from figures/mutants_*.json and
figures/schedules.json beside it.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

_REASONS = json.loads(Path(__file__).with_name("harmless.json").read_text())
_BLOCK = re.compile(r"(<!-- mutants -->\n).*?(<!-- end -->)", re.DOTALL)


def reason(key: str) -> str | None:
    """Why a mutant that survives is harmless; None if nobody has said so."""
    return next((why for pattern, why in _REASONS.items() if re.search(pattern, key)), None)


def page(text: str, folder: Path) -> str:
    """A page with its tables made anew."""
    figures = [json.loads(path.read_text()) for path in sorted(folder.glob("figures/mutants_*.json"))]
    book = folder / "figures/schedules.json"
    parts = [_summary(figures), *(_survivors(each) for each in figures)]
    if book.exists():
        parts.append(_passed(json.loads(book.read_text())))
    parts += [_caught(each) for each in figures]
    return _BLOCK.sub(lambda found: found[1] + "\n".join(parts) + found[2], text)


def _rows(head: list[str], rows: list[list[str]]) -> str:
    return "".join("| " + " | ".join(line) + " |\n" for line in [head, ["---"] * len(head), *rows])


def _summary(figures: list[dict[str, Any]]) -> str:
    rows = []
    for each in figures:
        judged = each["mutants"]
        caught = [one for one in judged if one["caught"]]
        soon = sum(one["after"] <= 5 for one in caught)
        why = [reason(one["key"]) for one in judged if not one["caught"]]
        kinds = ", ".join(f"{kind} {n}" for kind, n in Counter(one["caught"] for one in caught).most_common())
        rows.append([
            each["op"], f"{len(judged)} of {each['of']}", f"{len(caught)}", f"{soon}", kinds,
            f"{sum(map(bool, why))}", f"{why.count(None)}", each["date"],
        ])  # fmt: skip
    head = ["op", "judged", "caught", "within 5 schedules", "as", "survived, explained", "unexplained", "run"]
    return "## What came of them\n\n" + _rows(head, rows)


def _survivors(figures: dict[str, Any]) -> str:
    rows = [
        [
            _code(one["key"].rpartition(" [")[0]),
            one["operator"],
            f"{one['after']}",
            reason(one["key"]) or "**unexplained**",
        ]
        for one in figures["mutants"]
        if not one["caught"]
    ]
    return f"## {figures['op']}: what survived\n\n" + _rows(["statement", "operator", "schedules", "why"], rows)


def _passed(book: dict[str, Any]) -> str:
    rows = [
        [
            op,
            f"{e['schedules']}",
            f"{e['ranks']}",
            " ".join(f"{k}={v}" for k, v in e["sizes"].items()),
            e["device_code"],
            e["date"],
        ]
        for op, e in book.items()
    ]
    return "## Schedules passed\n\n" + _rows(
        ["op", "schedules, seeds from 0", "ranks", "problem", "device code", "run"], rows
    )


def _caught(figures: dict[str, Any]) -> str:
    rows = [
        [_code(one["key"].rpartition(" [")[0]), one["operator"], one["caught"], f"{one['after']}"]
        for one in figures["mutants"]
        if one["caught"]
    ]
    return f"## {figures['op']}: what was caught\n\n" + _rows(["statement", "operator", "fault", "schedules"], rows)


def _code(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`"


def main() -> None:
    """Rewrite the pages named on the command line."""
    for path in map(Path, sys.argv[1:]):
        path.write_text(page(path.read_text(), path.parent))


if __name__ == "__main__":
    main()
