"""The stress driver: a minute of it, and that it sees what goes wrong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tileweave.checker import stress
from tileweave.checker.draw import Call
from tileweave.checker.problems import PROBLEMS
from tileweave.fabric import World

SECONDS = 60  # of a core, in each run of the suite


def test_a_minute_of_random_calls_in_the_emulator(tmp_path):
    path = tmp_path / "stress.json"
    assert stress.main(["--seconds", str(SECONDS), "--json", str(path)]) == 0
    told = json.loads(path.read_text())
    assert told["wrong"] == told["untold"] == [] and told["hangs"] == 0
    assert told["calls"] == sum(told["by_op"].values()) == sum(told["by_ranks"].values()) > told["rounds"] > 0


def test_processes_make_rounds_at_once_and_one_that_ends_without_a_word_is_a_finding(monkeypatch):
    monkeypatch.setattr(stress, "run", run_or_die)
    tally = stress.run_together("emulated", 0, 7, 2)
    assert tally.rounds == 1 and tally.calls == sum(tally.by_op.values()) == len(tally.distinct) >= 1
    assert tally.wrong == [f"the process of the seeds from {7 + stress.SEEDS} on has ended without a word"]
    assert not tally.ok


def run_or_die(world, seconds, seed, report, run=stress.run):
    """A `run` in which only the first process lives."""
    if seed == 7:
        run(world, seconds, seed, report)


def test_what_processes_have_come_to_is_added():
    one, other = (stress.Tally("emulated", "CPU", seed, calls=3 + seed, hangs=seed) for seed in (0, 1))
    one.by_op["all_gather"], other.by_op["all_gather"], other.by_op["all_reduce"] = 2, 3, 1
    other.seconds, other.wrong = 2.0, ["seed 1: no"]
    one.add(other)
    assert (one.calls, one.hangs, one.seconds, one.wrong, one.seed) == (7, 1, 2.0, ["seed 1: no"], 0)
    assert one.by_op == {"all_gather": 5, "all_reduce": 1}


@pytest.mark.gpu
def test_half_a_minute_on_virtual_ranks(tmp_path):
    path = tmp_path / "stress.json"
    command = ["--seconds", "30", "--world", "virtual", "--processes", "4", "--json", str(path)]
    assert stress.main(command) == 0
    told = json.loads(path.read_text())
    assert told["calls"] == sum(told["by_op"].values()) >= 10 * told["rounds"] > 0


def test_a_seed_is_a_round():
    def drawn():
        return [Call.drawn(ranks, kind, 0, 4, unicast=False) for ranks in range(1, 9) for kind in range(100)]

    assert drawn() == drawn()
    assert {call.op for call in drawn()} == set(PROBLEMS) and len(set(drawn())) > 700
    unicast = [Call.drawn(ranks, kind, 0, 24, unicast=True) for ranks in range(1, 9) for kind in range(100)]
    assert not [call for call in unicast if "multimem" in call.variant]
    assert [call for call in drawn() if "multimem" in call.variant and not call.planned]


def seeds(found, op):
    """The first seed whose round has a call of `op`, and those after it that have none."""
    tried = [(seed, op in [call.op for call in calls]) for seed, calls in ((s, rounds(s)) for s in range(60))]
    return next(seed for seed, has in tried if has == found)


def rounds(seed):
    """The calls of a round in the emulator."""
    made = []

    class Noted(stress.Stress):
        def _world(self, ranks, seed, late):
            raise StopIteration

        def _draw(self, rng, ranks):
            made.append(super()._draw(rng, ranks)[0])
            return made[-1], 0

    with pytest.raises(StopIteration):
        Noted("emulated", 0).round(seed)
    return made


@pytest.mark.parametrize("how", ["value", "nan", "shape", "raises"])
def test_what_is_wrong_is_told_with_the_seed_that_shows_it_again(how, monkeypatch, capsys):
    op = PROBLEMS["all_to_all"]

    def wrong(x, group, **options):
        (out,) = op.call(x, group, **options)
        if group.rank == 0 and how == "raises":
            raise ValueError("no such thing")
        if group.rank == 0:
            out = out[:-1] if how == "shape" else out + (1.0 if how == "value" else float("nan"))
        return (out,)

    monkeypatch.setitem(PROBLEMS, "all_to_all", replace(op, call=wrong))
    seed = seeds(True, "all_to_all")
    for _ in range(2):
        assert stress.main(["--seconds", "0", "--seed", str(seed)]) == 1
        (told,) = json.loads(capsys.readouterr().out)["wrong"][:1]
        assert told.startswith(f"seed {seed}: ") and "all_to_all m=" in told
        assert ("no such thing" if how == "raises" else "on rank 0") in told
    assert stress.main(["--seconds", "0", "--seed", str(seeds(False, "all_to_all"))]) == 0


@pytest.mark.parametrize("fault", stress.FAULTS)
def test_a_fault_that_nobody_is_told_of_is_a_finding(fault, monkeypatch):
    driver = stress.Stress("emulated", 0)
    with driver._world(3, 0, None) as world:
        driver._fault(0, world, fault, 1)
        assert driver.tally.ok and driver.tally.faults == {fault: 1}
        monkeypatch.setattr(World, "run", lambda self, fn: [])
        driver._fault(5, world, fault, 1)
    assert driver.tally.untold == [f"seed 5: {fault}, rank 1 of 3"] and not driver.tally.ok


def test_a_round_that_hangs_is_written_down_and_ends_the_process(tmp_path, monkeypatch):
    path, ended = tmp_path / "stress.json", []
    monkeypatch.setattr(stress, "HANG_SECONDS", 0.05)
    monkeypatch.setattr(stress.os, "_exit", ended.append)
    monkeypatch.setattr(stress.faulthandler, "dump_traceback", lambda **_: None)
    monkeypatch.setattr(stress.Stress, "round", lambda self, seed: stress.time.sleep(0.5) or self._counted())
    monkeypatch.setattr(stress.Stress, "_counted", lambda self: setattr(self.tally, "rounds", 1), raising=False)
    assert stress.main(["--seconds", "0", "--seed", "7", "--json", str(path)]) == 1
    assert ended == [1] and json.loads(path.read_text())["hangs"] == 1
    assert json.loads(path.read_text())["wrong"] == ["seed 7: the round has not ended in 0.05 s"]


def test_errors_are_relative_and_the_worst_counts():
    truths = torch.full((4,), 2.0), torch.zeros(3)
    assert stress._error((truths[0] * 1.5, truths[1]), truths) == 0.5
    assert stress._error((truths[0], truths[1] + 1), truths) == 3**0.5
    assert stress._error((truths[0], torch.zeros(2)), truths) == float("inf")


@pytest.mark.parametrize("world", ["emulated", "virtual"])
def test_the_page_says_what_the_driver_wrote(world):
    docs = Path(__file__).parents[2] / "docs"
    told = json.loads((docs / f"figures/stress_{world}.json").read_text())
    cells = [f"{world}, {told['device']}", round(told["seconds"]), told["rounds"], f"{told['calls']:,}"]
    cells += [sum(told["faults"].values()), len(told["untold"]), len(told["wrong"]), told["hangs"]]
    assert f"| {' | '.join(map(str, cells))} |\n" in (docs / "reliability.md").read_text()
