"""Problems for the tests of matmul_all_reduce: operands of all ranks, runs, comparison with the float32 truth."""

import torch

import tileweave as tw
from tests.ops import problems
from tileweave.ops.matmul_all_reduce import reference, relative_error, tolerance

NONE = dict(bias=None, residual=None, norm_weight=None)


def operands(world, m, n, k, seed, extras="brn", dtype=torch.bfloat16, a_t=False, b_t=True, device="cpu"):
    """Fresh random a, b of every rank, and a dictionary of what is asked for of b(ias), r(esidual), n(orm_weight)."""
    a, b, _ = problems.operands(world, m, n, k, seed, dtype, a_t, b_t, device=device)
    g = torch.Generator().manual_seed(1000 + seed)
    made = {
        name: torch.randn(*shape, generator=g).to(dtype).to(device)
        for name, shape in (("bias", (n,)), ("residual", (m, n)), ("norm_weight", (n,)))
    }
    return a, b, {name: x for name, x in made.items() if name[0] in extras}


def assert_right(results, a, b, extras, norm_eps=1e-6):
    """Every rank has the same bits, and they are near the truth, which is not zero."""
    truths = reference(a, b, *({**NONE, **extras}.values()), norm_eps)
    normed = "norm_weight" in extras
    for i, truth in enumerate(truths if normed else (truths,)):
        outs = [result[i] if normed else result for result in results]
        assert all(out.shape == truth.shape and out.is_contiguous() and out.dtype == a[0].dtype for out in outs)
        assert all(torch.equal(outs[0], out) for out in outs[1:])
        error = relative_error(outs[0], truth)
        assert error <= tolerance(a[0].dtype, len(a)), error
        if truth.numel() and truth.norm() > 0:
            assert outs[0].abs().sum() > 0


def run_calls(world, calls, **options):
    """Make the calls, one after the other, on every rank of `world`; a call is (a, b, tensors and options by name).

    Returns, per call, the results of all ranks. No rank waits for the others between its calls.
    """

    def rank_program(rank, group):
        return [tw.matmul_all_reduce(a[rank], b[rank], group, **{**kw, **options}) for a, b, kw in calls]

    return list(zip(*world.run(rank_program), strict=True))
