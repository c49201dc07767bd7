"""The matmul template's own roles on tensor cores that work in tensor memory (tcgen05): besides loader and storer

    multiplier   four warps: takes an accumulator, that the issuer has filled, to registers part by part, and each part
                 through the op's EPILOGUE
    issuer       one warp: a tcgen05.mma for each K step in the ring, into one of two accumulators
    fetcher      one warp: what the op's LOAD_MORE loads, to a ring of its own, so that no K step waits for an epilogue

So the next tile is multiplied while one is in its epilogue.

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| ring.ready / empty | loader's TMA / the commit of the product that reads the place | issuer / loader | mbarrier, CTA | Channel's phases |
| accumulators.ring.ready / empty | the commit behind a tile's last product / multiplier, all parts are in registers | multiplier / issuer | mbarrier, CTA | Channel's phases |
| ready / empty of the MORE places behind the ring | fetcher's TMA / multiplier | multiplier / fetcher | mbarrier, CTA | Channel's phases |
"""

from tileweave import lang as gl
from tileweave.tiles.block_scales import multiply_scaled
from tileweave.tiles.channel import Channel, make_channel
from tileweave.tiles.units import first_unit, unit, unit_step, units

MORE = gl.constexpr(2)  # places, of A's size, for what LOAD_MORE loads


@gl.aggregate
class Accumulators:
    """Two of [ROWS, ACC] float32 in tensor memory, and whose turn it is."""

    bufs: gl.tensor_memory_descriptor
    ring: Channel

    @gl.constexpr_function
    def __init__(self, bufs, ring):
        self.bufs, self.ring = bufs, ring


@gl.jit
def make_accumulators(mm):
    """Allocate them."""
    LAYOUT: gl.constexpr = gl.TensorMemoryLayout([mm.ROWS, mm.ACC], 1)
    return Accumulators(gl.allocate_tensor_memory(gl.float32, [2, mm.ROWS, mm.ACC], LAYOUT), make_channel(2, 1))


@gl.jit
def issue_role(work, accumulators, scales=None):
    """Issuer: the products of each tile's K steps, then the commit that hands the accumulator to the multiplier. With
    `scales`, those of blocks along K."""
    mm, full = work.matmul, accumulators.ring
    at, to = mm.ring.start(), full.start()
    for u in range(first_unit(mm), units(mm), unit_step(mm)):
        t, share, shares, first, last = unit(mm, u)
        full.producer_wait(to)
        for step in range(first, last):
            mm.ring.consumer_wait(at)
            a = mm.a_bufs.index(at.slot)
            b = mm.b_bufs.index(at.slot)
            if mm.A_T:
                a = a.permute((1, 0))
            if mm.B_T:
                b = b.permute((1, 0))
            read = [mm.ring.empty_at(at)]
            acc = accumulators.bufs.index(to.slot)
            if scales is None:
                gl.tcgen05_mma(a, b, acc, use_acc=step > first, mbarriers=read)
            else:
                multiply_scaled(scales, at, a, b, acc, step > first, read[0])
            at = mm.ring.next(at)
        gl.tcgen05_commit(full.ready_at(to))
        to = full.next(to)


@gl.jit
def fetch_role(work, LOCATE: gl.constexpr, MEET: gl.constexpr, LOAD_MORE: gl.constexpr, epoch):
    """Fetcher: what the tiles' epilogues take in. `epoch` is this call's, read before any role may advance it."""
    mm = work.matmul
    met = epoch == epoch
    at, previous = mm.ring.behind(MORE).start(), -1
    for u in range(first_unit(mm), units(mm), unit_step(mm)):
        t, share, shares, first, last = unit(mm, u)
        owner, a_row, row, col = LOCATE(work, t)
        if owner != previous:
            met = MEET(work, owner, epoch)
            previous = owner
        for j in range(share, mm.BN // mm.WIDTH, shares):
            at = LOAD_MORE(work, at, owner, row, col + j * mm.WIDTH, epoch, met)


@gl.jit
def part_of(mm, parts, j: gl.constexpr, LAYOUT: gl.constexpr):
    """Part j of an accumulator: of those it has been cut into or, TENSOR, out of tensor memory, and there those of both
    products that a tile is made of, if ACC has two."""
    if mm.TENSOR:
        part = gl.tcgen05_load(parts.slice(j * mm.WIDTH, mm.WIDTH), LAYOUT)
        if mm.ACC == mm.BN:
            return part
        else:
            return part, gl.tcgen05_load(parts.slice(mm.BN + j * mm.WIDTH, mm.WIDTH), LAYOUT)
    else:
        return parts[j]
