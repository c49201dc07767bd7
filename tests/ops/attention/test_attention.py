"""attention in emulated worlds, against the float32 truth; its contract."""

import pytest
import torch

import tileweave as tw
from tests.ops.attention.problems import assert_right, operands, run
from tileweave.fabric import fabric_of
from tileweave.ops.attention import Tiling, attention
from tileweave.ops.attention.check import check, check_tiling, tiling_for

SMALL = Tiling(2, bn=16, stages=3)


def world(seed=0, sms=2):
    return tw.virtual_world(1, device="cpu", seed=seed, sms=sms)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    "batch, heads, kv_heads, rows, cols, causal, offset",
    [
        (1, 1, 1, 128, 64, False, 0),
        (2, 4, 2, 100, 40, True, 0),
        (2, 2, 1, 70, 100, True, 30),
        (1, 3, 3, 140, 50, True, -90),
        (1, 2, 1, 1, 33, False, 0),
        (1, 2, 2, 16, 1, True, 0),
    ],
)
def test_shapes_masks_groups(batch, heads, kv_heads, rows, cols, causal, offset, layout):
    calls = [operands(batch, heads, kv_heads, rows, cols, 64, seed, layout=layout) for seed in range(2)]
    with world(seed=rows) as w:
        results = run(w, *calls, causal=causal, offset=offset, layout=layout, tiling=SMALL)
    for result, call in zip(results, calls, strict=True):
        assert_right(result, *call, layout=layout, causal=causal, offset=offset)


@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(1, bn=16, stages=3, q_bufs=1),
        Tiling(1, bn=32, stages=5, take_turns=True),
        Tiling(2, bn=16, stages=4, take_turns=True),
        Tiling(2, bn=32, stages=3, q_bufs=1),
        Tiling(2, bn=64, stages=6, q_bufs=3),
    ],
)
def test_tilings_under_many_schedules(tiling):
    calls = [operands(1, 2, 1, 150, 120, 64, seed) for seed in range(2)]
    for seed in range(12):
        with world(seed, sms=1 + seed % 3) as w:
            results = run(w, *calls, causal=True, offset=-20, tiling=tiling)
        for result, call in zip(results, calls, strict=True):
            assert_right(result, *call, causal=True, offset=-20)


@pytest.mark.parametrize("dim", [8, 72, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dimensions_and_large_logits(dim, dtype):
    call = operands(1, 1, 1, 80, 48, dim, 1, dtype, times=50)
    with world() as w:
        assert_right(run(w, call, causal=True, tiling=Tiling(2, bn=16, stages=3, q_bufs=1))[0], *call, causal=True)


def test_strides_that_tma_takes_and_others_equal_those_in_one_piece():
    q, k, v = operands(2, 4, 2, 70, 40, 64, 5)
    packed = torch.empty(2, 70, 4, 3, 64).bfloat16()
    packed[:, :, :, 1] = q.transpose(1, 2)
    odd = torch.empty(2, 2, 40, 65).bfloat16()[..., :64].copy_(k)
    shifted = torch.empty(v.numel() + 1).bfloat16()[1:].view(v.shape).copy_(v)
    with world() as w:
        plain, strided, expanded = (
            run(w, each, tiling=SMALL)[0]
            for each in (
                (q, k, v),
                (packed[:, :, :, 1].transpose(1, 2), odd, shifted),
                (q, k[:1].expand(2, -1, -1, -1), v),
            )
        )
    assert torch.equal(plain[0], strided[0]) and torch.equal(plain[1], strided[1])
    assert torch.equal(plain[0][0], expanded[0][0])


@pytest.mark.parametrize("sizes", [(0, 2, 1, 5, 5), (2, 0, 0, 5, 5), (1, 2, 2, 0, 5), (1, 2, 2, 5, 0)])
def test_empty_sizes(sizes):
    call = operands(*sizes, 64)
    with world() as w:
        (result,) = run(w, call)
    assert_right(result, *call)


def test_what_the_contract_refuses():
    q, k, v = operands(1, 4, 2, 8, 8, 64)
    for message, args in {
        "layout must be": (q, k, v, False, 0, None, "bsdh"),
        "four dimensions": (q[0], k, v, False, 0, None, "bhsd"),
        "all be bfloat16": (q, k.half(), v, False, 0, None, "bhsd"),
        "one shape": (q, k, v[:, :1], False, 0, None, "bhsd"),
        "same batch and head dimension": (q, k[..., :32], v[..., :32], False, 0, None, "bhsd"),
        "must be a multiple": (q[:, :3], k, v, False, 0, None, "bhsd"),
        "positive and finite": (q, k, v, False, 0, 0.0, "bhsd"),
    }.items():
        with pytest.raises(ValueError, match=message):
            check(*args, False)
    with pytest.raises(TypeError, match=r"k must be a torch.Tensor"):
        check(q, None, v, False, 0, None, "bhsd", False)


def test_what_the_kernel_refuses():
    with world() as w, pytest.raises(ValueError, match="multiples of 8 up to 256"):
        run(w, operands(1, 1, 1, 8, 8, 20))
    with pytest.raises(ValueError, match="attention: "):
        attention(fabric_of(None, "cpu"), *operands(1, 1, 1, 8, 8, 64))
    call = check(*operands(1, 1, 1, 100, 8, 128), False, 0, None, "bhsd", False)
    check_tiling(call, tiling_for(call))
    for message, tiling in {
        "consumers must be 1 or 2": Tiling(3),
        "bn must be": Tiling(bn=48),
        "at least 3 stages": Tiling(stages=2),
        "bytes of shared memory": Tiling(stages=6),
    }.items():
        with pytest.raises(ValueError, match=message):
            check_tiling(call, tiling)
