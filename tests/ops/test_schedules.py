"""matmul_reduce_scatter's schedules beside the default, inter-SM and one after the other, in emulated worlds."""

import ast
from pathlib import Path

import pytest
import torch

import tileweave as tw
from tests.ops.problems import SHARED_TILES, assert_right, operands, run_calls
from tileweave import Plan
from tileweave.ops.matmul_reduce_scatter import kernel

MODES = [False, True]


def plan(schedule, comm_sms=1, tile=(128, 64, 64), stages=3, split=1):
    """A small plan."""
    return Plan(
        schedule=schedule, tile=tile, stages=stages, split=split, comm_sms=comm_sms if schedule == "inter_sm" else 0
    )


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize("schedule, comm_sms", [("inter_sm", 1), ("inter_sm", 3), ("none", 0)])
@pytest.mark.parametrize(
    "world, m, n, k",
    [
        (1, 130, 72, 136),
        (2, 2 * 200, 200, 72),
        (3, 3 * 136, 72, 200),
        (4, 32, 264, 8),
        (5, 200, 136, 64),
        (8, 64, 72, 8),
    ],
)
def test_every_world_size_and_ragged_shapes(world, m, n, k, schedule, comm_sms, deterministic):
    if world == 1 and schedule == "inter_sm":
        pytest.skip("nobody to send to")
    seed = 7 * comm_sms + deterministic
    calls = []
    for i in range(3):  # the third call uses the first one's slot again
        a, b, bias = operands(world, m, n, k, seed=10 * seed + i, bias=True)
        calls.append((a, b, dict(bias=bias)))
    with tw.virtual_world(world, device="cpu", seed=seed, sms=4) as w:
        results = run_calls(w, calls, deterministic=deterministic, plan=plan(schedule, comm_sms))
    for outs, (a, b, kw) in zip(results, calls, strict=True):
        assert_right(outs, a, b, deterministic=deterministic, **kw)


@pytest.mark.parametrize("schedule", ["inter_sm", "none"])
@pytest.mark.parametrize("world, m, n, k, sms, tile, split", [each for each in SHARED_TILES if each[0] in (2, 3)])
def test_tiles_that_several_ctas_share(world, m, n, k, sms, tile, split, schedule):
    for seed, deterministic in enumerate(MODES):
        calls = [(*operands(world, m, n, k, seed=i)[:2], {}) for i in range(2)]
        with tw.virtual_world(world, device="cpu", seed=seed, sms=64) as w:
            results = run_calls(w, calls, deterministic=deterministic, plan=plan(schedule, 2, tile, 2, split))
        for outs, (a, b, _) in zip(results, calls, strict=True):
            assert_right(outs, a, b, deterministic=deterministic)


@pytest.mark.parametrize("late", [0, 2])
def test_calls_of_all_schedules_and_changing_shapes_on_one_workspace_one_rank_late(late):
    world = 3
    shapes = [
        (3 * 200, 136, 64, plan("inter_sm", 2)),
        (3 * 136, 72, 64, plan("intra_sm")),
        (3 * 8, 264, 128, plan("inter_sm", 1, (64, 64, 64))),
        (3 * 264, 264, 8, plan("inter_sm", 3)),
        (3 * 72, 128, 72, plan("none")),
        (3 * 200, 64, 64, plan("inter_sm", 1, (128, 128, 64))),
    ]
    calls = []
    for i, (m, n, k, chosen) in enumerate(shapes):
        deterministic = bool(i % 2) ^ bool(late)
        calls.append((*operands(world, m, n, k, seed=i)[:2], dict(plan=chosen, deterministic=deterministic)))
    with tw.virtual_world(world, device="cpu", seed=late, sms=4, delayed=(late,)) as w:
        for _ in range(2):  # once for the workspace to grow, once more so that the ranks may drift apart
            for outs, (a, b, kw) in zip(run_calls(w, calls), calls, strict=True):
                assert_right(outs, a, b, deterministic=kw["deterministic"])


@pytest.mark.parametrize("schedule", ["inter_sm", "none"])
@pytest.mark.parametrize(
    "dtype, out, op",
    [(torch.float16, None, "avg"), (torch.bfloat16, torch.float32, "avg"), (torch.float16, None, "sum")],
)
def test_other_types_means_and_stride_orders(dtype, out, op, schedule):
    for deterministic in MODES:
        a, b, bias = operands(3, 3 * 136, 72, 200, seed=3, dtype=dtype, a_t=True, b_t=False, bias=True)
        kw = dict(op=op, bias=bias, out_dtype=out, deterministic=deterministic, plan=plan(schedule, 2))
        with tw.virtual_world(3, device="cpu", sms=4) as w:
            (outs,) = run_calls(w, [(a, b, kw)])
        assert outs[0].dtype == (out or dtype)
        assert_right(outs, a, b, op=op, bias=bias, deterministic=deterministic)


@pytest.mark.parametrize("schedule", ["inter_sm", "none"])
@pytest.mark.parametrize("m, n, k", [(0, 64, 64), (4, 0, 64), (4, 64, 0), (2, 8, 8)])
def test_empty_and_single_sizes(m, n, k, schedule):
    a, b, bias = operands(2, m, n, k, seed=2, bias=True)
    with tw.virtual_world(2, device="cpu", sms=2) as w:
        for outs in run_calls(w, [(a, b, dict(bias=bias))] * 2, plan=plan(schedule)):
            assert_right(outs, a, b, bias=bias)


@pytest.mark.parametrize("schedule", ["inter_sm", "none"])
def test_deterministic_results_do_not_depend_on_the_schedule_of_events(schedule):
    a, b, _ = operands(3, 3 * 40, 128, 128, seed=7)
    bits = []
    for seed in range(5):
        with tw.virtual_world(3, device="cpu", seed=seed, sms=3) as w:
            bits.append(torch.cat(run_calls(w, [(a, b, dict(deterministic=True, plan=plan(schedule)))])[0]))
    assert all(torch.equal(bits[0], x) for x in bits[1:])


def test_a_mean_that_fp16_can_hold_does_not_overflow_on_the_way():
    a = [torch.full((3 * 8, 8), 5000.0).half()] * 3
    b = [torch.ones(8, 8).half()] * 3
    for schedule in ("inter_sm", "none"):
        with tw.virtual_world(3, device="cpu", sms=2) as w:
            (outs,) = run_calls(w, [(a, b, dict(op="avg", plan=plan(schedule)))])
        assert_right(outs, a, b, op="avg")


# Roles that only the inter-SM schedule has, and its lines in those of both.
ROLES = ("owner_of", "tiles_in", "strip", "fetch_strip", "send_strip", "tell", "communicate")
LINES = """    if work.INTER:
        phase = t % per // work.block_tiles * work.flags.world + owner
        first = phase - work.flags.rank if work.INTER else 0
    elif work.INTER:
        gl.tma_store(work.home, [0, owner, row, col], buf)
        tiles = tiles_in(work, phase // work.flags.world) if work.INTER else tiles_per_owner(work)
            if work.INTER:
                gl.signal(work.flags, work.flags.rank, LAST_FLAG - phase, epoch)
"""


def test_inter_sm_adds_fewer_than_fifty_lines_to_the_kernel():
    """Decorators and all, but for docstrings; what all inter-SM kernels share is in tiles/."""
    text = Path(kernel.__file__).read_text()
    lines = LINES.splitlines()
    assert all(line in text.splitlines() for line in lines)
    count = len(lines)
    for role in ast.parse(text).body:
        if isinstance(role, ast.FunctionDef) and role.name in ROLES:
            docstring = role.body.pop(0)
            length = role.end_lineno - role.decorator_list[0].lineno + 1
            count += length - (docstring.end_lineno - docstring.lineno + 1)
    assert 40 < count < 50, count
