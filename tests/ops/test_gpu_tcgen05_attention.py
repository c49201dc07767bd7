"""The attention ops on virtual ranks of a Blackwell GPU, against the float32 truth: what has never run."""

import pytest
import torch

import tileweave as tw
from tests.ops.attention.problems import assert_right as attention_right
from tests.ops.attention.problems import operands, run
from tests.ops.sequence.fused import assert_right, run_calls
from tests.ops.sequence.problems import whole
from tests.ops.test_gpu_tcgen05 import pytestmark as blackwell
from tileweave import Plan
from tileweave.ops.attention import Tiling

pytestmark = blackwell


def plan(tile, stages=3, **changes):
    return Plan(**{**dict(tile=tile, stages=stages, schedule="inter_sm", comm_sms=4, core="tcgen05"), **changes})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim, rows", [(64, 128), (64, 1000), (72, 1000), (128, 100), (128, 2048)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(dim, rows, causal, dtype):
    calls = [operands(2, 8, 2, rows, 1111, dim, seed, dtype, device="cuda") for seed in range(3)]
    with tw.virtual_world(1, device="cuda", timeout=5.0) as w:
        results = run(w, *calls, causal=causal, offset=100)
    for result, call in zip(results, calls, strict=True):
        attention_right(result, *call, causal=causal, offset=100)


@pytest.mark.parametrize("tiling", [Tiling(1, 32, 6), Tiling(1, 64, 5, 1), Tiling(2, 64, 6), Tiling(2, 16, 8, 1)])
def test_every_tile(tiling):
    call = operands(1, 4, 4, 1000, 700, 128, device="cuda")
    chosen = Tiling(tiling.consumers, tiling.bn, tiling.stages, tiling.q_bufs, core="tcgen05")
    with tw.virtual_world(1, device="cuda", timeout=5.0) as w:
        attention_right(run(w, call, causal=True, offset=-20, tiling=chosen)[0], *call, causal=True, offset=-20)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "op, kw",
    [
        ("ring_attention", dict()),
        ("ring_attention", dict(causal=True, placement="zigzag")),
        ("ring_attention", dict(causal=True, placement="zigzag", plan=plan((128, 64, 128), 5, schedule="two_blocks"))),
        ("ring_attention", dict(causal=True, cu_seqlens=(0, 500, 501, 2048))),
        ("ulysses_attention", dict(causal=True)),
        ("ulysses_attention", dict(plan=plan((128, 128, 128), 5))),
    ],
)
def test_attention_between_ranks(op, kw, world):
    kw = dict(kw)
    if "cu_seqlens" in kw:
        kw["cu_seqlens"] = torch.tensor(kw["cu_seqlens"], dtype=torch.int32, device="cuda")
    calls = [(whole(1, 8, 4, 2048, 128, dtype=torch.bfloat16, seed=i, device="cuda"), kw) for i in range(3)]
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        assert_right(run_calls(w, op, calls), calls)
