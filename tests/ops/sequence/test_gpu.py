"""The attention ops on virtual ranks of a real GPU, against the float32 truth of the whole sequence."""

import functools

import pytest
import torch

import tileweave as tw
from tests.ops.sequence.problems import assert_near, run, truth, whole
from tileweave.ops.sequence.local import attend, attend_backward, kernel_of

pytestmark = pytest.mark.gpu


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


@pytest.mark.parametrize("op", ["ring_attention", "ulysses_attention"])
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
                assert_near(got, truth(tensors, **options), torch.bfloat16, slack=6)


@pytest.mark.parametrize("op", ["ring_attention", "ulysses_attention"])
def test_large_logits_and_compiled(op):
    tensors = whole(1, 8, 8, 1024, 64, dtype=torch.bfloat16, times=50, device="cuda")
    call = torch.compile(functools.partial(getattr(tw, op)), fullgraph=True)
    for fn in (getattr(tw, op), call):
        with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
            got = run(w, fn, tensors, causal=True)
        assert_near(got, truth(tensors, causal=True), torch.bfloat16, slack=6)
