"""The op on virtual ranks of a real GPU, against the float32 truth."""

import pytest
import torch

import tileweave as tw
from tests.fabric.test_virtual import capture
from tests.ops.all_gather_matmul.problems import WAYS, assert_right, operands, plan, run_calls, way_name
from tests.ops.all_gather_matmul.test_gradients import assert_near, gradients, problem, true_gradients
from tileweave import FabricTimeout
from tileweave.fabric import fabric_of
from tileweave.planner.tiling import TILINGS

pytestmark = pytest.mark.gpu
NAME = "all_gather_matmul"


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "world, rows, ns, k",
    [
        (1, 1000, [776], 520),
        (2, 1024, [1024, 136], 512),
        (3, 104, [328], 200),
        (4, 520, [1032, 64, 8], 72),
        (5, 8, [72], 264),
        (8, 264, [520], 1032),
    ],
)
def test_world_sizes_ragged_shapes_two_calls(world, rows, ns, k, dtype):
    calls = []
    for i in range(2):
        made = operands(world, rows, ns, k, seed=i, dtype=dtype, device="cuda")
        calls.append((*made, dict(return_gathered=i == 1)))
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        for outs, (a, b, bias, kw) in zip(run_calls(w, calls), calls, strict=True):
            assert_right(outs, a, b, bias, **kw)


@pytest.mark.parametrize("way", WAYS, ids=way_name)
@pytest.mark.parametrize("comm_sms", [1, 3, 8])
def test_ways_to_gather_and_communicators(way, comm_sms):
    chosen = plan(tile=(128, 256, 64), stages=4, **dict(way, comm_sms=comm_sms))
    calls = [(*operands(4, 520, [776], 1032, seed=i, device="cuda"), dict(return_gathered=i > 0)) for i in range(3)]
    with tw.virtual_world(4, device="cuda", timeout=5.0) as w:
        for outs, (a, b, bias, kw) in zip(run_calls(w, calls, plan=chosen), calls, strict=True):
            assert_right(outs, a, b, bias, **kw)


@pytest.mark.parametrize("mechanism", ["tma", "register"])
@pytest.mark.parametrize(
    "world, rows, ns, k, tile, split",
    [
        (2, 1, [8192], 4096, (64, 64, 64), 1),
        (2, 32, [3840, 136], 8192, (64, 128, 64), 2),
        (3, 24, [328], 200, (64, 64, 64), 1),
        (4, 40, [1032, 64, 8], 520, (128, 128, 64), 1),
        (8, 5, [776], 264, (128, 256, 64), 1),
        (8, 100, [72], 1032, (256, 64, 64), 1),
    ],
)
def test_one_shot_of_few_rows(world, rows, ns, k, tile, split, mechanism):
    chosen = plan(schedule="one_shot", mechanism=mechanism, tile=tile, stages=4, split=split, comm_sms=2)
    for dtype in (torch.bfloat16, torch.float16):
        calls = []
        for i in range(4):
            made = operands(world, rows, ns, k, seed=i, dtype=dtype, device="cuda")
            calls.append((*made, dict(return_gathered=i > 1)))
        with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
            for outs, (a, b, bias, kw) in zip(run_calls(w, calls, plan=chosen), calls, strict=True):
                assert_right(outs, a, b, bias, **kw)


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("tiling", TILINGS, ids=lambda each: f"{each.tile}, {each.stages}")
def test_tilings(tiling, split):
    chosen = plan(tile=tiling.tile, stages=tiling.stages, comm_sms=2, split=split)
    a, b, bias = operands(2, 100, [200], 1032, seed=1, device="cuda")
    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        for outs in run_calls(w, [(a, b, bias, dict(plan=chosen, return_gathered=True))] * 3):
            assert_right(outs, a, b, bias, True)


def test_strides_empty_and_unaddressable_sizes():
    a, b, bias = operands(2, 264, [136, 72], 136, seed=1, device="cuda")
    calls = [
        ([x.t().contiguous().t() for x in a], b, bias, {}),
        (a, [[x, y.contiguous()] for x, y in b], bias, {}),
        *((*operands(2, rows, ns, k, seed=2, device="cuda"), {}) for rows, ns, k in (
            (0, [64], 64), (4, [0, 8], 64), (4, [64], 0), (1, [1], 1), (256, [100], 64), (256, [64], 36),
        )),
    ]  # fmt: skip
    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        for outs, (x, y, z, _) in zip(run_calls(w, calls, return_gathered=True), calls, strict=True):
            assert_right(outs, x, y, z, True)


def test_fifty_calls_with_changing_shapes_and_plans():
    shapes = [
        (128, [512], 256, {}),
        (264, [264, 8], 64, dict(plan=plan(schedule="intra_sm", comm_sms=2))),
        (1, [1032], 512, dict(plan=plan(tile=(128, 64, 64), stages=6))),
        (512, [2048], 1032, dict(plan=plan(tile=(128, 256, 64), stages=4, comm_sms=5))),
        (128, [128], 8, dict(plan=plan(schedule="none", comm_sms=8))),
        (264, [264], 200, dict(plan=plan(mechanism="copy_engine", comm_sms=2))),
        (520, [512], 1024, dict(plan=plan(mechanism="register", comm_sms=3))),
    ]
    calls = [
        (*operands(4, rows, ns, k, seed=10 * i + j, device="cuda"), kw)
        for i in range(10)
        for j, (rows, ns, k, kw) in enumerate(shapes)
    ]
    with tw.virtual_world(4, device="cuda", timeout=5.0) as w:
        for outs, (a, b, bias, _) in zip(run_calls(w, calls), calls, strict=True):
            assert_right(outs, a, b, bias)


def test_an_absent_rank_gives_a_timeout_and_the_world_works_again():
    """Rank 1 has fallen a call behind for good: its peers wait for flags that never come."""
    a, b, bias = operands(3, 256, [256], 128, seed=1, device="cuda")
    with tw.virtual_world(3, device="cuda", timeout=1.0) as w:
        run_calls(w, [(a, b, bias, {})])
        kept = {}

        def rank_program(rank, group):
            kept[rank] = tw.all_gather_matmul(a[rank], b[rank], group)[0]

        w.workspace.ops[NAME].state[1, 0] -= 1
        with pytest.raises(FabricTimeout, match=rf"{NAME}: rank [02] waited") as caught:
            w.run(rank_program)
        assert caught.value.expected - caught.value.seen == 1
        assert kept[0][256:512].isnan().all() and kept[2][256:512].isnan().all()
        (outs,) = run_calls(w, [(a, b, bias, {})])
    assert_right(outs, a, b, bias)


def test_a_copy_engine_copies_blocks_of_megabytes():
    """More than one block of a source, several calls, the grid as large as it may be."""
    calls = [(*operands(2, 2048, [512], 4096, seed=i, device="cuda"), dict(return_gathered=True)) for i in range(3)]
    with tw.virtual_world(2, device="cuda", timeout=10.0) as w:
        chosen = plan(tile=(128, 256, 64), stages=4, mechanism="copy_engine", comm_sms=2)
        for outs, (a, b, bias, kw) in zip(run_calls(w, calls, plan=chosen), calls, strict=True):
            assert_right(outs, a, b, bias, **kw)


def test_copies_without_free_sms_are_refused():
    a, b, bias = operands(2, 128, [128], 64, seed=1, device="cuda")
    with tw.virtual_world(2, device="cuda", timeout=5.0) as w, pytest.raises(ValueError, match="1 at least"):
        run_calls(w, [(a, b, bias, {})], plan=plan(mechanism="copy_engine", comm_sms=0))


@pytest.mark.parametrize("way", WAYS, ids=way_name)
def test_hundreds_of_replays_with_new_data_between_eager_calls(way):
    data = [operands(2, 136, [264, 72], 264, seed=i, device="cuda") for i in range(20)]
    other = operands(2, 72, [264], 64, seed=100, device="cuda")
    options = dict(plan=plan(**dict(way, comm_sms=2)), return_gathered=True)

    def rank_program(rank, group):
        def call(a, b, bias):
            return tw.all_gather_matmul(a, b, group, bias=bias, **options)

        a, b, bias = data[0][0][rank].clone(), [x.clone() for x in data[0][1][rank]], data[0][2][rank]
        call(a, b, bias)
        call(*(x[rank] for x in other))
        torch.cuda.synchronize()
        fabric_of(group).rendezvous()
        graph, (outs, gathered) = capture(lambda: call(a, b, bias))
        replayed, eager = [], []
        for i in range(300):
            chosen = data[7 * i % len(data)]
            for static, new in zip((a, *b), (chosen[0][rank], *chosen[1][rank]), strict=True):
                static.copy_(new)
            fabric_of(group).rendezvous()
            graph.replay()
            if i % 10 == 0:
                replayed.append(([x.clone() for x in outs], gathered.clone()))
            if i % 25 == 0:
                eager.append(call(*(x[rank] for x in other)))
        return replayed, eager

    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        by_rank = w.run(rank_program)
    replayed, eager = (list(zip(*kind, strict=True)) for kind in zip(*by_rank, strict=True))
    for j, results in enumerate(replayed):
        a, b, _ = data[70 * j % len(data)]
        assert_right(results, a, b, data[0][2], True)
    for results in eager:
        assert_right(results, *other, True)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize("world, rows, ns, k", [(1, 264, [136], 72), (2, 256, [264, 72], 128), (3, 40, [20], 12)])
def test_gradients(world, rows, ns, k, regather, compiled):
    given = problem(world, rows, ns, k, device="cuda")
    call = torch.compile(tw.all_gather_matmul, fullgraph=True) if compiled else tw.all_gather_matmul
    options = dict(return_gathered=True, regather=regather)
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        for _ in range(3):
            got = gradients(w, *given, call=call, **options)
            assert_near(got, true_gradients(*given, **options), torch.bfloat16, world, slack=1.5)


def test_slots_beyond_two_to_the_31_elements():
    """A slot of more than 4 GiB: all offsets take 64 bits. The third call reuses the first one's slot."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < 60:
        pytest.skip(f"needs 60 GiB of GPU memory, {free} are free")
    rows, n, k = (1 << 16) + 264, 64, 1 << 15
    assert rows * k > 1 << 31
    calls = [operands(2, rows, [n], k, seed=i, device="cuda")[:2] for i in range(3)]
    with tw.virtual_world(2, device="cuda", timeout=20.0) as w:
        results = run_calls(w, [(a, b, None, {}) for a, b in calls])
    sample = torch.tensor([0, 1, 127, 128, 1 << 15, 50001, (1 << 16) - 1, 1 << 16, rows - 1])
    for outs, (a, b) in zip(results, calls, strict=True):
        picked = torch.cat([sample, rows + sample])
        assert all(out.sum(dtype=torch.float32).isfinite() for (out,) in outs)
        assert_right([[out[picked]] for (out,) in outs], [x[sample] for x in a], b)
