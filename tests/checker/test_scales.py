"""Operands of few bits with their scales: what they stand for, and that the checks of the matmuls come by them."""

from dataclasses import replace

import pytest
import torch

from tests.ops.test_block_scales import FOURS, FP4
from tileweave.checker import OpCase, check
from tileweave.checker.scales import BLOCKS, narrowed, widened

OPS = ("matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce")


def operands(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(140, 320, generator=g).bfloat16(), torch.randn(320, 24, generator=g).bfloat16()


@pytest.mark.parametrize("scaled", BLOCKS)
def test_values_of_operands_with_scales_of_blocks(scaled):
    """An element at a time, by the order that torch's scaled_mm takes."""
    a, b = narrowed(*operands(0), scaled)
    each, wide = (16, 5) if scaled == "nvfp4" else (32, 3)  # values of a scale, blocks along K
    left, right = widened(a, b, scaled)
    for x, scale, values in ((*a, left), (b[0].t(), b[1], right.t())):
        for row, k in ((0, 0), (13, 319), (23, 170), (len(x) - 1, 64)):
            if x.dtype == FP4:
                bits = x.view(torch.uint8)[row, k // 2].item()
                value = FOURS[bits >> 4 if k % 2 else bits & 15]
            else:
                value = x[row, k].float()
            c = k // each
            at = (row // 128 * wide + c // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + c % 4
            assert values[row, k] == value * scale[at].float()


@pytest.mark.parametrize("scaled", ["rows", *BLOCKS])
def test_numbers_are_near_what_they_were(scaled):
    """But for scales, which are those of no quantizer: signs are the same, and scales differ."""
    given = operands(1)
    few = narrowed(*given, scaled)
    assert all(len(scale.float().unique()) > 8 for _, scale in few)
    for wide, values in zip(given, widened(*few, scaled), strict=True):
        assert (values * wide.float() >= 0).all() and (values != 0).float().mean() > 0.7


@pytest.mark.parametrize("scaled", BLOCKS)
def test_other_operands_have_other_scales(scaled):
    (_, first), _ = narrowed(*operands(0), scaled)
    (_, other), _ = narrowed(*operands(1), scaled)
    assert (first.float() != other.float()).float().mean() > 0.5


@pytest.mark.parametrize("op", OPS)
def test_an_odd_k_is_refused_as_it_is_without_scales(op):
    with pytest.raises(ValueError, match=r"no kernel would run: K = \d+ is not a multiple of 8"):
        OpCase(op, 3, {"k": 27}).fitted()


@pytest.mark.parametrize(("k", "why"), [(600, "K = 200 values are no whole blocks"), (0, "K = 0 is no multiple of")])
def test_sizes_of_which_there_are_no_blocks_leave_them_out(k, why):
    case = OpCase("matmul_reduce_scatter", 3, {"k": k}).fitted()
    assert set(case.left_out) == {"one_shot, mxfp8", "one_shot, nvfp4"} and len(case.all_variants) == 5
    assert all(why in reason for reason in case.left_out.values())


@pytest.mark.parametrize("op", OPS)
def test_default_checks_come_by_scales_of_blocks(op):
    case = OpCase(op, 2).fitted()
    scaled = {name: options for name, options in case.all_variants.items() if "scaled" in options}
    assert {options["scaled"] for options in scaled.values()} == set(BLOCKS)
    for name, options in scaled.items():
        report = check(replace(case, variants={name: options}), [0], processes=1)
        assert report.ok and not report.too_small, (name, report.too_small, report.story)
