"""The op as PyTorch sees it, on a real GPU: gradients between virtual ranks, compiled functions, autocast, max_sms."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tileweave as tw
from tests.ops.problems import assert_gradients, assert_right, gradients, operands, true_gradients
from tileweave.fabric import group_name

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("op, out_dtype", [("sum", None), ("avg", torch.float32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world, m, n, k", [(1, 264, 136, 72), (2, 512, 264, 128), (3, 3 * 40, 20, 12), (4, 4, 0, 8)])
def test_gradients(world, m, n, k, dtype, op, out_dtype):
    a, b, bias = operands(world, m, n, k, seed=1, dtype=dtype, bias=True, device="cuda")
    weights = torch.randn(m, n, device="cuda").to(out_dtype or dtype)
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        for _ in range(3):
            got = gradients(w, a, b, bias, weights, op=op, out_dtype=out_dtype)
            assert_gradients(got, true_gradients(a, b, bias, weights, op), dtype, world)


def checkpointed(*args, **options):
    """The op, whose forward pass is run again by its backward pass."""
    return checkpoint(tw.matmul_reduce_scatter, *args, use_reentrant=False, **options)


@pytest.mark.parametrize("how", ["compiled", "compiled, dynamic", "checkpointed"])
def test_gradients_of_compiled_and_checkpointed_calls(how):
    call = {
        "compiled": lambda: torch.compile(tw.matmul_reduce_scatter, fullgraph=True),
        "compiled, dynamic": lambda: torch.compile(tw.matmul_reduce_scatter, fullgraph=True, dynamic=True),
        "checkpointed": lambda: checkpointed,
    }[how]()
    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        for m in (256, 512, 264):
            a, b, bias = operands(2, m, 264, 128, seed=m, bias=True, device="cuda")
            weights = torch.randn(m, 264, device="cuda").bfloat16()
            got = gradients(w, a, b, bias, weights, call=call)
            assert_gradients(got, true_gradients(a, b, bias, weights), torch.bfloat16, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_torch_matmul_does(dtype):
    a, b, bias = operands(2, 256, 264, 128, seed=2, dtype=torch.float32, bias=True, device="cuda")

    def call(*args, **options):
        with torch.autocast("cuda", dtype=dtype):
            assert tw.explain("matmul_reduce_scatter", *args, **options).fused
            return tw.matmul_reduce_scatter(*args, **options)

    weights = torch.randn(256, 264, device="cuda").to(dtype)
    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        outs = w.run(lambda rank, group: call(a[rank], b[rank], group, bias=bias))
        got = gradients(w, a, b, bias, weights, call=call)
    low = [[x.to(dtype) for x in xs] for xs in (a, b, [bias])]
    assert outs[0].dtype == dtype
    assert_right(outs, low[0], low[1], bias=low[2][0], deterministic=True)
    truth = true_gradients(low[0], low[1], low[2][0], weights)
    assert all(x.dtype == torch.float32 for xs in got for x in xs)
    assert_gradients([[x.to(dtype) for x in xs] for xs in got], truth, dtype, 2)


@pytest.mark.parametrize("max_sms", [1, 8])
def test_max_sms(max_sms):
    a, b, bias = operands(2, 1024, 1032, 264, seed=3, bias=True, device="cuda")
    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        for deterministic in (False, True):
            options = dict(bias=bias, deterministic=deterministic, max_sms=max_sms)
            outs = w.run(lambda rank, group, o=options: tw.matmul_reduce_scatter(a[rank], b[rank], group, **o))
            assert_right(outs, a, b, bias=bias, deterministic=True)


def test_opcheck_in_a_world_of_one():
    a, b, bias = operands(1, 64, 72, 136, seed=4, bias=True, device="cuda")
    inputs = [x.requires_grad_() for x in (a[0], b[0], bias)]
    torch.library.opcheck(
        torch.ops.tileweave.matmul_reduce_scatter.default,
        (*inputs[:2], group_name(None), "sum", inputs[2], False, None, "", 0),
    )
