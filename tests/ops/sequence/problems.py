"""Problems for the attention ops' tests: a whole sequence, its shards, a call on every rank, what is true."""

import torch

import tileweave as tw
from tileweave.ops.ring_attention import reference

ROUNDING = {torch.bfloat16: 1.7e-3, torch.float16: 2.1e-4, torch.float32: 2e-6, torch.float64: 1e-13}


def whole(batch, heads, kv_heads, rows, dim, *, kv_rows=None, dtype=torch.float32, seed=0, times=1.0, device="cpu"):
    """q, k, v of a whole sequence, heads first, and weights of the result in a loss. `times`: q is so much larger."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(heads, rows)] + [(kv_heads, rows if kv_rows is None else kv_rows)] * 2 + [(heads, rows)]
    made = [torch.randn(batch, h, n, dim, generator=g).to(dtype).to(device) for h, n in shapes]
    return made[0] * times, *made[1:]


def laid(x, layout):
    """A tensor with its heads first in a layout, or back."""
    return x if layout == "bhsd" else x.transpose(1, 2)


def shards(x, world, layout="bhsd", placement="contiguous"):
    """A contiguous shard of x, heads first, for every rank, in a layout."""
    parts = [tw.place_sequence(x, world, rank, 2, placement) for rank in range(world)]
    return [laid(part, layout).contiguous() for part in parts]


def run(world, op, tensors, *, grads=False, **options):
    """`op` of the shards of whole q, k, v and weights on every rank: the whole results, and gradients if asked for.

    Returns, heads first: out, lse if `return_lse`, then gradients of q, k, v.
    """
    layout, placement = options.get("layout", "bhsd"), options.get("placement", "contiguous")
    parts = [shards(x, world.size, layout, placement) for x in tensors]

    def rank_program(rank, group):
        q, k, v, weights = (x[rank] for x in parts)
        inputs = [x.detach().clone().requires_grad_(grads) for x in (q, k, v)]
        with torch.set_grad_enabled(grads or torch.is_grad_enabled()):
            results = op(*inputs, group, **options)
            outs = list(results) if isinstance(results, tuple) else [results]
            assert outs[0].is_contiguous() and outs[0].dtype == q.dtype and outs[0].shape == q.shape
            found = list(torch.autograd.grad((outs[0] * weights).sum(), inputs)) if grads else []
        assert all(x.dtype == q.dtype for x in found)
        heads_first = [laid(x.detach(), layout) for x in (outs[0], *found)]
        return [heads_first[0], *(x.detach() for x in outs[1:]), *heads_first[1:]]

    by_rank = world.run(rank_program)
    return [tw.unplace_sequence(xs, 2, placement) for xs in zip(*by_rank, strict=True)]


def as_function(world, op, **options):
    """`op` as a function of whole q, k and v: each pass is a run of the world."""

    class Whole(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return run(world, op, (q, k, v, q), **options)[0]

        @staticmethod
        def backward(ctx, grad):
            return tuple(run(world, op, (*ctx.saved_tensors, grad), grads=True, **options)[1:])

    return Whole.apply


def truth(tensors, *, causal=False, scale=None, cu_seqlens=None, grads=False, return_lse=False, **_):
    """The same of one process, in float32 at least."""
    q, k, v, weights = (x.detach().to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)
    inputs = [x.requires_grad_(grads) for x in (q, k, v)]
    out, lse = reference(*inputs, causal, scale, cu_seqlens)
    found = torch.autograd.grad((out * weights).sum(), inputs) if grads else []
    return [out.detach(), *([lse.detach()] if return_lse else []), *found]


def relative_error(got, true):
    """Frobenius norm of the difference over that of the truth; NaN or infinity if `got` has any."""
    scale = true.double().norm()
    return ((got.double() - true.double()).norm() / (scale if scale > 0 else 1.0)).item()


def assert_each_near(out, true, dtype):
    """Every element is within a few roundings of `dtype`, of its row's largest value where it is small itself: a row in
    another's place, of which a norm over all rows might say little, is not."""
    largest = true.abs().amax(-1, keepdim=True).clamp(min=1e-2)
    apart = (out.float() - true).abs() / largest
    assert out.shape == true.shape and (apart <= 12 * ROUNDING[dtype]).all(), apart.max()


def assert_near(got, true, dtype, slack=3):
    """Every result has no more than a few roundings of `dtype` in the Frobenius norm, and no NaN."""
    assert len(got) == len(true)
    for i, (x, y) in enumerate(zip(got, true, strict=True)):
        assert x.shape == y.shape
        assert torch.equal(x.isneginf(), y.isneginf())
        error = relative_error(x.masked_fill(x.isneginf(), 0.0), y.masked_fill(y.isneginf(), 0.0))
        assert error <= slack * ROUNDING[dtype], (i, error)
