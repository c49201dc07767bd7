"""One schedule of a case: its seed says which order, which hostile scenario and which variant; what came of it.

| scenario | what it does to the fabric |
|---|---|
| calm | nothing beyond what the order itself does |
| a rank starts late | its host launches only when no other rank can go on, so that the others are a call ahead |
| a rank is slow | none of its agents runs while another rank's can |
| transfers land late | TMA stores, adds and copies land only when nobody else can run, in any order |
| a rank's transfers land late | only those that it has issued |
| loads are late | TMA loads read only when nobody else can run |
| products are late | wgmma read their operands only when nobody else can run |
| graph replay | a captured call is replayed with new data in the same memory, under the same launch arguments |
| graph replay, a rank is slow | the same, and none of that rank's agents runs while another rank's can |
| two streams | calls take turns with those of another op, on a stream of its own, chained in host order |
| two streams, a rank starts late | the same, and that rank launches only when no other rank can go on |
| two groups | each call is also made in a group of the same ranks in reverse order, with flags and slots of its own |
| two groups, a rank starts late | the same, and that rank launches only when no other rank can go on |

The last six run the calls another way, so a case must know how: those of ops do (`Case.ways`). All scenarios meet the
random order and PCT, and every variant of the case, as seeds go on.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tileweave.checker.cases import Case
from tileweave.checker.watchdog import OutOfTime, in_time
from tileweave.emulator import DeadlockError, EmulatorError, ProtocolError, RaceError
from tileweave.emulator.coverage import Coverage
from tileweave.emulator.exhaustive import Exploration
from tileweave.emulator.search import Choice, PriorityOrder, RandomOrder, Recorded, Replay, Strategy, Turns, choosing
from tileweave.emulator.shrink import Shrunk, shrink
from tileweave.fabric.bound import WorkspaceExceeded

_LANDING = ("TMA store", "TMA reduce-add", "copy-engine copy")
SCENARIOS: dict[str, Callable[[int], list[tuple]]] = {
    "calm": lambda rank: [],
    "rank {} starts late": lambda rank: [("cta", rank, None)],
    "rank {} is slow": lambda rank: [("rank", rank)],
    "transfers land late": lambda rank: [("op", kind) for kind in _LANDING],
    "transfers of rank {} land late": lambda rank: [("op", kind, rank) for kind in _LANDING],
    "loads are late": lambda rank: [("op", "TMA load")],
    "products are late": lambda rank: [("op", "wgmma")],
}
REPLAY, STREAMS, GROUPS = "graph replay", "two streams", "two groups"  # ways to run a case
_WAYS: dict[str, tuple[str, Callable[[int], list[tuple]]]] = {
    "graph replay": (REPLAY, SCENARIOS["calm"]),
    "graph replay, rank {} is slow": (REPLAY, SCENARIOS["rank {} is slow"]),
    "two streams": (STREAMS, SCENARIOS["calm"]),
    "two streams, rank {} starts late": (STREAMS, SCENARIOS["rank {} starts late"]),
    "two groups": (GROUPS, SCENARIOS["calm"]),
    "two groups, rank {} starts late": (GROUPS, SCENARIOS["rank {} starts late"]),
}
_KINDS = {RaceError: "race", DeadlockError: "deadlock", ProtocolError: "misuse"}


@dataclass(frozen=True)
class Trial:
    """What a seed stands for. Every third one takes PCT, with runs taken to have anything from 30 to 30,000 steps.
    `ways`: those of the case."""

    seed: int
    ranks: int
    ways: tuple[str, ...] = ()

    @property
    def order(self) -> str:
        """random or priorities."""
        return "priorities" if self.seed % 3 == 2 else "random"

    @property
    def _all(self) -> list[tuple[str, str, Callable[[int], list[tuple]]]]:
        """Every scenario: its name, the way it runs the case, whom it holds up."""
        own = [(name, way, held) for name, (way, held) in _WAYS.items() if way in self.ways]
        return [(name, "", held) for name, held in SCENARIOS.items()] + own

    @property
    def scenarios(self) -> list[str]:
        """The names of all scenarios, which seeds take in turn."""
        return [name for name, *_ in self._all]

    @property
    def rank(self) -> int:
        """The rank that the scenario is about."""
        return self.seed // len(self._all) % self.ranks

    @property
    def scenario(self) -> str:
        """What is done to the fabric."""
        return self._all[self.seed % len(self._all)][0].format(self.rank)

    @property
    def way(self) -> str:
        """How the case is run; "": as it is written."""
        return self._all[self.seed % len(self._all)][1]

    @property
    def held(self) -> list[tuple]:
        """The agents that run when nobody else can, as a World takes them."""
        return self._all[self.seed % len(self._all)][2](self.rank)

    def strategy(self, index: int) -> Strategy:
        """The order of the index-th world."""
        seed = self.seed + index * 1_000_003
        if self.order == "random":
            return RandomOrder(seed)
        return PriorityOrder(seed, depth=2 + self.seed % 4, steps=(30, 300, 3_000, 30_000)[self.seed // 3 % 4])


@dataclass
class Finding:
    """What a schedule showed. kind: race, deadlock, misuse, wrong result, or error (of the case's own code); text: what
    the emulator or the assertion said; told: its parts (see emulator/explain.py); turns, draws: the shortened schedule
    of the world that failed; was: how many turns it had; steps: the last places of those concerned, oldest first."""

    kind: str
    text: str
    told: dict[str, Any] = field(default_factory=dict)
    turns: Turns | None = None
    draws: list[int] = field(default_factory=list)
    was: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)


Watch = Callable[[int], None]  # is told of the steps so far


@dataclass
class Outcome:
    """What became of one schedule. cut: the time was up before its end, and this is what it had come to; stuck: the
    line that did not come back to the emulator then, if there is one."""

    seed: int
    order: str
    scenario: str
    variant: str
    steps: int
    coverage: dict[str, Any]
    finding: Finding | None = None
    cut: bool = False
    stuck: str = ""


def run_trial(
    case: Case, seed: int, max_steps: int | None = None, watch: Watch | None = None, end: float | None = None
) -> Outcome:
    """Run a case once, in the order that the seed stands for. A world that takes more than `max_steps` steps is taken
    to have no end, which is reported as a deadlock. `watch` is called every few hundred steps, and may raise
    OutOfTime; what does not take steps is ended soon after `end`, of time.monotonic()."""
    trial = Trial(seed, case.ranks, case.ways)
    choice = Choice(lambda _, index: trial.strategy(index), trial.held, max_steps, watch)
    return _outcome(case, seed, choice, (trial.order, trial.scenario), trial.way, end)


def run_orders(
    case: Case, seed: int, search: Exploration, watch: Watch | None = None, end: float | None = None
) -> Iterator[Outcome]:
    """Run a case, in the variant that is the seed's turn, in every order that differs; `search` says how many at most.
    Orders that turn out to have been run come to nothing. `watch` and `end` as in `run_trial`."""
    for order in search:
        choice = Choice(lambda _, index, order=order: order, watch=watch)  # type: ignore[misc]
        outcome = _outcome(case, seed, choice, ("every one", "calm"), "", end)
        if not order.redundant:
            yield outcome


def _outcome(case: Case, seed: int, choice: Choice, schedule: tuple[str, str], way: str, end: float | None) -> Outcome:
    finding, cut, stuck = None, False, ""
    try:
        with in_time(end, _run.__code__):
            finding = _run(case, seed, choice, way)
    except OutOfTime as over:
        cut, stuck = True, over.stuck
    coverage = Coverage.of(choice.worlds).told()
    return Outcome(seed, *schedule, case.variant(seed), choice.steps, coverage, finding, cut, stuck)


def _run(case: Case, seed: int, choice: Choice, way: str = "") -> Finding | None:
    with choosing(choice):
        try:
            case.run(seed, way)
            return None
        except EmulatorError as error:
            kind = next(kind for type_, kind in _KINDS.items() if isinstance(error, type_))
            return Finding(kind, RuntimeError.__str__(error), error.told)
        except AssertionError as error:
            text = str(error) or "".join(traceback.format_tb(error.__traceback__)[-1:]).strip()
            return Finding("wrong result", text)
        except WorkspaceExceeded:  # the user's own bound, in any schedule
            raise
        except (Exception, SystemExit) as error:  # of the case's own code: a schedule is no excuse for it
            return Finding("error", "".join(traceback.format_exception(error)[-3:]).strip())


def shortened(case: Case, seed: int, *, tries: int = 60, seconds: float = 20.0) -> Finding:
    """The finding of a seed again, in the shortest schedule that can be found in so many tries or seconds."""
    trial = Trial(seed, case.ranks, case.ways)
    recorded: list[Recorded] = []

    def record(_: int, index: int) -> Strategy:
        recorded.append(Recorded(trial.strategy(index)))
        return recorded[-1]

    finding = _run(case, seed, Choice(record, trial.held), trial.way)
    if finding is not None and not recorded:  # it does not take a world to show
        return finding
    if finding is None:
        raise RuntimeError(f"seed {seed} found something once, and now does not: the case itself depends on chance")
    last, first = len(recorded) - 1, finding

    def again(strategy: Strategy) -> Finding | None:
        choice = Choice(lambda _, index: strategy if index == last else trial.strategy(index), trial.held)
        return _run(case, seed, choice, trial.way)

    def fails(replay: Replay) -> bool:
        found = again(replay)
        return found is not None and found.kind == first.kind

    short = shrink(fails, recorded[last].turns, recorded[last].draws, tries=tries, seconds=seconds)
    return _retold(again, short, finding)


def _retold(again: Callable[[Strategy], Finding | None], short: Shrunk, finding: Finding) -> Finding:
    """The finding as the shortened schedule shows it, with what those concerned did before."""
    recorded = Recorded(Replay(short.turns, short.draws))
    found = again(recorded) or finding
    found.turns, found.draws, found.was = short.turns, short.draws, short.was
    agents = [side["agent"] for side in found.told.get("sides", ())]
    found.steps = _last_places(recorded.steps, agents)
    return found


def _last_places(steps: Iterable[tuple[str, Any]], agents: list[str], each: int = 5) -> list[dict[str, Any]]:
    """The last places in a kernel at which these agents went on, a line of the kernel once in a row, oldest first."""
    from tileweave.emulator.explain import told_of

    kept: list[dict[str, Any]] = []
    left = dict.fromkeys(agents, each)
    for name, place in reversed(list(steps)):
        agent = name.partition("@")[0]
        if place is None or not left.get(agent):
            continue
        told = told_of(place)
        same = next((other for other in reversed(kept) if other["agent"] == agent), None)
        if same and (same["line"], same["file"]) == (told["line"], told["file"]):
            continue
        kept.append({**told, "is_operation": "@" in name})
        left[agent] -= 1
    return kept[::-1]
