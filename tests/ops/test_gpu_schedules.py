"""matmul_reduce_scatter's schedules beside the default on virtual ranks of a real GPU, against the float32 truth."""

import threading

import pytest
import torch

import tileweave as tw
from tests.fabric.test_virtual import capture
from tests.ops.problems import assert_right, operands, run_calls
from tileweave import FabricTimeout, Plan
from tileweave.fabric import fabric_of

pytestmark = pytest.mark.gpu
MODES = [False, True]


def plan(schedule, comm_sms=1, tile=(128, 256, 64), stages=4, split=1):
    """A plan; only inter_sm has communicators."""
    return Plan(
        schedule=schedule, tile=tile, stages=stages, split=split, comm_sms=comm_sms if schedule == "inter_sm" else 0
    )


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize("schedule, comm_sms", [("inter_sm", 1), ("inter_sm", 4), ("none", 0)])
@pytest.mark.parametrize(
    "world, m, n, k",
    [
        (1, 1000, 776, 520),
        (2, 2048, 2048, 512),
        (3, 3 * 104, 328, 200),
        (4, 4 * 520, 1032, 72),
        (5, 5 * 8, 72, 264),
        (8, 8 * 1032, 1032, 128),
    ],
)
def test_world_sizes_ragged_shapes_four_calls(world, m, n, k, schedule, comm_sms, deterministic):
    if world == 1 and schedule == "inter_sm":
        pytest.skip("nobody to send to")
    calls = []
    for i in range(4):
        a, b, bias = operands(world, m, n, k, seed=i, dtype=torch.bfloat16, bias=True, device="cuda")
        calls.append((a, b, dict(bias=bias, deterministic=deterministic, op=("sum", "avg")[i % 2])))
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        results = run_calls(w, calls, plan=plan(schedule, comm_sms))
    for outs, (a, b, kw) in zip(results, calls, strict=True):
        assert_right(outs, a, b, **kw)


@pytest.mark.parametrize("tile, stages", [((128, 64, 64), 8), ((64, 256, 64), 4), ((256, 128, 64), 4)])
@pytest.mark.parametrize("dtype, out", [(torch.float16, None), (torch.bfloat16, torch.float32)])
def test_tiles_types_and_stride_orders(dtype, out, tile, stages):
    for schedule in ("inter_sm", "none"):
        for deterministic in MODES:
            a, b, bias = operands(
                3, 3 * 1000, 1032, 264, seed=3, dtype=dtype, a_t=True, b_t=deterministic, bias=True, device="cuda"
            )
            kw = dict(bias=bias, out_dtype=out, deterministic=deterministic)
            with tw.virtual_world(3, device="cuda", timeout=5.0) as w:
                results = run_calls(w, [(a, b, kw)] * 3, plan=plan(schedule, 3, tile, stages))
            for outs in results:
                assert outs[0].dtype == (out or dtype)
                assert_right(outs, a, b, bias=bias, deterministic=deterministic)


@pytest.mark.parametrize("schedule", ["inter_sm", "none"])
def test_tiles_that_several_ctas_share(schedule):
    for deterministic in MODES:
        calls = [(*operands(2, 2 * 200, 264, 1032, seed=i, device="cuda")[:2], {}) for i in range(4)]
        with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
            chosen = plan(schedule, 2, (128, 128, 64), 4, 3)
            results = run_calls(w, calls, deterministic=deterministic, plan=chosen)
        for outs, (a, b, _) in zip(results, calls, strict=True):
            assert_right(outs, a, b, deterministic=deterministic)


def test_fifty_calls_of_all_schedules_shapes_and_modes_on_one_workspace():
    world = 4
    shapes = [
        (2048, 2048, 256, dict(plan=plan("inter_sm", 4))),
        (1024, 264, 64, dict(deterministic=True, plan=plan("intra_sm"))),
        (4, 1032, 512, dict(plan=plan("inter_sm", 1, (128, 64, 64), 6))),
        (4096, 1032, 128, dict(deterministic=True, plan=plan("inter_sm", 2))),
        (512, 128, 8, dict(op="avg", plan=plan("none"))),
    ]
    calls = [
        (*operands(world, m, n, k, seed=10 * i + j, device="cuda")[:2], kw)
        for i in range(10)
        for j, (m, n, k, kw) in enumerate(shapes)
    ]
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        for outs, (a, b, kw) in zip(run_calls(w, calls), calls, strict=True):
            assert_right(outs, a, b, op=kw.get("op", "sum"), deterministic=kw.get("deterministic", False))
        assert not w.workspace.ops["matmul_reduce_scatter"].adding.any()


@pytest.mark.parametrize("schedule", ["inter_sm", "one_shot", "none"])
def test_replays_of_a_graph_with_new_data_between_eager_calls(schedule):
    world, chosen = 3, plan(schedule, 2)
    data = [operands(world, world * 520, 1032, 264, seed=i, device="cuda")[:2] for i in range(20)]

    def rank_program(rank, group):
        a, b = (x[rank].clone() for x in data[0])

        def call():
            return tw.matmul_reduce_scatter(a, b, group, plan=chosen)

        call()
        torch.cuda.synchronize()
        fabric_of(group).rendezvous()
        graph, out = capture(call)
        replayed, eager = [], []
        for x, y in data:
            a.copy_(x[rank])
            b.copy_(y[rank])
            fabric_of(group).rendezvous()
            graph.replay()
            replayed.append(out.clone())
            eager.append(call())
        return replayed + eager

    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        results = list(zip(*w.run(rank_program), strict=True))
    for outs, (a, b) in zip(results, data * 2, strict=True):
        assert_right(outs, a, b)


@pytest.mark.parametrize("schedule", ["inter_sm", "one_shot"])
def test_an_absent_rank_gives_a_timeout_and_the_world_works_again(schedule):
    """Rank 1 launches a kernel that never tells of what it sends: the others' waits end, the result is NaN."""
    a, b, _ = operands(3, 3 * 256, 256, 128, seed=1, device="cuda")
    chosen = plan(schedule, 2)
    with tw.virtual_world(3, device="cuda", timeout=1.0) as w:
        run_calls(w, [(a, b, {})], plan=chosen)
        kept, lock = {}, threading.Lock()

        def rank_program(rank, group):
            out = tw.matmul_reduce_scatter(a[rank], b[rank], group, plan=chosen)
            with lock:
                kept[rank] = out

        w.workspace.ops["matmul_reduce_scatter"].state[1, 0] -= 1  # a call behind for good
        with pytest.raises(FabricTimeout, match=r"matmul_reduce_scatter: rank [02] waited"):
            w.run(rank_program)
        assert kept[0].isnan().any() and kept[2].isnan().any()
        (outs,) = run_calls(w, [(a, b, {})], plan=chosen)
    assert_right(outs, a, b)


@pytest.mark.parametrize(
    "world, rows, n, k, tile, split",
    [
        (2, 1, 8192, 4096, (64, 64, 64), 1),
        (2, 32, 4096, 1024, (64, 128, 64), 2),
        (3, 24, 328, 200, (64, 64, 64), 1),
        (4, 40, 1032, 520, (128, 128, 64), 1),
        (8, 5, 776, 264, (128, 256, 64), 1),
        (8, 100, 72, 1032, (256, 64, 64), 1),
    ],
)
def test_one_shot_of_few_rows(world, rows, n, k, tile, split):
    for dtype, out in ((torch.bfloat16, None), (torch.float16, torch.float32)):
        calls = []
        for i in range(4):
            a, b, bias = operands(world, world * rows, n, k, seed=i, dtype=dtype, bias=True, device="cuda")
            calls.append((a, b, dict(bias=bias, out_dtype=out, op=("sum", "avg")[i % 2])))
        with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
            results = run_calls(w, calls, plan=plan("one_shot", 0, tile, 4, split))
        for outs, (a, b, kw) in zip(results, calls, strict=True):
            assert_right(outs, a, b, op=kw["op"], bias=kw["bias"], deterministic=True)
