"""Sums behind a tile loop: rows of a result whose addends every rank has left in a place of its own in this rank's slot.

All CTAs wait for all ranks once they have no more tiles, and sum rows over the places in rank order, in float32. It is for
results of few rows, whose tiles nobody should walk owner by owner: that would read all of B for each.

| word | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| flags[d][r] = epoch | rank r, its addends for d performed: see the op | all CTAs of d, behind their tiles | acquire, sys | monotonic |

After a wait that timed out the sums are NaN.
"""

from tileweave import lang as gl

INFINITY = gl.constexpr(float("inf"))


@gl.aggregate
class Extras:
    """What is made of the sum, [m, n]: `total` = sum + bias + residual, and `normed` = RMSNorm(total) * weight."""

    total: gl.tensor
    normed: gl.tensor
    bias: gl.tensor
    residual: gl.tensor
    weight: gl.tensor
    eps: gl.tensor
    m: gl.tensor
    n: gl.tensor
    HAS_BIAS: gl.constexpr
    HAS_RESIDUAL: gl.constexpr
    NORM: gl.constexpr
    COLS: gl.constexpr  # that a CTA takes at once

    @gl.constexpr_function
    def __init__(self, total, normed, bias, residual, weight, eps, m, n, HAS_BIAS, HAS_RESIDUAL, NORM, COLS):
        self.total, self.normed, self.bias, self.residual, self.weight = total, normed, bias, residual, weight
        self.eps, self.m, self.n = eps, m, n
        self.HAS_BIAS, self.HAS_RESIDUAL = gl.constexpr(HAS_BIAS), gl.constexpr(HAS_RESIDUAL)
        self.NORM, self.COLS = gl.constexpr(NORM), gl.constexpr(COLS)


@gl.aggregate
class Sums:
    """Where the addends lie: `places` [slot x source, m, n] of this rank, `place_lines` lines of 16 bytes apart."""

    flags: gl.Flags
    extras: Extras
    places: gl.tensor
    place_lines: gl.tensor

    @gl.constexpr_function
    def __init__(self, flags, extras, places, place_lines):
        self.flags, self.extras, self.places, self.place_lines = flags, extras, places, place_lines


@gl.jit
def add_bias(extras, part, col, LAYOUT: gl.constexpr):
    """`part`, at a column of the result, a multiple of 8, plus bias."""
    if extras.HAS_BIAS:
        col = col // 8 * 8  # as it is: now the compiler knows
        cols = col + gl.arange(0, part.shape[1], gl.SliceLayout(0, LAYOUT))
        part += gl.load(extras.bias + cols, mask=cols < extras.n, other=0.0).to(gl.float32)[None, :]
    return part


@gl.jit
def normalize(extras, row, squares, L: gl.constexpr):
    """RMSNorm of a row of `total`, whose squares add up to `squares`, into `normed`."""
    scale = gl.exp2(-0.5 * gl.log2(squares / (extras.n * 1.0) + extras.eps))
    start = row.to(gl.int64) * extras.n
    for col in range(0, extras.n, extras.COLS):
        cols = col + gl.arange(0, extras.COLS, gl.SliceLayout(0, L))[None, :]
        keep = cols < extras.n
        x = gl.load(extras.total + start + cols, mask=keep, other=0.0).to(gl.float32)  # what this very thread stored
        x = x * scale * gl.load(extras.weight + cols, mask=keep, other=0.0).to(gl.float32)
        gl.store(extras.normed + start + cols, x.to(extras.normed.dtype.element_ty), mask=keep)


@gl.jit
def fetch(sums, source, row, cols, keep, epoch):
    """Elements of a row of a source's place."""
    LINE: gl.constexpr = 128 // sums.places.dtype.element_ty.primitive_bitwidth
    place = (epoch & 1) * sums.flags.world + source
    start = place.to(gl.int64) * sums.place_lines * LINE + row.to(gl.int64) * sums.extras.n
    return gl.load(sums.places + start + cols, mask=keep, other=0.0).to(gl.float32)


@gl.jit
def sum_up(sums, row, cols, keep, met, epoch, L: gl.constexpr):
    """Elements of a row of the sum over ranks; NaN unless the wait was met."""
    flags = sums.flags
    AT_ONCE: gl.constexpr = min(flags.world, 8)
    total = gl.full([1, sums.extras.COLS], gl.where(met, 0.0, INFINITY) * 0.0, gl.float32, L)
    for first in range(0, flags.world, AT_ONCE):
        for j in gl.static_range(AT_ONCE):  # unrolled, so that the loads of these sources are in flight together
            total += fetch(sums, first + j, row, cols, keep & met & (first + j < flags.world), epoch)
    return total


@gl.jit
def finish_rows(sums, met, epoch):
    """All CTAs: rows of the sum, and what is made of them."""
    extras = sums.extras
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, gl.num_warps()], [1, 0])
    pieces = 1 if extras.NORM else gl.cdiv(extras.n, extras.COLS)
    for item in range(gl.program_id(0), extras.m * pieces, gl.num_programs(0)):
        row = item // pieces
        start = item % pieces * extras.COLS
        squares = gl.zeros([1, extras.COLS], gl.float32, L)
        for col in range(start, extras.n if extras.NORM else start + extras.COLS, extras.COLS):
            cols = col + gl.arange(0, extras.COLS, gl.SliceLayout(0, L))[None, :]
            keep = cols < extras.n
            here = row.to(gl.int64) * extras.n + cols
            total = add_bias(extras, sum_up(sums, row, cols, keep, met, epoch, L), col, L)
            if extras.HAS_RESIDUAL:
                total += gl.load(extras.residual + here, mask=keep, other=0.0).to(gl.float32)
            total = total.to(extras.total.dtype.element_ty)
            gl.store(extras.total + here, total, mask=keep)
            x = total.to(gl.float32)
            squares += gl.where(keep, x * x, 0.0)
        if extras.NORM:
            normalize(extras, row, gl.sum(gl.sum(squares, 1), 0), L)


@gl.jit
def hand_out(sums, epoch):
    """All CTAs, behind their tiles: sum rows. `epoch` is this call's, read before any role may advance it."""
    met = gl.wait_all(sums.flags, 0, sums.flags.world, epoch)
    finish_rows(sums, met, epoch)
