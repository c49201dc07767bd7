"""Problems for the op's tests: operands of all ranks, a run in an emulated world, comparison with the float32 truth."""

import torch

import tileweave as tw
from tileweave import Plan
from tileweave.ops.matmul_reduce_scatter import reference, relative_error, tolerance

# Calls whose last wave's tiles are shared: world, m, n, k, SMs, tile, CTAs that share a tile. Ragged all of them.
SHARED_TILES = [
    (1, 72, 136, 136, 6, (64, 64, 64), 2),  # one rank, three tiles, all of them shared; tiles of one part
    (1, 264, 200, 72, 5, (128, 128, 64), 2),  # one whole tile a CTA, then one shared one; K steps of 64 and 8
    (2, 2 * 72, 72, 200, 8, (64, 128, 64), 2),  # one multiplier
    (2, 2 * 136, 264, 320, 9, (128, 128, 64), 3),  # foreign tiles whole, own ones in part; more CTAs than parts
    (3, 3 * 40, 72, 264, 24, (128, 64, 64), 4),  # three of four CTAs finish nothing
    (3, 3 * 136, 328, 136, 5, (128, 256, 64), 2),
    (3, 3 * 264, 136, 1032, 8, (256, 64, 64), 2),
    (5, 5 * 8, 8, 200, 15, (64, 64, 64), 3),
]


def operands(world, m, n, k, seed, dtype=torch.bfloat16, a_t=False, b_t=True, bias=False, device="cpu"):
    """Fresh random a, b of every rank, and a bias; `k` is one rank's share."""
    g = torch.Generator().manual_seed(seed)

    def rand(rows, columns, transposed):
        shape = (columns, rows) if transposed else (rows, columns)
        x = torch.randn(*shape, generator=g).to(dtype).to(device)
        return x.t() if transposed else x

    a = [rand(m, k, a_t) for _ in range(world)]
    b = [rand(k, n, b_t) for _ in range(world)]
    return a, b, torch.randn(n, generator=g).to(dtype).to(device) if bias else None


def assert_right(outs, a, b, *, op="sum", bias=None, deterministic=False):
    """Every shard has its shape and is near the truth, which is not zero."""
    world = len(a)
    (m, _), n = a[0].shape, b[0].shape[1]
    assert [tuple(o.shape) for o in outs] == [(m // world, n)] * world
    truth = reference(a, b, op, bias)
    error = relative_error(torch.cat(outs), truth)
    assert error <= tolerance(outs[0].dtype, world, deterministic), error
    if truth.numel() and truth.norm() > 0:
        assert torch.cat(outs).abs().sum() > 0


def run_calls(world, calls, **options):
    """Make the calls, one after the other, on every rank of `world`; a call is (a, b, keyword arguments).

    Returns, per call, the results of all ranks. No rank waits for the others between its calls.
    """

    def rank_program(rank, group):
        return [tw.matmul_reduce_scatter(a[rank], b[rank], group, **kw, **options) for a, b, kw in calls]

    by_rank = world.run(rank_program)
    return list(zip(*by_rank, strict=True))


def leaves(tensors):
    """The same values as leaves that require gradients; strides are kept."""
    return [x.detach().requires_grad_() for x in tensors]


def true_gradients(a, b, bias, weights, op="sum"):
    """Float32 gradients of (reference * weights).sum(): of each a, each b, and per rank of bias."""
    world = len(a)
    a, b = leaves(x.float() for x in a), leaves(x.float() for x in b)
    (reference(a, b, op) * weights.float()).sum().backward()
    return [x.grad for x in a], [x.grad for x in b], [rows.float().sum(0) for rows in weights.chunk(world)]


def gradients(world, a, b, bias, weights, *, call=tw.matmul_reduce_scatter, **options):
    """Forward and backward of `call` on every rank of `world`; the gradients as `true_gradients` gives them."""

    def rank_program(rank, group):
        inputs = leaves([a[rank], b[rank], bias])
        out = call(*inputs[:2], group, bias=inputs[2], **options)
        out.backward(weights.chunk(len(a))[rank] if out.numel() else torch.zeros_like(out))
        return [x.grad for x in inputs]

    return list(zip(*world.run(rank_program), strict=True))


def assert_gradients(got, truth, dtype, world):
    """Gradients of all ranks are near the true ones and of `dtype`."""
    for mine, true in zip(got, truth, strict=True):
        for x, y in zip(mine, true, strict=True):
            assert x.dtype == dtype and x.shape == y.shape
            assert relative_error(x, y) <= tolerance(dtype, world, True)


def calls_of_changing_plans(world, device="cpu"):
    """Calls for `run_calls` on `4 * world` SMs, most of which share tiles: of other shapes, by other CTAs each time."""
    wide, narrow, tall = (world * 72, 72, 200), (world * 40, 72, 136), (world * 136, 8, 72)
    plans = [
        (wide, Plan(tile=(128, 128, 64), stages=2, split=3)),
        (wide, Plan(tile=(128, 128, 64), stages=2)),
        (narrow, Plan(tile=(64, 64, 64), stages=3, split=2)),
        (tall, None),
        (wide, Plan(tile=(128, 64, 64), stages=2, split=2)),
        (wide, Plan(tile=(128, 128, 64), stages=2, split=3)),
    ]
    calls = []
    for i, (shape, plan) in enumerate(plans):
        a, b, bias = operands(world, *shape, seed=i, bias=True, device=device)
        calls.append((a, b, dict(bias=bias, plan=plan)))
    return calls
