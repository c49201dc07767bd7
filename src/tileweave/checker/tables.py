"""docs/mutants.md from the committed figures: what was planted, what was caught, and why what survived is harmless.

    python -m tileweave.checker.tables docs/mutants.md

rewrites what stands between `<!-- situations -->` or `<!-- mutants -->` and `<!-- end -->`, from situations.json here,
and figures/mutants_*.json and figures/schedules.json beside the page.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

_REASONS = json.loads(Path(__file__).with_name("harmless.json").read_text())
SITUATIONS = json.loads(Path(__file__).with_name("situations.json").read_text())


def reason(op: str, key: str) -> str | None:
    """Why a mutant that survives an op's setups is harmless; None if nobody has said so. A pattern is looked for in the
    op's name, ": " and the key: device code that ops share may need a statement in one of them only."""
    return next((why for pattern, why in _REASONS.items() if re.search(pattern, f"{op}: {key}")), None)


def page(text: str, folder: Path) -> str:
    """A page with its tables made anew."""
    figures = [json.loads(path.read_text()) for path in sorted(folder.glob("figures/mutants_*.json"))]
    book = folder / "figures/schedules.json"
    parts = [_summary(figures), *(_survivors(each) for each in figures)]
    if book.exists():
        parts.append(_passed(json.loads(book.read_text())))
    parts += [_caught(each) for each in figures]
    text = _filled(text, "situations", _situations(figures))
    return _filled(text, "mutants", "\n".join(parts))


def _filled(text: str, name: str, made: str) -> str:
    """A page with what a block of this name holds replaced."""
    block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    return block.sub(lambda found: found[1] + made + found[2], text)


def standing_for(patterns: list[str], figures: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """The judged mutants, each with its op, that a situation's patterns name as its fault."""
    return [
        (each["op"], one)
        for each in figures
        for one in each["mutants"]
        if any(re.search(pattern, one["key"]) for pattern in patterns)
    ]


def _situations(figures: list[dict[str, Any]]) -> str:
    rows = []
    for each in SITUATIONS:
        judged = [one for _, one in standing_for(each.get("mutants", []), figures)]
        shown = []
        if judged:
            caught = Counter(one["caught"] for one in judged if one["caught"])
            operators = ", ".join(sorted({one["operator"] for one in judged}))
            kinds = ", ".join(f"{kind} {n}" for kind, n in caught.most_common())
            shown.append(f"mutants ({operators}): {caught.total()} of {len(judged)} caught, {kinds}")
        shown += [f"planted: {_test(test)}" for test in each.get("planted", [])]
        shown += [_test(test) for test in each.get("tests", [])] + [each[name] for name in ("but",) if name in each]
        kind = "protocol" if each.get("protocol") else ""
        rows.append([each["seen"], each["what"], kind, "; ".join(shown) or "no test yet"])
    return _rows(["seen in", "situation", "kind", "here"], rows)


def _test(path: str) -> str:
    file, _, name = path.partition("::")
    return f"[{name}](../tests/{file})"


def _rows(head: list[str], rows: list[list[str]]) -> str:
    return "".join("| " + " | ".join(line) + " |\n" for line in [head, ["---"] * len(head), *rows])


def _summary(figures: list[dict[str, Any]]) -> str:
    rows = [_row(each["op"], [each], each["date"]) for each in figures] + [_row("all", figures, "")]
    head = ["op", "judged", "caught", "within 5 schedules", "as", "survived, explained", "unexplained", "run"]
    return "## What came of them\n\n" + _rows(head, rows)


def _row(name: str, figures: list[dict[str, Any]], date: str) -> list[str]:
    judged = [(each["op"], one) for each in figures for one in each["mutants"]]
    caught = [one for _, one in judged if one["caught"]]
    soon = sum(one["after"] <= 5 for one in caught)
    why = [reason(op, one["key"]) for op, one in judged if not one["caught"]]
    kinds = ", ".join(f"{kind} {n}" for kind, n in Counter(one["caught"] for one in caught).most_common())
    of = sum(each["of"] for each in figures)
    return [
        name, f"{len(judged)} of {of}", f"{len(caught)}", f"{soon}, {soon / max(len(caught), 1):.1%}", kinds,
        f"{sum(map(bool, why))}", f"{why.count(None)}", date,
    ]  # fmt: skip


def _survivors(figures: dict[str, Any]) -> str:
    rows = [
        [
            _code(one["key"].rpartition(" [")[0]),
            one["operator"],
            f"{one['after']}",
            reason(figures["op"], one["key"]) or "**unexplained**",
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
            f"{e['seconds']:.0f} s",
            f"{len(e['variants'])}",
            f"{e['ranks']} of {e['sms']} SMs",
            " ".join(f"{k}={v}" for k, v in e["sizes"].items()),
            e["device_code"],
            e["date"],
        ]
        for op, e in book.items()
    ]
    head = ["op", "schedules, seeds from 0", "processor", "variants", "ranks", "problem", "device code", "run"]
    said = "Of the small calls in [small.py](../src/tileweave/checker/small.py), two back to back with new data.\n\n"
    return f"## Schedules passed\n\n{said}{_rows(head, rows)}"


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
