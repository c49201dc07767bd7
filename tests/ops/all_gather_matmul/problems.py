"""Problems for the op's tests: operands of all ranks, runs in a world, comparison with the float32 truth."""

import torch

import tileweave as tw
from tileweave import Plan
from tileweave.ops.all_gather_matmul import reference
from tileweave.ops.matmul_reduce_scatter import relative_error, tolerance

# Ways to gather, as changes of a plan.
MECHANISMS = [
    dict(mechanism="register"),
    dict(mechanism="register", schedule="intra_sm"),
    dict(mechanism="copy_engine", comm_sms=0),
]
MULTIMEM = [dict(mechanism="multimem")]  # not on virtual ranks
WAYS = [*(dict(schedule=name) for name in ("inter_sm", "intra_sm", "none")), *MECHANISMS]


def way_name(way) -> str:
    """Of one of WAYS, for a test."""
    return " ".join(str(value) for name, value in way.items() if name != "comm_sms")


def plan(**changes) -> Plan:
    """A plan of small tiles, of which even small problems have several, but for `changes`."""
    return Plan(**{**dict(tile=(128, 64, 64), stages=2, schedule="inter_sm", comm_sms=1), **changes})


def operands(world, rows, ns, k, seed, dtype=torch.bfloat16, b_t=True, device="cpu"):
    """Fresh random shards a of every rank, and lists of b and of biases of every rank, one for each of `ns` columns."""
    g = torch.Generator(device).manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g, device=device).to(dtype)

    a = [rand(rows, k) for _ in range(world)]
    b = [[rand(n, k).t() if b_t else rand(k, n) for n in ns] for _ in range(world)]
    bias = [[rand(n) for n in ns] for _ in range(world)]
    return a, b, bias


def run_calls(world, calls, **options):
    """Make the calls, one after the other, on every rank of `world`; a call is (a, b, bias or None, keyword arguments).

    Returns, per call, the results of all ranks. No rank waits for the others between its calls.
    """

    def rank_program(rank, group):
        return [
            tw.all_gather_matmul(a[rank], b[rank], group, bias=bias and bias[rank], **kw, **options)
            for a, b, bias, kw in calls
        ]

    return list(zip(*world.run(rank_program), strict=True))


def assert_right(results, a, b, bias=None, return_gathered=False):
    """Every result of every rank is near the truth, which is not zero; gathered rows are equal to it."""
    for rank, result in enumerate(results):
        outs = result
        if return_gathered:
            outs, gathered = result
            assert torch.equal(gathered, torch.cat(a)) and gathered.is_contiguous()
        assert len(outs) == len(b[rank])
        for i, out in enumerate(outs):
            truth = reference(a, b[rank][i], bias and bias[rank][i])
            assert out.shape == truth.shape and out.is_contiguous()
            error = relative_error(out, truth)
            assert error <= tolerance(out.dtype, 1, True), (rank, i, error)
            if truth.numel() and truth.norm() > 0:
                assert out.any()
