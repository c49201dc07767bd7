"""Mechanisms beside TMA in emulated worlds, against the float32 truth: registers, multicast, and the copy engine."""

import pytest
import torch

import tileweave as tw
from tests.ops.all_gather_matmul.problems import (
    MECHANISMS,
    MULTIMEM,
    WAYS,
    assert_right,
    operands,
    plan,
    run_calls,
    way_name,
)
from tileweave.fabric import fabric_of
from tileweave.fabric.base import ABORT, HEADER_WORDS
from tileweave.ops.all_gather_matmul import places
from tileweave.ops.all_gather_matmul.check import impossible, settle
from tileweave.ops.contract import Site
from tileweave.planner.all_gather_matmul import Problem, unsupported

NAME = "all_gather_matmul"
COPY = dict(mechanism="copy_engine", comm_sms=0)


@pytest.mark.parametrize("way", MECHANISMS + MULTIMEM, ids=way_name)
@pytest.mark.parametrize(
    "world, rows, ns, k",
    [
        (1, 130, [72], 136),
        (2, 264, [136], 64),
        (3, 40, [64, 8], 200),
        (4, 136, [72], 72),
        (5, 8, [24, 136, 64], 8),
        (8, 24, [136], 64),
    ],
)
def test_every_world_size_and_ragged_shapes_under_several_schedules(world, rows, ns, k, way):
    chosen = plan(**way) if world > 1 else plan(mechanism=way["mechanism"], comm_sms=0)
    for seed in range(2):
        calls = [(*operands(world, rows, ns, k, seed=10 * seed + i), dict(return_gathered=seed > 0)) for i in range(3)]
        with tw.virtual_world(world, device="cpu", seed=seed, sms=3) as w:
            results = run_calls(w, calls, plan=chosen)
        for outs, (a, b, bias, kw) in zip(results, calls, strict=True):
            assert_right(outs, a, b, bias, **kw)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_calls_with_changing_shapes_and_mechanisms_one_rank_late(late):
    shapes = [
        (264, [64], 136, COPY),
        (8, [72, 8], 520, dict(mechanism="register")),
        (1, [64], 640, COPY),
        (136, [64], 64, dict(tile=(64, 64, 64), comm_sms=2)),
        (136, [64], 72, dict(mechanism="multimem", comm_sms=2)),
        (256, [72, 64, 8], 136, dict(tile=(128, 128, 64), stages=3, mechanism="register", comm_sms=2)),
        (72, [72], 64, dict(COPY, tile=(64, 64, 64))),
    ]
    for seed in range(2):
        calls = [(*operands(3, *s[:3], seed=seed * 10 + i), dict(plan=plan(**s[3]))) for i, s in enumerate(shapes)]
        with tw.virtual_world(3, device="cpu", seed=seed, sms=3, delayed=(late,)) as w:
            for _ in range(2):
                for outs, (a, b, bias, _) in zip(run_calls(w, calls), calls, strict=True):
                    assert_right(outs, a, b, bias)


def test_a_copy_engine_copies_a_shard_in_blocks_and_leaves_no_flag_behind(monkeypatch):
    monkeypatch.setattr(places, "COPY_BYTES", 1)
    shapes = [(328, [64], 72), (40, [64], 72), (200, [8], 64)]
    calls = [(*operands(2, *shape, seed=i), dict(return_gathered=True)) for i, shape in enumerate(shapes)]
    for seed in range(3):
        with tw.virtual_world(2, device="cpu", seed=seed, sms=2) as w:
            for outs, (a, b, bias, kw) in zip(
                run_calls(w, calls, plan=plan(tile=(64, 64, 64), **COPY)), calls, strict=True
            ):
                assert_right(outs, a, b, bias, **kw)
            flags = w.workspace.ops[f"{NAME}/copy_engine"].flags[:, HEADER_WORDS:]
        of_peer = [flags[0, 8:16], flags[1, :8]]
        done = [flags[0, 17:18], flags[1, 16:17]]
        assert all((words == len(calls)).all() for words in of_peer + done)


def test_blocks_are_few_and_large():
    assert places.copied_tiles(8192, 16384, 128, 8) == 8  # 16 MB each, as there are flags for 8
    assert places.copied_tiles(1024, 16384, 128, 8) == 2  # 4 MB each
    assert places.copied_tiles(100, 16384, 128, 8) == 1
    assert [places.flags_each(world, plan(**COPY)) for world in (2, 8, 16, 64)] == [8, 8, 7, 1]


@pytest.mark.parametrize("way", MECHANISMS + MULTIMEM, ids=way_name)
def test_tiles_that_ctas_share_and_strided_inputs(way):
    chosen = plan(tile=(128, 128, 64), split=2, **way)
    a, b, bias = operands(3, 72, [72], 200, seed=1)
    wide = [torch.randn(72, 400).bfloat16() for _ in range(3)]
    calls = [
        (a, b, bias, {}),
        ([x[:, :200] for x in wide], b, bias, {}),  # long rows
        ([x[:, ::2] for x in wide], b, bias, {}),
        ([x.t().contiguous().t() for x in a], b, bias, {}),
    ]
    with tw.virtual_world(3, device="cpu", seed=1, sms=6 + chosen.comm_sms) as w:
        for outs, (x, y, z, _) in zip(run_calls(w, calls, plan=chosen, return_gathered=True), calls, strict=True):
            assert_right(outs, x, y, z, True)


@pytest.mark.parametrize("way", MECHANISMS + MULTIMEM, ids=way_name)
def test_an_aborted_wait_makes_the_peers_rows_nan_and_leaves_own_rows(way):
    a, b, bias = operands(3, 136, [72], 72, seed=6)
    options = dict(plan=plan(**way), return_gathered=True)
    with tw.virtual_world(3, device="cpu", sms=2) as w:
        run_calls(w, [(a, b, bias, options)])
        (shared,) = w.workspace.ops.values()
        shared.flags[1, ABORT] = 1
        (results,) = run_calls(w, [(a, b, bias, options)])
    assert_right([results[0], results[2]], a, [b[0], b[2]], [bias[0], bias[2]], True)
    (out,), gathered = results[1]
    own = slice(136, 272)
    assert torch.equal(gathered[own], a[1]) and not out[own].isnan().any()
    for x in (out, gathered):
        assert torch.cat([x[:136], x[272:]]).isnan().all()


@pytest.mark.parametrize("way", WAYS + MULTIMEM, ids=way_name)
def test_what_lies_in_the_slots_beside_the_rows_does_not_count(way):
    """Rows are padded with zeros, not with what earlier calls of other shapes have left."""
    a, b, bias = operands(2, 72, [72], 72, seed=1)
    with tw.virtual_world(2, device="cpu", sms=2) as w:
        for _ in range(2):
            (outs,) = run_calls(w, [(a, b, bias, {})], plan=plan(**way))
            assert_right(outs, a, b, bias)
            (shared,) = w.workspace.ops.values()
            shared.staging.fill_(0xFF)  # NaN, in 8 bits and in 16


def test_epochs_of_a_copy_engine_may_wrap():
    a, b, bias = operands(2, 72, [72], 72, seed=1)
    with tw.virtual_world(2, device="cpu", sms=2) as w:
        run_calls(w, [(a, b, bias, {})], plan=plan(**COPY))
        (shared,) = w.workspace.ops.values()
        shared.state[:, 0] = 2**31 - 2
        shared.flags[:, HEADER_WORDS:] = 2**31 - 2
        for outs in run_calls(w, [(a, b, bias, {})] * 4, plan=plan(**COPY)):
            assert_right(outs, a, b, bias)


def test_as_many_ranks_as_a_copy_engine_has_flags_for():
    a, b, bias = operands(64, 1, [8], 8, seed=1)
    with tw.virtual_world(64, device="cpu", sms=1) as w:
        (outs,) = run_calls(w, [(a, b, bias, dict(plan=plan(tile=(64, 64, 64), **COPY)))])
    assert_right(outs[:2] + outs[-2:], a, b[:2] + b[-2:], bias[:2] + bias[-2:])


@pytest.mark.parametrize(
    "changes, world, says",
    [
        (dict(mechanism="copy_engine", schedule="none"), 2, "has 'inter_sm' with 'copy_engine'"),
        (dict(mechanism="register", comm_sms=0), 2, "the inter_sm schedule has 1 to 3 with 4 SMs"),
        (dict(mechanism="copy_engine", comm_sms=4), 2, "leaves 0 to 3 of 4 SMs to the copies"),
        (dict(mechanism="copy_engine", comm_sms=0), 65, "up to 64 ranks, the group has 65"),
        (dict(mechanism="copy_engine", comm_sms=1), 1, "a world of one has 0"),
        (dict(mechanism="multimem", schedule="intra_sm"), 2, "has 'inter_sm', 'none' with 'multimem'"),
        (dict(mechanism="smoke"), 2, "'tma', 'register', 'multimem', 'copy_engine'"),
    ],
)
def test_what_a_mechanism_does_not_take(changes, world, says):
    assert says in unsupported(Problem(128, (64,), 64, world, 4), plan(**changes))
    assert unsupported(Problem(128, (64,), 64, 64, 4), plan(**COPY)) is None


def test_virtual_ranks_leave_sms_to_the_copies():
    """Copies within one GPU would wait for ever behind the kernels that wait for them."""
    site = Site("virtual", 2, 66, torch.device("cuda"), None)
    none, one = plan(**COPY), plan(mechanism="copy_engine", comm_sms=1)
    assert "ranks that share one leave 1 at least" in impossible(site, none) and impossible(site, one) is None
    assert impossible(site._replace(backend="processes"), none) is not None  # on one GPU
    assert impossible(site._replace(backend="processes", linked=True), none) is None
    assert impossible(site._replace(world=1), none) is None


def test_a_launch_is_kept_with_the_channel_that_it_goes_through(monkeypatch):
    """What the planner chooses decides on the channel; once that has grown, launches of before are forgotten."""
    monkeypatch.setattr("tileweave.planner.all_gather_matmul.plan_for", lambda problem, hardware: plan(**COPY))
    settle.cache_clear()
    calls = [operands(2, rows, [72], 64, seed=i) for i, rows in enumerate((8, 64, 64, 512, 64))]

    def rank_program(rank, group):
        made = []
        for a, b, _ in calls:
            outs = tw.all_gather_matmul(a[rank], b[rank], group)
            made.append((outs, [len(fabric_of(group).views(each) or ()) for each in places.CHANNELS]))
        return made

    with tw.virtual_world(2, device="cpu", sms=2) as w:
        made = list(zip(*w.run(rank_program), strict=True))
    settle.cache_clear()
    for of_ranks, (a, b, _) in zip(made, calls, strict=True):
        assert_right([outs for outs, _ in of_ranks], a, b)
    assert [kept for (_, kept), _ in made] == [[0, 1], [0, 1], [0, 1], [0, 1], [0, 2]]


def test_multimem_needs_multicast():
    site, chosen = Site("processes", 2, 132, torch.device("cuda"), None, None), plan(mechanism="multimem")
    assert impossible(site, chosen) is None
    why = impossible(site._replace(unicast="NCCL_NVLS_ENABLE=0 forbids it"), chosen)
    assert why == "plan.mechanism='multimem' needs multicast: NCCL_NVLS_ENABLE=0 forbids it; 'tma' would do"
