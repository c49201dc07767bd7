"""The op on virtual ranks of a real GPU, against the float32 truth."""

import pytest
import torch

import tileweave as tw
from tests.fabric.test_virtual import capture
from tests.ops.matmul_all_reduce.problems import NONE, assert_right, operands, run_calls
from tests.ops.matmul_all_reduce.test_operator import assert_gradients, gradients, true_gradients
from tileweave import FabricTimeout, Plan
from tileweave.fabric import fabric_of
from tileweave.ops.matmul_all_reduce import reference, relative_error, tolerance
from tileweave.planner.tiling import TILINGS

pytestmark = pytest.mark.gpu
NAME = "matmul_all_reduce"
FUSED = ["one_shot", "intra_sm", "inter_sm"]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def plan(schedule, tile=(64, 128, 64), stages=4, **changes):
    return Plan(schedule=schedule, tile=tile, stages=stages, comm_sms=2 if schedule == "inter_sm" else 0, **changes)


@pytest.mark.parametrize("schedule", [None, *FUSED, "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "world, m, n, k",
    [(2, 2048, 1024, 512), (3, 100, 328, 200), (4, 2081, 1032, 72), (5, 1, 72, 264), (8, 16, 8192, 1024)],
)
def test_world_sizes_ragged_shapes_two_calls(world, m, n, k, dtype, schedule):
    chosen = None if schedule is None else plan(schedule)
    for extras in ("", "br", "brn"):
        calls = [operands(world, m, n, k, i, extras, dtype, device="cuda") for i in range(2)]
        with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
            for outs, call in zip(run_calls(w, calls, plan=chosen), calls, strict=True):
                assert_right(outs, *call)


def test_a_world_of_one():
    call = operands(1, 1000, 776, 520, 1, device="cuda")
    with tw.virtual_world(1, device="cuda", timeout=5.0) as w:
        assert_right(run_calls(w, [call])[0], *call)


@pytest.mark.parametrize("m", [1, 3, 16, 64, 130, 256])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_decode_shapes_a_hundred_calls_in_a_row(world, m):
    """No rank waits for another between its calls, so a slot that is reused too early shows."""
    calls = [operands(world, m, 1024, 1024, i, "br", device="cuda") for i in range(4)]
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        results = run_calls(w, calls * 25)
    for i, outs in enumerate(results):
        assert_right(outs, *calls[i % 4])


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("tiling", TILINGS, ids=lambda each: f"{each.tile}, {each.stages}")
@pytest.mark.parametrize("schedule", FUSED)
def test_tilings(tiling, split, schedule):
    chosen = plan(schedule, tiling.tile, tiling.stages, split=split)
    call = operands(2, 100, 200, 1032, 1, "br", device="cuda")
    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        try:
            w.run(lambda rank, group: tw.explain(NAME, call[0][rank], call[1][rank], group, plan=chosen))
        except ValueError as error:
            pytest.skip(str(error))
        for outs in run_calls(w, [call] * 3, plan=chosen):
            assert_right(outs, *call)


@pytest.mark.parametrize("schedule", FUSED[1:])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_many_chunks_equal_bits(world, schedule):
    """Large enough for several chunks; every rank has the same bits, and every call."""
    call = operands(world, 2048, 2048, 512, 1, "r", device="cuda")
    chosen = plan(schedule, (64, 64, 64), 8)
    with tw.virtual_world(world, device="cuda", timeout=5.0, sms=12) as w:
        results = run_calls(w, [call] * 5, plan=chosen)
    for outs in results:
        assert_right(outs, *call)
        assert torch.equal(outs[0], results[0][0])


def test_virtual_ranks_have_no_multicast():
    a, b, _ = operands(2, 64, 64, 64, 1, device="cuda")
    chosen = Plan("multimem", "inter_sm", (64, 64, 64), 4, comm_sms=2)
    with (
        tw.virtual_world(2, device="cuda", timeout=5.0) as w,
        pytest.raises(ValueError, match="needs multicast: virtual ranks share one GPU"),
    ):
        w.run(lambda rank, group: tw.matmul_all_reduce(a[rank], b[rank], group, plan=chosen))


@pytest.mark.parametrize("m, n, k", [(0, 64, 64), (4, 0, 64), (4, 64, 0), (2, 1, 1), (1, 8, 8), (256, 100, 64)])
def test_empty_single_and_unaddressable_sizes(m, n, k):
    call = operands(2, m, n, k, 2, device="cuda")
    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        for outs in run_calls(w, [call] * 2):
            assert_right(outs, *call)


def test_fifty_calls_with_changing_shapes_and_plans():
    shapes = [
        (512, 512, 256, "", {}),
        (1000, 264, 64, "br", dict(plan=plan("intra_sm"))),
        (4, 1032, 512, "brn", dict(plan=plan("one_shot", (64, 64, 64), 8))),
        (2048, 2048, 256, "r", dict(plan=plan("intra_sm", (128, 256, 64), 4))),
        (33, 128, 8, "b", dict(plan=plan("none"))),
        (1000, 1032, 64, "brn", dict(plan=plan("inter_sm"))),
    ]
    calls = [
        (*operands(4, m, n, k, 10 * i + j, extras, device="cuda"), kw)
        for i in range(10)
        for j, (m, n, k, extras, kw) in enumerate(shapes)
    ]
    with tw.virtual_world(4, device="cuda", timeout=5.0) as w:
        results = run_calls(w, [(a, b, {**extras, **kw}) for a, b, extras, kw in calls])
    for outs, (a, b, extras, _) in zip(results, calls, strict=True):
        assert_right(outs, a, b, extras)


@pytest.mark.parametrize("schedule", FUSED)
def test_an_absent_rank_gives_a_timeout_and_the_world_works_again(schedule):
    """Rank 1 has fallen a call behind for good: its peers wait for flags that never come."""
    a, b, extras = operands(3, 300, 256, 128, 1, "br", device="cuda")
    with tw.virtual_world(3, device="cuda", timeout=1.0) as w:
        run_calls(w, [(a, b, extras)], plan=plan(schedule))
        kept = {}

        def rank_program(rank, group):
            kept[rank] = tw.matmul_all_reduce(a[rank], b[rank], group, plan=plan(schedule))

        w.workspace.ops[NAME].state[1, 0] -= 1
        with pytest.raises(FabricTimeout, match=rf"{NAME}: rank [02] waited") as caught:
            w.run(rank_program)
        assert caught.value.expected - caught.value.seen == 1
        assert kept[0].isnan().any() and kept[2].isnan().any()
        assert_right(run_calls(w, [(a, b, extras)], plan=plan(schedule))[0], a, b, extras)


@pytest.mark.parametrize("schedule", [*FUSED, "none"])
def test_hundreds_of_replays_with_new_data_between_eager_calls(schedule):
    data = [operands(2, 136, 264, 264, i, device="cuda") for i in range(20)]
    other = operands(2, 72, 264, 64, 100, "b", device="cuda")

    def rank_program(rank, group):
        def call(a, b, extras):
            return tw.matmul_all_reduce(a, b, group, **extras, plan=plan(schedule))

        a, b = data[0][0][rank].clone(), data[0][1][rank].clone()
        extras = {name: x.clone() for name, x in data[0][2].items()}
        call(a, b, extras)
        call(other[0][rank], other[1][rank], other[2])
        torch.cuda.synchronize()
        fabric_of(group).rendezvous()
        graph, outs = capture(lambda: call(a, b, extras))
        replayed, eager = [], []
        for i in range(300):
            chosen = data[7 * i % len(data)]
            news = (chosen[0][rank], chosen[1][rank], *chosen[2].values())
            for static, new in zip((a, b, *extras.values()), news, strict=True):
                static.copy_(new)
            fabric_of(group).rendezvous()
            graph.replay()
            if i % 10 == 0:
                replayed.append(tuple(x.clone() for x in outs))
            if i % 25 == 0:
                eager.append(call(other[0][rank], other[1][rank], other[2]))
        return replayed, eager

    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        by_rank = w.run(rank_program)
    replayed, eager = (list(zip(*kind, strict=True)) for kind in zip(*by_rank, strict=True))
    for j, results in enumerate(replayed):
        assert_right(results, *data[70 * j % len(data)])
    for results in eager:
        assert_right(results, *other)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("world, m, n, k", [(2, 264, 136, 72), (3, 40, 20, 12), (4, 16, 264, 128)])
def test_gradients(world, m, n, k, compiled):
    a, b, extras = operands(world, m, n, k, 1, device="cuda")
    weights = torch.randn(2, m, n, device="cuda")
    call = torch.compile(tw.matmul_all_reduce, fullgraph=True) if compiled else tw.matmul_all_reduce
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        for _ in range(3):
            got = gradients(w, a, b, extras, weights, call=call)
            assert_gradients(got, true_gradients(a, b, extras, weights), torch.bfloat16, world)


def test_slots_beyond_two_to_the_31_elements():
    """A slot of more than 4 GiB: all offsets take 64 bits. The third call reuses the first one's slot."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < 80:
        pytest.skip(f"needs 80 GiB of GPU memory, {free} are free")
    m, n, k = (1 << 16) + 264, 1 << 15, 64
    assert m * n > 1 << 31
    calls = [operands(2, m, n, k, i, "b", device="cuda") for i in range(3)]
    sample = torch.tensor([0, 1, 127, 128, 1 << 15, 33000, 50001, (1 << 16) - 1, 1 << 16, m - 1], device="cuda")

    def rank_program(rank, group):
        found = []
        for a, b, extras in calls:
            out = tw.matmul_all_reduce(a[rank], b[rank], group, **extras)
            found.append((out[sample], out.sum(dtype=torch.float32).isfinite()))
        return found

    with tw.virtual_world(2, device="cuda", timeout=20.0) as w:
        results = list(zip(*w.run(rank_program), strict=True))
    for by_rank, (a, b, extras) in zip(results, calls, strict=True):
        truth = reference([x[sample] for x in a], b, *({**NONE, **extras}.values()))
        for got, finite in by_rank:
            assert finite and relative_error(got, truth) <= tolerance(torch.bfloat16, 2)
