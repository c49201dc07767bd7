"""Units of work of the matmul template: tiles, and shares of those that several CTAs multiply together."""

from tileweave import lang as gl


@gl.jit
def first_unit(mm):
    """Number of the first unit of work of this CTA, a tile or a share of one; the next ones follow at `unit_step`."""
    return gl.program_id(0) - mm.COMM_SMS


@gl.jit
def unit_step(mm):
    """Number of computing CTAs."""
    return gl.num_programs(0) - mm.COMM_SMS


@gl.jit
def units(mm):
    """Units of the whole grid."""
    return (mm.whole + (mm.tiles - mm.whole) * mm.split) if mm.SHARED else mm.tiles


@gl.jit
def unit(mm, u):
    """Unit u: its tile, which share of it, of how many, its first K step and the one past its last."""
    tile, share, shares, first, last = u, 0, 1, 0, mm.k_steps
    if mm.SHARED:
        if u >= mm.whole:  # divisions, which only the last tile should pay for
            beyond = u - mm.whole
            tile, share, shares = mm.whole + beyond // mm.split, beyond % mm.split, mm.split
            first = share * mm.k_steps // mm.split
            last = (share + 1) * mm.k_steps // mm.split
    return tile, share, shares, first, last
