"""Runs litmus tests: one instance a schedule in the emulator, very many at a time on a GPU."""

import inspect
import re
from collections import Counter
from typing import Any

import torch

from tileweave import lang
from tileweave.bench.litmus.cases import Litmus, Outcome
from tileweave.emulator import EmulatorError, Multicast, World
from tileweave.ops.descriptors import describe

SEEDS = 60  # schedules of each test
MORE_SEEDS = 3000  # within which the emulator must show what it is to show
WARPS = 4
CELLS, ROWS, COLS = 256, 32, 64  # as in kernel.py
WORDS = {"x": 0, "y": 32}
TURNS = 200  # for which parties wait for each other on a GPU


class Memory:
    """What the instances of a test work on."""

    def __init__(self, case: Litmus, instances: int, device: str):
        self.cells = torch.zeros(instances, CELLS, dtype=torch.int32, device=device)
        self.out = torch.full((instances, case.parties, 2), -1, dtype=torch.int32, device=device)
        self.names = inspect.signature(case.kernel.fn).parameters
        tiles = instances * (case.parties if "slices" in self.names else 1)
        self.tiles = torch.zeros(tiles, ROWS, COLS, dtype=torch.bfloat16, device=device)

    def clear(self) -> None:
        """As at first."""
        self.cells.zero_()
        self.out.fill_(-1)
        self.tiles.zero_()

    def arguments(self, case: Litmus, first: int, turns: int) -> tuple:
        """The kernel's."""
        args: tuple[Any, ...] = first, self.cells, self.out
        if "tiles" in self.names:
            args = *args, self.tiles
        if "slices" in self.names:
            args = *args, Multicast(self.tiles)
        if "desc" in self.names:
            adds = case.kernel.__name__ == "tma_additions"  # by a parallel tensor's descriptor
            flat = self.tiles.view(-1, COLS)
            args = *args, describe(self.tiles, [1, ROWS, COLS]) if adds else describe(flat, [ROWS, COLS])
        return *args, turns, *case.options.values()

    def copies(self, case: Litmus) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Target and source of each copy beside the kernel."""
        targets = {"tile": self.tiles, "flag": self.cells[0, lang.HEADER_WORDS.value :][:1]}
        return [(targets[name], torch.ones_like(targets[name])) for name in case.copies]

    def results(self, case: Litmus) -> torch.Tensor:
        """[instances, results] int32."""
        columns = []
        for name in case.results:
            if name in WORDS:
                columns.append(self.cells[:, WORDS[name]])
            elif name == "tile":
                columns.append(self.tiles.view(len(self.cells), -1).float().amin(1).int())
            else:
                columns.append(self.out[:, int(name[1]), len(name) - 2])
        return torch.stack(columns, 1)


def emulate(case: Litmus, seed: int) -> tuple[Outcome | None, str]:
    """One schedule: the outcome and "", or None and what was found."""
    memory = Memory(case, 1, "cpu")
    world = World(case.parties if case.ranks else 1, seed, **case.world)

    def rank_program(rank: int) -> None:
        grid = 1 if case.ranks else case.parties
        args = memory.arguments(case, rank if case.ranks else 0, 0)
        world.launch(case.kernel, (grid,), *args, num_warps=WARPS, copies=memory.copies(case))

    try:
        world.run(rank_program)
    except EmulatorError as error:
        return None, str(error)
    return tuple(memory.results(case)[0].tolist()), ""


def emulated(case: Litmus) -> tuple[Counter[Outcome], list[str]]:
    """Outcomes, and the texts of findings, of SEEDS schedules, and of more until all that is to be shown has been."""
    outcomes: Counter[Outcome] = Counter()
    findings: list[str] = []
    for seed in range(MORE_SEEDS):
        if seed >= SEEDS and (findings if case.finding else case.shown <= outcomes.keys()):
            break
        outcome, text = emulate(case, seed)
        if outcome is None:
            findings.append(text)
        else:
            outcomes[outcome] += 1
    return outcomes, findings


def faults(case: Litmus, outcomes: Counter[Outcome], findings: list[str]) -> list[str]:
    """What is not as the test says, of what the emulator showed."""
    wrong = []
    if case.finding is None:
        wrong += [f"a false alarm: {text}" for text in findings[:1]]
        wrong += [f"{outcome} is not shown" for outcome in sorted(case.shown - outcomes.keys())]
    else:
        if not any(re.search(case.finding, text, re.DOTALL) for text in findings):
            wrong.append(f"no finding is like {case.finding!r}; the first: {findings[:1]}")
    return wrong + not_allowed(case, outcomes)


def not_allowed(case: Litmus, outcomes: Counter[Outcome]) -> list[str]:
    """Outcomes that the model forbids, of those seen."""
    if case.allowed is None:
        return []
    return [f"{outcome} is forbidden, seen {outcomes[outcome]} times" for outcome in outcomes.keys() - case.allowed]


def observed(case: Litmus, launches: int = 200) -> Counter[Outcome]:
    """Outcomes of so many launches on the current CUDA device, each of as many instances as are resident together."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    instances = 4 * sms // case.parties  # four CTAs an SM: those of an instance run side by side
    memory = Memory(case, instances, "cuda")
    args = memory.arguments(case, 0, TURNS)
    counts: Counter[Outcome] = Counter()
    seen = []
    for _ in range(launches):
        memory.clear()
        case.kernel[(instances * case.parties,)](*args, num_warps=WARPS)
        seen.append(memory.results(case))
    found, times = torch.cat(seen).unique(dim=0, return_counts=True)
    for outcome, n in zip(found.tolist(), times.tolist(), strict=True):
        counts[tuple(outcome)] += n
    return counts
