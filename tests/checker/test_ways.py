"""Scenarios that run an op's calls another way: a graph replayed, another op's calls between them, another group."""

from dataclasses import replace

from tileweave.checker import SCENARIOS, CallableCase, OpCase, catalogue, check
from tileweave.checker.mutants import mutants
from tileweave.checker.problems import PROBLEMS
from tileweave.checker.trial import GROUPS, REPLAY, STREAMS, Trial, run_trial
from tileweave.fabric.emulated import EmulatedWorld
from tileweave.fabric.workspace import Workspace

SMALL = OpCase("all_gather", 2, {"m": 32, "n": 16})


def test_seeds_of_ops_go_through_more_scenarios_than_those_of_functions():
    of_ops, of_all = ({Trial(seed, 2, ways).scenario for seed in range(100)} for ways in (SMALL.ways, ()))
    assert of_ops - of_all == {
        "graph replay", "two streams", *(f"graph replay, rank {rank} is slow" for rank in range(2)),
        *(f"two streams, rank {rank} starts late" for rank in range(2)),
        "two groups", *(f"two groups, rank {rank} starts late" for rank in range(2)),
    }  # fmt: skip
    assert not CallableCase(print).ways
    orders = {(Trial(seed, 2, SMALL.ways).order, Trial(seed, 2, SMALL.ways).way) for seed in range(100)}
    assert len(orders) == 8


def test_a_report_counts_them():
    report = check(SMALL, range(len(SCENARIOS) + 6), processes=1)
    assert report.ok and {"graph replay", "two streams", "two groups, a rank starts late"} <= set(report.scenarios)


def kinds(case, way):
    """The kinds of what some schedules found, the case run this way; None: nothing."""
    trials = [trial for trial in (Trial(seed, case.ranks, case.ways) for seed in range(60)) if trial.way == way]
    findings = [run_trial(case, trial.seed).finding for trial in trials[:4]]
    return {finding.kind if finding else None for finding in findings}


def test_a_copy_of_an_operand_that_is_kept_by_its_address_is_stale_in_a_replay(monkeypatch):
    real, kept = PROBLEMS["all_gather"], {}

    def call(x, group, **options):
        copy = kept.setdefault(x[0].data_ptr(), (x[0], x[0].clone()))[1]
        return real.call((copy,), group, **options)

    monkeypatch.setitem(PROBLEMS, "all_gather", replace(real, call=call))
    assert kinds(SMALL, "") == {None}
    assert kinds(SMALL, REPLAY) == {"wrong result"}


def test_ops_that_share_flags_are_found_where_they_take_turns(monkeypatch):
    variants = OpCase("matmul_reduce_scatter").all_variants
    case = OpCase("matmul_reduce_scatter", 2, {"m": 64, "n": 64, "k": 128}, variants={"": variants["intra_sm"]})
    for name in ("find", "grow"):
        real = getattr(Workspace, name)
        monkeypatch.setattr(Workspace, name, lambda self, op, *rest, real=real: real(self, "all", *rest))
    assert kinds(case, "") == {None}
    assert kinds(case, STREAMS) - {None}


def test_groups_that_share_flags_are_found_where_they_take_turns(monkeypatch):
    real = EmulatedWorld.part

    def part(self, ranks):
        made = real(self, ranks)
        made.workspace = self.workspace
        return made

    assert kinds(SMALL, GROUPS) == {None}
    monkeypatch.setattr(EmulatedWorld, "part", part)
    assert kinds(SMALL, GROUPS) - {None}


def test_operands_are_made_by_the_stream_so_a_kernel_must_wait_before_it_reads_them():
    """attention_kernel has no state of its own: what it must wait for is what it is given."""
    reached = catalogue.reached("attention", 1)
    (mutant,) = [m for m in mutants(reached) if "grid_dependency_wait" in m.source and m.operator == "drop"]
    assert "race on global memory" in catalogue.judge("attention", mutant, [0], 1)["said"]
