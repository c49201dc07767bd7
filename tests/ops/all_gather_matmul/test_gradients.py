"""Gradients of the op in emulated worlds, against those of one process."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tileweave as tw
from tests.ops.all_gather_matmul.problems import operands, plan
from tileweave.ops.matmul_reduce_scatter import relative_error, tolerance


def leaf(x, needed=True):
    """The same values as a leaf; strides are kept."""
    return x.detach().requires_grad_(needed)


def problem(world, rows, ns, k, dtype=torch.bfloat16, seed=1, device="cpu"):
    """Operands of all ranks, and random weights of the results and of the gathered rows in a loss."""
    a, b, bias = operands(world, rows, ns, k, seed=seed, dtype=dtype, device=device)
    g = torch.Generator().manual_seed(seed + 1000)
    widths = [*ns, k]
    weights = [[torch.randn(world * rows, n, generator=g).to(dtype).to(device) for n in widths] for _ in range(world)]
    return a, b, bias, weights


def loss(outs, gathered, weights, power):
    """A number that depends on all results, and on the gathered rows unless they are None."""
    total = sum((out**power * w).sum() for out, w in zip(outs, weights, strict=False))
    return total if gathered is None else total + (gathered**power * weights[-1]).sum()


def derived(total, inputs, order):
    """First derivatives, or those of the sum of their squares."""
    firsts = torch.autograd.grad(total, inputs, create_graph=order > 1)
    return firsts if order == 1 else torch.autograd.grad(sum((x.float() ** 2).sum() for x in firsts), inputs)


def gradients(world, a, b, bias, weights, *, order=1, call=tw.all_gather_matmul, **options):
    """Of a, each b and each bias on every rank of `world`; bias may be None."""

    def rank_program(rank, group):
        x, ys, zs = leaf(a[rank]), [leaf(y) for y in b[rank]], [leaf(z) for z in bias[rank]] if bias else None
        result = call(x, ys, group, bias=zs, **options)
        outs, gathered = result if options.get("return_gathered") else (result, None)
        return derived(loss(outs, gathered, weights[rank], order), [x, *ys, *(zs or [])], order)

    return world.run(rank_program)


def true_gradients(a, b, bias, weights, *, order=1, return_gathered=False, **_):
    """The same of one process, in float32."""
    xs = [leaf(x.float()) for x in a]
    ys = [[leaf(y.float()) for y in each] for each in b]
    zs = [[leaf(z.float()) for z in each] for each in bias] if bias else [[] for _ in a]
    whole, total = torch.cat(xs), 0
    for rank, columns in enumerate(ys):
        outs = [whole @ y for y in columns]
        if bias:
            outs = [out + z for out, z in zip(outs, zs[rank], strict=True)]
        scales = [w.float() for w in weights[rank]]
        total = total + loss(outs, whole if return_gathered else None, scales, order)
    found = iter(derived(total, [t for x, y, z in zip(xs, ys, zs, strict=True) for t in (x, *y, *z)], order))
    return [[next(found) for _ in (x, *y, *z)] for x, y, z in zip(xs, ys, zs, strict=True)]


def assert_near(got, truth, dtype, world, slack=1):
    for mine, true in zip(got, truth, strict=True):
        for x, y in zip(mine, true, strict=True):
            assert x.dtype == dtype and x.shape == y.shape
            assert relative_error(x, y) <= slack * tolerance(dtype, world, True)


@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize("return_gathered", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "world, rows, ns, k", [(1, 40, [24], 16), (2, 72, [72, 8], 24), (3, 40, [64, 16, 8], 72), (4, 16, [20], 12)]
)
def test_gradients(world, rows, ns, k, dtype, return_gathered, regather):
    given = problem(world, rows, ns, k, dtype)
    options = dict(return_gathered=return_gathered, regather=regather)
    with tw.virtual_world(world, device="cpu", sms=2) as w:
        got = gradients(w, *given, **options)
    assert_near(got, true_gradients(*given, **options), dtype, world, slack=1.5)


@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize("return_gathered", [False, True])
def test_second_derivatives(return_gathered, regather):
    given = problem(2, 16, [16, 8], 8)
    options = dict(order=2, return_gathered=return_gathered, regather=regather)
    with tw.virtual_world(2, device="cpu", sms=2) as w:
        got = gradients(w, *given[:2], None, given[3], **options)
    assert_near(got, true_gradients(*given[:2], None, given[3], **options), torch.bfloat16, 2, slack=4)


@pytest.mark.parametrize("rows, ns, k", [(0, [16], 8), (2, [0], 8), (2, [8, 0], 8), (2, [16], 0), (1, [1], 1)])
def test_empty_and_single_sizes(rows, ns, k):
    given = problem(2, rows, ns, k)
    with tw.virtual_world(2, device="cpu", sms=2) as w:
        got = gradients(w, *given)
    assert_near(got, true_gradients(*given), torch.bfloat16, 2, slack=2)


@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize("needs", [(1, 0, 0, 0), (0, 1, 1, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 0, 1, 1), (0, 0, 0, 0)])
def test_only_what_is_needed_is_kept_and_computed(needs, regather, monkeypatch):
    """Inputs a, two b and a bias."""
    a, b, bias = operands(2, 16, [16, 8], 8, seed=5)
    made = []

    def rank_program(rank, group):
        given = [a[rank], *b[rank], bias[rank][0]]
        x, y0, y1, z = (leaf(t, bool(need)) for t, need in zip(given, needs, strict=True))
        outs = tw.all_gather_matmul(x, [y0, y1], group, bias=[z, bias[rank][1]], regather=regather)
        if any(needs):
            kept, *ys = outs[0].grad_fn.saved_tensors
            assert [y is not None for y in ys] == ([True, True] if needs[0] else [])
            rows = 16 if regather else 32
            assert (kept is None and not any(needs[1:3])) or (kept.shape[0] == rows and any(needs[1:3]))
            (outs[0].sum() + outs[1].sum()).backward()
        assert [t.grad is not None for t in (x, y0, y1, z)] == list(map(bool, needs))

    with tw.virtual_world(2, device="cpu") as w:
        kind = type(w.run(lambda rank, group: tw.fabric.fabric_of(group))[0])
        monkeypatch.setattr(kind, "agree", lambda self, call: made.append(call.op))
        w.run(rank_program)
    expected = ["all_gather_matmul"] + ["matmul_reduce_scatter"] * needs[0]
    expected += ["all_gather"] * (regather and any(needs[1:3]))
    assert sorted(made) == sorted(2 * expected)


def test_a_result_that_takes_no_part_in_the_loss():
    given = problem(2, 16, [16, 8], 8)

    def rank_program(rank, group):
        x, ys = leaf(given[0][rank]), [leaf(y) for y in given[1][rank]]
        _, out = tw.all_gather_matmul(x, ys, group)
        (out * given[3][rank][1]).sum().backward()
        assert ys[0].grad is None
        return x.grad, ys[1].grad

    with tw.virtual_world(2, device="cpu") as w:
        got = w.run(rank_program)
    a, b, _, weights = given
    truth = true_gradients(a, [each[1:] for each in b], None, [each[1:] for each in weights])
    assert_near(got, truth, torch.bfloat16, 2)


def test_checkpointing_gives_the_same_gradients():
    given = problem(2, 16, [24], 16)

    def checkpointed(*args, **options):
        return checkpoint(tw.all_gather_matmul, *args, use_reentrant=False, **options)

    with tw.virtual_world(2, device="cpu", sms=2) as w:
        plain = gradients(w, *given, plan=plan())
        again = gradients(w, *given, plan=plan(), call=checkpointed)
    for xs, ys in zip(plain, again, strict=True):
        for x, y in zip(xs, ys, strict=True):
            torch.testing.assert_close(x, y)


def test_two_layers_train_as_one_process_would():
    """Column-parallel, then row-parallel, rows sharded outside: what a transformer's block has."""
    world, rows, hidden, inner = 2, 16, 24, 16
    a, b, _ = operands(world, rows, [inner], hidden, seed=3)
    c = [torch.randn(inner, hidden, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(world)]

    def rank_program(rank, group):
        x, y, z = leaf(a[rank]), leaf(b[rank][0]), leaf(c[rank])
        middle = torch.tanh(tw.all_gather_matmul(x, y, group))
        tw.matmul_reduce_scatter(middle, z, group).float().square().sum().backward()
        return x.grad, y.grad, z.grad

    with tw.virtual_world(world, device="cpu") as w:
        got = w.run(rank_program)
    xs, ys, zs = ([leaf(t.float()) for t in ts] for ts in (a, [each[0] for each in b], c))
    sum(torch.tanh(torch.cat(xs) @ y) @ z for y, z in zip(ys, zs, strict=True)).square().sum().backward()
    truth = [[t.grad for t in each] for each in zip(xs, ys, zs, strict=True)]
    assert_near(got, truth, torch.bfloat16, 2, slack=3)


def test_forward_mode_and_transforms_are_refused_by_name():
    a, b, _ = operands(1, 64, [64], 32, seed=1)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a[0], a[0])
        with pytest.raises(NotImplementedError, match="all_gather_matmul has no forward-mode derivative"):
            tw.all_gather_matmul(dual, b[0][0])
    with pytest.raises(NotImplementedError, match=r"all_gather_matmul has no rules for torch.func transforms"):
        torch.func.grad(lambda x: tw.all_gather_matmul(x, b[0][0]).float().sum())(a[0])
