"""The op in emulated worlds: the real device code under hostile schedules, against the float32 truth."""

from dataclasses import replace

import pytest
import torch

import tileweave as tw
from tests.ops.matmul_all_reduce.problems import assert_right, operands, run_calls
from tileweave import Plan
from tileweave.fabric import MAX_RANKS
from tileweave.ops.contract import Site
from tileweave.ops.matmul_all_reduce.check import Call, Options, choose
from tileweave.planner.matmul_all_reduce import Problem, candidates, chunks_of, plan_for, unsupported

FUSED = ("one_shot", "intra_sm", "inter_sm", "multimem")  # the last one is inter-SM too
SCHEDULES = (*FUSED, "none")


def small(schedule, tile=(64, 64, 64), **changes):
    """A plan for few SMs, two at least."""
    if schedule in ("inter_sm", "multimem"):
        changes = {"mechanism": "multimem" if schedule == "multimem" else "tma", "comm_sms": 1, **changes}
        schedule = "inter_sm"
    return Plan(schedule=schedule, tile=tile, stages=2, **changes)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "world, m, n, k, extras",
    [(2, 1, 72, 136, ""), (3, 3, 136, 72, "brn"), (4, 16, 72, 64, "b"), (5, 64, 72, 72, "r"), (8, 130, 72, 64, "br"),
     (3, 300, 136, 72, "rn")],
)  # fmt: skip
def test_every_world_size_and_ragged_shapes_under_several_schedules(world, m, n, k, extras, schedule):
    for seed in range(2):
        calls = [operands(world, m, n, k, 10 * seed + i, extras) for i in range(2)]  # two in a row with new data
        with tw.virtual_world(world, device="cpu", seed=seed, sms=2) as w:
            results = run_calls(w, calls, plan=small(schedule, (128, 64, 64) if m > 64 else (64, 64, 64)))
        for outs, call in zip(results, calls, strict=True):
            assert_right(outs, *call)


@pytest.mark.parametrize("m", [1, 3, 16, 64, 130, 300])
def test_what_the_planner_chooses(m):
    calls = [operands(2, m, 136, 72, i, extras) for i, extras in enumerate(("", "brn", "r"))]
    with tw.virtual_world(2, device="cpu", seed=m, sms=4) as w:
        for outs, call in zip(run_calls(w, calls), calls, strict=True):
            assert_right(outs, *call)


def test_a_world_of_one_is_a_plain_matmul():
    calls = [operands(1, 130, 136, 72, i, extras) for i, extras in enumerate(("", "br", "brn"))]
    with tw.virtual_world(1, device="cpu", sms=2) as w:
        for outs, call in zip(run_calls(w, calls), calls, strict=True):
            assert_right(outs, *call)
        (route,) = w.run(lambda rank, group: tw.explain("matmul_all_reduce", calls[0][0][0], calls[0][1][0], group))
    assert route.plan.schedule == "none" and "plain matmul" in route.reason


@pytest.mark.parametrize("schedule", FUSED[1:])
@pytest.mark.parametrize("extras", ["br", "rn"])
def test_several_chunks_whose_tiles_travel_while_others_are_multiplied(extras, schedule):
    """Five chunks of two tiles an owner; the last owner has fewer columns; right twice over."""
    m, n, k, comm_sms = 264, 248, 72, 0 if schedule == "intra_sm" else 2
    plan = small(schedule, comm_sms=comm_sms)
    assert chunks_of(Problem(m, n, k, 2, 2 + comm_sms), plan) == (2, 5)
    calls = [operands(2, m, n, k, i, extras) for i in range(2)]
    for seed in range(3):
        with tw.virtual_world(2, device="cpu", seed=seed, sms=2 + comm_sms) as w:
            for outs, call in zip(run_calls(w, calls, plan=plan), calls, strict=True):
                assert_right(outs, *call)


@pytest.mark.parametrize("schedule", ["one_shot", "intra_sm"])
def test_rows_of_tiles_that_fill_their_groups(schedule):
    """A storer asks for the tile behind the last one, of a group without rows."""
    call = operands(2, 512, 72, 64, 0, "")
    with tw.virtual_world(2, device="cpu", sms=3) as w:
        (outs,) = run_calls(w, [call], plan=small(schedule, (64, 64, 64)))
    assert_right(outs, *call)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_calls_with_changing_shapes_and_plans_on_one_workspace_one_rank_late(late):
    shapes = [
        (130, 128, 64, "", small("one_shot")),
        (200, 72, 64, "r", small("intra_sm")),
        (1, 264, 128, "rn", small("one_shot", (64, 128, 64))),
        (72, 136, 64, "brn", small("intra_sm")),
        (24, 64, 8, "b", small("none")),
        (72, 72, 64, "r", small("multimem")),
        (200, 136, 64, "b", small("inter_sm")),
        (130, 72, 64, "b", small("intra_sm", (128, 64, 64))),
    ]
    calls = [
        (a, b, {**kw, "plan": plan})
        for i, (m, n, k, extras, plan) in enumerate(shapes)
        for a, b, kw in [operands(3, m, n, k, i, extras)]
    ]
    for seed in range(2):
        with tw.virtual_world(3, device="cpu", seed=seed, sms=2, delayed=(late,)) as w:
            # once for the workspace to grow (growing makes the ranks meet), once more so that they may drift apart
            for _ in range(2):
                for outs, (a, b, kw) in zip(run_calls(w, calls), calls, strict=True):
                    assert_right(outs, a, b, {name: x for name, x in kw.items() if name != "plan"})


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "world, m, n, k, sms, tile, split",
    [
        (2, 16, 136, 200, 18, (64, 64, 64), 3),
        (3, 72, 72, 320, 18, (64, 64, 64), 2),
        (2, 40, 264, 136, 12, (128, 128, 64), 2),
    ],
)
def test_tiles_that_several_ctas_share(world, m, n, k, sms, tile, split, schedule):
    calls = [operands(world, m, n, k, i, "br") for i in range(2)]
    plan = small(schedule, tile, split=split)
    for seed in range(2):
        with tw.virtual_world(world, device="cpu", seed=seed, sms=sms + plan.comm_sms) as w:
            results = run_calls(w, calls, plan=plan)
        for outs, call in zip(results, calls, strict=True):
            assert_right(outs, *call)


@pytest.mark.parametrize("schedule", FUSED)
def test_results_do_not_depend_on_the_schedule(schedule):
    a, b, extras = operands(3, 72, 136, 136, 7)
    bits = []
    for seed in range(4):
        with tw.virtual_world(3, device="cpu", seed=seed, sms=2) as w:
            bits.append(run_calls(w, [(a, b, extras)], plan=small(schedule))[0])
    for i in range(2):
        assert all(torch.equal(bits[0][0][i], outs[rank][i]) for outs in bits for rank in range(3))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("a_t, b_t, dtype", [(False, False, torch.float16), (True, True, torch.bfloat16)])
def test_either_stride_order_and_both_dtypes(a_t, b_t, dtype, schedule):
    a, b, extras = operands(2, 72, 136, 72, 1, dtype=dtype, a_t=a_t, b_t=b_t)
    with tw.virtual_world(2, device="cpu", sms=2) as w:
        assert_right(run_calls(w, [(a, b, extras)], plan=small(schedule))[0], a, b, extras)


@pytest.mark.parametrize("schedule", FUSED)
def test_strided_and_misaligned_inputs(schedule):
    wide = [torch.randn(64, 160).bfloat16() for _ in range(2)]
    _, b, extras = operands(2, 64, 64, 64, 3)
    strange = {
        "bias": torch.randn(128).bfloat16()[::2],
        "residual": torch.randn(64, 65).bfloat16()[:, 1:],
        "norm_weight": torch.randn(65).bfloat16()[1:],
    }
    calls = [([x[:, ::2][:, :64] for x in wide], b, extras), ([x[:, 1:65] for x in wide], b, strange)]
    with tw.virtual_world(2, device="cpu", sms=2) as w:
        for outs, call in zip(run_calls(w, calls, plan=small(schedule)), calls, strict=True):
            assert_right(outs, *call)


@pytest.mark.parametrize("extras", ["", "brn"])
@pytest.mark.parametrize("m, n, k", [(0, 64, 64), (4, 0, 64), (4, 64, 0), (0, 0, 0), (2, 1, 1), (1, 8, 8), (4, 1, 0)])
def test_empty_and_single_sizes(m, n, k, extras):
    call = operands(2, m, n, k, 2, extras)
    with tw.virtual_world(2, device="cpu", sms=2) as w:
        for outs in run_calls(w, [call] * 2):
            assert_right(outs, *call)


def test_a_norm_is_that_of_the_rounded_sum():
    a, b, extras = operands(2, 16, 264, 72, 5)
    for schedule in SCHEDULES:
        with tw.virtual_world(2, device="cpu", sms=2) as w:
            ((normed, total), _) = run_calls(w, [(a, b, extras)], plan=small(schedule), norm_eps=0.5)[0]
        truth = torch.nn.functional.rms_norm(total, (264,), extras["norm_weight"], 0.5)
        assert torch.allclose(normed.float(), truth.float(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("schedule", FUSED)
def test_seventy_two_ranks(schedule):
    world = 72
    a, b, extras = operands(world, 2, 8, 8, 1, "r")
    plan = small(schedule)
    if schedule != "one_shot":
        with (
            tw.virtual_world(world, device="cpu", sms=2) as w,
            pytest.raises(ValueError, match="72 ranks, an op has 128"),
        ):
            w.run(lambda rank, group: tw.explain("matmul_all_reduce", a[rank], b[rank], group, plan=plan))
        return
    with tw.virtual_world(world, device="cpu", sms=1) as w:
        assert_right(run_calls(w, [(a, b, extras)], plan=plan)[0], a, b, extras)


def test_more_ranks_than_a_channel_has_words_for_fall_back():
    a, b, _ = operands(1, 2, 8, 8, 1)
    with tw.virtual_world(MAX_RANKS + 1, device="cpu", sms=1) as w:
        routes = w.run(lambda rank, group: tw.explain("matmul_all_reduce", a[0], b[0], group))
    assert not routes[0].fused and f"more than the {MAX_RANKS}" in routes[0].reason


@pytest.mark.parametrize("n, k", [(100, 64), (64, 36), (1, 1)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_tma_cannot_address_falls_back_and_says_so(n, k, deterministic):
    a, b, extras = operands(2, 16, n, k, 4)
    with tw.virtual_world(2, device="cpu") as w:
        assert_right(run_calls(w, [(a, b, extras)], deterministic=deterministic)[0], a, b, extras)
        routes = w.run(lambda rank, group: tw.explain("matmul_all_reduce", a[rank], b[rank], group))
    for r in routes:
        assert (r.fused, r.backend, r.plan) == (False, "fallback", None) and "multiple of 8" in r.reason


ABORTED = [(schedule, extras) for schedule in FUSED for extras in ("", "brn")]


@pytest.mark.parametrize("schedule, extras", ABORTED)
def test_an_aborted_call_gives_nan_on_every_rank(schedule, extras):
    from tests.emulator.test_abort import ABORT

    call = operands(3, 130, 136, 136, 1, extras)
    for seed in range(2):
        with tw.virtual_world(3, device="cpu", seed=seed, sms=2) as w:
            assert_right(run_calls(w, [call], plan=small(schedule))[0], *call)
            for shared in w.workspace.ops.values():
                shared.flags[:, ABORT] = 1
            (outs,) = run_calls(w, [call], plan=small(schedule))
        for out in outs:
            assert all(x.isnan().all() for x in (out if extras else (out,)))


def test_one_shot_up_to_a_size_then_two_shots():
    chosen = [plan_for(Problem(m, 8192, 1024, 8, 132)).schedule for m in (1, 16, 64, 256, 1024, 4096, 8192)]
    assert chosen[0] == "one_shot" and chosen[-1] == "intra_sm"
    assert chosen == sorted(chosen, reverse=True)  # and never back
    times = [candidates(Problem(m, 8192, 1024, 8, 132))[0][0] for m in (1, 64, 256, 1024, 8192)]
    assert times == sorted(times) and times[0] > 0


# Rows up to which one shot is ahead of two, of [M, 8192] @ [8192, 8192] on virtual ranks of an H200, of M = 1, 16, 64,
# 128 and 256; both take as long, within 3 us, at the next M with two ranks and at 64 with four.
@pytest.mark.parametrize("world, most", [(2, 128), (4, 16), (8, 1)])
def test_one_shot_is_chosen_as_long_as_it_was_measured_to_be_ahead(world, most):
    for m in (1, 16, 64, 128, 256):
        chosen = plan_for(Problem(m, 8192, 8192, world, 132 // world, linked=False)).schedule
        assert chosen == ("one_shot" if m <= most else "intra_sm"), m


def test_the_fabric_sums_large_products_where_it_can():
    problem = Problem(4096, 8192, 3584, 8, 132, multicast=True)
    plan = plan_for(problem)
    assert (plan.mechanism, plan.schedule) == ("multimem", "inter_sm") and plan.comm_sms > 0
    assert f"{132 - plan.comm_sms} SMs beside {plan.comm_sms} communicators" in plan.reason
    assert plan_for(replace(problem, multicast=False)).mechanism == "tma"
    assert plan_for(replace(problem, m=1)).schedule == "one_shot"


@pytest.mark.parametrize("why", ["virtual ranks share one GPU, and multicast joins several", "rank 1: X=1"])
def test_multimem_is_refused_with_the_fabrics_reason(why):
    site = Site("virtual", 2, 4, torch.device("cpu"), None, why)
    call = Call(torch.bfloat16, 64, 64, 64, False, False, False, Options(False, 1e-6, 0))
    with pytest.raises(ValueError, match=f"plan.mechanism='multimem' needs multicast: {why}; 'tma' would do"):
        choose(site, call, torch.device("cpu"), small("multimem"))
    assert choose(site, call, torch.device("cpu"), small("inter_sm")).fused


GOOD = dict(a=torch.zeros(4, 8).bfloat16(), b=torch.zeros(8, 16).bfloat16())
WRONG = [
    (dict(a=torch.zeros(4, 16).bfloat16()), ValueError, r"\[4, 16\].*\[8, 16\]"),
    (dict(b=torch.zeros(8, 16).half()), ValueError, "bfloat16.*float16"),
    (dict(a=torch.zeros(4, 8), b=torch.zeros(8, 16)), ValueError, "float32"),
    (dict(a=torch.zeros(2, 4, 8).bfloat16()), ValueError, r"\[2, 4, 8\]"),
    (dict(bias=torch.zeros(8).bfloat16()), ValueError, r"bias must be \[16\].*got \[8\]"),
    (dict(residual=torch.zeros(4, 8).bfloat16()), ValueError, r"residual must be \[4, 16\].*got \[4, 8\]"),
    (dict(norm_weight=torch.zeros(16).bfloat16()), ValueError, "norm_weight goes with residual, which is None"),
    (dict(norm_eps=-1.0), ValueError, "norm_eps must be from 0 up, got -1.0"),
    (dict(norm_eps="0"), TypeError, "norm_eps must be a number"),
    (dict(deterministic="yes"), TypeError, "deterministic must be True, False or None"),
    (dict(max_sms=0), ValueError, "max_sms must be from 1"),
    (dict(plan="fast"), TypeError, "plan must be a tileweave.Plan"),
    (dict(plan=Plan(mechanism="copy_engine")), ValueError, "mechanism='copy_engine': .* 'tma' in the intra_sm"),
    (dict(plan=Plan("register", "inter_sm", comm_sms=1)), ValueError, "has 'tma' and 'multimem' in the inter_sm"),
    (dict(plan=Plan(schedule="two_shot")), ValueError, "has 'none', 'one_shot', 'intra_sm', 'inter_sm'"),
    (dict(plan=Plan(schedule="inter_sm")), ValueError, "comm_sms=0: the inter_sm schedule has 1 to 3 of 4 SMs"),
    (dict(plan=Plan(schedule="inter_sm", comm_sms=4)), ValueError, "comm_sms=4: the inter_sm schedule has 1 to 3"),
    (dict(plan=Plan(schedule="one_shot", comm_sms=2)), ValueError, "comm_sms=2: the one_shot schedule has 0"),
    (dict(plan=Plan(schedule="intra_sm", stages=9)), ValueError, "bytes of shared memory"),
    (
        dict(plan=Plan(schedule="intra_sm", split=2)),
        ValueError,
        r"with plan.split=2: .* registers for tiles of up to 16384 elements",
    ),
]


@pytest.mark.parametrize("changes, kind, words", WRONG)
def test_errors_name_the_argument_and_come_on_every_rank(changes, kind, words):
    given = {**GOOD, **changes}

    def rank_program(rank, group):
        for call in (tw.matmul_all_reduce, lambda *args, **kw: tw.explain("matmul_all_reduce", *args, **kw)):
            with pytest.raises(kind, match=words):
                call(given["a"], given["b"], group, **{k: v for k, v in given.items() if k not in ("a", "b")})
        return True

    with tw.virtual_world(2, device="cpu") as w:
        assert w.run(rank_program) == [True, True]


def test_a_world_of_one_has_no_shots():
    assert "a world of one has 'none'" in unsupported(Problem(8, 8, 64, 1, 4), small("one_shot"))
