"""The op in emulated worlds: the real device code under hostile schedules, against the float32 truth."""

import pytest
import torch

import tileweave as tw
from tests.ops.problems import SHARED_TILES, assert_right, calls_of_changing_plans, operands, run_calls
from tileweave import Plan
from tileweave.fabric import MAX_RANKS
from tileweave.ops.contract import Agreement
from tileweave.ops.matmul_reduce_scatter.check import Call

SMALL = Plan(tile=(128, 64, 64), stages=2)
MODES = [False, True]


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize(
    "world, m, n, k",
    [(1, 130, 72, 136), (2, 260, 136, 64), (3, 3 * 40, 64, 200), (4, 4 * 136, 72, 72), (8, 8 * 24, 136, 64)],
)
def test_every_world_size_and_ragged_shapes_under_several_schedules(world, m, n, k, deterministic):
    for seed in range(3):
        calls = []
        for i in range(2):  # two calls in a row with new data
            a, b, bias = operands(world, m, n, k, seed=10 * seed + i, bias=True)
            calls.append((a, b, dict(bias=bias)))
        with tw.virtual_world(world, device="cpu", seed=seed, sms=2) as w:
            results = run_calls(w, calls, deterministic=deterministic, plan=SMALL)
        for outs, (a, b, kw) in zip(results, calls, strict=True):
            assert_right(outs, a, b, deterministic=deterministic, **kw)


@pytest.mark.parametrize("deterministic", MODES)
def test_a_problem_on_which_every_ring_wraps(deterministic):
    """Two tiles a CTA and eight K steps each through three stages, twice."""
    calls = [(*operands(4, 512, 512, 512, seed=i)[:2], {}) for i in range(2)]
    for seed in range(4):
        with tw.virtual_world(4, device="cpu", seed=seed, sms=4) as w:
            results = run_calls(w, calls, deterministic=deterministic, plan=Plan(tile=(128, 256, 64), stages=3))
        for outs, (a, b, _) in zip(results, calls, strict=True):
            assert_right(outs, a, b, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", MODES)
def test_a_deep_float16_product_is_not_zero(deterministic):
    """Many more K steps than there are stages, and sums far from 1: flux #154 in small."""
    calls = [(*operands(2, 2 * 72, 136, 2048, seed=i, dtype=torch.float16)[:2], {}) for i in range(2)]
    with tw.virtual_world(2, device="cpu", sms=2) as w:
        results = run_calls(w, calls, deterministic=deterministic, plan=Plan(tile=(128, 128, 64), stages=3))
    for outs, (a, b, _) in zip(results, calls, strict=True):
        assert_right(outs, a, b, deterministic=deterministic)
        assert all(row.count_nonzero() > 0.9 * row.numel() for out in outs for row in out)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_five_calls_with_changing_shapes_and_plans_on_one_workspace_one_rank_late(late):
    world = 3
    shapes = [
        (3 * 128, 128, 64, dict(plan=SMALL)),
        (3 * 136, 72, 64, dict(deterministic=True, plan=Plan(tile=(128, 128, 64), stages=3))),
        (3 * 8, 264, 128, dict(plan=Plan(tile=(128, 256, 64), stages=2))),
        (3 * 200, 64, 64, dict(deterministic=True)),
        (3 * 72, 128, 8, dict(op="avg")),
    ]
    for seed in range(2):
        calls = [(*operands(world, m, n, k, seed=seed * 10 + i)[:2], kw) for i, (m, n, k, kw) in enumerate(shapes)]
        with tw.virtual_world(world, device="cpu", seed=seed, sms=2, delayed=(late,)) as w:
            # once for the workspace to grow (growing makes the ranks meet), once more so that they may drift apart
            for _ in range(2):
                for outs, (a, b, kw) in zip(run_calls(w, calls), calls, strict=True):
                    assert_right(outs, a, b, op=kw.get("op", "sum"), deterministic=kw.get("deterministic", False))


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize("world, m, n, k, sms, tile, split", SHARED_TILES)
def test_tiles_of_the_last_wave_that_several_ctas_share(world, m, n, k, sms, tile, split, deterministic):
    options = dict(deterministic=deterministic, plan=Plan(tile=tile, stages=2, split=split))
    for seed in range(3):
        calls = []
        for i in range(2):
            a, b, bias = operands(world, m, n, k, seed=10 * seed + i, bias=True)
            calls.append((a, b, dict(bias=bias)))
        with tw.virtual_world(world, device="cpu", seed=seed, sms=sms) as w:
            results = run_calls(w, calls, **options)
        for outs, (a, b, kw) in zip(results, calls, strict=True):
            assert_right(outs, a, b, deterministic=deterministic, **kw)


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "dtype, out, op",
    [(torch.float16, None, "avg"), (torch.bfloat16, torch.float32, "avg"), (torch.float16, None, "sum")],
)
def test_shared_tiles_of_other_types_and_means(world, dtype, out, op, deterministic):
    a, b, bias = operands(world, world * 136, 72, 200, seed=3, dtype=dtype, a_t=True, b_t=False, bias=True)
    kw = dict(op=op, bias=bias, out_dtype=out)
    with tw.virtual_world(world, device="cpu", seed=1, sms=6 * world) as w:
        results = run_calls(
            w, [(a, b, kw)] * 2, deterministic=deterministic, plan=Plan(tile=(128, 128, 64), stages=2, split=3)
        )
    for outs in results:
        assert outs[0].dtype == (out or dtype)
        assert_right(outs, a, b, op=op, bias=bias, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_shared_tiles_between_calls_of_other_plans_and_shapes(world, deterministic):
    """Flags of shares are as old as the last call that shared tiles, and other CTAs shared them."""
    calls = calls_of_changing_plans(world)
    for seed in range(3):
        with tw.virtual_world(world, device="cpu", seed=seed, sms=4 * world) as w:
            results = run_calls(w, calls, deterministic=deterministic)
        for outs, (a, b, kw) in zip(results, calls, strict=True):
            assert_right(outs, a, b, bias=kw["bias"], deterministic=deterministic)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_deterministic_results_of_shared_tiles_do_not_depend_on_the_schedule(world):
    a, b, _ = operands(world, world * 136, 72, 264, seed=7)
    bits = []
    for seed in range(6):
        with tw.virtual_world(world, device="cpu", seed=seed, sms=8 * world) as w:
            plan = Plan(tile=(128, 128, 64), stages=2, split=4)
            bits.append(torch.cat(run_calls(w, [(a, b, dict(deterministic=True, plan=plan))])[0]))
    assert all(torch.equal(bits[0], x) for x in bits[1:])


@pytest.mark.parametrize(
    "k, split, legal",
    [
        (320, 0, "expected 1 to 4, as the last wave has 2 of 2 tiles, there are 8 SMs, and a tile has 5 K steps"),
        (320, 5, "expected 1 to 4"),
        (136, 4, "expected 1 to 3, as .* and a tile has 3 K steps"),
        (64, 2, "expected 1 to 1, as .* and a tile has 1 K steps"),
        (0, 2, "expected 1 to 1"),
        (2048, -1, "expected 1 to 4"),
    ],
)
def test_a_tile_is_shared_by_no_more_ctas_than_there_are_nor_than_it_has_k_steps(k, split, legal):
    def rank_program(rank, group):
        a, b, _ = operands(1, 128, 64, k, seed=0)
        for call in (tw.matmul_reduce_scatter, lambda *args, **kw: tw.explain("matmul_reduce_scatter", *args, **kw)):
            with pytest.raises(ValueError, match=rf"plan\.split={split}: {legal}"):
                call(a[0], b[0], group, plan=Plan(tile=(64, 64, 64), stages=2, split=split))
        return True

    with tw.virtual_world(2, device="cpu", sms=8) as w:
        assert w.run(rank_program) == [True, True]


def test_ranks_that_disagree_on_the_split_see_it_in_what_they_are_told():
    call = Call(torch.bfloat16, False, "sum", False, torch.bfloat16, 8, 8, 128, 4, 0)
    one, two = (Agreement("matmul_reduce_scatter", call, Plan(split=split)).facts() for split in (1, 2))
    assert {name for name in one if one[name] != two[name]} == {"plan.split"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("a_t, b_t", [(False, False), (True, True), (True, False)])
def test_either_stride_order_of_both_operands_and_both_dtypes(dtype, a_t, b_t):
    a, b, _ = operands(2, 272, 136, 72, seed=1, dtype=dtype, a_t=a_t, b_t=b_t)
    with tw.virtual_world(2, device="cpu", sms=2) as w:
        (outs,) = run_calls(w, [(a, b, {})])
    assert outs[0].dtype == dtype
    assert_right(outs, a, b)


def test_strided_misaligned_and_expanded_inputs_are_right():
    a, b, _ = operands(2, 64, 64, 64, seed=3)
    wide = [torch.randn(64, 160).bfloat16() for _ in range(2)]
    cases = [
        ([x[:, ::2][:, :64] for x in wide], b),  # steps of two
        ([x[:, 1:65] for x in wide], b),  # rows that start at odd addresses
        ([x[:, :64] for x in wide], b),  # long rows: no copy needed
        (a, [x[:1].expand(64, 64) for x in b]),  # stride zero
    ]
    with tw.virtual_world(2, device="cpu", sms=2) as w:
        for outs, (a, b) in zip(run_calls(w, [(a, b, {}) for a, b in cases]), cases, strict=True):
            assert_right(outs, a, b)


@pytest.mark.parametrize("deterministic", MODES)
def test_float32_results_avg_and_bias(deterministic):
    a, b, bias = operands(3, 3 * 40, 72, 128, seed=5, bias=True)
    with tw.virtual_world(3, device="cpu", sms=2) as w:
        (outs,) = run_calls(
            w, [(a, b, dict(op="avg", bias=bias, out_dtype=torch.float32))], deterministic=deterministic
        )
    assert outs[0].dtype == torch.float32
    assert_right(outs, a, b, op="avg", bias=bias, deterministic=deterministic)


@pytest.mark.parametrize("m, n, k", [(0, 64, 64), (4, 0, 64), (4, 64, 0), (0, 0, 0), (2, 1, 1), (2, 8, 8), (4, 1, 0)])
def test_empty_and_single_sizes(m, n, k):
    a, b, bias = operands(2, m, n, k, seed=2, bias=True)
    with tw.virtual_world(2, device="cpu", sms=2) as w:
        for outs in run_calls(w, [(a, b, dict(bias=bias))] * 2):
            assert_right(outs, a, b, bias=bias)


def test_deterministic_results_do_not_depend_on_the_schedule():
    a, b, _ = operands(4, 4 * 40, 128, 128, seed=7)
    bits = []
    for seed in range(6):
        with tw.virtual_world(4, device="cpu", seed=seed, sms=2) as w:
            bits.append(torch.cat(run_calls(w, [(a, b, dict(deterministic=True))])[0]))
    assert all(torch.equal(bits[0], x) for x in bits[1:])


def test_torch_deterministic_mode_chooses_the_deterministic_path():
    a, b, _ = operands(3, 72, 64, 64, seed=1)
    with tw.virtual_world(3, device="cpu") as w:
        torch.use_deterministic_algorithms(True)
        try:
            routes = w.run(lambda rank, group: tw.explain("matmul_reduce_scatter", a[rank], b[rank], group))
        finally:
            torch.use_deterministic_algorithms(False)
        plain = w.run(lambda rank, group: tw.explain("matmul_reduce_scatter", a[rank], b[rank], group))
    assert all("place per source" in r.plan.reason for r in routes)
    assert all("TMA add" in r.plan.reason for r in plain)


def test_two_ranks_keep_their_parts_apart_anyway():
    a, b, _ = operands(2, 64, 64, 64, seed=1)
    with tw.virtual_world(2, device="cpu") as w:
        routes = w.run(lambda rank, group: tw.explain("matmul_reduce_scatter", a[rank], b[rank], group))
    assert all("place per source" in r.plan.reason for r in routes)


@pytest.mark.parametrize("n, k", [(100, 64), (64, 36), (1, 1)])
def test_what_tma_cannot_address_falls_back_and_says_so(n, k):
    a, b, bias = operands(2, 16, n, k, seed=4, bias=True)
    with tw.virtual_world(2, device="cpu") as w:
        (outs,) = run_calls(w, [(a, b, dict(bias=bias))])
        routes = w.run(lambda rank, group: tw.explain("matmul_reduce_scatter", a[rank], b[rank], group))
    assert_right(outs, a, b, bias=bias)
    for r in routes:
        assert (r.fused, r.backend, r.plan, r.predicted_us) == (False, "fallback", None, None)
        assert "multiple of 8" in r.reason


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize("k", [8, 7])  # fused, fallback
@pytest.mark.parametrize("world", [2, 3])
def test_a_mean_that_fp16_can_hold_does_not_overflow_on_the_way(world, k, deterministic):
    a = [torch.full((world * 8, k), 40000.0 / k).half()] * world
    b = [torch.ones(k, 8).half()] * world
    with tw.virtual_world(world, device="cpu", sms=2) as w:
        (outs,) = run_calls(w, [(a, b, dict(op="avg"))], deterministic=deterministic)
    assert_right(outs, a, b, op="avg")


def test_more_ranks_than_a_channel_has_words_for_fall_back():
    world = MAX_RANKS + 1
    a, b, _ = operands(1, world, 8, 8, seed=1)
    with tw.virtual_world(world, device="cpu", sms=1) as w:
        routes = w.run(lambda rank, group: tw.explain("matmul_reduce_scatter", a[0], b[0], group))
    assert not routes[0].fused and f"{world} ranks, more than the {MAX_RANKS}" in routes[0].reason


def test_more_ranks_than_a_node_of_eight_or_a_rack_has():
    """72 ranks of one row each: every peer has a flag and a counter of its own."""
    world = 72
    a, b, _ = operands(world, world, 8, 8, seed=1)
    with tw.virtual_world(world, device="cpu", sms=1) as w:
        (outs,) = run_calls(w, [(a, b, dict(plan=SMALL, deterministic=True))])
    assert_right(outs, a, b, deterministic=True)


def test_explain_names_the_plan_and_launches_nothing():
    a, b, _ = operands(2, 512, 512, 256, seed=4)
    with tw.virtual_world(2, device="cpu") as w:
        r0, r1 = w.run(lambda rank, group: tw.explain("matmul_reduce_scatter", a[rank], b[rank], group))
    assert r0 == r1 and r0.fused and r0.backend == "emulated"
    assert (r0.plan.mechanism, r0.plan.schedule, r0.plan.comm_sms) == ("tma", "intra_sm", 0)
    assert r0.predicted_us > 0 and "tiles" in r0.reason
    assert set(r0.plan.to_dict()) >= {"mechanism", "schedule", "tile", "stages", "comm_sms", "predicted_us", "reason"}


GOOD = dict(a=torch.zeros(4, 8).bfloat16(), b=torch.zeros(8, 16).bfloat16())
WRONG = [
    (dict(a=torch.zeros(4, 16).bfloat16()), ValueError, r"\[4, 16\].*\[8, 16\]"),
    (dict(a=torch.zeros(5, 8).bfloat16()), ValueError, "5 rows, not divisible by the world size 2; 4 or 6"),
    (dict(b=torch.zeros(8, 16).half()), ValueError, "bfloat16.*float16"),
    (dict(a=torch.zeros(4, 8), b=torch.zeros(8, 16)), ValueError, "float32"),
    (dict(a=torch.zeros(2, 4, 8).bfloat16()), ValueError, r"\[2, 4, 8\]"),
    (dict(b=torch.zeros(8, 16, device="meta").bfloat16()), ValueError, "meta"),
    (dict(b=[1.0]), TypeError, "b must be a torch.Tensor, got list"),
    (dict(a=None), TypeError, "a must be a torch.Tensor, got NoneType"),
    (dict(op="max"), ValueError, "'sum' or 'avg', got 'max'"),
    (dict(bias=torch.zeros(8).bfloat16()), ValueError, r"bias must be \[16\].*got \[8\]"),
    (dict(bias=torch.zeros(16)), ValueError, "float32"),
    (dict(out_dtype=torch.float16), ValueError, "out_dtype"),
    (dict(op=["sum"]), ValueError, "'sum' or 'avg'"),
    (dict(deterministic="no"), TypeError, "True, False or None, got 'no'"),
    (dict(max_sms=2**31), ValueError, "max_sms must be from 1 to .*, or None for all, got 2147483648"),
    (dict(a=torch.zeros(4, 8).bfloat16().to_sparse()), TypeError, "a must be a dense tensor.*to_dense"),
    (dict(plan="fast"), TypeError, "Plan"),
    (dict(plan=Plan(mechanism="multimem")), ValueError, "'tma'"),
    (dict(plan=Plan(schedule="two_shot")), ValueError, "has 'intra_sm', 'inter_sm', 'one_shot', 'none'"),
    (dict(plan=Plan(schedule="inter_sm")), ValueError, r"plan\.comm_sms=0: the inter_sm schedule has 1 to"),
    (dict(plan=Plan(schedule="none", comm_sms=1)), ValueError, r"plan\.comm_sms=1: the none schedule has 0"),
    (dict(plan=Plan(tile=(100, 256, 64))), ValueError, "128 or 256"),
    (dict(plan=Plan(stages=9)), ValueError, "shared memory"),
    (dict(plan=Plan(tile=(64, 64, 64), split=2)), ValueError, r"plan\.split=2: expected 1 to 1"),
    (dict(out_dtype="float32"), TypeError, r"out_dtype must be a torch\.dtype or None, got str"),
    (dict(max_sms=0), ValueError, "max_sms must be from 1 to .*, or None for all, got 0"),
    (dict(max_sms=2.0), TypeError, "max_sms must be an int or None, got float"),
]


@pytest.mark.parametrize("change, error, text", WRONG)
def test_wrong_input_raises_on_every_rank_before_anything_is_launched(change, error, text):
    def rank_program(rank, group):
        arguments = {**GOOD, **change}
        with pytest.raises(error, match=text):
            tw.matmul_reduce_scatter(arguments.pop("a"), arguments.pop("b"), group, **arguments)
        return True

    with tw.virtual_world(2, device="cpu") as w:
        assert w.run(rank_program) == [True, True]


def test_explain_knows_its_ops():
    with pytest.raises(ValueError, match="matmul_reduce_scatter"):
        tw.explain("matmul_all_to_none")


@pytest.mark.parametrize(
    "op, args, kwargs, text",
    [
        (
            "matmul_reduce_scatter",
            (1,),
            {},
            r"missing a required argument: 'b'; the op is matmul_reduce_scatter\(a, b,",
        ),
        ("matmul_all_reduce", (1, 2), dict(op="avg"), r"keyword argument 'op'; the op is matmul_all_reduce\(a, b,"),
        ("all_to_all", (1,), {}, r"required.* argument: 'split_dim'; the op is all_to_all\(x, group=None, \*, split"),
        ("all_gather", (1, None, 0), {}, r"too many positional arguments; the op is all_gather\(x, group=None, \*,"),
    ],
)
def test_explain_names_the_signature_that_arguments_do_not_fit(op, args, kwargs, text):
    with pytest.raises(TypeError, match=text):
        tw.explain(op, *args, **kwargs)
