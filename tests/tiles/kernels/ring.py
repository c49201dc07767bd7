"""Kernels of `Channel` alone: tiles copied through a ring between two roles; and of a tile order alone."""

from tileweave import lang as gl
from tileweave.tiles.channel import Channel, make_channel
from tileweave.tiles.matmul import grouped_order


@gl.aggregate
class Copy:
    """What both roles share."""

    ring: Channel
    bufs: gl.shared_memory_descriptor
    source: gl.tensor_descriptor
    out: gl.tensor_descriptor
    tiles: gl.tensor
    BY_TMA: gl.constexpr

    @gl.constexpr_function
    def __init__(self, ring, bufs, source, out, tiles, BY_TMA):
        self.ring, self.bufs, self.source, self.out, self.tiles = ring, bufs, source, out, tiles
        self.BY_TMA = gl.constexpr(BY_TMA)


@gl.jit
def fill(work):
    """Producer: TMA loads that complete on the slot's barrier, or tiles written from registers and published."""
    ROWS: gl.constexpr = work.source.block_shape[0]
    COLS: gl.constexpr = work.source.block_shape[1]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    at = work.ring.start()
    for n in range(work.tiles):
        buf = work.bufs.index(at.slot)
        work.ring.producer_wait(at)
        if work.BY_TMA:
            gl.mbarrier_expect(work.ring.ready_at(at), ROWS * COLS * 2)
            gl.tma_load(work.source, [n * ROWS, 0], work.ring.ready_at(at), buf)
        else:
            buf.store(gl.full([ROWS, COLS], 1.0, gl.bfloat16, L) * n)
            gl.fence_async_shared()
            work.ring.publish(at)
        at = work.ring.next(at)


@gl.jit
def drain(work, NUMBER: gl.constexpr):
    """Consumer number NUMBER: TMA stores of what has come to a result of its own."""
    ROWS: gl.constexpr = work.source.block_shape[0]
    at = work.ring.start()
    for n in range(work.tiles):
        work.ring.consumer_wait(at)
        gl.tma_store(work.out, [(NUMBER * work.tiles + n) * ROWS, 0], work.bufs.index(at.slot))
        gl.store_read_wait(0)
        work.ring.release(at)
        at = work.ring.next(at)


@gl.jit
def copy_kernel(source, out, tiles, STAGES: gl.constexpr, BY_TMA: gl.constexpr, CONSUMERS: gl.constexpr):
    """`tiles` tiles of `source`, or of their own numbers, to `out`, CONSUMERS times, one below the other. One CTA."""
    bufs = gl.allocate_shared_memory(source.dtype, [STAGES] + source.block_shape, source.layout)
    work = Copy(make_channel(STAGES, CONSUMERS), bufs, source, out, tiles, BY_TMA)
    if CONSUMERS == 1:
        gl.warp_specialize([(drain, (work, 0)), (fill, (work,))], [1], [40])
    else:
        gl.warp_specialize([(drain, (work, 0)), (drain, (work, 1)), (fill, (work,))], [4, 1], [40, 40])


@gl.jit
def places_kernel(out, uses, STAGES: gl.constexpr):
    """out[n] = (slot, parity) of the n-th use of a ring. One CTA."""
    ring = make_channel(STAGES, 1)
    at = ring.start()
    for n in range(uses):
        gl.store(out + 2 * n, at.slot)
        gl.store(out + 2 * n + 1, at.parity)
        at = ring.next(at)


@gl.jit
def order_kernel(out, rows, cols, GROUP: gl.constexpr):
    """out[t] = row * cols + column of the t-th tile. One CTA."""
    for t in range(rows * cols):
        row, col = grouped_order(t, rows, cols, GROUP)
        gl.store(out + t, row * cols + col)
