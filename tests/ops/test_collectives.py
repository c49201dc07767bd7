"""The collectives in emulated worlds: the real device code under hostile schedules, against the truth."""

import pytest
import torch

import tileweave as tw
from tests.ops.collectives import assert_right, inputs, run_calls
from tileweave.fabric import MAX_RANKS
from tileweave.fabric.base import HEADER_WORDS
from tileweave.ops.collectives import launch, passes, reference

ONE_SHOT, TWO_SHOTS = 1 << 40, 0


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small tiles and steps, so that small problems have many of both."""
    monkeypatch.setattr(passes, "TILE", 64)
    monkeypatch.setattr(passes, "STEP_TILES", 2)
    monkeypatch.setattr(passes, "STEPS", 4)


def check(world, calls, seed=0, sms=3, **options):
    """Run the calls in an emulated world, compare all results; the schedule's seed and late ranks are options."""
    with tw.virtual_world(world, device="cpu", seed=seed, sms=sms, **options) as w:
        for outs, (name, xs, kw) in zip(run_calls(w, calls), calls, strict=True):
            assert_right(name, outs, xs, **kw)


def every_collective(world, seed, width=40):
    """Calls of each collective on different dimensions, ragged but where a dimension is shared."""
    return [
        ("all_gather", inputs(world, (3, width, 7), seed), dict(dim=1)),
        ("reduce_scatter", inputs(world, (5, 2 * world, width), seed + 1), dict(dim=1)),
        ("all_to_all", inputs(world, (3 * world, 5, width), seed + 2), dict(split_dim=0, concat_dim=2)),
        ("all_reduce", inputs(world, (11, width), seed + 3), dict(op="avg")),
        ("all_gather", inputs(world, (width, 16), seed + 4, torch.float32), {}),
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("shots", [ONE_SHOT, TWO_SHOTS])
def test_every_world_size_under_several_schedules(world, shots, monkeypatch):
    monkeypatch.setattr(passes, "ONE_SHOT_BYTES", shots)
    for seed in range(4 if world < 5 else 1):
        check(world, every_collective(world, 10 * seed) + every_collective(world, 10 * seed + 5), seed)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_changing_shapes_on_one_workspace_with_one_rank_late(late):
    calls = [call for i, width in enumerate((40, 200, 8)) for call in every_collective(3, 20 * i, width)]
    with tw.virtual_world(3, device="cpu", seed=late, sms=2, delayed=(late,)) as w:
        # once for the workspace to grow (growing makes the ranks meet), once more so that they may drift apart
        for _ in range(2):
            for outs, (name, xs, kw) in zip(run_calls(w, calls), calls, strict=True):
                assert_right(name, outs, xs, **kw)


@pytest.mark.parametrize("shape", [(12,), (4, 12), (2, 8, 24), (2, 3, 4, 8), (1, 1, 1, 4, 1)])
def test_any_dimension_of_any_tensor(shape):
    world, calls = 4, []
    for dim in range(-len(shape), len(shape)):
        shared = tuple(n * world if i == dim % len(shape) else n for i, n in enumerate(shape))
        calls.append(("all_gather", inputs(world, shape, dim), dict(dim=dim)))
        calls.append(("reduce_scatter", inputs(world, shared, dim), dict(dim=dim)))
        for other in range(len(shape)):
            calls.append(("all_to_all", inputs(world, shared, other), dict(split_dim=dim, concat_dim=other)))
    check(world, calls)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 16, 40, 41])
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn),
        *(torch.int8, torch.bool, torch.int64, torch.complex128),
    ],
)
def test_any_dtype_is_moved_whatever_the_length_of_rows(dtype, n):
    """Rows of n elements: accesses of 16, 8, 4, 2 and 1 bytes."""
    world = 3

    def as_bytes(x):
        return x.view(torch.uint8) if dtype is torch.float8_e4m3fn else x

    xs = inputs(world, (5, n), n, dtype)
    parts = inputs(world, (world, 5, n), n, dtype)
    with tw.virtual_world(world, device="cpu", sms=2) as w:
        calls = [("all_gather", xs, dict(dim=1)), ("all_to_all", parts, dict(split_dim=0, concat_dim=2))]
        for outs, (name, given, kw) in zip(run_calls(w, calls), calls, strict=True):
            true = reference(name, [as_bytes(x) for x in given], **kw)
            assert all(x.dtype == dtype and torch.equal(as_bytes(x), y) for x, y in zip(outs, true, strict=True))


@pytest.mark.parametrize("shots", [ONE_SHOT, TWO_SHOTS])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_of_every_dtype_and_odd_lengths(dtype, op, shots, monkeypatch):
    monkeypatch.setattr(passes, "ONE_SHOT_BYTES", shots)
    calls = []
    for n in (1, 2, 7, 8, 100, 333):
        calls.append(("all_reduce", inputs(3, (n,), n, dtype), dict(op=op)))
        calls.append(("reduce_scatter", inputs(3, (5, 3, n), n, dtype), dict(op=op, dim=1)))
        calls.append(("reduce_scatter", inputs(3, (5, 3 * n), n, dtype), dict(op=op, dim=-1)))
    calls.append(("all_reduce", inputs(3, (), 1, dtype), dict(op=op)))
    check(3, calls)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.int64, torch.complex64])
def test_sums_that_the_kernel_does_not_make_fall_back(dtype):
    xs = inputs(2, (4, 6), 1, dtype)
    with tw.virtual_world(2, device="cpu") as w:
        for kw in ({}, dict(deterministic=True)):
            shares = w.run(lambda rank, group, kw=kw: tw.reduce_scatter(xs[rank], group, dim=1, **kw))
            wholes = w.run(lambda rank, group, kw=kw: tw.all_reduce(xs[rank], group, **kw))
            torch.testing.assert_close(torch.cat(shares, 1), xs[0] + xs[1])
            assert all(torch.equal(x, xs[0] + xs[1]) for x in wholes)
        route = w.run(lambda rank, group: tw.explain("all_reduce", xs[rank], group))[0]
    assert not route.fused and route.backend == "fallback" and f"not {dtype}" in route.reason


def test_strided_misaligned_expanded_and_lazily_conjugated_inputs():
    wide = inputs(2, (16, 40), 1)
    complex_ = inputs(2, (4, 8), 2, torch.complex64)
    views = [
        [x[:, ::2] for x in wide],
        [x.t() for x in wide],
        [x.view(-1)[1:-31].view(-1, 8) for x in wide],  # contiguous, at an odd address
        [x[:1].expand(16, 40) for x in wide],
        [x.conj() for x in complex_],
        [x.conj().imag for x in complex_],
    ]
    calls = []
    for xs in views:
        calls.append(("all_gather", xs, dict(dim=1)))
        calls.append(("all_to_all", xs, dict(split_dim=0, concat_dim=1)))
        if not xs[0].is_complex():
            calls.append(("reduce_scatter", xs, {}))
            calls.append(("all_reduce", xs, {}))
    check(2, calls)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (4, 0), (2, 0, 3)])
def test_empty_tensors(shape):
    xs = inputs(2, shape, 1)
    calls = [(name, xs, {}) for name in ("all_gather", "reduce_scatter", "all_reduce")]
    check(2, [*calls, ("all_to_all", xs, dict(split_dim=0, concat_dim=-1))])


@pytest.mark.parametrize("shots", [ONE_SHOT, TWO_SHOTS])
def test_results_do_not_depend_on_the_schedule(shots, monkeypatch):
    monkeypatch.setattr(passes, "ONE_SHOT_BYTES", shots)
    xs = inputs(4, (4 * 33, 5), 1)
    bits = []
    for seed in range(5):
        with tw.virtual_world(4, device="cpu", seed=seed, sms=2) as w:
            bits.append(
                [torch.cat(outs) for outs in run_calls(w, [(n, xs, {}) for n in ("reduce_scatter", "all_reduce")])]
            )
    assert all(torch.equal(x, y) for each in bits for x, y in zip(bits[0], each, strict=True))


@pytest.mark.parametrize("start", [2**27 - 3, 2**31 - 3, -2])
def test_epochs_and_flags_wrap(start):
    """A flag is 16 times the epoch: it wraps at 2**27 calls already."""
    calls = every_collective(3, 1)
    with tw.virtual_world(3, device="cpu", sms=2) as w:
        run_calls(w, calls)
        shared = w.workspace.ops["collectives"]
        shared.state[:, 0] = start
        shared.flags[:, HEADER_WORDS:] = (start * launch.STEPS + 2**31) % 2**32 - 2**31
        for outs, (name, xs, kw) in zip(run_calls(w, calls), calls, strict=True):
            assert_right(name, outs, xs, **kw)


def test_a_mean_that_fp16_can_hold_does_not_overflow_on_the_way():
    xs = [torch.full((6, 8), 40000.0).half()] * 3
    check(3, [("all_reduce", xs, dict(op="avg")), ("reduce_scatter", xs, dict(op="avg"))])
    huge = [torch.full((6, 8), 3e38)] * 3
    check(3, [("all_reduce", huge, dict(op="avg"))])


@pytest.mark.parametrize("world, fused", [(72, True), (MAX_RANKS + 1, False)])
def test_many_ranks(world, fused):
    xs, parts = inputs(world, (1, 3), 1), inputs(world, (world, 3), 2)
    with tw.virtual_world(world, device="cpu", sms=1) as w:
        routes = w.run(lambda rank, group: tw.explain("all_gather", xs[rank], group, dim=1))
        assert {route.fused for route in routes} == {fused}
        calls = [("all_gather", xs, dict(dim=1)), ("reduce_scatter", parts, {})]
        for outs, (name, given, kw) in zip(run_calls(w, calls), calls, strict=True):
            assert_right(name, outs, given, **kw)


def test_explain_tells_the_path_and_launches_nothing():
    xs = inputs(4, (4, 1024), 1)
    with tw.virtual_world(4, device="cpu") as w:
        for name, kw in (("all_gather", {}), ("reduce_scatter", dict(op="avg")), ("all_reduce", dict(op="sum"))):
            first, *others = w.run(lambda rank, group, name=name, kw=kw: tw.explain(name, xs[rank], group, **kw))
            assert first.op == name and first.fused and first.backend == "emulated" and "16-byte" in first.reason
            assert all(route == first for route in others) and first.predicted_us is None
        assert w.workspace.ops == {}
    route = tw.explain("all_to_all", xs[0], split_dim=0, concat_dim=1)
    assert not route.fused and "one rank: the result is a copy" in route.reason


def test_a_world_of_one_copies():
    x = inputs(1, (4, 6), 1)[0]
    for out in (tw.all_gather(x), tw.reduce_scatter(x.t()).t(), tw.all_reduce(x, op="avg")):
        assert torch.equal(out, x) and out.data_ptr() != x.data_ptr()


WRONG = [
    ("all_gather", (torch.zeros(()),), {}, ValueError, r"at least one dimension"),
    ("all_gather", (torch.zeros(2, 3),), dict(dim=2), ValueError, r"dim must be from -2 to 1 .*\[2, 3\], got 2"),
    ("all_gather", (torch.zeros(2, 3),), dict(dim=1.0), TypeError, "dim must be an int, got 1.0"),
    ("all_gather", ([1.0],), {}, TypeError, "x must be a torch.Tensor, got list"),
    ("all_gather", (torch.zeros(2, 3).to_sparse(),), {}, TypeError, "x must be a dense tensor.*to_dense"),
    ("reduce_scatter", (torch.zeros(5, 3),), {}, ValueError, r"5 in dim=0, not divisible by the world size 2; 4 or 6"),
    ("reduce_scatter", (torch.zeros(4),), dict(op="max"), ValueError, "'sum' or 'avg', got 'max'"),
    ("reduce_scatter", (torch.zeros(4),), dict(deterministic=2), TypeError, "True, False or None, got 2"),
    ("reduce_scatter", (torch.zeros(4).bool(),), {}, ValueError, "can be summed, .* int64.*; got torch.bool"),
    ("reduce_scatter", (torch.zeros(4).to(torch.uint32),), {}, ValueError, "can be summed, .*got torch.uint32"),
    ("all_reduce", (torch.zeros(4).to(torch.int16),), {}, ValueError, "bfloat16, float16, float32, .*got torch.int16"),
    (
        "all_reduce",
        (torch.zeros(4).to(torch.float8_e4m3fn),),
        {},
        ValueError,
        "can be summed, .*got torch.float8_e4m3fn",
    ),
    ("all_reduce", (torch.zeros(4).int(),), dict(op="avg"), ValueError, "floating-point x, got torch.int32"),
    ("all_reduce", (torch.zeros(4),), dict(op=["sum"]), ValueError, "'sum' or 'avg'"),
    (
        "all_to_all",
        (torch.zeros(3, 4),),
        dict(split_dim=0, concat_dim=1),
        ValueError,
        "3 in split_dim=0, not divisible",
    ),
    ("all_to_all", (torch.zeros(4),), dict(split_dim=0, concat_dim=-2), ValueError, "concat_dim must be from -1 to 0"),
]


@pytest.mark.parametrize("name, args, options, error, text", WRONG)
def test_wrong_input_raises_on_every_rank_before_anything_is_launched(name, args, options, error, text):
    def rank_program(rank, group):
        for call in (getattr(tw, name), lambda *a, **kw: tw.explain(name, *a, **kw)):
            with pytest.raises(error, match=text):
                call(*args, group, **options)
        return True

    with tw.virtual_world(2, device="cpu") as w:
        assert w.run(rank_program) == [True, True]
        assert w.workspace.ops == {}


def test_ranks_that_disagree_are_told():
    with (
        tw.virtual_world(2, device="cpu") as w,
        pytest.raises(RuntimeError, match=r"reduce_scatter on rank 0, all_gather on rank 1$"),
    ):
        w.run(lambda r, g: tw.all_gather(torch.zeros(4), g) if r else tw.reduce_scatter(torch.zeros(4), g))
