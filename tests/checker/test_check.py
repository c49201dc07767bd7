"""Checks: clean ones say what they covered, findings come as a story with the order that was missing."""

import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checker import kernels
from tileweave.checker import OPS, SCENARIOS, FunctionCase, OpCase, check, explore, run_trial
from tileweave.checker.problems import PROBLEMS
from tileweave.checker.trial import Trial, shortened
from tileweave.checker.workers import each
from tileweave.cli import main

HERE = "tests.checker.kernels"


def case(name, ranks=2):
    return FunctionCase(f"{HERE}:{name}", ranks)


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_clean_and_wraps_what_it_uses(op):
    report = check(OpCase(op, 2), range(2), processes=1)
    assert report.ok, report.story
    assert report.schedules == 2 and not report.too_small


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("op", ["moe_dispatch_matmul", "moe_matmul_combine"])
def test_calls_whose_routings_differ_raise_the_same_flags(op, ranks):
    """In each variant, also where the sizes of exchanges follow from the routing."""
    case = OpCase(op, ranks)
    for name, options in case.all_variants.items():
        report = check(replace(case, variants={name: options}), [0], processes=1)
        assert report.ok and not report.too_small, (name, report.too_small, report.story)


def test_a_default_check_is_large_enough():
    case = OpCase("matmul_reduce_scatter", 4)
    assert case.sizes == {"m": 512, "n": 512, "k": 2048} and case.calls == 2
    report = check(case, range(2), processes=1)
    assert report.ok and not report.too_small and set(report.variants) == {"intra_sm", "intra_sm, deterministic"}
    assert report.flag_uses == 2 and max(ring["uses"][1] for ring in report.rings.values()) >= 5


def test_a_small_check_is_called_small():
    report = check(OpCase("matmul_reduce_scatter", 2, {"m": 32, "n": 64, "k": 64}, calls=1), range(1), processes=1)
    assert report.ok and any("never wrapped" in why for why in report.too_small)
    assert any("once only" in why for why in report.too_small)


@pytest.mark.parametrize("op", ["ring_attention", "ulysses_attention"])
@pytest.mark.parametrize("dim", [40, 128])
def test_heads_of_any_dimension_are_checked(op, dim):
    case = OpCase(op, 2, {"seq": 128, "heads": 2, "kv_heads": 2, "dim": dim}).fitted()
    report = check(case, range(len(case.all_variants)), processes=1)
    assert report.ok and not report.left_out, report.story
    assert len(report.variants) == len(case.all_variants) == len(OpCase(op, 2).all_variants)


def test_no_choice_is_dropped_however_many_there_are():
    shape = {"topk": 5, "tokens": 180, "hidden": 8, "inner": 8}
    report = check(OpCase("moe_dispatch_matmul", 2, shape).fitted(), range(1), processes=1)
    assert report.ok and list(report.variants) == ["capacity"], report.story


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 7, 12])
def test_default_sizes_are_legal(op, ranks):
    assert not OpCase(op, ranks).fitted().left_out or ranks == 12


def test_experts_that_are_left_out_are_as_many_as_choices():
    assert OpCase("moe_dispatch_matmul", 2, {"topk": 12}).fitted().sizes["experts"] == 12
    assert OpCase("moe_dispatch_matmul", 16).fitted().sizes["experts"] == 16


@pytest.mark.parametrize(
    ("given", "others"),
    [
        ({"heads": 6}, {"kv_heads": 2}), ({"kv_heads": 3}, {"heads": 9}), ({}, {"heads": 8, "kv_heads": 4}),
        ({"heads": 2, "kv_heads": 1}, {}),
    ],
)  # fmt: skip
def test_heads_that_are_left_out_go_with_those_given(given, others):
    sizes = OpCase("ring_attention", 3, given).sizes
    assert sizes.items() >= (given | others).items()


def test_variants_that_cannot_be_are_left_out_by_name():
    case = OpCase("ring_attention", 2, {"seq": 130}).fitted()
    assert list(case.all_variants) == ["contiguous, causal", "all"]
    assert set(case.left_out) == {"zigzag, causal", "zigzag, causal, two blocks"}
    assert all("even numbers would do" in why for why in case.left_out.values())


def test_calls_in_several_runs_of_a_world_count_together():
    report = check(case("a_run_each"), range(2), processes=1)
    assert report.flag_uses == 2 and not any("once only" in why for why in report.too_small)
    assert check(case("a_world_each"), range(1), processes=1).flag_uses == 1


def test_seeds_go_through_every_order_and_scenario():
    trials = [Trial(seed, 2) for seed in range(2 * len(SCENARIOS) * 3)]
    assert len({(trial.order, trial.scenario) for trial in trials}) == 2 * (2 * len(SCENARIOS) - 4)
    assert {trial.rank for trial in trials} == {0, 1}


def test_a_seed_replays():
    first, second = (run_trial(OpCase("all_gather", 2, {"m": 16, "n": 16}), 5) for _ in range(2))
    assert first == second and first.steps > 0


def test_a_race_is_told_as_a_story():
    report = check(case("told_too_early"), range(3), processes=1)
    assert not report.ok and report.finding.kind == "race"
    text = report.story
    for part in (
        "A race on global memory inbox", "CTA 0", "TMA store wrote it", "nothing orders the first",
        "store_wait for the TMA store", "gl.load_async(inbox, rank, [0, 0], tile, bar)", "no particular order",
    ):  # fmt: skip
        assert part in text, text
    json.dumps(report.to_dict())


@pytest.mark.parametrize(("name", "kind"), [("passed_on", None), ("wrong_result", "wrong result"), ("broken", "error")])
def test_what_a_function_comes_to(name, kind):
    report = check(case(name), range(4), processes=1)
    assert report.ok is (kind is None)
    assert kind is None or (report.finding.kind == kind and report.schedules == 1)


def test_what_few_schedules_show_is_shortened():
    report = check(case("out_of_order"), range(200), processes=1)
    assert report.finding.kind == "wrong result" and "rank 1 was first" in report.story
    assert report.finding.turns == [("1.host", 1)]
    assert shortened(case("out_of_order"), report.seed).turns == report.finding.turns


def test_processes_find_the_same():
    report = check(case("told_too_early"), range(6), processes=2)
    assert report.finding.kind == "race"


def test_time_is_kept():
    report = check(case("passed_on"), range(100_000), seconds=1.0, processes=1)
    assert report.ok and 0 < report.schedules < 100_000 and not report.too_small[0].startswith("no schedule")


@pytest.mark.parametrize("processes", [1, 2])
def test_time_ends_a_schedule_and_what_it_came_to_is_told(processes):
    told = []
    endless = case("endless")
    report = check(endless, range(9), seconds=2.0, processes=processes, progress=lambda r: told.append(r.steps))
    assert report.ok and (report.schedules, report.cut) == (0, processes)
    assert report.too_small == ["no schedule came to its end in this time"]
    assert told == sorted(told) and report.steps == told[-1] > 0 and len(set(told)) > 3
    assert explore(endless, 9, seconds=0.2).cut == 1


@pytest.mark.parametrize(
    ("name", "line", "options"),
    [
        ("stuck", " in stuck: BARRIER.wait()", ("--seconds", "0.1", "--processes", "1")),
        ("stuck", " in stuck: BARRIER.wait()", ("--seconds", "1", "--processes", "2")),
        ("stuck_in_a_rank", " in <lambda>: world.run(lambda", ("--seconds", "0.1", "--processes", "1")),
        ("spinning", " in spinning: ", ("--seconds", "0.1", "--processes", "1")),
    ],
)
def test_what_gets_stuck_outside_of_the_emulator_is_ended_and_named(name, line, options, capsys, others_released):
    code, shown = run(capsys, f"{HERE}:{name}", *options)
    assert code == 2 and "schedules 0 of 100 (seeds from 0) and " in shown.out
    assert "stuck when the time was up, at kernels.py:" in shown.out and line in shown.out


@pytest.fixture
def others_released():
    """Threads that are left behind would keep later checks from forking their workers."""
    yield
    kernels.BARRIER.abort()
    while len(threading.enumerate()) > 1:
        time.sleep(0.01)
    kernels.BARRIER.reset()


def test_time_ends_one_agent_that_nobody_else_interrupts():
    report = check(case("endless_alone"), range(9), seconds=0.1, processes=1)
    assert report.ok and report.cut == 1
    assert report.stuck == "" or "kernels.py" in report.stuck  # "": the emulator looked at the time just before
    assert explore(case("endless_alone"), 9, seconds=0.1).cut == 1


def test_after_a_schedule_that_got_stuck_others_can_be_run(others_released):
    assert check(case("stuck_in_a_rank"), range(1), seconds=0.1, processes=1).stuck
    assert check(case("passed_on"), range(2), processes=1).ok


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def test(:\n", "bad_module.py:1: SyntaxError: invalid syntax"),
        ("import nowhere_to_be_found\n", "bad_module.py:1: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("\nx = y\n", "bad_module.py:2: NameError: name 'y' is not defined"),
        ("raise SystemExit(0)\n", "bad_module.py:1: SystemExit: 0"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_module_that_cannot_be_imported_is_bad_usage(text, message, as_json, tmp_path, monkeypatch, capsys):
    (tmp_path / "bad_module.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    code, shown = run(capsys, "bad_module:test", *["--json"] * as_json)
    told = json.loads(shown.out)["error"] if as_json else shown.err
    assert code == 2 and "bad_module cannot be imported" in told and message in told and "Traceback" not in shown.err


@pytest.mark.parametrize("target", ["nothing", ":x", f"{HERE}:", f"{HERE}:absent", f"{HERE}:HERE", f"{HERE}:two"])
def test_targets_that_are_no_functions(target):
    with pytest.raises(TypeError):
        FunctionCase(target).function()


@pytest.mark.parametrize("target", ["tests/checker/kernels.py:broken", "kernels.py:broken", "./kernels:broken"])
def test_a_file_is_no_module(target):
    with pytest.raises(TypeError, match="as `import` has it, such as kernels:broken"):
        FunctionCase(target).function()


def test_a_test_that_exits_is_a_finding_and_what_it_prints_is_not_in_the_json(capsys):
    code, shown = run(capsys, f"{HERE}:gives_up", "--schedules", "1", "--processes", "1", "--json")
    finding = json.loads(shown.out)["finding"]
    assert code == 1 and finding["kind"] == "error" and "SystemExit: 0" in finding["text"]
    assert "so much for that" in shown.err


def run(capsys, *arguments):
    code = main(["check", *arguments])
    return code, capsys.readouterr()


def test_the_command(capsys):
    code, shown = run(capsys, "all_gather", "--ranks", "2", "--schedules", "2", "--processes", "1")
    assert code == 0 and "result" in shown.out and "clean" in shown.out and "each raised 2 times" in shown.out
    code, shown = run(capsys, "all_gather", "--ranks", "2", "--schedules", "1", "--processes", "1", "--json")
    assert code == 0 and json.loads(shown.out)["ok"] is True


def test_every_key_of_the_json_is_documented():
    page = (Path(__file__).parents[2] / "docs/using.md").read_text()
    table = page.partition("`tileweave check --json` has")[2].partition("`tileweave doctor`")[0]
    report = check(case("told_too_early"), range(1), processes=1).to_dict()
    missing = [key for key in [*report, *report["finding"]] if f"`{key}`" not in table]
    assert not missing, f"docs/using.md says nothing of {missing}"


def test_what_is_too_small_is_no_success(capsys):
    code, shown = run(capsys, f"{HERE}:passed_on", "--ranks", "2", "--schedules", "1", "--processes", "1")
    assert code == 2 and "too small to be a check" in shown.out and "clean" not in shown.out
    code, shown = run(capsys, "all_gather", "--ranks", "2", "--shape", "m=4,n=8", "--exhaustive")
    assert code == 0 and "clean in every order" in shown.out
    code, shown = run(capsys, f"{HERE}:endless", "--processes", "1", "--seconds", "0.1")
    assert code == 2 and "0 of 100 (seeds from 0) and 1 cut short" in shown.out


@pytest.fixture
def interruptible():
    """Where the tests run in the background, interrupts would be ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_the_workers_at_once(interruptible):
    """None of their tasks would end by itself."""
    with pytest.raises(KeyboardInterrupt), closing(each(does_not_end, [os.getpid(), 0, 0, 0], 2)) as results:
        next(results)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_an_interrupt_says_what_was_covered(processes, interruptible, capsys):
    """In text and as an object."""
    code, shown = run(capsys, f"{HERE}:interrupts", "--processes", processes)
    done = int(re.search(r"schedules (\d+) of 100 \(seeds from 0\), [\d,]+ steps", shown.out)[1])
    assert code == 130 and 0 < done < 20 and "each raised 1 times" in shown.out
    assert "nothing was found, which says little: interrupted\n" in shown.out and "Traceback" not in shown.err
    code, shown = run(capsys, f"{HERE}:interrupts", "--processes", processes, "--json")
    told = json.loads(shown.out)
    assert code == 130 and told["interrupted"] and told["ok"] and 0 < told["schedules"] < 20


def test_an_interrupt_of_every_order_says_what_was_covered(interruptible, capsys):
    code, shown = run(capsys, f"{HERE}:interrupts", "--exhaustive")
    assert code == 130 and re.search(r"schedules 2 of 100 ", shown.out) and ": interrupted\n" in shown.out


def test_an_interrupt_before_anything_was_covered(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("tileweave.checker.check", interrupted)
    code, shown = run(capsys, "all_gather", "--ranks", "2", "--json")
    assert code == 130 and json.loads(shown.out) == {"error": "interrupted", "ok": False}


def does_not_end(interrupts):
    """A task that interrupts the process of this number, if any, and does not end."""
    if interrupts:
        os.kill(interrupts, signal.SIGINT)
    time.sleep(1000)


def test_the_command_on_a_function_of_ones_own(capsys):
    code, shown = run(capsys, f"{HERE}:told_too_early", "--schedules", "1", "--processes", "1")
    assert code == 1 and "A race on global memory inbox" in shown.out and "--seed 0 --schedules 1" in shown.out
    code, shown = run(capsys, f"{HERE}:told_too_early", "--schedules", "1", "--processes", "1", "--json")
    assert code == 1 and json.loads(shown.out)["finding"]["kind"] == "race"


def test_left_out_variants_and_the_faulty_one_are_named(capsys, monkeypatch):
    sizes = ("ring_attention", "--ranks", "2", "--shape", "seq=66,heads=1", "--processes", "1")
    code, shown = run(capsys, *sizes, "--schedules", "1")
    assert "left out  zigzag, causal (ring_attention: with placement='zigzag'" in shown.out
    monkeypatch.setitem(PROBLEMS, "ring_attention", replace(PROBLEMS["ring_attention"], truth=wrong_without_a_mask))
    code, shown = run(capsys, *sizes, "--schedules", "2")
    assert code == 1 and "seed 1 (random order, rank 0 starts late, variant 'all')" in shown.out
    code, shown = run(capsys, *sizes, "--schedules", "2", "--json")
    told = json.loads(shown.out)
    assert told["variant"] == "all" and set(told["left_out"]) == {"zigzag, causal", "zigzag, causal, two blocks"}


def wrong_without_a_mask(operands, options):
    """The truth of ring_attention, twice as large without a mask."""
    results = PROBLEMS["ulysses_attention"].truth(operands, options)
    return results if options.get("causal") else [tuple(2 * x for x in each) for each in results]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ring_attention", "--shape", "dim=4"), "no kernel would run: heads have dimension 4"),
        (("moe_dispatch_matmul", "--shape", "hidden=7"), "no kernel would run: H = 7 is no multiple of 8"),
        (("moe_matmul_combine", "--shape", "inner=7"), "no kernel would run: I = 7 is no multiple of 8"),
        (("matmul_reduce_scatter", "--shape", "n=9"), "no kernel would run: N = 9 is not a multiple of 8"),
        (("all_gather", "--ranks", "1"), "no kernel would run: the world has one rank"),
        (("attention", "--shape", "seq=0"), "no kernel would run: no query has anything to attend to"),
        (("moe_dispatch_matmul", "--shape", "experts=3"), "experts must be at least one for each of 4 ranks, got 3"),
        (("moe_dispatch_matmul", "--shape", "topk=0"), "topk must be at least 1, got 0"),
        (("ring_attention", "--shape", "heads=0"), "heads must be at least 1, got 0"),
        (("ring_attention", "--shape", "dim=0"), "dim must be at least 1, got 0"),
        (("ring_attention", "--shape", "heads=-4"), "sizes from 0 to 999999, got 'heads=-4'"),
        (("ring_attention", "--shape", "heads=6,kv_heads=4"), "a multiple of those of k and v"),
        (("ulysses_attention", "--shape", "heads=2"), "heads=2 is not divisible by the 4 ranks that share it; "),
        (("ulysses_attention", "--shape", "kv_heads=3"), "have 3 heads in a world of 4: one must be a multiple"),
        (("grouped_matmul", "--shape", "experts=0"), "experts must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_checked_are_bad_usage(arguments, message, capsys):
    code, shown = run(capsys, *arguments)
    assert code == 2 and message in shown.err and shown.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("matmul",), ("all_gather", "--ranks", "0"), ("all_gather", "--shape", "k=5"), ("all_gather", "--shape", "m=x"),
        ("all_gather", "--ranks", "3", "--shape", "m=4"), ("all_gather", "--schedules", "0"),
        ("all_gather", "--seed", "-1"), ("all_gather", "--processes", "0"), (f"{HERE}:absent",),
        (f"{HERE}:passed_on", "--shape", "m=4"),
        ("no.such.module:test",), ("all_gather", "--shape", "m=4,m=4"),
    ],
)  # fmt: skip
def test_bad_usage(arguments, capsys):
    code, shown = run(capsys, *arguments)
    assert code == 2 and shown.err.startswith("tileweave: ")


def test_kernels_are_those_of_the_lesson():
    kernels.passed_on()
