"""matmul_all_reduce of operands with scales of blocks along K: mxfp8 and nvfp4."""

import re

import pytest
import torch

import tileweave as tw
from tests.ops.test_block_scales import FP4, FP8, operands, plan
from tileweave.ops.contract import Like, Site
from tileweave.ops.matmul_all_reduce import relative_error, tolerance
from tileweave.ops.matmul_all_reduce.check import Options, settle

NAME = "matmul_all_reduce"


def run(world, a, b, scales, calls=2, **options):
    """The results of all ranks of the last of some calls."""

    def rank_program(rank, group):
        scale_a, scale_b = scales[rank]
        for _ in range(calls):
            out = tw.matmul_all_reduce(a[rank], b[rank], group, scale_a=scale_a, scale_b=scale_b, **options)
        return out

    return world.run(rank_program)


def explained(world, a, b, scales, **options):
    """What all ranks are told."""

    def rank_program(rank, group):
        return tw.explain(NAME, a[rank], b[rank], group, scale_a=scales[rank][0], scale_b=scales[rank][1], **options)

    return world.run(rank_program)[0]


def assert_right(outs, truth):
    """All ranks have the same bits, and they are near the truth."""
    assert all(torch.equal(outs[0], out) for out in outs[1:])
    assert outs[0].dtype == torch.bfloat16 and outs[0].shape == truth.shape
    assert relative_error(outs[0].cpu(), truth) <= tolerance(torch.bfloat16, len(outs))


@pytest.mark.parametrize("dtype", [FP8, FP4])
@pytest.mark.parametrize("world, m, n, k", [(1, 136, 264, 256), (2, 40, 136, 384), (3, 200, 264, 128)])
def test_worlds_and_ragged_sizes(world, m, n, k, dtype):
    """Rows and columns that are no whole blocks; K of nvfp4 is no whole step."""
    a, b, scales, truth = operands(world, m, n, k, dtype)
    with tw.virtual_world(world, device="cpu", sms=3) as emulated:
        route = explained(emulated, a, b, scales)
        outs = run(emulated, a, b, scales)
    assert route.fused and route.plan.core == "tcgen05" and route.plan.tile == (128, 128, 128)
    assert_right(outs, truth)


WAYS = [
    dict(schedule="one_shot"),
    dict(schedule="intra_sm"),
    dict(schedule="inter_sm", comm_sms=1),
    dict(schedule="inter_sm", comm_sms=1, mechanism="multimem"),
    dict(schedule="none"),
]


@pytest.mark.parametrize("dtype", [FP8, FP4])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(map(str, way.values())))
def test_every_schedule(way, dtype):
    """Several tiles of an owner's columns, which begin where his scales do."""
    a, b, scales, truth = operands(2, 136, 520, 256, dtype, seed=1)
    with tw.virtual_world(2, device="cpu", seed=1, sms=3) as emulated:
        outs = run(emulated, a, b, scales, plan=plan(**way))
    assert_right(outs, truth)


def test_shared_tiles():
    a, b, scales, truth = operands(2, 40, 136, 512, FP8)
    with tw.virtual_world(2, device="cpu", sms=8) as emulated:
        outs = run(emulated, a, b, scales, plan=plan(schedule="one_shot", split=2))
    assert_right(outs, truth)


@pytest.mark.parametrize("schedule", ["one_shot", "intra_sm"])
def test_bias_residual_and_norm(schedule):
    """Of the result's dtype; scales that are a view of a larger tensor, and rows of b apart, are copied."""
    a, b, scales, truth = operands(2, 40, 136, 128, FP8)
    scales = [tuple(torch.cat((x[:8], x))[8:] for x in pair) for pair in scales]
    b[1] = b[1].view(torch.uint8).contiguous().view(FP8)
    bias, residual, weight = (torch.randn(*shape).bfloat16() for shape in ((136,), (40, 136), (136,)))
    extras = dict(bias=bias, residual=residual, norm_weight=weight)
    with tw.virtual_world(2, device="cpu", sms=2) as emulated:
        results = run(emulated, a, b, scales, plan=plan(schedule=schedule), **extras)
    truth = truth + bias.float() + residual.float()
    assert_right([total for _, total in results], truth)
    assert_right([normed for normed, _ in results], torch.nn.functional.rms_norm(truth, (136,), weight.float(), 1e-6))


@pytest.mark.parametrize(
    "dtype, n, k, says",
    [
        (FP8, 40, 160, "K = 160 is no multiple of 128"),
        (FP4, 40, 96, "K = 96 is no multiple of 64"),
        (FP4, 40, 0, "K = 0 is no multiple of 64"),
        (FP8, 36, 128, "N = 36 is not a multiple of 8"),
    ],
)
def test_what_no_kernel_serves_is_dequantized(dtype, n, k, says):
    a, b, scales, truth = operands(2, 24, n, k, dtype)
    with tw.virtual_world(2, device="cpu") as emulated:
        route = explained(emulated, a, b, scales)
        outs = run(emulated, a, b, scales, bias=torch.zeros(n).bfloat16())
    assert not route.fused and route.reason.startswith(says)
    assert route.reason.endswith(": operands times their scales in float32, torch.matmul, then the group's all-reduce")
    assert_right(outs, truth)


def test_hopper_dequantizes():
    gpu = torch.device("cuda", 0)
    of = [
        ((512, 512), FP8),
        ((512, 512), FP8),
        ((512 * 16,), torch.float8_e8m0fnu),
        ((512 * 16,), torch.float8_e8m0fnu),
    ]
    a, b, of_a, of_b = (Like(torch.Size(shape), dtype, gpu) for shape, dtype in of)
    site = Site("virtual", 4, 132, gpu, None, cores=("wgmma",))
    _, route = settle(site, a, b, None, None, None, Options(False, 1e-6, 0), None, of_a, of_b)
    assert not route.fused and route.reason.startswith("the kernel multiplies by tcgen05, this GPU by wgmma: operands")


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(scale_b=None), "scale_b of torch.float8_e4m3fn in blocks must be torch.float8_e8m0fnu on cpu, got None"),
        (
            dict(scale_a=torch.ones(256, 1), scale_b=torch.ones(1, 136)),
            "scale_a of torch.float8_e4m3fn in blocks must be torch.float8_e8m0fnu on cpu, got torch.float32 on cpu",
        ),
        (dict(scale_a=torch.ones(8).to(torch.float8_e8m0fnu)), "scale_a must have 1024 values, those of 256 x 4 in"),
        (dict(scale_a=2.0), "scale_a must be a torch.Tensor"),
        (dict(plan=plan(schedule="none", core="wgmma")), "plan.core='wgmma': the kernel has 'tcgen05' here"),
        (dict(plan=plan(schedule="none", tile=(128, 64, 128))), "lie together for 128 columns, a tile has 128 columns"),
        (dict(bias=torch.zeros(136)), "bias must be [136] of torch.bfloat16"),
    ],
)
def test_what_breaks_the_contract(change, says):
    a, b, ((scale_a, scale_b),), _ = operands(1, 256, 136, 128, FP8)
    given = {"scale_a": scale_a, "scale_b": scale_b, **change}
    with tw.virtual_world(1, device="cpu") as emulated, pytest.raises((ValueError, TypeError), match=re.escape(says)):
        emulated.run(lambda rank, group: tw.matmul_all_reduce(a[0], b[0], group, **given))


def test_scales_go_with_8_and_4_bits_only():
    x = torch.randn(16, 16).bfloat16()
    with pytest.raises(ValueError, match=r"scale_b goes with float8_e4m3fn operands, but a is torch\.bfloat16"):
        tw.matmul_all_reduce(x, x, scale_b=torch.ones(()))


def test_no_gradients_and_no_autocast_and_full_graphs():
    a, b, ((scale_a, scale_b),), truth = operands(1, 32, 64, 64, FP8)
    residual = torch.zeros(32, 64).bfloat16().requires_grad_()
    with pytest.raises(NotImplementedError, match=r"of torch\.float8_e4m3fn operands has no gradients"):
        tw.matmul_all_reduce(a[0], b[0], residual=residual, scale_a=scale_a, scale_b=scale_b)

    def call(*x):
        return tw.matmul_all_reduce(x[0], x[1], scale_a=x[2], scale_b=x[3])

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_right([call(a[0], b[0], scale_a, scale_b)], truth)
    assert_right([compiled(a[0], b[0], scale_a, scale_b)], truth)
