"""Many schedules of one case, in several processes, within a time: what was run, what it exercised, what was found."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from tileweave.checker.cases import Case
from tileweave.checker.story import story
from tileweave.checker.trial import Finding, Outcome, run_orders, run_trial, shortened
from tileweave.checker.watchdog import OutOfTime
from tileweave.checker.workers import count, each
from tileweave.emulator.exhaustive import Exploration


@dataclass
class Report:
    """What a check came to.

    schedules: how many were run of those `asked` for; cut: how many more had begun when the time was up; stuck: the
    line of the user's program that one of these did not come back from; seconds: how long that took; orders, scenarios,
    variants: how many of each; steps: of all agents together, those of `cut` ones and of those that are being run
    included; rings, flags, flag_uses: what one schedule exercised at least (see
    emulator/coverage.py); too_small: why the case is too small to be a check, empty if it is not; finding: of schedule
    `seed`, in its `scenario` and `variant`, None if there was none; left_out: variants that the case cannot have, and
    why; interrupted: whether somebody has ended it, and what had not come to its end is in `steps` alone.
    """

    case: str
    ranks: int
    asked: int
    schedules: int = 0
    cut: int = 0
    seconds: float = 0.0
    orders: dict[str, int] = field(default_factory=dict)
    scenarios: dict[str, int] = field(default_factory=dict)
    variants: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    rings: dict[str, dict[str, Any]] = field(default_factory=dict)
    flags: int = 0
    flag_uses: int | None = None
    finding: Finding | None = None
    seed: int | None = None
    scenario: str = ""
    variant: str = ""
    left_out: dict[str, str] = field(default_factory=dict)
    stuck: str = ""
    complete: bool = False  # these were all orders that there are
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return self.finding is None

    @property
    def too_small(self) -> list[str]:
        """Which rings did not wrap in any CTA, whether a flag was raised once only, or that no schedule has ended."""
        if not self.schedules:
            return ["no schedule came to its end in this time"]
        most: dict[str, int] = {}  # by place: of a pair named ready and empty, one may be without use
        for name, ring in self.rings.items():
            place = name.rpartition(", ")[2]
            most[place] = max(most.get(place, 0), ring["uses"][1])
        why = [
            f"the ring of {place} never wrapped: a slot of it is used {uses} times at most"
            for place, uses in most.items()
            if uses < 2
        ]
        if self.flag_uses is not None and self.flag_uses < 2:
            why.append("a flag was raised once only: its reuse by a later call was not seen")
        if not self.rings and self.flag_uses is None:
            why.append("no ring and no flag was used")
        return why

    @property
    def story(self) -> str:
        """The finding as a story; empty if there is none."""
        if self.finding is None:
            return ""
        variant = f", variant {self.variant!r}" if self.variant else ""
        return story(self.finding, f"in the schedule of seed {self.seed} ({self.scenario}{variant})")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "ok": self.ok, "too_small": self.too_small, "story": self.story}

    def take(self, outcome: Outcome) -> None:
        """Take in one schedule, but for its steps."""
        if outcome.cut:
            self.cut += outcome.steps > 0 or bool(outcome.stuck)
            self.stuck = self.stuck or outcome.stuck
            return
        self.schedules += 1
        _count(self.orders, outcome.order)
        _count(self.scenarios, re.sub(r"rank \d+", "a rank", outcome.scenario))
        if outcome.finding is not None:  # cut short: it has exercised less than a whole one
            if self.seed is None or outcome.seed < self.seed:
                self.finding, self.seed, self.variant = outcome.finding, outcome.seed, outcome.variant
                self.scenario = f"{outcome.order} order, {outcome.scenario}"
            return
        if outcome.variant:
            _count(self.variants, outcome.variant)
        told = outcome.coverage
        for name, ring in told["rings"].items():
            low, high = self.rings.get(name, ring)["uses"]
            uses = [min(low, ring["uses"][0]), max(high, ring["uses"][1])]
            self.rings[name] = {"slots": ring["slots"], "uses": uses}
        if told["flags"]:
            self.flags = max(self.flags, told["flags"])
            self.flag_uses = min(told["uses"], self.flag_uses if self.flag_uses is not None else told["uses"])


def check(
    case: Case,
    seeds: Iterable[int] = range(100),
    *,
    seconds: float | None = None,
    processes: int | None = None,
    progress: Callable[[Report], None] | None = None,
    shorten: bool = True,
) -> Report:
    """Run a case under the schedules of `seeds`, until one finds something, or for `seconds`, which end a schedule that
    is being run.

    `processes`: how many run schedules side by side, by default one for each of this process's cores, up to 8.
    `progress` is called after each schedule, and while one takes long. With `shorten` a failing schedule is cut down
    and told as a story.
    """
    seeds = list(seeds)
    report, start = _report(case, len(seeds)), time.monotonic()
    end = start + seconds if seconds is not None else None
    processes = min(
        processes or min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2, 8), len(seeds)
    )

    def show(steps: int) -> None:
        report.steps, report.seconds = steps, time.monotonic() - start
        if progress:
            progress(report)

    with closing(_outcomes(case, seeds, end, max(processes, 1), show)) as outcomes:
        for outcome in outcomes:
            report.take(outcome)
            show(report.steps)
    if report.finding is not None and report.finding.kind != "error" and report.seed is not None and shorten:
        report.finding = shortened(case, report.seed)
    return report


def explore(
    case: Case,
    limit: int,
    *,
    seed: int = 0,
    seconds: float | None = None,
    progress: Callable[[Report], None] | None = None,
) -> Report:
    """Run a small case in every order that differs, up to `limit` of them or for `seconds`, until one finds something.

    `seed` says which variant. The report's `complete` says whether those were all.
    """
    report, start, search = _report(case, limit), time.monotonic(), Exploration(limit)
    end = start + seconds if seconds is not None else None
    for outcome in run_orders(case, seed, search, lambda steps: _in_time(end), end):
        report.take(outcome)
        report.steps += outcome.steps
        report.seconds = time.monotonic() - start
        if progress:
            progress(report)
        if outcome.finding is not None or outcome.cut or (end is not None and time.monotonic() >= end):
            break
    report.complete = search.complete
    return report


def _report(case: Case, asked: int) -> Report:
    return Report(case.name, case.ranks, asked, left_out=dict(getattr(case, "left_out", {})))


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _in_time(end: float | None) -> None:
    if end is not None and time.monotonic() >= end:
        raise OutOfTime


def _trial(case: Case, end: float | None, seed: int) -> Outcome:
    """A schedule, whose steps are counted as they are taken."""
    if end is not None and time.monotonic() >= end:  # it has lain in a queue for too long
        return Outcome(seed, "", "", "", 0, {}, cut=True)
    counted = 0

    def watch(steps: int) -> None:
        nonlocal counted
        count(steps - counted)
        counted = steps
        _in_time(end)

    outcome = run_trial(case, seed, watch=watch, end=end)
    count(outcome.steps - counted)
    return outcome


def _outcomes(
    case: Case, seeds: list[int], end: float | None, processes: int, meanwhile: Callable[[int], None]
) -> Generator[Outcome, None, None]:
    """Of the seeds in turn, until one finds something or the time is up."""
    found = False

    def more() -> bool:
        return not found and (end is None or time.monotonic() < end)

    for outcome in each(partial(_trial, case, end), seeds, processes, more, meanwhile):
        found = found or outcome.finding is not None
        yield outcome
