"""The attention ops on virtual ranks of a real GPU, against the float32 truth of the whole sequence."""

import functools

import pytest
import torch

import tileweave as tw
from tests.fabric.test_virtual import capture
from tests.ops.sequence.fused import assert_right, explained, placed, plan, run_calls
from tests.ops.sequence.problems import assert_each_near, assert_near, run, truth, whole
from tileweave import FabricTimeout
from tileweave.fabric import fabric_of
from tileweave.ops.sequence.local import attend, attend_backward, kernel_of

pytestmark = pytest.mark.gpu
OPS = ["ring_attention", "ulysses_attention"]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (8, 2), (4, 1)])
@pytest.mark.parametrize("rows, dim", [(256, 128), (512, 64), (100, 128), (16, 64), (1, 64), (130, 40), (7, 12)])
def test_a_block_by_each_kernel(rows, dim, heads, kv_heads, dtype, causal):
    """Values, log-sum-exps and gradients of one block, which is all of them."""
    q, k, v, weights = whole(2, heads, kv_heads, rows, dim, dtype=dtype, device="cuda")
    out, lse = attend(q, k, v, causal, 0.2)
    grads = attend_backward(weights, q, k, v, out.to(dtype), lse, causal, 0.2)
    true = truth((q, k, v, weights), causal=causal, scale=0.2, grads=True, return_lse=True)
    assert_near([out, lse, *grads], true, torch.bfloat16 if dtype == torch.float32 else dtype, slack=6)


def test_which_kernel_computes_a_block():
    names = {(256, 128): "cudnn", (128, 64): "cudnn", (100, 128): "flash", (256, 96): "flash", (256, 12): "math"}
    for (rows, dim), name in names.items():
        x = torch.empty(1, 1, rows, dim, dtype=torch.bfloat16, device="cuda")
        assert kernel_of(x, x) == name
        assert kernel_of(x.float(), x.float()) == "math"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "world, heads, kv_heads, rows, dim",
    [(1, 4, 2, 256, 64), (2, 32, 8, 1024, 128), (2, 2, 1, 16, 64), (3, 6, 3, 600, 64), (4, 8, 8, 2048, 128),
     (8, 8, 1, 2048, 64)],
)  # fmt: skip
def test_values_and_gradients(world, heads, kv_heads, rows, dim, causal, layout, op):
    for placement in ("contiguous", "zigzag") if op == "ring_attention" else ("contiguous",):
        options = dict(causal=causal, layout=layout, grads=True)
        more = dict(placement=placement) if op == "ring_attention" else {}
        with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
            for seed in range(2):
                tensors = whole(2, heads, kv_heads, rows, dim, dtype=torch.bfloat16, seed=seed, device="cuda")
                got = run(w, getattr(tw, op), tensors, **options, **more)
                true = truth(tensors, **options)
                assert_near(got, true, torch.bfloat16, slack=6)
                assert_each_near(got[0], true[0], torch.bfloat16)


@pytest.mark.parametrize("op", OPS)
def test_large_logits_and_compiled(op):
    tensors = whole(1, 8, 8, 1024, 64, dtype=torch.bfloat16, times=50, device="cuda")
    call = torch.compile(functools.partial(getattr(tw, op)), fullgraph=True)
    for fn in (getattr(tw, op), call):
        with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
            got = run(w, fn, tensors, causal=True)
        assert_near(got, truth(tensors, causal=True), torch.bfloat16, slack=6)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("comm_sms", [1, 3, 8])
def test_tiles_and_communicators(op, comm_sms):
    """Calls of changing shapes, masks and plans on one workspace, back to back."""
    shapes = [
        ((1, 8, 8, 4 * 700, 128), dict(causal=True, plan=plan((128, 128, 128), 5, comm_sms))),
        ((2, 8, 4, 4 * 10, 64), dict(plan=plan((128, 64, 64), 6, comm_sms))),
        ((1, 16, 4, 4 * 514, 64), dict(causal=True, layout="bshd", plan=plan((128, 128, 64), 8, comm_sms))),
        ((3, 4, 1, 4 * 96, 72), dict(plan=plan((64, 64, 128), 4, comm_sms))),
    ]
    for placement in ("contiguous", "zigzag") if op == "ring_attention" else ("contiguous",):
        more = dict(placement=placement) if op == "ring_attention" else {}
        calls = [
            (whole(*shape, dtype=torch.bfloat16, seed=10 * i + j, device="cuda"), {**kw, **more})
            for i in range(3)
            for j, (shape, kw) in enumerate(shapes)
        ]
        with tw.virtual_world(4, device="cuda", timeout=5.0) as w:
            assert w.run(lambda rank, group, c=calls[0]: explained(op, c[0], group, c[1]))[0].fused
            assert_right(run_calls(w, op, calls), calls)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_two_blocks_of_heads(world):
    """Calls of both schedules in turn, of which the first one of two blocks uses a slot several times."""
    made = [((1, 12, 12, world * 520, 128), "two_blocks"), ((2, 8, 2, world * 96, 64), "two_blocks"),
            ((1, 8, 4, world * 300, 64), "inter_sm")]  # fmt: skip
    for causal, placement in ((False, "contiguous"), (True, "contiguous"), (True, "zigzag")):
        calls = []
        for i in range(6):
            shape, schedule = made[i % 3]
            chosen = plan((128, 128, shape[-1]), 4, 2, schedule=schedule)
            kw = dict(causal=causal, placement=placement, plan=chosen)
            calls.append((whole(*shape, dtype=torch.bfloat16, seed=i, device="cuda"), kw))
        with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
            assert_right(run_calls(w, "ring_attention", calls), calls)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_packed_sequences(world, causal, op):
    """Values and gradients; sequences of a few tokens, and such as several ranks have parts of."""
    total = world * 700
    more = dict(placement="zigzag") if op == "ring_attention" else {}
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        for seed, most in enumerate((40, 400, 3 * total)):
            g = torch.Generator().manual_seed(seed)
            ends = torch.randint(1, most, (total,), generator=g).cumsum(0)
            ends = torch.cat((torch.zeros(1), ends[ends < total], torch.tensor([total]))).int().cuda()
            tensors = whole(1, 8, 4, total, 128, dtype=torch.bfloat16, seed=seed, device="cuda")
            options = dict(causal=causal, cu_seqlens=ends, grads=True)
            got = run(w, getattr(tw, op), tensors, **options, **more)
            assert_near(got, truth(tensors, **options), torch.bfloat16, slack=6)


@pytest.mark.parametrize("op", OPS)
def test_an_absent_rank_gives_a_timeout_and_the_world_works_again(op):
    """Rank 1 has fallen a call behind for good: its peers wait for flags that never come."""
    calls = [(whole(1, 6, 3, 3 * 300, 64, dtype=torch.bfloat16, device="cuda"), {})]
    with tw.virtual_world(3, device="cuda", timeout=1.0) as w:
        run_calls(w, op, calls)
        w.workspace.ops[op].state[1, 0] -= 1
        with pytest.raises(FabricTimeout, match=rf"{op}: rank [02] waited") as caught:
            run_calls(w, op, calls)
        assert caught.value.expected - caught.value.seen == 1
        assert_right(run_calls(w, op, calls), calls)


@pytest.mark.parametrize("op", OPS)
def test_hundreds_of_replays_with_new_data_between_eager_calls(op):
    data = [whole(1, 8, 4, 2 * 520, 64, dtype=torch.bfloat16, seed=i, device="cuda")[:3] for i in range(11)]
    other = (whole(2, 4, 2, 2 * 72, 128, dtype=torch.bfloat16, seed=100, device="cuda"), {})
    parts, parts_of_other = [placed(x, 2, {}) for x in data], placed(other[0][:3], 2, {})

    def rank_program(rank, group):
        static = [x[rank].clone() for x in parts[0]]
        getattr(tw, op)(*static, group, causal=True)
        getattr(tw, op)(*(x[rank] for x in parts_of_other), group)
        torch.cuda.synchronize()
        fabric_of(group).rendezvous()
        graph, out = capture(lambda: getattr(tw, op)(*static, group, causal=True))
        replayed, eager = [], []
        for i in range(300):
            for x, new in zip(static, parts[7 * i % len(data)], strict=True):
                x.copy_(new[rank])
            fabric_of(group).rendezvous()
            graph.replay()
            if i % 10 == 0:
                replayed.append(out.clone())
            if i % 25 == 0:
                eager.append(getattr(tw, op)(*(x[rank] for x in parts_of_other), group))
        return replayed, eager

    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        by_rank = w.run(rank_program)
    replayed, eager = ([torch.cat(xs, 2) for xs in zip(*kind, strict=True)] for kind in zip(*by_rank, strict=True))
    for j, out in enumerate(replayed):
        q, k, v = data[70 * j % len(data)]
        assert_near([out], truth((q, k, v, q), causal=True), torch.bfloat16)
    for out in eager:
        assert_near([out], truth(other[0]), torch.bfloat16)
