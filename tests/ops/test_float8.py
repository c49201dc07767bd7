"""matmul_reduce_scatter of float8_e4m3fn operands with scales."""

import pytest
import torch

import tileweave as tw
from tileweave import Plan
from tileweave.ops.matmul_reduce_scatter import reference, relative_error, tolerance

FP8 = torch.float8_e4m3fn


def operands(world, m, n, k, by_row, seed=0, device="cpu"):
    """a, b and scales of every rank: one value, or one for each row of a and column of b."""
    g = torch.Generator().manual_seed(seed)
    a = [torch.randn(m, k, generator=g).to(FP8).to(device) for _ in range(world)]
    b = [torch.randn(n, k, generator=g).to(FP8).to(device).t() for _ in range(world)]
    of_a, of_b = ((m, 1), (1, n)) if by_row else ((), (1,))
    scales = [[(torch.rand(of, generator=g) + 0.5).to(device) for of in (of_a, of_b)] for _ in range(world)]
    return a, b, scales


def run(world, a, b, scales, calls=1, **options):
    """The results of all ranks of the last of some calls."""

    def rank_program(rank, group):
        scale_a, scale_b = scales[rank]
        for _ in range(calls):
            out = tw.matmul_reduce_scatter(a[rank], b[rank], group, scale_a=scale_a, scale_b=scale_b, **options)
        return out

    return world.run(rank_program)


def assert_scaled_right(outs, a, b, scales, bias=None, op="sum"):
    truth = reference(a, b, op, bias, scales)
    assert relative_error(torch.cat(outs), truth) <= tolerance(outs[0].dtype, len(a), True)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(
    "world, m, n, k",
    [(1, 136, 264, 272), (2, 2 * 136, 200, 384), (3, 3 * 40, 136, 256), (4, 4 * 8, 64, 16), (5, 5 * 24, 128, 128)],
)
@pytest.mark.parametrize("seed", range(2))
def test_worlds_and_ragged_sizes(world, m, n, k, by_row, seed):
    a, b, scales = operands(world, m, n, k, by_row, seed)
    with tw.virtual_world(world, device="cpu", seed=seed, sms=3) as emulated:
        outs = run(emulated, a, b, scales, calls=3)
    assert outs[0].dtype == torch.bfloat16
    assert_scaled_right(outs, a, b, scales)


@pytest.mark.parametrize("options", [dict(deterministic=True), dict(out_dtype=torch.float32), dict(op="avg")])
def test_options(options):
    a, b, scales = operands(3, 3 * 72, 192, 320, True)
    with tw.virtual_world(3, device="cpu", sms=2) as emulated:
        outs = run(emulated, a, b, scales, **options)
    assert outs[0].dtype == options.get("out_dtype", torch.bfloat16)
    assert_scaled_right(outs, a, b, scales, op=options.get("op", "sum"))


def test_bias_is_not_scaled():
    a, b, scales = operands(2, 64, 128, 128, True)
    bias = torch.randn(128).bfloat16()
    with tw.virtual_world(2, device="cpu", sms=2) as emulated:
        outs = run(emulated, a, b, scales, bias=bias)
    assert_scaled_right(outs, a, b, scales, bias)


def test_shared_tiles_and_a_plan_of_the_callers():
    a, b, scales = operands(1, 136, 256, 1024, True)
    plan = Plan(tile=(128, 128, 128), stages=3, split=2)
    with tw.virtual_world(1, device="cpu", sms=9) as emulated:
        outs = run(emulated, a, b, scales, calls=2, plan=plan)
    assert_scaled_right(outs, a, b, scales)
    with tw.virtual_world(1, device="cpu") as emulated, pytest.raises(ValueError, match="the K step 128"):
        run(emulated, a, b, scales, plan=Plan(tile=(128, 128, 64)))


def test_strides_that_the_tensor_cores_do_not_take_are_copied():
    a, b, scales = operands(2, 64, 128, 160, True)
    a = [x.view(torch.uint8).t().contiguous().view(FP8).t() for x in a]
    b = [x.view(torch.uint8).contiguous().view(FP8) for x in b]
    with tw.virtual_world(2, device="cpu", sms=2) as emulated:
        outs = run(emulated, a, b, scales, calls=2)
    assert_scaled_right(outs, a, b, scales)


@pytest.mark.parametrize("k", [0, 24])
def test_no_inner_dimension_and_one_that_tma_cannot_address(k):
    a, b, scales = operands(2, 64, 128, k, True)
    with tw.virtual_world(2, device="cpu", sms=2) as emulated:
        outs = run(emulated, a, b, scales)
        route = emulated.run(
            lambda r, g: tw.explain("matmul_reduce_scatter", a[r], b[r], g, scale_a=scales[r][0], scale_b=scales[r][1])
        )[0]
    assert route.fused == (k == 0) and (k == 0 or "multiple of 16" in route.reason)
    assert_scaled_right(outs, a, b, scales)


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(scale_a=None), r"need scale_a: one float32 value, or \[64, 1\]"),
        (dict(scale_b=None), r"need scale_b: one float32 value, or \[1, 128\]"),
        (dict(scale_a=torch.ones(64)), r"scale_a must be one value or \[64, 1\], got shape \[64\]"),
        (dict(scale_b=torch.ones(128, 1)), r"scale_b must be one value or \[1, 128\]"),
        (dict(scale_a=torch.ones(64, 1).double()), "scale_a must be float32"),
        (dict(scale_a=2.0), "scale_a must be a torch.Tensor"),
        (dict(out_dtype=torch.float16), "out_dtype must be torch.bfloat16 or torch.float32"),
        (dict(bias=torch.zeros(128)), r"bias must be \[128\] of torch.bfloat16"),
    ],
)
def test_what_breaks_the_contract(change, says):
    a, b, scales = operands(1, 64, 128, 64, True)
    given = {"scale_a": scales[0][0], "scale_b": scales[0][1], **change}
    with pytest.raises((ValueError, TypeError), match=says):
        tw.matmul_reduce_scatter(a[0], b[0], **given)


def test_scales_go_with_float8_only():
    x = torch.randn(16, 16).bfloat16()
    with pytest.raises(ValueError, match=r"goes with float8_e4m3fn operands, but a is torch\.bfloat16"):
        tw.matmul_reduce_scatter(x, x, scale_a=torch.ones(()), scale_b=torch.ones(()))


def test_no_gradients_and_no_autocast():
    a, b, scales = operands(1, 32, 64, 32, False)
    scale = scales[0][0].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="has no gradients"):
        tw.matmul_reduce_scatter(a[0], b[0], scale_a=scale, scale_b=scales[0][1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = tw.matmul_reduce_scatter(a[0], b[0], scale_a=scales[0][0], scale_b=scales[0][1])
    assert_scaled_right([out], a, b, scales)


def test_torch_compile_traces_it():
    a, b, scales = operands(1, 32, 64, 32, True)
    f = torch.compile(
        lambda *x: tw.matmul_reduce_scatter(x[0], x[1], scale_a=x[2], scale_b=x[3]) * 2,
        backend="aot_eager",
        fullgraph=True,
    )
    got = f(a[0], b[0], *scales[0])
    assert_scaled_right([got / 2], a, b, scales)


@pytest.mark.gpu
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("world, m, n, k", [(1, 136, 264, 272), (2, 2 * 136, 200, 4096), (3, 3 * 328, 1032, 1024)])
def test_on_virtual_ranks(world, m, n, k, by_row):
    a, b, scales = operands(world, m, n, k, by_row, device="cuda")
    with tw.virtual_world(world, "cuda") as virtual:
        outs = run(virtual, a, b, scales, calls=3)
    # The tensor cores sum 8-bit products with about 14 bits.
    truth = reference(a, b, scales=scales)
    assert relative_error(torch.cat(outs), truth) <= 2 * tolerance(torch.bfloat16, world, True)
