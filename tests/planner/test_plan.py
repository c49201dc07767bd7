"""The planner: choices, refusals and predictions."""

import dataclasses
import json

import pytest

from tileweave.fabric.base import STATE_WORDS
from tileweave.planner import Plan, Problem, candidates, plan_for, unsupported
from tileweave.planner import all_gather_matmul as gathering
from tileweave.planner import matmul_all_reduce as reducing
from tileweave.planner import plan as scattering
from tileweave.planner.hardware import H200
from tileweave.planner.plan import blocks_of, cost_of, in_one_ring
from tileweave.planner.tiling import TILINGS, tiles_of
from tileweave.tiles.matmul import FIRST_SHARE

BIG = Problem(m=8192, n=8192, k=4096, world=4, message_bytes=2, sms=132)


def test_a_large_problem_gets_a_large_tile_and_a_small_one_a_smaller():
    big = plan_for(BIG).tile
    assert big[0] * big[1] >= 128 * 128
    small = plan_for(dataclasses.replace(BIG, m=512, n=512, k=4096)).tile
    assert small[0] * small[1] < 128 * 128


@pytest.mark.parametrize("message_bytes", [2, 4])
@pytest.mark.parametrize("m, n, k", [(8, 8, 8), (8, 8192, 8), (8192, 8, 0), (128 * 1024, 57344, 8192)])
def test_every_problem_has_a_plan_that_can_run(m, n, k, message_bytes):
    problem = dataclasses.replace(BIG, m=m, n=n, k=k, message_bytes=message_bytes)
    plan = plan_for(problem)
    assert unsupported(problem, plan) is None
    assert plan.predicted_us > 0 and plan.reason


def test_candidates_come_fastest_first_and_all_can_run():
    found = candidates(BIG)
    assert len(found) > len(TILINGS) and [cost for cost, _ in found] == sorted(cost for cost, _ in found)
    assert not any(unsupported(BIG, plan) for _, plan in found)
    assert plan_for(BIG).tile == found[0][1].tile


@pytest.mark.parametrize("faster, deeper", [(1, False), (3, True)])
def test_a_ring_is_deeper_than_the_swept_one_only_where_tensor_cores_are_so_fast(faster, deeper):
    """Of a tile whose ring can be: its steps are short."""
    hardware = dataclasses.replace(H200, matmul_tflops=faster * H200.matmul_tflops)
    small = dataclasses.replace(BIG, m=64, n=64 * 132, k=65536, world=1)
    found = [(us, plan) for us, plan in candidates(small, hardware) if plan.tile == (64, 64, 64) and plan.split == 1]
    stages = [plan.stages for _, plan in found]
    assert sorted(stages) == [9, 10, 11, 12, 13]
    assert stages == ([13, 12, 11, 10, 9] if deeper else [10, 9, 11, 12, 13])
    assert (found[0][0] < found[-1][0]) == deeper
    assert len(in_one_ring(candidates(BIG))) < len(candidates(BIG))


@pytest.mark.parametrize("scales", [4, 16])
@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce"])
def test_rings_leave_room_for_scales_of_blocks(op, scales):
    """Whatever memory there is: where only scales decide whether a stage more fits, all that is tried can run."""
    of = dict(world=4, sms=132, operand_bytes=1, cores=("tcgen05",), scales=scales)
    planner, problem = {
        "matmul_reduce_scatter": (scattering, Problem(m=8192, n=8192, k=2048, message_bytes=2, **of)),
        "all_gather_matmul": (gathering, gathering.Problem(rows=2048, ns=(2048,), k=8192, **of)),
        "matmul_all_reduce": (reducing, reducing.Problem(m=8192, n=8192, k=2048, **of)),
    }[op]
    stages = set()
    for less in range(0, 64 << 10, 1 << 10):
        hardware = dataclasses.replace(H200, shared_bytes=H200.shared_bytes - less)
        plans = [plan for _, plan in planner.candidates(problem, hardware)]
        assert not any(planner.unsupported(problem, plan, hardware) for plan in plans)
        stages |= {plan.stages for plan in plans}
    assert len(stages) > 1


def test_tiles_of_a_last_wave_are_shared_only_where_there_are_some():
    alone = dataclasses.replace(BIG, world=1, m=128 * 132, n=256)  # 132 tiles of 128 x 256: one full wave
    shared = dataclasses.replace(alone, m=128 * 144)  # and twelve more
    of = {p.split for _, p in candidates(alone) if p.tile == (128, 256, 64)}
    assert of == {1}
    assert {p.split for _, p in candidates(shared) if p.tile == (128, 256, 64)} == {1, 2, 3, 4}
    assert plan_for(dataclasses.replace(shared, k=65536)).split > 1


def test_one_rank_sends_nothing():
    assert "sends" in plan_for(BIG).reason
    alone = plan_for(dataclasses.replace(BIG, world=1)).reason
    assert "one rank" in alone and "send" not in alone


def test_the_prediction_is_no_better_than_each_limit():
    tiling = next(t for t in TILINGS if t.tile == (128, 256, 64))
    plan = Plan(tile=tiling.tile, stages=tiling.stages)

    def predicted(problem):
        return cost_of(problem, plan, tiling, H200).total_us

    flop = 2 * BIG.m * BIG.n * BIG.k
    assert predicted(BIG) >= flop / 989e6  # what the tensor cores could do
    thin = dataclasses.replace(BIG, k=8)
    sent = BIG.m * BIG.n * 2 * 3 / 4
    assert predicted(thin) >= sent / (H200.link_gb_per_s * 1e3)
    assert predicted(dataclasses.replace(thin, linked=False)) < predicted(thin)
    few = dataclasses.replace(BIG, m=128, n=57344, k=8192, world=1)
    assert predicted(few) >= 57344 * 8192 * 2 / (H200.memory_gb_per_s * 1e3)


@pytest.mark.parametrize(
    "change, legal",
    [
        (dict(mechanism="copy_engine"), "'tma'"),
        (dict(schedule="two_shot"), "has 'intra_sm', 'inter_sm', 'one_shot', 'none'"),
        (dict(schedule="one_shot", comm_sms=4), "the one_shot schedule has 0"),
        (dict(comm_sms=4), "has 0"),
        (dict(schedule="none", comm_sms=4), "the none schedule has 0"),
        (dict(schedule="inter_sm"), "plan.comm_sms=0: the inter_sm schedule has 1 to 131 of 132 SMs"),
        (dict(schedule="inter_sm", comm_sms=132), "has 1 to 131"),
        (
            dict(schedule="inter_sm", comm_sms=64, split=9),
            "expected 1 to 8, as the last wave has 8 of 2048 tiles, there are 68 SMs",
        ),
        (dict(tile=(32, 256, 64)), "64, 128 or 256"),
        (dict(tile=(128, 256, 32)), "K step 64"),
        (dict(tile=(128, 256)), "rows and columns are"),
        (dict(tile=(256, 256, 64)), "at most 32768"),
        (dict(stages=1), "at least 2"),
        (dict(stages=5), "a CTA has 232448"),
        (dict(split=0), "expected 1 to 1, as the last wave has 68 of 2048 tiles, there are 132 SMs"),
        (dict(split=2), "expected 1 to 1"),
        (dict(split=17, tile=(64, 64, 64)), "expected 1 to"),
    ],
)
def test_a_plan_that_cannot_run_is_refused_with_what_would_be_legal(change, legal):
    assert legal in unsupported(BIG, Plan(**change))


def test_tiles_of_8_bit_operands_leave_registers_for_scales():
    problem = dataclasses.replace(BIG, operand_bytes=1)
    large = Plan(tile=(128, 256, 128))
    assert "up to 16384 elements" in unsupported(problem, large)
    assert unsupported(dataclasses.replace(problem, world=1), large) is None
    assert all(plan.tile[0] * plan.tile[1] <= 16384 for _, plan in candidates(problem))


@pytest.mark.parametrize(
    "change, legal",
    [
        (dict(world=1), "a world of one has 'intra_sm' and 'none'"),
        (dict(world=64, m=64), "too few flags for 64 ranks"),
        (dict(sms=1), "needs an SM to communicate and one to multiply"),
    ],
)
def test_where_nobody_communicates_inter_sm_is_refused(change, legal):
    assert legal in unsupported(dataclasses.replace(BIG, **change), Plan(schedule="inter_sm", comm_sms=1))


@pytest.mark.parametrize("world", [2, 3, 5, 8, 40, 63])
@pytest.mark.parametrize("m, n", [(1, 8), (136, 200), (1 << 17, 8), (1 << 16, 1 << 15)])
def test_blocks_cover_an_owners_tiles_with_the_flags_and_counters_there_are(world, m, n):
    plan = Plan(schedule="inter_sm", tile=(64, 64, 64), comm_sms=4)
    problem = dataclasses.replace(BIG, world=world, m=world * m, n=n)
    tiles, blocks = blocks_of(problem, plan)
    per = tiles_of(m, n, 1, plan.tile)
    assert (blocks - 1) * tiles < per <= blocks * tiles
    assert 2 * world * blocks <= FIRST_SHARE.value  # flags of an op
    assert (2 * world - 1) * blocks <= STATE_WORDS - 2  # words of `state`


@pytest.mark.parametrize(
    "field, value, legal",
    [
        ("stages", "4", "plan.stages must be an int, got '4'"),
        ("comm_sms", True, "plan.comm_sms must be an int, got True"),
        ("split", 1.5, "plan.split must be an int, got 1.5"),
        ("schedule", None, "plan.schedule must be a string, got None"),
        ("mechanism", 1, "plan.mechanism must be a string, got 1"),
        ("reason", 1, "plan.reason must be a string, got 1"),
        ("tile", 128, "plan.tile must be three ints, rows, columns and K step, got 128"),
        ("tile", (128, 256.0, 64), r"plan.tile must be three ints, .*got \(128, 256.0, 64\)"),
        ("predicted_us", "soon", "plan.predicted_us must be a number of microseconds or None, got 'soon'"),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(field, value, legal):
    with pytest.raises(TypeError, match=legal):
        Plan(**{field: value})
    text = json.dumps({**Plan().to_dict(), field: value})
    if isinstance(json.loads(text)[field], bool | str | float | int | None):
        with pytest.raises(ValueError, match=legal):
            Plan.from_json(text)


def test_a_plan_of_legal_types_comes_back_from_its_text():
    plan = Plan("tma", "inter_sm", [64, 128, 64], 3, 2, 4, 12)
    assert plan.tile == (64, 128, 64) and Plan.from_json(plan.to_json()) == plan


def test_a_float32_message_has_fewer_buffers_and_still_fits():
    wide = dataclasses.replace(BIG, message_bytes=4)
    assert unsupported(wide, Plan(tile=(128, 256, 64), stages=4)) is None
    assert "; 4 stages would do" in unsupported(wide, Plan(tile=(128, 256, 64), stages=5))
    assert "; 6 stages would do" in unsupported(wide, Plan(tile=(128, 128, 64), stages=20))
    assert unsupported(wide, Plan(tile=(128, 128, 64), stages=6)) is None


def test_a_matrix_smaller_than_a_tile_is_cut_no_larger_for_the_sake_of_l2():
    """Between ranks that share a GPU all tiles that cover it read the same."""
    few = dataclasses.replace(BIG, m=64, n=40, k=32, linked=False)
    assert plan_for(few).tile == candidates(few)[0][1].tile
    gathered = gathering.Problem(rows=16, k=64, ns=(40,), world=2, sms=66, linked=False)
    assert gathering.plan_for(gathered).tile == gathering.candidates(gathered)[0][1].tile
    reduced = reducing.Problem(16, 40, 64, 2, 66, linked=False)
    assert reducing.plan_for(reduced).tile == reducing.candidates(reduced)[0][1].tile


def test_a_world_of_one_shares_its_gpu_with_nobody():
    """Whether or not it says that its peers are behind a link."""
    for few in (8, 512):
        linked = gathering.Problem(rows=few, k=8192, ns=(512,), world=1, sms=132)
        alone = dataclasses.replace(linked, linked=False)
        assert gathering.candidates(alone) == gathering.candidates(linked)
        assert gathering.plan_for(alone) == gathering.plan_for(linked)
