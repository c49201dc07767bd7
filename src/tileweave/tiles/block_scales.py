"""Scales of operands in blocks along K (MX formats, nvfp4): what a K step's products in tensor memory are multiplied with.

They travel with the operands of a K step, in places of their own that the ring's barriers cover, from global memory to
shared memory by the loader's TMA, and from there to tensor memory by the issuer. In global memory they lie as torch's
block-scaled products take them: blocks of 128 rows and 4 scales, 512 bytes each. So tiles begin at multiples of 128 rows.

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| ring.ready / empty, the scales of a place | loader's TMA / the commit of the product behind the copy that reads them | issuer / loader | mbarrier, CTA | Channel's phases |
| the same, in a communicator | its TMA | itself, before it stores them | mbarrier, CTA | as the tile beside them |
| scales in tensor memory | the issuer's copy of a K step | the step's product, behind it in the issuer's order | a tcgen05 pipeline | the next copy is behind the product, in the same order |
"""

from tileweave import lang as gl

BLOCK = gl.constexpr(128)  # rows whose scales lie together


@gl.aggregate
class BlockScales:
    """Of A's and B's K steps, STEP of each row."""

    a_desc: gl.tensor_descriptor
    b_desc: gl.tensor_descriptor
    a_bufs: gl.shared_memory_descriptor
    b_bufs: gl.shared_memory_descriptor
    a_there: gl.tensor_memory_descriptor
    b_there: gl.tensor_memory_descriptor
    BYTES: gl.constexpr  # of both in a K step

    @gl.constexpr_function
    def __init__(self, a_desc, b_desc, a_bufs, b_bufs, a_there, b_there, BYTES):
        self.a_desc, self.b_desc = a_desc, b_desc
        self.a_bufs, self.b_bufs, self.a_there, self.b_there = a_bufs, b_bufs, a_there, b_there
        self.BYTES = gl.constexpr(BYTES)


@gl.jit
def make_block_scales(mm, a_desc, b_desc):
    """Allocate their places. The boxes of the descriptors are those of a K step: [tiles of 128 rows, STEP / 4, 2, 256]."""
    STAGES: gl.constexpr = mm.ring.STAGES
    STEP: gl.constexpr = 4 * a_desc.block_shape[1]
    LAYOUT: gl.constexpr = gl.TensorMemoryScalesLayout()
    return BlockScales(
        a_desc,
        b_desc,
        gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_shape, a_desc.layout),
        gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_shape, b_desc.layout),
        gl.allocate_tensor_memory(a_desc.dtype, [mm.BM, STEP], LAYOUT),
        gl.allocate_tensor_memory(b_desc.dtype, [mm.BN, STEP], LAYOUT),
        (mm.BM + mm.BN) * STEP,
    )


@gl.jit
def load_scale(desc, buf, bar, row, step):
    """Start the load of a K step's scales of a tile's rows, from beyond the last ones for a row that is beyond the last."""
    of = step * desc.block_shape[1]
    gl.tma_load(desc, [gl.cdiv(row, BLOCK), of, 0, 0], bar, buf)


@gl.jit
def load_scales(work, scales, at, bar, owner, a_row, col, step, epoch, there):
    """LOAD_SCALES of a kernel whose operands are all local: start the loads of a K step's scales to a place in the ring,
    whose barrier expects BYTES more."""
    load_scale(scales.a_desc, scales.a_bufs.index(at.slot), bar, a_row, step)
    load_scale(scales.b_desc, scales.b_bufs.index(at.slot), bar, col, step)


@gl.jit
def multiply_scaled(scales, at, a, b, acc, use_acc, read):
    """Issuer: a K step's scales to tensor memory, then its product; a commit behind both tells `read`."""
    gl.tcgen05_copy_scales(scales.a_bufs.index(at.slot), scales.a_there)
    gl.tcgen05_copy_scales(scales.b_bufs.index(at.slot), scales.b_there)
    gl.tcgen05_mma_scaled(a, b, acc, scales.a_there, scales.b_there, use_acc=use_acc, mbarriers=[read])


@gl.aggregate
class RowScales:
    """Scales of rows of A that travel with them, a K step of a tile at a time: as they lie, in any rank's places for those
    of a source, and in shared memory where BlockScales has A's and B's.

    slots: [world, place, blocks of rows, 2 x blocks along K in whole steps, 128], as 16-bit words, of which what is
    beyond reads as NaN, of either type."""

    own: gl.tensor_descriptor
    slots: gl.tensor_descriptor
    a_bufs: gl.shared_memory_descriptor
    b_bufs: gl.shared_memory_descriptor

    @gl.constexpr_function
    def __init__(self, own, slots, a_bufs, b_bufs):
        self.own, self.slots, self.a_bufs, self.b_bufs = own, slots, a_bufs, b_bufs


@gl.jit
def rows_buf(of, at, J: gl.constexpr):
    """The scales of the J-th tile of A at a place in the ring, where a communicator has two."""
    if J == 0:
        return of.a_bufs.index(at.slot)
    else:
        return of.b_bufs.index(at.slot)


@gl.jit
def place_of_rows(of, place, row, step):
    """Where in `slots` a K step of a tile's rows is."""
    return [place, gl.cdiv(row, BLOCK), step * of.slots.block_shape[3], 0]


@gl.jit
def load_row_scales(of, at, bar, source, place, row, step):
    """Loader: start the load of a tile's K step from a place of rank `source`."""
    buf = gl.reinterpret(of.a_bufs.index(at.slot), of.slots.dtype, of.slots.block_shape, of.slots.layout)
    gl.load_async(of.slots, source, place_of_rows(of, place, row, step), buf, bar)


@gl.jit
def fetch_row_scales(of, at, J: gl.constexpr, bar, row, step):
    """Communicator: start the load of a tile's K step, as it lies."""
    load_scale(of.own, rows_buf(of, at, J), bar, row, step)


@gl.jit
def send_row_scales(of, at, J: gl.constexpr, rank, place, row, step):
    """Communicator: start the store of it to a place of `rank`."""
    buf = gl.reinterpret(rows_buf(of, at, J), of.slots.dtype, of.slots.block_shape, of.slots.layout)
    gl.store_async(of.slots, rank, place_of_rows(of, place, row, step), buf)
