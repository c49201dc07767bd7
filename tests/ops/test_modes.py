"""Modes of PyTorch around calls: inference mode within ranks, transforms that the ops have no rules for."""

import pytest
import torch
from torch.autograd import forward_ad

import tileweave as tw

A, B = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
CALLS = {
    "matmul_reduce_scatter": lambda group: tw.matmul_reduce_scatter(A, B, group),
    "all_gather_matmul": lambda group: tw.all_gather_matmul(A, B, group),
    "matmul_all_reduce": lambda group: tw.matmul_all_reduce(A, B, group),
    "all_reduce": lambda group: tw.all_reduce(A, group),
}


@pytest.mark.parametrize("name", CALLS)
def test_inference_mode_in_some_ranks_and_not_in_the_next_run(name):
    def serving(rank, group, in_mode):
        with torch.inference_mode(in_mode):
            return CALLS[name](group)

    with tw.virtual_world(2, device="cpu") as world:
        expected = world.run(lambda rank, group: CALLS[name](group))
        for modes in ((True, True), (True, False), (False, False)):
            outs = world.run(lambda rank, group, modes=modes: serving(rank, group, modes[rank]))
            assert [out.is_inference() for out in outs] == list(modes)
            assert all(torch.equal(x, y) for x, y in zip(outs, expected, strict=True))
    with tw.virtual_world(2, device="cpu") as world:  # the workspace is made within the mode
        with torch.inference_mode():
            world.run(lambda rank, group: CALLS[name](group))
        outs = world.run(lambda rank, group: CALLS[name](group))
        assert all(torch.equal(x, y) for x, y in zip(outs, expected, strict=True))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("around_the_world", [False, True])
def test_what_ops_make_does_not_lie_on_the_default_device(name, around_the_world):
    def as_on_meta(rank, group):
        with torch.device("meta"):
            return CALLS[name](group)

    with tw.virtual_world(2, device="cpu") as world:
        expected = world.run(lambda rank, group: CALLS[name](group))
    with torch.device("meta" if around_the_world else "cpu"), tw.virtual_world(2, device="cpu") as world:
        outs = world.run(as_on_meta)
    assert all(torch.equal(x, y) for x, y in zip(outs, expected, strict=True))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: tw.all_reduce(x),
        lambda x: tw.all_gather(x),
        lambda x: tw.reduce_scatter(x),
        lambda x: tw.all_to_all(x, split_dim=0, concat_dim=1),
    ],
)
def test_derivatives_that_would_be_missing_are_refused(call):
    x = torch.ones(2, 2)
    with pytest.raises(NotImplementedError, match="backward"):
        torch.func.jvp(call, (x,), (x,))
    with pytest.raises(NotImplementedError, match="backward"):
        torch.func.grad(lambda q: call(q).sum())(x)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode"):
        call(forward_ad.make_dual(x, x))
    with forward_ad.dual_level():
        assert torch.equal(call(x), x)


def test_float8_needs_scales_and_is_not_for_all_ops():
    x = torch.ones(128, 128).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"in blocks must be torch\.float8_e8m0fnu on cpu, got None"):
        tw.matmul_all_reduce(x, x)
    for op in (tw.all_gather_matmul, tw.matmul_reduce_scatter):
        with pytest.raises(ValueError, match="need scale_a"):
            op(x, x)


def test_a_row_of_one_element_may_have_any_stride():
    from tileweave.ops.collectives.check import check
    from tileweave.ops.collectives.launch import unfused

    class Alone:
        world_size = 1

        def all_gather(self, x):
            return x.clone()

    x = torch.ones(1, 4).t()
    assert x.is_contiguous() and x.stride(1) == 4
    assert torch.equal(unfused(Alone(), check("all_gather", 1, x, 0), x), x)


def test_a_plan_for_a_gpu_is_no_error_where_nothing_is_fused():
    plan = tw.Plan(schedule="inter_sm", comm_sms=0)
    assert tw.explain("all_gather_matmul", A, B, plan=plan).fused is False
    assert tw.explain("matmul_reduce_scatter", A, B, plan=tw.Plan(tile=(64, 64, 64))).fused is False
