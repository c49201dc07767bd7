"""The attention template with K and V of several sources, in the emulator, and compiled."""

import math

import pytest
import torch

from tests.tiles.kernels.attention_segments import segments_kernel
from tileweave import lang
from tileweave.emulator import World
from tileweave.ops.attention.reference import reference, relative_error, tolerance
from tileweave.ops.descriptors import describe

HEADS, KV_HEADS, DIM, BN = 4, 2, 64, 16


def arguments(rows, world, rank, absent, consumers, device="cpu", dim=DIM, bn=BN):
    """The kernel's arguments, q, k, v (all shards) and the result."""
    g = torch.Generator(device).manual_seed(rows) if device == "cpu" else None
    q, k, v = (
        torch.randn(n, h, rows, dim, generator=g, device=device).bfloat16()
        for n, h in ((1, HEADS), (world, KV_HEADS), (world, KV_HEADS))
    )
    out = torch.full_like(q, math.nan)
    boxes = describe(q, (1, 1, 64, dim)), describe(k, (1, 1, bn, dim), "nan"), describe(v, (1, 1, bn, dim))
    tiles = HEADS * math.ceil(rows / (64 * consumers))
    numbers = tiles, math.log2(math.e) / math.sqrt(dim), HEADS // KV_HEADS, rows, rows, rank, absent
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    args = (*boxes, describe(out, (1, 1, 64, dim)), counter, *numbers, world, consumers, 3 if bn == BN else 5)
    return args, (q, k, v, out)


def attended(seed, rows, world, rank, absent=-1, consumers=2, grid=2):
    """One schedule: the result and the truth."""
    args, (q, k, v, out) = arguments(rows, world, rank, absent, consumers)
    machine = World(1, seed)
    machine.run(lambda _: machine.launch(segments_kernel, (grid,), *args, num_warps=4))
    whole_k, whole_v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (k, v))
    return out, reference(q, whole_k, whole_v, causal=True, offset=rank * rows)[0]


@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("rows", [10, 100, 129])
@pytest.mark.parametrize("world, rank", [(1, 0), (2, 0), (2, 1), (4, 0), (4, 2), (4, 3)])
def test_shards_of_a_sequence(world, rank, rows, consumers):
    for seed in range(3):
        out, truth = attended(seed, rows, world, rank, consumers=consumers)
        assert relative_error(out, truth) <= tolerance(torch.bfloat16)


def test_a_shard_that_has_not_come_makes_the_result_nan_where_it_is_seen():
    out, _ = attended(0, 100, 3, 1, absent=0)
    assert out.isnan().all()
    out, truth = attended(0, 100, 3, 1, absent=2)
    assert relative_error(out, truth) <= tolerance(torch.bfloat16)


@pytest.mark.skipif(not lang.HAS_TRITON, reason="compiles")
def test_it_compiles_without_spills_in_loops():
    from tileweave.bench.compile import compile_report

    args, _ = arguments(4096, 4, 1, -1, 2, device="meta", dim=128, bn=128)
    report = compile_report(segments_kernel, args, num_warps=4)
    assert report["stack"] <= 32, "more than some words at the roles' beginnings"
    assert report["HGMMA"] == 96
