"""What docs/planner.md answers, beside what the model says, and what was measured beside the plain way."""

import json
import statistics
from dataclasses import replace

import pytest

from tileweave.bench import planner_page
from tileweave.bench.predictions import FIGURES
from tileweave.planner import profile
from tileweave.planner.cost import collective_us

RACK = profile("gb200-nvl72")


def test_on_a_b200_intra_sm_leads_reduce_scatter_and_the_fabric_all_reduce():
    """As on the others: what each rank's tiles cross once, or twice, decides."""
    for rates in planner_page.by_gpu("matmul_reduce_scatter").values():
        assert max(rates, key=lambda way: rates[way]) == "tma intra_sm"
    for rates in planner_page.by_gpu("matmul_all_reduce").values():
        assert max(rates, key=lambda way: rates[way]) == "multimem inter_sm"


@pytest.mark.parametrize("op", planner_page.LAYER)
def test_a_product_that_hides_its_transfer_on_few_gpus_is_bound_by_the_link_from_32_on(op):
    found = planner_page.by_ranks(op)
    few = {"matmul_all_reduce": 4}.get(op, 8)  # of which the sums come twice
    assert found[few][0] < 1.2 * found[few][2]
    for ranks in (32, 64, 72):
        taken, plain, alone = found[ranks]
        assert taken > 2 * alone and taken > 0.9 * found[32][0] and plain > taken
    lead = {ranks: plain / taken for ranks, (taken, plain, _) in found.items()}
    largest = {"matmul_all_reduce": 32}.get(op, 16)
    behind = [lead[ranks] for ranks in planner_page.RANKS if ranks >= largest]
    assert max(lead.values()) == lead[largest] and behind == sorted(behind, reverse=True)


def test_at_72_ranks_an_all_reduce_has_no_kernel_of_two_shots():
    sizes = dict.fromkeys("mnk", planner_page.RACK)
    ways = planner_page.ways(planner_page.plan("matmul_all_reduce", sizes, gpu="gb200-nvl72", ranks=72))
    assert ways.keys() == {"tma none", "tma one_shot", "nccl none"} and min(ways, key=ways.get) == "tma none"


def test_beyond_the_rack_what_the_network_carries_comes_on_top():
    """Two levels: all GPUs of a rack send their share at once."""
    sent, two = 1e9, 2 * RACK.ranks
    within, beyond = (collective_us("all_gather", ranks, sent, RACK) for ranks in (RACK.ranks, two))
    assert beyond > within
    slow = replace(RACK, network_gb_per_s=1.0)
    assert collective_us("all_gather", RACK.ranks, sent, slow) == within
    assert collective_us("all_gather", two, sent, slow) == pytest.approx(sent / RACK.ranks / 1e3 + RACK.sync_us)


@pytest.mark.parametrize("op", planner_page.LAYER)
@pytest.mark.parametrize("ranks", [2, 8])
def test_of_these_layers_none_is_predicted_to_lose_by_more_than_the_model_can_tell(op, ranks):
    lead = planner_page.by_rows(op, ranks)
    assert min(lead.values()) > 0.95
    assert [rows for rows, each in lead.items() if each < 1] == (
        [64] if (op, ranks) == ("all_gather_matmul", 2) else []
    )


@pytest.mark.parametrize("file, fewest", [("between_2xH200", 37), ("collectives_2xH200", 56)])
def test_no_call_was_measured_to_be_more_than_three_percent_slower_than_the_plain_way(file, fewest):
    """Nor in the median at all."""
    rows = [row["us"] for row in json.loads((FIGURES / f"{file}.json").read_text())["rows"]]
    slower = [us["tileweave"][0] / us["nccl"][0] - 1 for us in rows]
    assert len(slower) == fewest and statistics.median(slower) < 0 and max(slower) <= 0.03
