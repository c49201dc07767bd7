"""all_gather_matmul of operands with scales of blocks along K: mxfp8 and nvfp4."""

import re
from functools import partial

import pytest
import torch

import tileweave as tw
from tests.ops.all_gather_matmul.problems import way_name
from tests.ops.test_block_scales import FP4, FP8, operand
from tileweave import Plan, emulator
from tileweave.fabric.base import ABORT
from tileweave.ops.all_gather_matmul.check import settle
from tileweave.ops.contract import Like, Site
from tileweave.ops.matmul_reduce_scatter import relative_error, tolerance

NAME = "all_gather_matmul"
WAYS = [dict(schedule=name) for name in ("inter_sm", "intra_sm", "none")]


def operands(world, rows, ns, k, dtype, seed=0, device="cpu"):
    """a, b and their scales of every rank, and each rank's results in float32."""
    g = torch.Generator().manual_seed(seed)
    a = [operand(rows, k, dtype, g) for _ in range(world)]
    b = [[operand(n, k, dtype, g) for n in ns] for _ in range(world)]
    gathered = torch.cat([values for _, _, values in a])
    return (
        [x.to(device) for x, _, _ in a],
        [[x.to(device).t() for x, _, _ in each] for each in b],
        [scale.to(device) for _, scale, _ in a],
        [[scale.to(device) for _, scale, _ in each] for each in b],
        [[gathered @ values.T for _, _, values in each] for each in b],
    )


def run(world, given, calls=2, **options):
    """The results of all ranks of the last of some calls."""
    a, b, scale_a, scale_b, _ = given

    def rank_program(rank, group):
        scales = dict(scale_a=scale_a[rank], scale_b=scale_b[rank])
        for _ in range(calls):
            results = tw.all_gather_matmul(a[rank], b[rank], group, return_gathered=True, **scales, **options)
        return results

    return world.run(rank_program)


def explained(world, given):
    """What all ranks are told."""
    a, b, of_a, of_b, _ = given
    return world.run(lambda r, group: tw.explain(NAME, a[r], b[r], group, scale_a=of_a[r], scale_b=of_b[r]))[0]


def assert_right(results, given):
    a, *_, truths = given
    rows = torch.cat([x.view(torch.uint8) for x in a])
    for (outs, gathered), truth in zip(results, truths, strict=True):
        assert gathered.dtype == a[0].dtype and torch.equal(gathered.view(torch.uint8), rows)
        for out, each in zip(outs, truth, strict=True):
            assert out.dtype == torch.bfloat16 and out.shape == each.shape
            assert relative_error(out.cpu(), each) <= tolerance(torch.bfloat16, 1, True)


def plan(**changes):
    return Plan(**{**dict(tile=(128, 128, 128), stages=2, schedule="inter_sm", comm_sms=1, core="tcgen05"), **changes})


@pytest.mark.parametrize("dtype", [FP8, FP4])
@pytest.mark.parametrize(
    "world, rows, ns, k",
    [(1, 136, [264], 384), (2, 200, [72, 136], 384), (3, 40, [8, 200, 128], 128), (4, 8, [136], 128)],
)
def test_worlds_and_ragged_sizes(world, rows, ns, k, dtype):
    """Rows and columns that are no whole blocks; K of nvfp4 is no whole step."""
    given = operands(world, rows, ns, k, dtype)
    with tw.virtual_world(world, device="cpu", sms=3) as emulated:
        route = explained(emulated, given)
        results = run(emulated, given)
    assert route.fused and route.plan.core == "tcgen05" and route.plan.tile == (128, 128, 128)
    assert route.plan.mechanism == "tma" and route.plan.schedule == "inter_sm"
    assert_right(results, given)


@pytest.mark.parametrize("dtype", [FP8, FP4])
@pytest.mark.parametrize("way", WAYS, ids=way_name)
def test_every_schedule_and_new_data(way, dtype):
    """Several blocks of rows; calls with other data, and of other sizes, follow each other in the two slots."""
    calls = [
        operands(3, rows, [136], k, dtype, seed) for seed, (rows, k) in enumerate([(264, 640), (136, 384), (264, 640)])
    ]

    def rank_program(rank, group):
        return [
            tw.all_gather_matmul(
                a[rank],
                b[rank],
                group,
                return_gathered=True,
                plan=plan(comm_sms=2, **way),
                scale_a=s[rank],
                scale_b=t[rank],
            )
            for a, b, s, t, _ in calls
        ]

    with tw.virtual_world(3, device="cpu", seed=1, sms=4) as emulated:
        for results, given in zip(zip(*emulated.run(rank_program), strict=True), calls, strict=True):
            assert_right(results, given)


def test_shared_tiles_bias_and_scales_that_lie_apart():
    given = operands(2, 40, [136], 512, FP8)
    given[2][:] = [torch.cat((x[:8], x))[8:] for x in given[2]]
    given[3][1] = [torch.cat((x[:8], x))[8:] for x in given[3][1]]
    bias = torch.randn(136).bfloat16()
    with tw.virtual_world(2, device="cpu", sms=9) as emulated:
        results = run(emulated, given, plan=plan(split=2), bias=[bias])
    assert_right(results, (*given[:-1], [[truth + bias.float()] for (truth,) in given[-1]]))


@pytest.mark.parametrize("dtype", [FP8, FP4])
def test_operands_of_any_strides_are_copied(dtype):
    given = operands(2, 40, [72], 256, dtype)
    given[0][0] = given[0][0].view(torch.uint8).t().contiguous().t().view(dtype)
    given[1][1] = [x.view(torch.uint8).contiguous().view(dtype) for x in given[1][1]]
    with tw.virtual_world(2, device="cpu", sms=2) as emulated:
        assert explained(emulated, given).fused
        assert_right(run(emulated, given), given)


@pytest.mark.parametrize(
    "dtype, rows, n, k, says",
    [
        (FP8, 24, 40, 160, "K = 160 is no multiple of 128"),
        (FP4, 24, 40, 96, "K = 96 is no multiple of 64"),
        (FP8, 24, 36, 128, "N = 36 is not a multiple of 8"),
        (FP4, 24, 40, 0, "there is nothing to gather"),
        (FP8, 0, 40, 128, "there is nothing to gather"),
    ],
)
def test_what_no_kernel_serves_is_dequantized(dtype, rows, n, k, says):
    given = operands(2, rows, [n], k, dtype)
    with tw.virtual_world(2, device="cpu") as emulated:
        route = explained(emulated, given)
        results = run(emulated, given, bias=[torch.zeros(n).bfloat16()])
    assert not route.fused and route.reason.startswith(says)
    way = "the group's all-gather, then torch.matmul of operands times their scales in float32"
    assert route.reason.endswith(way) or says.startswith("there")
    assert_right(results, given)


def test_hopper_dequantizes():
    gpu = torch.device("cuda", 0)
    a, b = Like(torch.Size([512, 512]), FP8, gpu), (Like(torch.Size([512, 512]), FP8, gpu),)
    scale = Like(torch.Size([512 * 16]), torch.float8_e8m0fnu, gpu)
    site = Site("virtual", 4, 132, gpu, None, cores=("wgmma",))
    _, route = settle(site, a, b, (), False, None, 0, scale, (scale,))
    assert not route.fused and route.reason.startswith(
        "the kernel multiplies by tcgen05, this GPU by wgmma: the group's"
    )


@pytest.mark.parametrize("dtype", [FP8, FP4])
@pytest.mark.parametrize("way", WAYS, ids=way_name)
def test_an_aborted_wait_makes_the_peers_rows_nan(way, dtype, monkeypatch):
    """Also of 4-bit operands, which have no NaN."""
    monkeypatch.setattr(emulator, "World", partial(emulator.World, halt=False))
    given = operands(2, 136, [72], 128, dtype)
    with tw.virtual_world(2, device="cpu", sms=2) as emulated:
        run(emulated, given, plan=plan(**way))
        (shared,) = emulated.workspace.ops.values()
        shared.flags[1, ABORT] = 1
        results = run(emulated, given, plan=plan(**way))
    (out,), _ = results[1]
    assert out[:136].isnan().all() and not out[136:].isnan().any()


OTHERS = [
    dict(mechanism="register"),
    dict(mechanism="copy_engine", comm_sms=0),
    dict(mechanism="register", schedule="intra_sm"),
]


@pytest.mark.parametrize("changes", OTHERS, ids=way_name)
def test_other_mechanisms_have_none(changes):
    given = operands(2, 24, [40], 128, FP8)
    with (
        tw.virtual_world(2, device="cpu") as emulated,
        pytest.raises(ValueError, match="travel with their rows by 'tma'"),
    ):
        run(emulated, given, plan=plan(**changes))


@pytest.mark.parametrize(
    "change, says",
    [
        (
            dict(scale_b=None),
            "scale_b[0] of torch.float8_e4m3fn in blocks must be torch.float8_e8m0fnu on cpu, got None",
        ),
        (dict(scale_a=None), "need scale_a: one float32 value"),
        (dict(scale_b=[torch.ones(1, 136)]), "scale_b[0] of torch.float8_e4m3fn in blocks must be"),
        (
            dict(scale_a=torch.ones(8).to(torch.float8_e8m0fnu)),
            "scale_a must have 512 values, those of 40 x 4 in blocks",
        ),
        (dict(plan=plan(comm_sms=0, core="wgmma")), "plan.core='wgmma': the kernel has 'tcgen05' here"),
        (dict(plan=plan(comm_sms=0, tile=(128, 256, 128))), "needs 576 columns of tensor memory, an SM has 512"),
        (dict(bias=[torch.zeros(136)]), "bias[0] must be [136] of torch.bfloat16"),
    ],
)
def test_what_breaks_the_contract(change, says):
    (a,), (b,), (scale_a,), (scale_b,), _ = operands(1, 40, [136], 128, FP8)
    given = {"scale_a": scale_a, "scale_b": scale_b, **change}
    with tw.virtual_world(1, device="cpu") as emulated, pytest.raises(ValueError, match=re.escape(says)):
        emulated.run(lambda rank, group: tw.all_gather_matmul(a, b, group, **given))


def test_one_shot_has_none():
    given = operands(2, 24, [40], 128, FP4)
    with tw.virtual_world(2, device="cpu") as emulated, pytest.raises(ValueError, match="'inter_sm' would do"):
        run(emulated, given, plan=plan(schedule="one_shot"))


def test_no_gradients_and_full_graphs():
    (a,), (b,), (scale_a,), (scale_b,), _ = given = operands(1, 32, [64], 64, FP4)
    bias = [torch.zeros(64).bfloat16().requires_grad_()]
    with pytest.raises(NotImplementedError, match=r"of torch\.float4_e2m1fn_x2 operands has no gradients"):
        tw.all_gather_matmul(a, b, bias=bias, scale_a=scale_a, scale_b=scale_b)

    def call(x, y, s, t):
        return tw.all_gather_matmul(x, [y], scale_a=s, scale_b=[t], return_gathered=True)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert_right([compiled(a, b[0], scale_a, scale_b[0])], given)
