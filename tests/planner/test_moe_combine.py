"""The way back of experts: a row for each choice or sums, what each is predicted to take, and which is chosen."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tileweave import plan
from tileweave.ops.contract import Like, Site
from tileweave.ops.moe.check import choose_combine, combine_problem_of
from tileweave.ops.moe.combine_kernel import CHUNKS
from tileweave.planner import H200, Plan, moe_combine
from tileweave.planner.cost import push_rate
from tileweave.planner.moe_combine import MARGIN, Problem, candidates, cost_of, summing, unsupported
from tileweave.planner.tiling import tiling_of

THIN = Problem(8, 32, 7168, 128, 4096, 16, 132)  # experts of few columns, of which a token has many
SUMS = Plan("register", "inter_sm", (128, 128, 64), 6, comm_sms=66)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Communicators that sum as fast as other sums are made, with which sums are worth it somewhere."""
    monkeypatch.setattr(moe_combine, "SUM_GBS", 13.0)
    summing.cache_clear()
    yield
    summing.cache_clear()


def test_an_h200_sends_rows(monkeypatch):
    """As fast as its communicators are, sums are not worth it even where they save most."""
    monkeypatch.undo()
    summing.cache_clear()
    assert moe_combine.SUM_GBS < 13 and summing(THIN) is None


def best(problem, schedule):
    return candidates(problem, schedule)[0]


def cost(problem, chosen):
    return cost_of(problem, chosen, tiling_of(chosen.tile, chosen.stages))


@pytest.mark.parametrize("world, topk", [(2, 1), (3, 2), (2, 5), (4, 3)])
def test_sums_are_as_many_as_ranks_with_rows_of_a_token(world, topk):
    """On average over all choices."""
    every = [len(set(ranks)) for ranks in product(range(world), repeat=topk)]
    assert Problem(world, 1, 8, 8, 10, topk, 4).sums == pytest.approx(10 * sum(every) / len(every))


def test_device_code_has_as_many_chunks():
    assert CHUNKS.value == moe_combine.CHUNKS


@pytest.mark.parametrize("sms", [1, 2, 3, 33, 132])
@pytest.mark.parametrize("core", ["wgmma", "tcgen05"])
def test_all_candidates_can_run(sms, core):
    problem = replace(THIN, sms=sms, cores=(core,))
    found = [plan for schedule in moe_combine.SCHEDULES for _, plan in candidates(problem, schedule)]
    assert found and not any(unsupported(problem, plan) for plan in found)
    assert {plan.schedule for plan in found} == set(moe_combine.SCHEDULES[: 1 + (sms > 1)])


def test_what_crosses_the_link_is_a_row_for_each_choice_or_rank(monkeypatch):
    """Where communicators read as fast as one likes."""
    row, away = 2 * THIN.n, 7 / 8
    by_row = cost(THIN, Plan("register", "intra_sm", (128, 128, 64), 6))
    rate = push_rate("register", 132, H200)
    assert by_row.communicate_us - H200.launch_us == pytest.approx(4096 * 16 * away * row / rate)
    slow = cost(THIN, SUMS)
    monkeypatch.setattr(moe_combine, "SM_FETCH_GBS", 1e6)
    monkeypatch.setattr(moe_combine, "SUM_GBS", 1e6)
    by_sums = cost(THIN, SUMS)
    assert by_sums.communicate_us - H200.launch_us == pytest.approx(THIN.sums * away * row / rate)
    assert by_sums.communicate_us < by_row.communicate_us / 2 and slow.communicate_us > by_sums.communicate_us


def test_communicators_take_sms_and_what_they_read_takes_time():
    few, many = (replace(SUMS, comm_sms=sms) for sms in (16, 66))
    assert cost(THIN, few).compute_us < cost(THIN, many).compute_us
    moved = (THIN.rows + THIN.sums) * 2 * THIN.n
    assert cost(THIN, few).communicate_us - H200.launch_us == pytest.approx(moved / (16 * 13.0e3))


def test_nothing_hides_the_last_chunk_of_a_long_transfer_or_the_first_of_a_long_product(monkeypatch):
    """Of four; a product so narrow that it has one tile of columns has one chunk."""
    behind = (THIN.sums + THIN.tokens) * 2 * THIN.n / (13.0e3 * 132)
    of = cost(THIN, SUMS)
    assert of.communicate_us > of.compute_us
    assert of.exposed_us - H200.launch_us - behind == pytest.approx(of.compute_us / 4)
    narrow = replace(THIN, n=128)
    of, behind = cost(narrow, SUMS), behind * 128 / 7168
    assert of.exposed_us - H200.launch_us - behind == pytest.approx(
        min(of.compute_us, of.communicate_us - H200.launch_us)
    )


@pytest.mark.parametrize(
    "change, taken",
    [
        ({}, True),
        (dict(k=2048), False),  # the product hides the link
        (dict(linked=False), False),
        (dict(topk=7), False),  # fewer choices than ranks: slots for sums may be more than for rows
        (dict(sms=1), False),
        (dict(topk=8, k=512), False),  # 3% faster
    ],
)
def test_sums_are_chosen_only_where_they_are_predicted_to_be_clearly_faster(change, taken):
    problem = replace(THIN, **change)
    found = summing(problem)
    assert (found is not None) == taken
    if taken:
        assert MARGIN * best(problem, "inter_sm")[0] < best(problem, "intra_sm")[0]
        assert "14.1" not in found.reason and "16 rows are on 7.1 ranks" in found.reason


def test_a_gain_below_the_margin_is_not_taken(monkeypatch):
    close = replace(THIN, topk=8, k=512)
    assert 1 < best(close, "intra_sm")[0] / best(close, "inter_sm")[0] < MARGIN
    summing.cache_clear()
    monkeypatch.setattr(moe_combine, "MARGIN", 1.0)
    try:
        assert summing(close) is not None
    finally:
        summing.cache_clear()


@pytest.mark.parametrize("inner, schedule", [(128, "inter_sm"), (2048, "intra_sm")])
def test_all_ranks_go_one_way_whatever_they_have_of_rows_and_experts(inner, schedule):
    site, chosen = Site("processes", 8, 132, torch.device("cuda"), None, "it is off", linked=True, nccl=True), []
    for own, rows in ((32, 0), (31, 65536), (32, 9_999_999)):  # of 255 experts
        w = Like(torch.Size((own, inner, 7168)), torch.bfloat16, site.device)
        problem = combine_problem_of(site, w, 255, 4096 * 16, 16)
        chosen.append(choose_combine(site, rows, w, problem, None).plan)
    assert {plan.schedule for plan in chosen} == {schedule}


def test_plan_shows_both_ways_with_reasons():
    shape = {"tokens": 32768, "topk": 16, "inner": 128}
    decision = plan("moe_matmul_combine", shape, gpu="h200", ranks=8)
    others = [decision.runner_up, *decision.rejected]
    assert decision.plan.schedule == "inter_sm" and "the sum of its own" in decision.plan.reason
    by_row = [each for each in others if each.schedule == "intra_sm"]
    assert len(by_row) == 1 and by_row[0].predicted_us > MARGIN * decision.plan.predicted_us
    thick = plan("moe_matmul_combine", {**shape, "inner": 2048}, gpu="h200", ranks=8)
    (sums,) = [each for each in (thick.runner_up, *thick.rejected) if each.schedule == "inter_sm"]
    assert thick.plan.schedule == "intra_sm" and sums.predicted_us > thick.plan.predicted_us
    assert f"{sums.comm_sms} of 132 SMs communicate" in sums.reason
    assert decision.workspace_bytes < thick.workspace_bytes
