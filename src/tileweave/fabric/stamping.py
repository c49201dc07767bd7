"""Launches whose kernels store timestamps, and the timeline that these make.

with stamping() as stamps:
    call()  # of ops on a GPU: their kernels are built
    stamps.again()
    call()
timeline = stamps.timeline()
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from tileweave.emulator.timeline import Span
from tileweave.fabric.world import current_group
from tileweave.lang.stamps import END, ID_BITS, MAIN, SLOTS, START, Site, rebuilt, stamped, warps_of

BETWEEN, RESIDENT = "between waits", "resident"
_TIME_BITS = 64 - ID_BITS


@dataclass(frozen=True)
class Launch:
    """A rank's `number`-th launch, of kernel `source`, that is, of what has been `built` from it; `words`, int64 [CTAs,
    warps, SLOTS] on the rank's GPU, is what it stores."""

    rank: int
    number: int
    source: Any
    built: Any
    sites: list[Site]
    words: torch.Tensor


@dataclass(frozen=True)
class Timeline:
    """spans, in microseconds from the first stamp, and when the last one was; lost: how many CTAs had more stamps than
    there was room for, of which the first ones are there; kernels: of launches, by rank and number."""

    spans: list[Span]
    now: float
    lost: int
    kernels: dict[tuple[int, int], str]


class Stamping:
    """The launches since `stamping` began, or since `again`."""

    def __init__(self) -> None:
        self._launches: dict[tuple[int, int], Launch] = {}
        self._counts: dict[int, int] = {}  # a rank's last launch
        self._lock = threading.Lock()

    def again(self) -> None:
        """Forget the stamps, and keep what is built: the same calls launch it as fast as they would without stamps.
        Waits for the GPUs."""
        for launch in self._launches.values():
            launch.words.zero_()
            torch.cuda.synchronize(launch.words.device)
        self._counts.clear()

    def timeline(self) -> Timeline:
        """What the kernels have done when. Waits for the GPUs; the clocks of all are taken for one."""
        launches = [each for each in self._launches.values() if each.number <= self._counts.get(each.rank, -1)]
        return timeline_of([(launch, launch.words.cpu()) for launch in launches])

    def to_launch(self, compiled: Any, grid: int, rank: int) -> Any:
        """What rank `rank` launches for a compiled kernel."""
        with self._lock:
            number = self._counts[rank] = self._counts.get(rank, -1) + 1
        known = self._launches.get((rank, number))
        if known is None or known.source is not compiled or known.words.shape[0] != grid:
            ptx = compiled.asm["ptx"]
            words = torch.zeros(grid, warps_of(ptx), SLOTS, dtype=torch.int64, device="cuda")
            text, sites = stamped(ptx, words.data_ptr())
            known = Launch(rank, number, compiled, rebuilt(compiled, text), sites, words)
            self._launches[rank, number] = known
        return known.built


_stamping: Stamping | None = None


@contextmanager
def stamping() -> Iterator[Stamping]:
    """While it lasts, whatever this process launches on a GPU stores timestamps. A kernel is built for each launch from
    the PTX of the one that it would be otherwise (`lang.stamps`), which takes seconds."""
    global _stamping
    _stamping = Stamping()
    try:
        yield _stamping
    finally:
        _stamping = None


def to_launch(compiled: Any, grid: int, rank: int) -> Any:
    """What a fabric launches on the current device for a compiled kernel: that one, unless `stamping` is on."""
    if _stamping is None:
        return compiled
    group = current_group()  # a rank's own launches are those of a world of one
    return _stamping.to_launch(compiled, grid, rank if group is None else group.rank)


def timeline_of(stored: list[tuple[Launch, torch.Tensor]]) -> Timeline:
    """What launches have stored, in the memory of the host, as one timeline."""
    since = int(stored[0][1][0, 0, 0]) >> ID_BITS if stored else 0
    read = [_Stamps(launch, words, since) for launch, words in stored]
    first = min((stamps.first for stamps in read), default=0.0)
    spans = [span for stamps in read for span in stamps.spans()]
    for span in spans:
        span.start, span.end = span.start - first, span.end - first
    lost = sum(int((words[:, :, -1] != 0).any(1).sum()) for _, words in stored)
    kernels = {(launch.rank, launch.number): launch.source.name for launch, _ in stored}
    return Timeline(spans, max((span.end for span in spans), default=0.0), lost, kernels)


class _Stamps:
    """The stamps of a launch, in microseconds since a clock's reading."""

    def __init__(self, launch: Launch, words: torch.Tensor, since: int):
        self._launch, self._words, self._since = launch, words, since
        self.first = min(self._us(int(word)) for word in words[:, 0, 0])
        self._roles = self._named_roles()

    def spans(self) -> Iterator[Span]:
        """Of each CTA that it is resident; of one warp for each role, its waits and the times between them."""
        for cta in range(self._words.shape[0]):
            for warp, names in self._roles.items():
                yield from self._of_warp(cta, warp, names)

    def _of_warp(self, cta: int, warp: int, names: dict[str, str]) -> Iterator[Span]:
        rank, number, sites = self._launch.rank, self._launch.number, self._launch.sites
        words = [word for word in self._words[cta, warp].tolist() if word]
        stamps = [(self._us(word), word & ((1 << ID_BITS) - 1)) for word in words]
        (start, first), (end, last) = stamps[0], stamps[-1]
        if warp == 0 and last == END:
            yield Span(rank, cta, number, "SM", f"SM {first - START}", RESIDENT, start, end, "")
        alone = all(site.role == MAIN for site in sites)
        role, since = MAIN if alone else "", start  # of roles it is not known when they begin
        for (begins, opens), (ends, closes) in pairwise(stamps):
            if opens % 2 == 0 and closes == opens + 1 and opens != END:
                site = sites[opens // 2 - 1]
                name = names[site.role]
                if site.role == role:
                    yield Span(rank, cta, number, name, BETWEEN, BETWEEN, since, begins, "")
                yield Span(rank, cta, number, name, site.kind, site.kind, begins, ends, site.place)
                role, since = site.role, ends
        if alone and last == END:
            yield Span(rank, cta, number, names[MAIN], BETWEEN, BETWEEN, since, end, "")

    def _us(self, word: int) -> float:
        """The time of a stamp: a clock of 48 bits of nanoseconds starts again every three days."""
        half = 1 << (_TIME_BITS - 1)
        return (((word >> ID_BITS) - self._since + half) % (1 << _TIME_BITS) - half) / 1e3

    def _named_roles(self) -> dict[int, dict[str, str]]:
        """The first warp of each partition, and names of the roles that it runs: a second partition of a role, which
        has code of its own, is numbered. Warps that stop at the same places are of one partition."""
        ids = self._words & ((1 << ID_BITS) - 1)
        seen: dict[int, set[int]] = {0: set()}
        for warp in range(ids.shape[1]):
            mine = {i // 2 - 1 for i in ids[:, warp].unique().tolist() if END < i < START}
            partition = next((w for w, sites in seen.items() if sites & mine), 0 if not mine else warp)
            seen.setdefault(partition, set()).update(mine)
        count: dict[str, int] = {}
        names: dict[int, dict[str, str]] = {}
        for warp, sites in seen.items():
            names[warp] = {MAIN: MAIN}
            for role in sorted({self._launch.sites[site].role for site in sites} - {MAIN}):
                count[role] = count.get(role, 0) + 1
                names[warp][role] = role if count[role] == 1 else f"{role} {count[role]}"
        return names
