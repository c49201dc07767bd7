"""The op's schedule for few rows, which multiplies all ranks' rows as one matrix, in emulated worlds."""

import pytest
import torch

import tileweave as tw
from tests.ops.all_gather_matmul.problems import assert_right, operands, plan, run_calls

SMALL = (64, 64, 64)


def one_shot(**changes):
    """A plan of small tiles."""
    return plan(**{**dict(schedule="one_shot", stages=3), **changes})


@pytest.mark.parametrize("mechanism", ["tma", "register"])
@pytest.mark.parametrize(
    "world, rows, ns, k, tile, split",
    [
        (2, 1, [72], 136, SMALL, 1),  # a tile that has rows of all ranks
        (2, 40, [136, 8], 72, (64, 128, 64), 1),
        (3, 24, [72], 200, (128, 64, 64), 2),  # one that two CTAs share
        (4, 100, [136], 72, (128, 128, 64), 1),  # tiles of one rank and tiles of two
        (8, 5, [24, 72, 64], 72, SMALL, 1),
        (2, 256, [72], 72, SMALL, 1),  # more rows than a tile, and just so many tiles as go together
    ],
)
def test_every_world_size_and_ragged_shapes(world, rows, ns, k, tile, split, mechanism):
    chosen = one_shot(mechanism=mechanism, tile=tile, split=split, comm_sms=1 + world % 2)
    calls = []
    for i in range(3):  # the third call uses the first one's slot again
        calls.append((*operands(world, rows, ns, k, seed=i), dict(return_gathered=i != 1)))
    with tw.virtual_world(world, device="cpu", seed=world, sms=6) as w:
        results = run_calls(w, calls, plan=chosen)
    for outs, (a, b, bias, kw) in zip(results, calls, strict=True):
        assert_right(outs, a, b, bias, **kw)


@pytest.mark.parametrize("dtype, b_t", [(torch.float16, False), (torch.bfloat16, False), (torch.float16, True)])
def test_both_types_and_stride_orders_without_bias(dtype, b_t):
    a, b, _ = operands(3, 20, [136, 72], 72, seed=1, dtype=dtype, b_t=b_t)
    with tw.virtual_world(3, device="cpu", sms=3) as w:
        (outs,) = run_calls(w, [(a, b, None, {})], plan=one_shot())
    assert outs[0][0].dtype == dtype
    assert_right(outs, a, b)


@pytest.mark.parametrize("late", [0, 2])
def test_calls_of_all_schedules_and_changing_shapes_on_one_workspace_one_rank_late(late):
    shapes = [
        (20, [64], 136, one_shot()),
        (136, [72, 8], 72, plan()),
        (1, [64], 640, one_shot(mechanism="register", comm_sms=2)),
        (40, [72], 72, plan(schedule="intra_sm")),
        (72, [72, 64], 8, one_shot(tile=SMALL)),
        (20, [64], 72, plan(schedule="none", comm_sms=3)),
    ]
    calls = [(*operands(3, *s[:3], seed=i), dict(plan=s[3])) for i, s in enumerate(shapes)]
    with tw.virtual_world(3, device="cpu", seed=late, sms=3, delayed=(late,)) as w:
        for _ in range(2):  # once for the workspace to grow, once more so that the ranks may drift apart
            for outs, (a, b, bias, _) in zip(run_calls(w, calls), calls, strict=True):
                assert_right(outs, a, b, bias)


def test_few_rows_take_it_and_many_do_not():
    def chosen(rows):
        a, b = torch.empty(rows, 8192, dtype=torch.bfloat16), torch.empty(8192, 14336, dtype=torch.bfloat16)
        with tw.virtual_world(2, device="cpu", sms=132) as w:
            return w.run(lambda rank, group: tw.explain("all_gather_matmul", a, b, group))[0].plan

    for rows in (1, 8, 32, 64):
        assert chosen(rows).schedule == "one_shot" and "few rows" in chosen(rows).reason
    assert chosen(4096).schedule == "inter_sm"


def test_what_it_does_not_do_is_refused():
    a, b, _ = operands(2, 16, [64], 64, seed=1)
    scales = [torch.ones(1, 1), [torch.ones(1, 1)]]
    a, b = [x.to(torch.float8_e4m3fn) for x in a], [[y.to(torch.float8_e4m3fn) for y in x] for x in b]
    options = dict(scale_a=scales[0], scale_b=scales[1])
    with tw.virtual_world(2, device="cpu") as w, pytest.raises(ValueError, match="8-bit operands have scales"):
        run_calls(w, [(a, b, None, options)], plan=one_shot(tile=(64, 64, 128)))
    with tw.virtual_world(2, device="cpu") as w, pytest.raises(ValueError, match="has 'inter_sm', 'none' with"):
        run_calls(w, [(*operands(2, 16, [64], 64, seed=1), {})], plan=one_shot(mechanism="multimem"))
