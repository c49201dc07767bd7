"""Predictions and choices beside every measured median of the fused matmuls in docs/figures."""

import json
import statistics
from pathlib import Path

import pytest
import torch

from tileweave.bench import fit_between, nccl_curves, planner_page
from tileweave.bench.predictions import FIGURES, FILES, PLANNERS, points, problem_of, summary, whole_problem
from tileweave.ops.all_gather_matmul.check import settle
from tileweave.ops.contract import Like, Site
from tileweave.planner import H200
from tileweave.planner.plan import AGREED
from tileweave.planner.tiling import tiling_of
from tileweave.planner.timeline import timeline

POINTS = points()
CHOICES = fit_between.choices(POINTS)


def test_predictions_are_within_five_percent_in_the_median():
    """10% was asked for. Between two GPUs the worst is that of a schedule that is never taken."""
    assert len(POINTS) == 225
    assert statistics.median(abs(each.error) for each in POINTS) < 0.05
    linked = [each for each in POINTS if each.file in FILES[:2]]
    assert all(abs(each.error) < 0.24 for each in linked), summary(linked)
    chosen = [each for each in POINTS if each.file == FILES[0]]
    assert statistics.median(abs(each.error) for each in chosen) < 0.035
    assert all(abs(each.error) < 0.12 for each in chosen), summary(chosen)


def test_the_simulation_comes_to_what_was_measured_of_chosen_plans():
    """It knows nothing of the last wave's tail but the order of tiles and messages."""
    errors = []
    for each in POINTS:
        if each.file == FILES[0] and each.plan and each.plan.schedule in ("intra_sm", "inter_sm"):
            sizes = dict(zip("mnk", map(int, each.shape.split(" x ")), strict=True))
            cost = PLANNERS[each.op].cost_of(each.problem, each.plan, tiling_of(each.plan.tile, each.plan.stages))
            simulated, events = timeline(each.op, each.world, sizes, each.plan, cost, H200.sms, H200)
            assert events[-1].end_us <= simulated
            errors.append(abs(simulated / each.measured_us - 1))
    assert len(errors) >= 25 and statistics.median(errors) < 0.05 and max(errors) < 0.21


def test_plans_that_were_measured_between_gpus_stay_as_they_were():
    """Tile, stages, sharing and communicators too: another plan needs a measurement that says so."""
    kept = json.loads((Path(__file__).parent / "plans_2xH200.json").read_text())
    assert len(kept) == 37
    for op, sizes, *plan in kept:
        _, found = PLANNERS[op].candidates(whole_problem(op, *sizes, 2))[0]
        now = [
            found.mechanism, found.schedule, list(found.tile), found.stages, found.split, found.comm_sms
        ]  # fmt: skip
        assert now == plan, (op, sizes)


@pytest.mark.parametrize("name", fit_between.CONSTANTS)
def test_the_constants_are_what_the_committed_fit_gives(name, monkeypatch):
    """No step of a tenth brings predictions nearer by more than the fit's own end, and leaves the plans."""
    monkeypatch.setattr(fit_between.CONSTANTS[name], name, fit_between.value(name))
    before = fit_between.loss(POINTS)
    after = fit_between.improve(name, POINTS, CHOICES, steps=(0.9, 1.1))
    assert after > (1 - 2 * fit_between.ENOUGH) * before, fit_between.value(name)


def test_what_nccl_takes_in_the_profiles_is_what_was_measured_of_it_alone():
    """The points of the committed figures; two runs of different programs agree where both have a size."""
    for name in nccl_curves.hardware.SHIPPED:
        profile = json.loads((nccl_curves.PROFILES / f"{name}.json").read_text())
        assert nccl_curves.filled(profile) == profile, "python -m tileweave.bench.nccl_curves"
    for kind in ("all_gather", "reduce_scatter"):
        rates = [
            {each["total_bytes"]: each["gb_per_s"] for each in of(kind)}
            for of in (nccl_curves.alone, nccl_curves.probed)
        ]
        assert rates[0][8 << 20] == pytest.approx(rates[1][8 << 20], rel=0.02)


@pytest.mark.parametrize(
    "op, size, mechanism, schedule",
    [
        ("matmul_reduce_scatter", 4096, "tma", "intra_sm"),
        ("all_gather_matmul", 4096, "copy_engine", "inter_sm"),
        ("all_gather_matmul", 8192, "copy_engine", "inter_sm"),
        ("matmul_all_reduce", 4096, "tma", "one_shot"),
    ],
)
def test_the_choice_is_what_was_measured_best_of_all_ways(op, size, mechanism, schedule):
    """Or within 2% of it: inter-SM by 16 SMs is 1% faster for the reduce-scatter."""
    _, plan = PLANNERS[op].candidates(whole_problem(op, size, size, size, 2))[0]
    assert (plan.mechanism, plan.schedule) == (mechanism, schedule)
    every = {each.way: each.measured_us for each in POINTS if each.op == op and each.shape == f"{size}^3"}
    ours = min(us for way, us in every.items() if way.startswith(f"{mechanism} {schedule} "))
    assert ours <= 1.02 * min(every.values())


def test_measured_order_of_the_plain_way_and_the_fused_one_is_predicted():
    """But for what is within 10%, between two GPUs."""
    pairs = {}
    for each in POINTS:
        if each.file == FILES[0]:
            pairs.setdefault((each.op, each.shape), {})[each.chosen] = each
    apart = [pair for pair in pairs.values() if abs(pair[False].measured_us / pair[True].measured_us - 1) > 0.10]
    assert len(apart) >= 15
    for pair in apart:
        measured = pair[False].measured_us > pair[True].measured_us
        assert (pair[False].predicted_us > pair[True].predicted_us) == measured, pair


def test_the_page_shows_these_predictions():
    text = planner_page.PAGE.read_text()
    assert planner_page.filled(text, POINTS) == text, "python -m tileweave.bench.planner_page"


def test_the_op_takes_the_plain_way_where_it_is_predicted_faster_and_nccl_is_there():
    """Of what all ranks share nothing else decides; a plan of the caller's is kept."""

    def route(rows, nccl=True, plan=None):
        site = Site("processes", 2, 132, torch.device("cuda"), None, "it is off", linked=True, nccl=nccl)
        k, columns = (28672, 256) if rows == 64 else (8192, 14336)  # of which few tiles come: few SMs would multiply
        a, b = (Like(torch.Size(shape), torch.bfloat16, site.device) for shape in ((rows // 2, k), (k, columns)))
        return settle(site, a, (b,), (), False, plan, 0)[1]

    assert route(64).verdict == "plain" and route(64).predicted_us > 0
    assert not route(64).fused and route(64).backend == "processes" and "NCCL" in route(64).reason
    assert route(64, nccl=False).fused and route(2048).fused
    assert route(64, plan=route(64, nccl=False).plan).fused


def agreed(plan):
    """What of a plan is the same on all ranks, of plain values."""
    return tuple(str(plan[name]) for name in AGREED)


def test_choices_for_ranks_that_share_a_gpu_are_near_the_best_of_a_sweep():
    """Of what was measured there: all plans that were predicted to be near the choice."""
    rows = json.loads((FIGURES / "sweep_virtual_1xH200.json").read_text())["rows"]
    apart, errors = [], []
    for row in rows:
        op, m, n, k, world = (row[name] for name in ("op", "m", "n", "k", "ranks"))
        shape = (m, n // world, k) if op == "all_gather_matmul" else (m, n, k // world)
        problem = problem_of(op, *shape, world, linked=False, sms=H200.sms // world)
        took = {agreed(each): each["measured_us"] for each in row["plans"]}
        planner = PLANNERS[op]
        apart.append(took[agreed(planner.plan_for(problem).to_dict())] / min(took.values()) - 1)
        every = planner.candidates(problem) + planner.candidates(problem, tried=planner.further_ways(problem))
        predicted = {agreed(plan.to_dict()): us for us, plan in every}
        errors += [abs(predicted[each] / us - 1) for each, us in took.items() if each in predicted]
    assert len(rows) == 18 and len(errors) >= 400
    assert statistics.median(apart) <= 0.03 and max(apart) <= 0.10
    assert statistics.median(errors) <= 0.10
