"""Scales of operands in blocks along K (MX formats, nvfp4): what a K step's products in tensor memory are multiplied with.

They travel with the operands of a K step, in places of their own that the ring's barriers cover, from global memory to
shared memory by the loader's TMA, and from there to tensor memory by the issuer. In global memory they lie as torch's
block-scaled products take them: blocks of 128 rows and 4 scales, 512 bytes each. So tiles begin at multiples of 128 rows.

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| ring.ready / empty, the scales of a place | loader's TMA / the commit of the product behind the copy that reads them | issuer / loader | mbarrier, CTA | Channel's phases |
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
def load_scales(scales, at, bar, a_row, col, step):
    """Loader: start the loads of a K step's scales to a place in the ring; its barrier expects BYTES more."""
    of = step * scales.a_desc.block_shape[1]
    gl.tma_load(scales.a_desc, [a_row // BLOCK, of, 0, 0], bar, scales.a_bufs.index(at.slot))
    gl.tma_load(scales.b_desc, [col // BLOCK, of, 0, 0], bar, scales.b_bufs.index(at.slot))


@gl.jit
def multiply_scaled(scales, at, a, b, acc, use_acc, read):
    """Issuer: a K step's scales to tensor memory, then its product; a commit behind both tells `read`."""
    gl.tcgen05_copy_scales(scales.a_bufs.index(at.slot), scales.a_there)
    gl.tcgen05_copy_scales(scales.b_bufs.index(at.slot), scales.b_there)
    gl.tcgen05_mma_scaled(a, b, acc, scales.a_there, scales.b_there, use_acc=use_acc, mbarriers=[read])
