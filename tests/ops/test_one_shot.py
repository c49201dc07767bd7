"""matmul_reduce_scatter's schedule for few rows, whose tiles have rows of several ranks, in emulated worlds."""

import ast
from pathlib import Path

import pytest
import torch

import tileweave as tw
from tests.ops.problems import assert_right, operands, run_calls
from tests.ops.test_schedules import plan
from tileweave import Plan
from tileweave.ops.matmul_reduce_scatter import kernel

SMALL = (64, 64, 64)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "world, rows, n, k, tile, split",
    [
        (2, 1, 72, 136, SMALL, 1),  # a tile that all ranks have rows of
        (2, 40, 200, 72, (128, 64, 64), 1),  # and one whose second multiplier has the other's,
        (3, 24, 136, 200, (64, 128, 64), 2),  # one that two CTAs share
        (3, 72, 72, 72, (256, 64, 64), 1),
        (4, 100, 72, 72, (128, 64, 64), 1),  # tiles of one rank and tiles of two
        (8, 5, 72, 136, SMALL, 3),
        (2, 256, 72, 72, SMALL, 1),  # more rows than a tile, and just so many tiles as go together
    ],
)
def test_every_world_size_and_ragged_shapes(world, rows, n, k, tile, split, deterministic):
    calls = []
    for i in range(3):  # the third call uses the first one's slot again
        a, b, bias = operands(world, world * rows, n, k, seed=i, bias=True)
        calls.append((a, b, dict(bias=bias)))
    with tw.virtual_world(world, device="cpu", seed=world + split, sms=8) as w:
        results = run_calls(w, calls, deterministic=deterministic, plan=plan("one_shot", tile=tile, split=split))
    for outs, (a, b, kw) in zip(results, calls, strict=True):
        assert_right(outs, a, b, deterministic=True, **kw)


@pytest.mark.parametrize(
    "dtype, out, op",
    [(torch.float16, None, "avg"), (torch.bfloat16, torch.float32, "avg"), (torch.float16, torch.float32, "sum")],
)
def test_other_types_means_and_stride_orders(dtype, out, op):
    a, b, bias = operands(3, 3 * 20, 136, 200, seed=3, dtype=dtype, a_t=True, b_t=False, bias=True)
    a = [x.t().contiguous().t()[: 3 * 16] for x in a]  # TMA takes columns of whole 16 bytes
    kw = dict(op=op, bias=bias, out_dtype=out, plan=plan("one_shot"))
    with tw.virtual_world(3, device="cpu", sms=4) as w:
        (outs,) = run_calls(w, [(a, b, kw)])
    assert outs[0].dtype == (out or dtype)
    assert_right(outs, a, b, op=op, bias=bias, deterministic=True)


@pytest.mark.parametrize("m, n, k", [(0, 64, 64), (4, 0, 64), (4, 64, 0), (2, 8, 8)])
def test_empty_and_single_sizes(m, n, k):
    a, b, bias = operands(2, m, n, k, seed=2, bias=True)
    with tw.virtual_world(2, device="cpu", sms=2) as w:
        for outs in run_calls(w, [(a, b, dict(bias=bias))] * 2, plan=plan("one_shot")):
            assert_right(outs, a, b, bias=bias)


@pytest.mark.parametrize("late", [0, 2])
def test_calls_of_all_schedules_and_changing_shapes_on_one_workspace_one_rank_late(late):
    shapes = [
        (3 * 20, 136, 64, plan("one_shot")),
        (3 * 136, 72, 64, plan("intra_sm")),
        (3 * 8, 264, 128, plan("one_shot", tile=SMALL)),
        (3 * 72, 72, 72, plan("inter_sm", 2)),
        (3 * 1, 72, 72, plan("one_shot")),
        (3 * 20, 128, 72, plan("none")),
    ]
    calls = []
    for i, (m, n, k, chosen) in enumerate(shapes):
        kw = dict(plan=chosen, deterministic=bool(i % 2) ^ bool(late))
        calls.append((*operands(3, m, n, k, seed=i)[:2], kw))
    with tw.virtual_world(3, device="cpu", seed=late, sms=4, delayed=(late,)) as w:
        for _ in range(2):  # once for the workspace to grow, once more so that the ranks may drift apart
            for outs, (a, b, kw) in zip(run_calls(w, calls), calls, strict=True):
                assert_right(outs, a, b, deterministic=kw["deterministic"])


def test_equal_inputs_give_equal_bits_whatever_comes_first():
    a, b, _ = operands(3, 3 * 20, 128, 128, seed=7)
    bits = []
    for seed in range(4):
        with tw.virtual_world(3, device="cpu", seed=seed, sms=3) as w:
            bits.append(torch.cat(run_calls(w, [(a, b, dict(plan=plan("one_shot")))])[0]))
    assert all(torch.equal(bits[0], x) for x in bits[1:])


def test_few_rows_take_it_and_many_do_not():
    def chosen(m):
        a, b = torch.empty(m, 4096, dtype=torch.bfloat16), torch.empty(4096, 8192, dtype=torch.bfloat16)
        with tw.virtual_world(2, device="cpu", sms=132) as w:
            return w.run(lambda rank, group: tw.explain("matmul_reduce_scatter", a, b, group))[0].plan

    for m in (2, 16, 64, 128):
        assert chosen(m).schedule == "one_shot" and "few rows" in chosen(m).reason
    assert chosen(8192).schedule == "intra_sm"


def test_one_rank_has_nobody_to_send_to():
    a, b, _ = operands(1, 16, 64, 64, seed=1)
    with tw.virtual_world(1, device="cpu") as w, pytest.raises(ValueError, match="a world of one has 'intra_sm'"):
        run_calls(w, [(a, b, dict(plan=Plan(schedule="one_shot")))])


ROLES = {"locate_in_whole", "averaged", "store_to_owners", "publish_to_all"}


def test_one_shot_adds_fewer_than_fifty_lines_to_the_kernel():
    """Decorators and all, but for docstrings; the sums behind the tiles, which all-reduce has too, are in tiles/."""
    text = Path(kernel.__file__).read_text()
    count = text[text.index("    if ONE_SHOT:\n        epoch") : text.index("    else:\n        run_matmul(")].count(
        "\n"
    )
    roles = [x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef) and x.name in ROLES]
    for role in roles:
        docstring = role.body.pop(0)
        length = role.end_lineno - role.decorator_list[0].lineno + 1
        count += length - (docstring.end_lineno - docstring.lineno + 1)
    assert len(roles) == len(ROLES) and 30 < count < 50, count
