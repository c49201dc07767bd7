"""A finding as a story: who did what, which order was missing, what would have supplied it, how it came about."""

from __future__ import annotations

import textwrap
from typing import Any

from tileweave.checker.trial import Finding

_DID = {
    "read": "read",
    "volatile read": "read",
    "write": "wrote",
    "add": "added to",
    "atomic": "did an atomic operation on",
}


def story(finding: Finding, when: str = "") -> str:
    """The report of a finding, several lines. `when`: which schedule showed it."""
    told = finding.told
    head = f"{_article(finding.kind)} {finding.kind}" + (f" on {told['memory']}" if "memory" in told else "")
    lines = [f"{head}{f', {when}' if when else ''}", ""]
    if "sides" in told:
        first, second = told["sides"]
        lines += _side("", first) + _side("then ", second)
        lines += ["  and nothing orders the first before the second.", f"  What would: {told['missing']}.", ""]
    else:
        lines += [f"  {line}" for line in finding.text.splitlines()] + [""]
    lines += _how(finding)
    return "\n".join(_wrapped(line) for line in lines).rstrip()


def _wrapped(line: str) -> str:
    """Long sentences broken; lines that quote a kernel, which are indented further, are left whole."""
    if line.startswith("      "):
        return line
    return textwrap.fill(line, 112, subsequent_indent="    ", break_on_hyphens=False)


def _article(kind: str) -> str:
    return "An" if kind[0] in "aeiou" else "A"


def who(side: dict[str, Any]) -> str:
    """Who a side is, in words."""
    if side["cta"] is None:
        return f"rank {side['rank']}, its host program"
    return f"rank {side['rank']}, CTA {side['cta']}, {side['role']}"


def _side(start: str, side: dict[str, Any]) -> list[str]:
    lines = [f"  {start}{who(side)}: {side['what']} {_DID[side['kind']]} it"]
    if side["file"]:
        lines.append(f"      {side['file']}:{side['line']} in {side['function']}:  {side['source']}")
    if side["called_at"]:
        lines.append(f"      called at {side['called_at']}")
    return lines


def _how(finding: Finding) -> list[str]:
    """The schedule, and what those concerned did before."""
    if finding.turns is None:
        return []
    if finding.turns:
        turns = ", ".join(f"{name} x{count}" for name, count in finding.turns[:8])
        more = f", and {len(finding.turns) - 8} more" if len(finding.turns) > 8 else ""
        how = (
            f"{len(finding.turns)} of {finding.was} turns are enough ({turns}{more}); then each runs until it must wait"
        )
    else:
        how = "no particular order is needed: it shows when each agent runs until it must wait"
    lines = [f"  The schedule: {how}."]
    if finding.steps:
        agents = {step["agent"] for step in finding.steps}
        lines.append(f"  What {'the two' if len(agents) > 1 else 'it'} did before, in this order:")
    width = max((len(who(step)) for step in finding.steps), default=0)
    for step in finding.steps:
        what = f"({step['what']}) " if step["is_operation"] else ""
        place = f"{step['file']}:{step['line']}" if step["file"] else "host"
        lines.append(f"      {who(step):<{width}}  {place}  {what}{step['source']}")
    return lines
