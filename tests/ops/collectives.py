"""Problems for the tests of the collectives: inputs of all ranks, runs in a world, comparison with the truth."""

import torch

import tileweave as tw
from tileweave.ops.collectives import reference

MOVING = ("all_gather", "all_to_all")


def inputs(world, shape, seed, dtype=torch.bfloat16, device="cpu"):
    """Fresh random x of every rank, of any dtype."""
    g = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        kind = torch.complex64 if dtype.is_complex else torch.float32
        return [torch.randn(shape, generator=g, dtype=kind).to(dtype).to(device) for _ in range(world)]
    return [torch.randint(0, 100, shape, generator=g).to(dtype).to(device) for _ in range(world)]


def run_calls(world, calls):
    """Make the calls, in a row, on every rank; a call is (name, xs, options). Returns, per call, all ranks' results.

    No rank waits for the others between its calls.
    """

    def rank_program(rank, group):
        return [getattr(tw, name)(xs[rank], group, **options) for name, xs, options in calls]

    return list(zip(*world.run(rank_program), strict=True))


def assert_right(name, outs, xs, **options):
    """Every rank's result is the truth: bit for bit where bits are moved, else but for one rounding."""
    options.pop("deterministic", None)
    for out, true in zip(outs, reference(name, xs, **options), strict=True):
        assert out.shape == true.shape and out.dtype == xs[0].dtype and out.device == xs[0].device
        assert out.is_contiguous()
        if name in MOVING:
            assert torch.equal(out, true), name
        else:
            rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(out.dtype, 2**-22)
            torch.testing.assert_close(out.float(), true.float(), rtol=rounding, atol=4e-6 * len(xs))
    if name == "all_reduce":
        assert all(torch.equal(out, outs[0]) for out in outs)
