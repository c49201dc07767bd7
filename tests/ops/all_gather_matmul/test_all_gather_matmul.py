"""The op in emulated worlds: the real device code under hostile schedules, against the float32 truth."""

import pytest
import torch

import tileweave as tw
from tests.ops.all_gather_matmul.problems import assert_right, operands, plan, run_calls
from tileweave import Plan
from tileweave.fabric import MAX_RANKS
from tileweave.fabric.base import ABORT, HEADER_WORDS
from tileweave.ops.all_gather_matmul import kernel

NAME = "all_gather_matmul"
SCHEDULES = ["inter_sm", "intra_sm", "none"]


@pytest.mark.parametrize("schedule", SCHEDULES)
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
def test_every_world_size_and_ragged_shapes_under_several_schedules(world, rows, ns, k, schedule):
    chosen = plan(schedule=schedule, comm_sms=min(world - 1, 2))
    for seed in range(2):
        calls = [(*operands(world, rows, ns, k, seed=10 * seed + i), dict(return_gathered=seed > 0)) for i in range(2)]
        with tw.virtual_world(world, device="cpu", seed=seed, sms=3) as w:
            results = run_calls(w, calls, plan=chosen)
        for outs, (a, b, bias, kw) in zip(results, calls, strict=True):
            assert_right(outs, a, b, bias, **kw)


@pytest.mark.parametrize("stages, comm_sms", [(3, 1), (4, 2)])
def test_a_problem_on_which_every_ring_wraps_and_blocks_are_many(stages, comm_sms):
    chosen = plan(tile=(64, 128, 64), stages=stages, comm_sms=comm_sms)
    calls = [(*operands(3, 264, [136], 328, seed=i), dict(return_gathered=True)) for i in range(3)]
    for seed in range(2):
        with tw.virtual_world(3, device="cpu", seed=seed, sms=4) as w:
            for outs, (a, b, bias, kw) in zip(run_calls(w, calls, plan=chosen), calls, strict=True):
                assert_right(outs, a, b, bias, **kw)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_calls_with_changing_shapes_and_plans_on_one_workspace_one_rank_late(late):
    world = 3
    shapes = [
        (264, [64], 136, plan()),
        (8, [72, 8], 520, plan(schedule="intra_sm")),
        (136, [64], 64, plan(tile=(64, 64, 64), comm_sms=2)),
        (1, [64], 640, plan(schedule="none", comm_sms=3)),
        (256, [72, 64, 8], 136, plan(tile=(128, 128, 64), stages=3)),
    ]
    for seed in range(2):
        calls = [(*operands(world, *s[:3], seed=seed * 10 + i), dict(plan=s[3])) for i, s in enumerate(shapes)]
        with tw.virtual_world(world, device="cpu", seed=seed, sms=3, delayed=(late,)) as w:
            # once for the workspace to grow (growing makes the ranks meet), once more so that they may drift apart
            for _ in range(2):
                for outs, (a, b, bias, _) in zip(run_calls(w, calls), calls, strict=True):
                    assert_right(outs, a, b, bias)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world, sms", [(1, 3), (3, 4)])
def test_tiles_of_the_last_wave_that_ctas_share(world, sms, schedule):
    comm = {"inter_sm": 1, "intra_sm": 1, "none": sms}[schedule] if world > 1 else 0
    for rows, n in ((72, 72), (72, 264)):  # all tiles shared, or some
        chosen = plan(tile=(128, 128, 64), split=2, schedule=schedule, comm_sms=comm)
        calls = [(*operands(world, rows, [n], 200, seed=i), dict(return_gathered=True)) for i in range(2)]
        try:
            with tw.virtual_world(world, device="cpu", seed=1, sms=sms) as w:
                results = run_calls(w, calls, plan=chosen)
        except ValueError as error:
            assert "plan.split" in str(error)
            continue
        for outs, (a, b, bias, kw) in zip(results, calls, strict=True):
            assert_right(outs, a, b, bias, **kw)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("b_t", [False, True])
def test_both_stride_orders_of_b_and_both_dtypes_without_bias(dtype, b_t):
    a, b, _ = operands(2, 136, [136, 72], 72, seed=1, dtype=dtype, b_t=b_t)
    with tw.virtual_world(2, device="cpu", sms=2) as w:
        (outs,) = run_calls(w, [(a, b, None, {})])
    assert outs[0][0].dtype == dtype
    assert_right(outs, a, b)


def test_strided_misaligned_expanded_and_mixed_inputs_are_right():
    a, b, bias = operands(2, 64, [64, 64], 64, seed=3)
    wide = [torch.randn(64, 160).bfloat16() for _ in range(2)]
    cases = [
        ([x[:, ::2][:, :64] for x in wide], b),  # steps of two
        ([x[:, 1:65] for x in wide], b),  # rows that start at odd addresses
        ([x[:, :64] for x in wide], b),  # long rows: no copy needed
        ([x.t().contiguous().t() for x in a], b),  # columns in one piece
        ([a[0], a[1].t().contiguous().t()], b),  # of one rank only
        (a, [[x[:1].expand(64, 64), y] for x, y in b]),  # stride zero
        (a, [[x, y.contiguous()] for x, y in b]),  # two orders
    ]
    with tw.virtual_world(2, device="cpu", sms=2) as w:
        for outs, (x, y) in zip(run_calls(w, [(x, y, bias, {}) for x, y in cases]), cases, strict=True):
            assert_right(outs, x, y, bias)


@pytest.mark.parametrize("return_gathered", [False, True])
@pytest.mark.parametrize(
    "rows, ns, k",
    [(0, [64], 64), (4, [0], 64), (4, [8, 0, 16], 64), (4, [64], 0), (0, [0], 0), (1, [1], 1), (2, [8], 8)],
)
def test_empty_and_single_sizes(rows, ns, k, return_gathered):
    a, b, bias = operands(2, rows, ns, k, seed=2)
    with tw.virtual_world(2, device="cpu", sms=2) as w:
        for outs in run_calls(w, [(a, b, bias, {})] * 2, return_gathered=return_gathered):
            assert_right(outs, a, b, bias, return_gathered)


def test_one_matrix_is_no_list():
    a, b, bias = operands(2, 24, [16], 8, seed=1)
    with tw.virtual_world(2, device="cpu") as w:
        outs = w.run(lambda rank, group: tw.all_gather_matmul(a[rank], b[rank][0], group, bias=bias[rank][0]))
        pairs = w.run(lambda rank, group: tw.all_gather_matmul(a[rank], b[rank][0], return_gathered=True))
    assert_right([[x] for x in outs], a, b, bias)
    assert_right([([x], y) for x, y in pairs], a, b, None, True)


@pytest.mark.parametrize("ns, k", [([100], 64), ([64, 12], 64), ([64], 36), ([1], 1)])
def test_what_tma_cannot_address_falls_back_and_says_so(ns, k):
    a, b, bias = operands(2, 16, ns, k, seed=4)
    with tw.virtual_world(2, device="cpu") as w:
        (outs,) = run_calls(w, [(a, b, bias, dict(return_gathered=True))])
        routes = w.run(lambda rank, group: tw.explain(NAME, a[rank], b[rank], group))
    assert_right(outs, a, b, bias, True)
    for r in routes:
        assert (r.fused, r.backend, r.plan, r.predicted_us) == (False, "fallback", None, None)
        assert "multiple of 8" in r.reason and "all-gather, then torch.matmul" in r.reason


def test_one_sm_gathers_first():
    """It could not communicate while it multiplies; and a rank of a hundred on one GPU has no more."""
    a, b, bias = operands(3, 136, [72], 200, seed=5)
    with tw.virtual_world(3, device="cpu", sms=1) as w:
        route = w.run(lambda rank, group: tw.explain(NAME, a[rank], b[rank], group))[0]
        (outs,) = run_calls(w, [(a, b, bias, {})])
    assert route.plan.schedule == "none" and route.plan.comm_sms == 1
    assert_right(outs, a, b, bias)


def test_max_sms_bounds_the_grid(monkeypatch):
    a, b, bias = operands(2, 136, [136], 72, seed=5)
    grids = []
    with tw.virtual_world(2, device="cpu", sms=8) as w:
        kind = type(w.run(lambda rank, group: tw.fabric.fabric_of(group))[0])
        launch = kind.launch

        def recorded(self, kernel, grid, args, **options):
            grids.append(grid)
            return launch(self, kernel, grid, args, **options)

        monkeypatch.setattr(kind, "launch", recorded)
        (outs,) = run_calls(w, [(a, b, bias, dict(max_sms=3))])
    assert_right(outs, a, b, bias)
    assert len(grids) == 2 and set(grids) <= {2, 3}


@pytest.mark.parametrize("world, schedule", [(33, "intra_sm"), (72, "inter_sm"), (MAX_RANKS, "none")])
def test_more_ranks_than_a_node_of_eight_or_a_rack_has(world, schedule):
    """Every peer has a flag and a counter of its own."""
    a, b, bias = operands(world, 1, [8], 8, seed=1)
    chosen = plan(tile=(64, 64, 64), schedule=schedule)
    with tw.virtual_world(world, device="cpu", sms=2) as w:
        (outs,) = run_calls(w, [(a, b, bias, dict(plan=chosen))])
    assert_right(outs[:2] + outs[-2:], a, b[:2] + b[-2:], bias[:2] + bias[-2:])


def test_more_ranks_than_a_channel_has_words_for_fall_back():
    a, b, _ = operands(1, 1, [8], 8, seed=1)
    with tw.virtual_world(MAX_RANKS + 1, device="cpu", sms=1) as w:
        routes = w.run(lambda rank, group: tw.explain(NAME, a[0], b[0], group))
    assert not routes[0].fused and f"more than the {MAX_RANKS}" in routes[0].reason


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_aborted_wait_makes_the_peers_rows_nan_and_leaves_own_rows(schedule):
    a, b, bias = operands(3, 136, [72], 72, seed=6)
    options = dict(plan=plan(schedule=schedule), return_gathered=True)
    with tw.virtual_world(3, device="cpu", sms=2) as w:
        run_calls(w, [(a, b, bias, options)])
        w.workspace.ops[NAME].flags[1, ABORT] = 1
        (results,) = run_calls(w, [(a, b, bias, options)])
    assert_right([results[0], results[2]], a, [b[0], b[2]], [bias[0], bias[2]], True)
    (out,), gathered = results[1]
    own = slice(136, 272)
    assert torch.equal(gathered[own], a[1]) and not out[own].isnan().any()
    for x in (out, gathered):
        assert torch.cat([x[:136], x[272:]]).isnan().all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_flags_that_short_calls_leave_out_do_not_fall_behind(schedule):
    """They would seem reached after 2**31 calls. Every flag is raised every so many calls."""
    period = kernel.REFRESH.value
    a, b, bias = operands(2, 8, [8], 8, seed=1)
    chosen = plan(tile=(64, 64, 64), schedule=schedule)
    with tw.virtual_world(2, device="cpu", sms=2) as w:
        run_calls(w, [(a, b, bias, {})], plan=chosen)
        shared = w.workspace.ops[NAME]
        shared.state[:, 0] = period - 2
        run_calls(w, [(a, b, bias, {})], plan=chosen)
        assert shared.flags[0, HEADER_WORDS + 64] < period - 1  # the second of rank 1, at 63 flags a rank
        (outs,) = run_calls(w, [(a, b, bias, {})], plan=chosen)
        flags = shared.flags[:, HEADER_WORDS : HEADER_WORDS + 126]
    assert_right(outs, a, b, bias)
    assert (flags[0, 63:] == period).all() and (flags[1, :63] == period).all()


def test_epochs_may_wrap():
    a, b, bias = operands(2, 72, [72], 72, seed=1)
    with tw.virtual_world(2, device="cpu", sms=2) as w:
        run_calls(w, [(a, b, bias, {})], plan=plan())
        shared = w.workspace.ops[NAME]
        shared.state[:, 0] = 2**31 - 2
        shared.flags[:, HEADER_WORDS:] = 2**31 - 2
        for outs in run_calls(w, [(a, b, bias, {})] * 4, plan=plan()):
            assert_right(outs, a, b, bias)


def test_explain_names_the_plan_and_launches_nothing():
    a, b, _ = operands(2, 512, [512], 256, seed=4)
    with tw.virtual_world(2, device="cpu") as w:
        r0, r1 = w.run(lambda rank, group: tw.explain(NAME, a[rank], b[rank][0], group))
        assert not w.workspace.ops
    assert r0 == r1 and r0.fused and r0.backend == "emulated" and r0.op == NAME
    assert (r0.plan.mechanism, r0.plan.schedule) == ("tma", "inter_sm") and r0.plan.comm_sms >= 1
    assert r0.predicted_us > 0 and "tiles" in r0.reason and f"push by {r0.plan.comm_sms} of 4" in r0.reason


A, B = torch.zeros(4, 8).bfloat16(), torch.zeros(8, 16).bfloat16()
WRONG = [
    (dict(a=torch.zeros(4, 16).bfloat16()), ValueError, r"a is \[4, 16\] and b\[0\] \[8, 16\]"),
    (dict(b=[B, torch.zeros(16, 8).bfloat16()]), ValueError, r"b\[1\] \[16, 8\]: it must be a matrix \[8, N\]"),
    (dict(b=B.half()), ValueError, "bfloat16.*float16"),
    (dict(a=A.float(), b=B.float()), ValueError, "bfloat16 or float16, .*got torch.float32"),
    (dict(a=torch.zeros(2, 4, 8).bfloat16()), ValueError, r"\[M / world, K\], got shape \[2, 4, 8\]"),
    (dict(b=torch.zeros(8, 16, device="meta").bfloat16()), ValueError, "meta"),
    (dict(b=[]), ValueError, "a matrix or a list of 1 to 3, got 0"),
    (dict(b=[B] * 4), ValueError, "a matrix or a list of 1 to 3, got 4"),
    (dict(b=[1.0]), TypeError, r"b\[0\] must be a torch.Tensor, got float"),
    (dict(b=None), TypeError, r"b\[0\] must be a torch.Tensor, got NoneType"),
    (dict(a=None), TypeError, "a must be a torch.Tensor, got NoneType"),
    (dict(a=A.to_sparse()), TypeError, "a must be a dense tensor.*to_dense"),
    (dict(bias=torch.zeros(8).bfloat16()), ValueError, r"bias\[0\] must be \[16\].*got \[8\]"),
    (dict(bias=torch.zeros(16)), ValueError, "float32"),
    (dict(bias=[torch.zeros(16).bfloat16()]), TypeError, "bias must be a single one, as b is, got a list"),
    (dict(b=[B], bias=torch.zeros(16).bfloat16()), TypeError, "bias must be a list, as b is, got a single one"),
    (dict(b=[B, B], bias=[torch.zeros(16).bfloat16()]), ValueError, "one for each of the 2 b, got 1"),
    (dict(return_gathered=1), TypeError, "return_gathered must be True or False, got 1"),
    (dict(regather="no"), TypeError, "regather must be True or False, got 'no'"),
    (dict(max_sms=0), ValueError, "max_sms must be from 1 to .*got 0"),
    (dict(max_sms=2.0), TypeError, "max_sms must be an int or None, got float"),
    (dict(plan="fast"), TypeError, "Plan"),
    (dict(plan=plan(mechanism="smoke")), ValueError, "'tma', 'register', 'multimem', 'copy_engine'"),
    (dict(plan=plan(schedule="sideways")), ValueError, "'inter_sm', 'intra_sm', 'one_shot', 'none'"),
    (dict(plan=plan(comm_sms=0)), ValueError, "plan.comm_sms=0: the inter_sm schedule has 1 to 3 with 4 SMs"),
    (dict(plan=plan(comm_sms=4)), ValueError, "plan.comm_sms=4: the inter_sm schedule has 1 to 3 with 4 SMs"),
    (dict(plan=plan(schedule="none", comm_sms=5)), ValueError, "plan.comm_sms=5: the none schedule has 1 to 4"),
    (dict(plan=plan(), max_sms=1), ValueError, "needs an SM to communicate and one to multiply; 'none' would do"),
    (dict(plan=plan(tile=(100, 256, 64))), ValueError, "128 or 256"),
    (dict(plan=plan(tile=(128, 256, 64), stages=8)), ValueError, "shared memory"),
    (dict(plan=plan(split=17)), ValueError, "plan.split=17"),
    (dict(plan=Plan()), ValueError, "plan.comm_sms=0: the intra_sm schedule has 1 to 3"),
]


@pytest.mark.parametrize("change, error, text", WRONG)
def test_wrong_input_raises_on_every_rank_before_anything_is_launched(change, error, text):
    def rank_program(rank, group):
        arguments = {**dict(a=A, b=B), **change}
        with pytest.raises(error, match=text):
            tw.all_gather_matmul(arguments.pop("a"), arguments.pop("b"), group, **arguments)
        return True

    with tw.virtual_world(2, device="cpu") as w:
        assert w.run(rank_program) == [True, True]
        assert not w.workspace.ops


def test_ranks_that_differ_are_told():
    a, b, _ = operands(2, 24, [16, 24], 8, seed=1)
    with (
        tw.virtual_world(2, device="cpu") as w,
        pytest.raises(RuntimeError, match=r"ns is \(16,\) on rank 0, \(24,\) on rank 1"),
    ):
        w.run(lambda rank, group: tw.all_gather_matmul(a[rank], b[rank][rank], group))


def test_a_world_of_one_has_no_communicators():
    a, b, bias = operands(1, 72, [72], 72, seed=1)
    with tw.virtual_world(1, device="cpu") as w:
        with pytest.raises(ValueError, match="comm_sms=1: a world of one has 0"):
            run_calls(w, [(a, b, bias, {})], plan=plan())
        route = w.run(lambda rank, group: tw.explain(NAME, a[0], b[0], group))[0]
    assert route.plan.comm_sms == 0 and "plain matmul" in route.reason
