"""Gradients of the op in emulated worlds, against those of the float32 reference."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tileweave as tw
from tests.ops.problems import assert_gradients, gradients, leaves, operands, true_gradients
from tileweave import Plan
from tileweave.fabric import fabric_of
from tileweave.ops.matmul_reduce_scatter import reference, relative_error, tolerance

SMALL = Plan(tile=(128, 64, 64), stages=2)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world, m, n, k", [(1, 40, 24, 16), (2, 130, 72, 24), (3, 3 * 40, 64, 72), (4, 64, 20, 12)])
def test_gradients(world, m, n, k, dtype, out_dtype, op):
    a, b, bias = operands(world, m, n, k, seed=1, dtype=dtype, bias=True)
    weights = torch.randn(m, n, generator=torch.Generator().manual_seed(2)).to(out_dtype or dtype)
    with tw.virtual_world(world, device="cpu", sms=2) as w:
        got = gradients(w, a, b, bias, weights, op=op, out_dtype=out_dtype, plan=SMALL)
    assert_gradients(got, true_gradients(a, b, bias, weights, op), dtype, world)


@pytest.mark.parametrize("a_t, b_t", [(False, False), (True, True), (True, False)])
def test_either_stride_order_and_gradients_that_are_not_contiguous(a_t, b_t):
    a, b, bias = operands(2, 48, 24, 40, seed=3, a_t=a_t, b_t=b_t, bias=True)
    for weights in (torch.randn(24, 48).bfloat16().t(), torch.ones(()).bfloat16().expand(48, 24)):
        with tw.virtual_world(2, device="cpu", sms=2) as w:
            got = gradients(w, a, b, bias, weights)
        assert_gradients(got, true_gradients(a, b, bias, weights), torch.bfloat16, 2)


@pytest.mark.parametrize("m, n, k", [(0, 16, 8), (4, 0, 8), (4, 16, 0), (0, 0, 0), (2, 1, 1)])
def test_empty_and_single_sizes(m, n, k):
    a, b, bias = operands(2, m, n, k, seed=4, bias=True)
    weights = torch.randn(m, n).bfloat16()
    with tw.virtual_world(2, device="cpu", sms=2) as w:
        got = gradients(w, a, b, bias, weights)
    assert_gradients(got, true_gradients(a, b, bias, weights), torch.bfloat16, 2)


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True), (False,) * 3])
def test_only_what_is_needed_is_computed(needs, monkeypatch):
    """And nothing is kept for, nor gathered in, a backward pass that needs no peers."""
    a, b, bias = operands(2, 16, 16, 8, seed=5, bias=True)
    made = []

    def rank_program(rank, group):
        inputs = [x.detach().requires_grad_(need) for x, need in zip((a[rank], b[rank], bias), needs, strict=True)]
        out = tw.matmul_reduce_scatter(*inputs[:2], group, bias=inputs[2])
        assert out.requires_grad == any(needs)
        if any(needs):
            kept = [x is not None for x in out.grad_fn.saved_tensors]
            assert kept == [needs[1], needs[0]]
            out.sum().backward()
        assert [x.grad is not None for x in inputs] == list(needs)

    with tw.virtual_world(2, device="cpu") as w:
        kind = type(w.run(lambda rank, group: fabric_of(group))[0])
        monkeypatch.setattr(kind, "agree", lambda self, call: made.append(call.op))
        w.run(rank_program)
    gather = ["all_gather_matmul"] * 2 if needs[0] else ["all_gather"] * 2 if needs[1] else []
    assert sorted(made) == sorted([*gather, "matmul_reduce_scatter", "matmul_reduce_scatter"])


def test_a_layer_between_others_trains_as_one_process_would():
    """Two steps of SGD on a row-parallel layer after a pointwise function, with the rows of its result sharded."""
    torch.manual_seed(0)
    world, m, n, k = 2, 32, 16, 24
    x, w0 = torch.randn(world, m, k).bfloat16(), torch.randn(world, k, n).bfloat16()
    target = torch.randn(m, n)

    def step(inputs, weights, product):
        loss = ((product([torch.tanh(i) for i in inputs], weights).float() - target) ** 2).sum() / m
        loss.backward()

    serial = [w.clone().float().requires_grad_() for w in w0]
    for _ in range(2):
        step([i.float() for i in x], serial, reference)
        for w in serial:
            w.data -= 0.01 * w.grad
            w.grad = None

    def rank_program(rank, group):
        weight = w0[rank].clone().requires_grad_()
        for _ in range(2):
            out = tw.matmul_reduce_scatter(torch.tanh(x[rank]), weight, group)
            (((out.float() - target.chunk(world)[rank]) ** 2).sum() / m).backward()
            weight.data -= 0.01 * weight.grad
            weight.grad = None
        return weight.detach()

    with tw.virtual_world(world, device="cpu") as w:
        for mine, true in zip(w.run(rank_program), serial, strict=True):
            assert relative_error(mine, true.detach()) < 0.01


def test_forward_mode_is_refused_rather_than_silently_zero():
    a, b, _ = operands(1, 64, 64, 32, seed=1)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: tw.matmul_reduce_scatter(x, b[0]), (a[0],), (a[0],))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a[0], a[0])
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            tw.matmul_reduce_scatter(dual, b[0])
        assert tw.matmul_reduce_scatter(a[0], b[0]).shape == (64, 64)


def test_transforms_are_right_or_refused_by_name():
    a, b, _ = operands(1, 64, 64, 32, seed=1)
    with pytest.raises(NotImplementedError, match=r"matmul_reduce_scatter has no rules for torch.func transforms"):
        torch.func.grad(lambda x: tw.matmul_reduce_scatter(x, b[0]).float().sum())(a[0])
    outs = torch.func.vmap(lambda x: tw.matmul_reduce_scatter(x, b[0]))(torch.stack([a[0], 2 * a[0]]))
    one = tw.matmul_reduce_scatter(a[0], b[0])
    torch.testing.assert_close(outs, torch.stack([one, 2 * one]))


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_second_derivatives(needs):
    """Of the sum of squares of the first ones of a sum of squares."""
    a, b, _ = operands(2, 16, 16, 8, seed=6)

    def second(losses, inputs):
        firsts = torch.autograd.grad(losses, inputs, create_graph=True)
        return torch.autograd.grad(sum((x.float() ** 2).sum() for x in firsts), inputs)

    def rank_program(rank, group):
        x, y = (x.detach().requires_grad_(need) for x, need in zip((a[rank], b[rank]), needs, strict=True))
        out = tw.matmul_reduce_scatter(x, y, group)
        return second((out**2).sum(), [z for z in (x, y) if z.requires_grad])

    with tw.virtual_world(2, device="cpu") as w:
        results = w.run(rank_program)
    true = [[x.float().requires_grad_(need) for x in xs] for xs, need in zip((a, b), needs, strict=True)]
    inputs = [x for pair in zip(*true, strict=True) for x in pair if x.requires_grad]
    truth = second((reference(*true) ** 2).sum(), inputs)
    for got, right in zip([x for result in results for x in result], truth, strict=True):
        assert relative_error(got, right) <= 4 * tolerance(torch.bfloat16, 2, True)


def test_checkpointing_gives_the_same_gradients():
    a, b, bias = operands(2, 32, 24, 16, seed=7, bias=True)

    def rank_program(rank, group):
        def block(x, y, z):
            return torch.relu(tw.matmul_reduce_scatter(torch.relu(x), y, group, bias=z))

        gradients = []
        for through in (lambda *xs: block(*xs), lambda *xs: checkpoint(block, *xs, use_reentrant=False)):
            inputs = leaves([a[rank], b[rank], bias])
            through(*inputs).sum().backward()
            gradients.append([x.grad for x in inputs])
        return gradients

    with tw.virtual_world(2, device="cpu") as w:
        for plain, recomputed in w.run(rank_program):
            assert all(x.any() and torch.equal(x, y) for x, y in zip(plain, recomputed, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_torch_matmul_does(dtype):
    a, b, bias = operands(2, 32, 24, 16, seed=8, dtype=torch.float32, bias=True)
    other = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16
    mixed = [x.to(other) for x in b]
    weights = torch.randn(32, 24).to(dtype)

    def rank_program(rank, group):
        inputs = leaves([a[rank], b[rank], bias])
        with torch.autocast("cpu", dtype=dtype):
            out = tw.matmul_reduce_scatter(inputs[0], inputs[1], group, bias=inputs[2])
            route = tw.explain("matmul_reduce_scatter", *inputs[:2], group, bias=inputs[2])
            assert out.dtype == dtype == torch.matmul(*inputs[:2]).dtype
            mix = tw.matmul_reduce_scatter(a[rank], mixed[rank], group)
            assert mix.dtype == dtype == torch.matmul(a[rank], mixed[rank]).dtype
            wide = tw.matmul_reduce_scatter(a[rank], b[rank], group, out_dtype=torch.float32)
            assert wide.dtype == torch.float32
            with pytest.raises(ValueError, match="float64"):
                tw.matmul_reduce_scatter(a[rank].double(), b[rank].double(), group)
        assert route.fused
        out.backward(weights.chunk(2)[rank])
        return out.detach(), *(x.grad for x in inputs)

    with tw.virtual_world(2, device="cpu") as w:
        outs, of_a, of_b, of_bias = zip(*w.run(rank_program), strict=True)
    low = [[x.to(dtype) for x in xs] for xs in (a, b, [bias])]
    assert relative_error(torch.cat(outs), reference(low[0], low[1], bias=low[2][0])) <= tolerance(dtype, 2, True)
    truth = true_gradients(low[0], low[1], low[2][0], weights)
    for got, true in zip((of_a, of_b, of_bias), truth, strict=True):
        for x, y in zip(got, true, strict=True):
            assert x.dtype == torch.float32 and relative_error(x, y) <= tolerance(dtype, 2, True)


def test_all_gather():
    xs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    kept = [x.clone() for x in xs]

    def rank_program(rank, group):
        whole = fabric_of(group).all_gather(xs[rank].t()[:, :2].t())
        xs[rank].fill_(float("nan"))  # legal as soon as the call has returned
        return whole

    with tw.virtual_world(3, device="cpu") as w:
        for whole in w.run(rank_program):
            assert whole.is_contiguous() and torch.equal(whole, torch.cat([x[:2] for x in kept]))
