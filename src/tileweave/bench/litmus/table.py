"""The table of litmus tests in the docs: what they say, and what a GPU has shown beside it."""

import json
import re
from collections import Counter
from pathlib import Path

from tileweave.bench.litmus.cases import CASES, Litmus, Outcome
from tileweave.bench.litmus.run import not_allowed

BLOCK = re.compile(r"(<!-- litmus: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = ("test", "results", "PTX ISA", "must not", "the emulator", "a GPU")


def filled(text: str, folder: Path) -> str:
    """A page with its table made anew; the comment that begins it names the file of a GPU's figures beside the page."""
    return BLOCK.sub(lambda found: found[1] + table(folder / found[2]) + found[3], text)


def table(file: Path) -> str:
    """The table, with a column for a GPU where its figures are there."""
    figures = json.loads(file.read_text()) if file.exists() else {"rows": []}
    outcomes = counted(figures)
    lines = [HEAD, ("---",) * len(HEAD), *(_row(case, outcomes.get(case.name)) for case in CASES)]
    text = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    if outcomes:
        m = figures["machine"]
        versions = f"torch {m['torch']}, triton {m['triton']}, CUDA {m['cuda']}, {m['date']}"
        text += f"\nThe GPU: {m['gpu']}, {versions}, {figures['launches']} launches of each test.\n"
    return text


def counted(figures: dict) -> dict[str, Counter[Outcome]]:
    """What a GPU has shown, by test."""
    return {row["name"]: Counter({tuple(n[:-1]): n[-1] for n in row["outcomes"]}) for row in figures["rows"]}


def _row(case: Litmus, seen: Counter[Outcome] | None) -> tuple[str, ...]:
    what = f"`{case.kernel.__name__}`: {case.name}" + (", a rank each" if case.ranks else "")
    must_not = _text(case.never) if case.never else "nothing"
    if case.allowed is None:
        must_not = {"deadlock": "end", "race": "nothing: it races", "misuse": "run"}[_kind(case)]
    if case.finding is None:
        emulator = "shows " + ", ".join(map(_text, sorted(case.shown)))
        if case.weak and case.weak not in case.shown:
            emulator += f"; not {_text(case.weak)}"
    else:
        emulator = f"reports a {_kind(case)}"
    return what, f"`{' '.join(case.results)}`", case.section, must_not, emulator, _gpu(case, seen)


def _kind(case: Litmus) -> str:
    """Of the finding that a test must come to."""
    return next((kind for kind in ("deadlock", "race") if kind in (case.finding or "")), "misuse")


def _gpu(case: Litmus, seen: Counter[Outcome] | None) -> str:
    if not case.gpu:
        return "not run"
    if seen is None:
        return "not yet run"
    wrong = not_allowed(case, seen)
    if wrong:
        return "**not as the model says**: " + "; ".join(wrong)
    weak = case.weak if case.weak in seen else None
    rest = [f"{_text(outcome)} {n}" for outcome, n in seen.most_common(4) if outcome != weak]
    return "; ".join(([f"**{_text(weak)} {seen[weak]}**"] if weak else []) + rest)


def _text(outcome: Outcome) -> str:
    """An outcome as it stands in the table."""
    return "(" + ", ".join("-" if value == -1 else str(value) for value in outcome) + ")"
