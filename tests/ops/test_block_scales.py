"""matmul_reduce_scatter of operands with scales of blocks along K: mxfp8 and nvfp4."""

import re
from functools import partial

import pytest
import torch

import tileweave as tw
from tests.ops import test_float8 as float8
from tileweave import Plan
from tileweave.ops.contract import Like, Site
from tileweave.ops.matmul_reduce_scatter import relative_error, tolerance
from tileweave.ops.matmul_reduce_scatter.check import settle

FP8, FP4, E8 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
BLOCK = {FP8: 32, FP4: 16}
run = partial(float8.run, calls=2)
FOURS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def blocked(scale):
    """[R, S] as torch's scaled_mm takes it, what is beyond filled with NaN: an element at a time."""
    rows, columns = scale.shape
    tall, wide = -(-rows // 128), -(-columns // 4)
    bits = torch.full((tall * wide * 512,), 0xFF if scale.dtype == E8 else 0x7F, dtype=torch.uint8)
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    bits[(r // 128 * wide + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scale.view(torch.uint8)
    return bits.view(scale.dtype)


def operand(rows, k, dtype, g):
    """An operand with K innermost, its scales in blocks, and its values in float32."""
    if dtype == FP8:
        bits = torch.randn(rows, k, generator=g).to(FP8)
        values, scale = bits.float(), torch.randint(120, 131, (rows, k // 32), generator=g).to(torch.uint8).view(E8)
    else:
        codes = torch.randint(0, 16, (rows, k), generator=g)
        bits = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(FP4)
        values, scale = FOURS[codes], (torch.rand(rows, k // 16, generator=g) + 0.5).to(FP8)
    of = scale.float().repeat_interleave(BLOCK[dtype], 1)
    return bits, blocked(scale), values * of


def operands(world, m, n, k, dtype, seed=0, device="cpu"):
    """a, b and scales of every rank, and the float32 sum of their products."""
    g = torch.Generator().manual_seed(seed)
    a, b, scales, truth = [], [], [], torch.zeros(m, n)
    for _ in range(world):
        x, of_x, left = operand(m, k, dtype, g)
        y, of_y, right = operand(n, k, dtype, g)
        a.append(x.to(device))
        b.append(y.to(device).t())
        scales.append((of_x.to(device), of_y.to(device)))
        truth += left @ right.T
    return a, b, scales, truth


def is_right(outs, truth, world):
    return relative_error(torch.cat(outs).cpu(), truth) <= tolerance(outs[0].dtype, world, True)


def assert_right(outs, truth, world):
    assert is_right(outs, truth, world)


def explained(world, a, b, scales):
    """What all ranks are told."""

    def rank_program(rank, group):
        scale_a, scale_b = scales[rank]
        return tw.explain("matmul_reduce_scatter", a[rank], b[rank], group, scale_a=scale_a, scale_b=scale_b)

    return world.run(rank_program)[0]


@pytest.mark.parametrize("dtype", [FP8, FP4])
@pytest.mark.parametrize("world, m, n, k", [(1, 136, 264, 256), (2, 2 * 128, 136, 384), (3, 3 * 40, 136, 128)])
def test_worlds_and_ragged_sizes(world, m, n, k, dtype):
    """With rows that are no whole blocks, in one shot."""
    a, b, scales, truth = operands(world, m, n, k, dtype)
    with tw.virtual_world(world, device="cpu", sms=3) as emulated:
        route = explained(emulated, a, b, scales)
        outs = run(emulated, a, b, scales)
    assert route.fused and route.plan.core == "tcgen05" and route.plan.tile == (128, 128, 128)
    assert route.plan.schedule == "one_shot" or m // world % 128 == 0 or world == 1
    assert outs[0].dtype == torch.bfloat16
    assert_right(outs, truth, world)


def plan(**changes):
    return Plan(**{**dict(tile=(128, 128, 128), stages=2, core="tcgen05"), **changes})


@pytest.mark.parametrize("changes", [dict(schedule="inter_sm", comm_sms=1), dict(split=2), dict(schedule="none")])
def test_other_schedules(changes):
    a, b, scales, truth = operands(2, 2 * 128, 136, 256, FP8)
    with tw.virtual_world(2, device="cpu", sms=8) as emulated:
        outs = run(emulated, a, b, scales, calls=1, plan=plan(**changes))
    assert_right(outs, truth, 2)


def test_options():
    """The mean in float32, with a bias; scales that are a view of a larger tensor."""
    a, b, scales, truth = operands(2, 2 * 128, 136, 128, FP8)
    scales = [tuple(torch.cat((x[:8], x))[8:] for x in pair) for pair in scales]
    bias = torch.randn(136).bfloat16()
    with tw.virtual_world(2, device="cpu", sms=2) as emulated:
        outs = run(emulated, a, b, scales, op="avg", bias=bias, out_dtype=torch.float32)
    assert outs[0].dtype == torch.float32
    assert_right(outs, truth / 2 + bias.float(), 2)


@pytest.mark.parametrize("dtype", [FP8, FP4])
def test_operands_of_any_strides_are_copied(dtype):
    """K not innermost, and every other column."""
    a, b, scales, truth = operands(1, 128, 136, 256, dtype)
    bits = [a[0].view(torch.uint8), b[0].view(torch.uint8)]
    wide = [bits[0].t().contiguous().t().view(dtype)], [bits[1].repeat_interleave(2, 1)[:, ::2].view(dtype)]
    with tw.virtual_world(1, device="cpu", sms=2) as emulated:
        assert explained(emulated, *wide, scales).fused
        assert_right(run(emulated, *wide, scales), truth, 1)


@pytest.mark.parametrize(
    "dtype, k, says",
    [
        (FP8, 160, "K = 160 is no multiple of 128"),
        (FP4, 96, "K = 96 is no multiple of 64"),
        (FP8, 0, "K = 0 is no multiple of 128"),
    ],
)
def test_what_no_kernel_serves_is_dequantized(dtype, k, says):
    a, b, scales, truth = operands(2, 2 * 24, 40, k, dtype)
    with tw.virtual_world(2, device="cpu") as emulated:
        route = explained(emulated, a, b, scales)
        outs = run(emulated, a, b, scales)
    assert (
        not route.fused and route.reason.startswith(says) and "operands times their scales in float32" in route.reason
    )
    assert_right(outs, truth, 2)


def test_hopper_dequantizes():
    """Its cores have no such scales."""
    gpu = torch.device("cuda", 0)
    a, b, of_a, of_b = (
        Like(torch.Size(shape), dtype, gpu) for shape, dtype in (((512, 512), FP8),) * 2 + (((512 * 16,), E8),) * 2
    )
    site = Site("virtual", 4, 132, gpu, None, cores=("wgmma",))
    _, route = settle(site, a, b, "sum", None, False, None, None, 0, of_a, of_b)
    assert not route.fused and route.reason == (
        "the kernel multiplies by tcgen05, this GPU by wgmma: operands times their scales in float32, torch.matmul, "
        "then the group's reduce-scatter"
    )


@pytest.mark.parametrize(
    "change, says",
    [
        (
            dict(scale_b=torch.ones(1, 136)),
            "scale_b of torch.float8_e4m3fn in blocks must be torch.float8_e8m0fnu on cpu",
        ),
        (dict(scale_b=None), "scale_b of torch.float8_e4m3fn in blocks must be torch.float8_e8m0fnu on cpu, got None"),
        (
            dict(scale_a=torch.ones(256, 8).to(E8)),
            "scale_a must have 1024 values, those of 256 x 4 in blocks of 128 x 4",
        ),
        (dict(plan=Plan()), "plan.core='wgmma': the kernel has 'tcgen05' here"),
        (
            dict(plan=plan(tile=(128, 256, 128))),
            "plan.tile[1]=256: with scales in blocks so wide a tile needs 576 columns of tensor memory, an SM has 512; "
            "128 would do",
        ),
        (
            dict(plan=plan(tile=(128, 64, 128))),
            "plan.tile[1]=64: with scales in blocks, which lie together for 128 columns, a tile has 128 columns",
        ),
        (dict(plan=plan(tile=(64, 128, 128))), "plan.tile[0]=64: tcgen05 has tiles of 128 rows"),
        (dict(plan=plan(tile=(128, 128, 64))), "plan.tile[2]=64: rows and columns are 64, 128 or 256, the K step 128"),
        (dict(bias=torch.zeros(136)), "bias must be [136] of torch.bfloat16"),
    ],
)
def test_what_breaks_the_contract(change, says):
    a, b, scales, _ = operands(1, 256, 136, 128, FP8)
    given = {"scale_a": scales[0][0], "scale_b": scales[0][1], **change}
    with tw.virtual_world(1, device="cpu") as emulated, pytest.raises(ValueError, match=re.escape(says)):
        emulated.run(lambda rank, group: tw.matmul_reduce_scatter(a[0], b[0], group, **given))


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce"])
@pytest.mark.parametrize("dtype, legal", [(FP8, "float8_e8m0fnu"), (FP4, "float8_e4m3fn")])
def test_scales_in_bytes_are_refused_with_what_would_be_legal(op, dtype, legal):
    """By each op, whichever operand they are of."""
    a, b, scales, _ = operands(1, 128, 136, 128, dtype)
    own, other = scales[0]
    for given, which in (
        ((own.view(torch.uint8), other.view(torch.uint8)), "scale_a"),
        ((own, other.view(torch.uint8)), r"scale_b(\[0\])?"),
    ):
        said = (
            rf"^{op}: {which} of torch\.{str(dtype)[6:]} in blocks must be torch\.{legal} on cpu, got "
            rf"torch\.uint8 on cpu; {which}\.view\(torch\.{legal}\) would be$"
        )
        with tw.virtual_world(1, device="cpu") as emulated, pytest.raises(ValueError, match=said):
            emulated.run(lambda rank, group, g=given: getattr(tw, op)(a[0], b[0], group, scale_a=g[0], scale_b=g[1]))


def test_rows_that_are_no_whole_blocks_go_in_one_shot():
    a, b, scales, _ = operands(2, 2 * 40, 136, 128, FP8)
    with tw.virtual_world(2, device="cpu", sms=2) as emulated, pytest.raises(ValueError, match="'one_shot' and 'none'"):
        run(emulated, a, b, scales, plan=plan())


def test_float4_needs_its_scales():
    a, b, scales, _ = operands(1, 16, 16, 64, FP4)
    with pytest.raises(ValueError, match=r"scale_a of torch\.float4_e2m1fn_x2 in blocks must be torch\.float8_e4m3fn"):
        tw.matmul_reduce_scatter(a[0], b[0])
    with pytest.raises(ValueError, match=r"K = 40 values are no whole blocks of 16 .*; 32 or 48 would be"):
        tw.matmul_reduce_scatter(a[0][:, :20], b[0][:20], scale_a=scales[0][0], scale_b=scales[0][1])
