"""all_gather_matmul of float8_e4m3fn operands with scales."""

from functools import partial

import pytest
import torch

import tileweave as tw
from tests.ops.all_gather_matmul.problems import MULTIMEM, WAYS, plan, way_name
from tileweave import emulator
from tileweave.fabric.base import ABORT
from tileweave.ops.all_gather_matmul import reference
from tileweave.ops.matmul_reduce_scatter import relative_error, tolerance

FP8 = torch.float8_e4m3fn
NAME = "all_gather_matmul"


def operands(world, rows, ns, k, by_row, seed=0, device="cpu"):
    """a, b, biases and scales of every rank: one value, or one for each row of a and column of b."""
    g = torch.Generator().manual_seed(seed)

    def scale(*of):
        return (torch.rand(of, generator=g) + 0.5).to(device)

    a = [torch.randn(rows, k, generator=g).to(FP8).to(device) for _ in range(world)]
    b = [[torch.randn(n, k, generator=g).to(FP8).to(device).t() for n in ns] for _ in range(world)]
    bias = [[torch.randn(n, generator=g).bfloat16().to(device) for n in ns] for _ in range(world)]
    scale_a = [scale(rows, 1) if by_row else scale() for _ in range(world)]
    scale_b = [[scale(1, n) if by_row else scale(1) for n in ns] for _ in range(world)]
    return a, b, bias, scale_a, scale_b


def run(world, given, calls=1, biased=True, **options):
    """The results of all ranks of the last of some calls."""
    a, b, bias, scale_a, scale_b = given

    def rank_program(rank, group):
        scales = dict(scale_a=scale_a[rank], scale_b=scale_b[rank])
        for _ in range(calls):
            outs = tw.all_gather_matmul(
                a[rank], b[rank], group, bias=bias[rank] if biased else None, return_gathered=True, **scales, **options
            )
        return outs

    return world.run(rank_program)


def assert_scaled_right(results, given, biased=True, slack=1.0):
    a, b, bias, scale_a, scale_b = given
    for rank, (outs, gathered) in enumerate(results):
        assert torch.equal(gathered.view(torch.uint8), torch.cat([x.contiguous().view(torch.uint8) for x in a]))
        for out, y, z, scale in zip(outs, b[rank], bias[rank], scale_b[rank], strict=True):
            truth = reference(a, y, z if biased else None, scale_a, scale)
            assert out.dtype == torch.bfloat16 and out.shape == truth.shape
            assert relative_error(out, truth) <= slack * tolerance(torch.bfloat16, 1, True)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("way", WAYS + MULTIMEM, ids=way_name)
@pytest.mark.parametrize(
    "world, rows, ns, k",
    [(1, 136, [264], 272), (2, 136, [200, 64], 384), (3, 40, [136], 256), (4, 8, [64, 8, 72], 16), (5, 24, [128], 128)],
)
def test_worlds_and_ragged_sizes(world, rows, ns, k, way, by_row):
    given = operands(world, rows, ns, k, by_row)
    way = way if world > 1 else dict(way, comm_sms=0)
    chosen = plan(tile=(128, 64, 128), **way)
    with tw.virtual_world(world, device="cpu", seed=int(by_row), sms=3) as emulated:
        results = run(emulated, given, calls=3, plan=chosen)
    assert_scaled_right(results, given)


def test_the_planners_own_plan_many_blocks_no_bias():
    given = operands(2, 520, [264], 272, True)
    with tw.virtual_world(2, device="cpu", sms=3) as emulated:
        results = run(emulated, given, calls=2, biased=False)
        route = emulated.run(
            lambda r, g: tw.explain(NAME, given[0][r], given[1][r], g, scale_a=given[3][r], scale_b=given[4][r])
        )[0]
    assert route.fused and route.plan.tile[2] == 128
    assert_scaled_right(results, given, biased=False)


def test_shared_tiles():
    given = operands(2, 72, [136], 1040, True)
    with tw.virtual_world(2, device="cpu", sms=9) as emulated:
        results = run(emulated, given, calls=2, plan=plan(tile=(128, 128, 128), stages=3, split=2))
    assert_scaled_right(results, given)


def test_scales_of_one_value_beside_scales_by_column_and_rank_by_rank():
    given = operands(2, 40, [64, 72], 128, True)
    given[4][0][1], given[4][1][1] = torch.tensor(0.5), torch.tensor([[2.0]])
    given[3][0] = torch.tensor([0.25])
    with tw.virtual_world(2, device="cpu", sms=2) as emulated:
        results = run(emulated, given, calls=2)
    assert_scaled_right(results, given)


def test_strides_that_the_tensor_cores_do_not_take_are_copied():
    given = operands(2, 64, [128], 160, True)
    given[0][0] = given[0][0].view(torch.uint8).t().contiguous().view(FP8).t()
    given[1][1] = [x.view(torch.uint8).contiguous().view(FP8) for x in given[1][1]]
    with tw.virtual_world(2, device="cpu", sms=2) as emulated:
        results = run(emulated, given, calls=2)
    assert_scaled_right(results, given)


@pytest.mark.parametrize(
    "rows, n, k, fused", [(64, 128, 0, False), (0, 64, 32, False), (16, 64, 24, False), (1, 8, 16, True)]
)
def test_empty_sizes_and_one_that_tma_cannot_address(rows, n, k, fused):
    given = operands(2, rows, [n], k, True)
    with tw.virtual_world(2, device="cpu", sms=2) as emulated:
        results = run(emulated, given)
        route = emulated.run(
            lambda r, g: tw.explain(NAME, given[0][r], given[1][r], g, scale_a=given[3][r], scale_b=given[4][r])
        )[0]
    assert route.fused == fused and (k != 24 or "multiple of 16" in route.reason)
    assert_scaled_right(results, given)


@pytest.mark.parametrize("way", WAYS, ids=way_name)
def test_an_aborted_wait_makes_the_peers_rows_nan(way, monkeypatch):
    """Scales are then read that may still be written, which is reported, but NaN times any is NaN."""
    monkeypatch.setattr(emulator, "World", partial(emulator.World, halt=False))
    given = operands(2, 136, [72], 144, True)
    chosen = plan(tile=(128, 64, 128), **way)
    with tw.virtual_world(2, device="cpu", sms=2) as emulated:
        run(emulated, given, plan=chosen)
        (shared,) = emulated.workspace.ops.values()
        shared.flags[1, ABORT] = 1
        results = run(emulated, given, plan=chosen)
    assert_scaled_right(results[:1], given)
    (out,), gathered = results[1]
    assert out[:136].isnan().all() and not out[136:].isnan().any()
    assert gathered[:136].float().isnan().any(1).all()


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(scale_a=None), r"need scale_a: one float32 value, or \[64, 1\]"),
        (dict(scale_b=None), r"need scale_b\[0\]: one float32 value, or \[1, 128\]"),
        (dict(scale_b=[torch.ones(1)] * 2), "scale_b must have one for each of the 1 b, got 2"),
        (dict(scale_b=torch.ones(1)), "scale_b must be a list, as b is, got a single one"),
        (dict(scale_a=torch.ones(64)), r"scale_a must be one value or \[64, 1\], got shape \[64\]"),
        (dict(scale_b=[torch.ones(128, 1)]), r"scale_b\[0\] must be one value or \[1, 128\]"),
        (dict(scale_a=torch.ones(64, 1).double()), "scale_a must be float32"),
        (dict(scale_a=2.0), "scale_a must be a torch.Tensor"),
        (dict(scale_b=[2.0]), r"scale_b\[0\] must be a torch.Tensor"),
        (dict(bias=[torch.zeros(128)]), r"bias\[0\] must be \[128\] of torch.bfloat16"),
        (dict(plan=plan(comm_sms=0)), "the K step 128"),
    ],
)
def test_what_breaks_the_contract(change, says):
    a, b, _, scale_a, scale_b = operands(1, 64, [128], 64, True)
    given = {"scale_a": scale_a[0], "scale_b": scale_b[0], **change}
    with pytest.raises((ValueError, TypeError), match=says):
        tw.all_gather_matmul(a[0], b[0], **given)


def test_scales_go_with_float8_only():
    x = torch.randn(16, 16).bfloat16()
    with pytest.raises(ValueError, match=r"scale_a goes with float8_e4m3fn operands, but a is torch\.bfloat16"):
        tw.all_gather_matmul(x, x, scale_a=torch.ones(()), scale_b=torch.ones(()))


def test_no_gradients_and_no_autocast_and_full_graphs():
    given = operands(1, 32, [64], 32, True)
    a, b, _, (scale_a,), (scale_b,) = given
    with pytest.raises(NotImplementedError, match="has no gradients"):
        tw.all_gather_matmul(a[0], b[0], scale_a=scale_a.clone().requires_grad_(), scale_b=scale_b)

    def call(x, y, s, t):
        return tw.all_gather_matmul(x, [y], scale_a=s, scale_b=[t], return_gathered=True)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [call(a[0], b[0][0], scale_a, scale_b[0])]
    results.append(compiled(a[0], b[0][0], scale_a, scale_b[0]))
    for each in results:
        assert_scaled_right([each], given, biased=False)


@pytest.mark.gpu
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=way_name)
@pytest.mark.parametrize(
    "world, rows, ns, k", [(1, 136, [264], 272), (2, 264, [200, 64], 4096), (3, 328, [1032], 1040)]
)
def test_on_virtual_ranks(world, rows, ns, k, way, by_row):
    given = operands(world, rows, ns, k, by_row, device="cuda")
    chosen = plan(tile=(128, 256, 128), stages=4, **dict(way, comm_sms=2 if world > 1 else 0))
    with tw.virtual_world(world, "cuda", timeout=5.0) as virtual:
        results = run(virtual, given, calls=3, plan=chosen)
    assert_scaled_right(results, given, slack=2.0)  # the tensor cores sum 8-bit products with about 14 bits


@pytest.mark.gpu
def test_a_timeout_on_a_gpu_poisons_the_peers_rows():
    """TMA fills 16-bit words beyond the slot with a NaN, each half of which would have to be one of 8 bits; one is."""
    given = operands(2, 264, [256], 512, True, device="cuda")
    with tw.virtual_world(2, "cuda", timeout=1.0) as virtual:
        run(virtual, given)
        kept = {}
        virtual.workspace.ops[NAME].state[1, 0] -= 1
        a, b, _, scale_a, scale_b = given

        def rank_program(rank, group):
            scales = dict(scale_a=scale_a[rank], scale_b=scale_b[rank])
            kept[rank] = tw.all_gather_matmul(a[rank], b[rank], group, **scales)[0]

        with pytest.raises(tw.FabricTimeout):
            virtual.run(rank_program)
    assert kept[0][264:].isnan().all()
