"""The communicator role of an inter-SM kernel: CTAs that carry tiles from here to peers through the operand ring.

What is sent goes in blocks, one after the other, about each of which somebody is told. A block is dealt to the COMM_SMS
communicators of the grid, `share` items to each. A CTA keeps half a ring of loads in flight ahead of its stores, and asks
whether stores are performed only LAG items later, so that neither waits for the other's round trip.

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| ring.ready | FETCH's TMA load | this CTA, before SEND | mbarrier, CTA | store_read_wait: the stores of the buffer's last use have read it |
| state[OWN_WORDS + block] | every communicator CTA, its share of the block performed | nobody; the last one tells | acq_rel, gpu | the last one puts it back to 0 |

An op states FETCH (start the load of an item to a place in the ring) and SEND (start its stores, STORES of them; with more, fewer items are in flight), or COPY
(both, through registers), and TELL (raise the flags of a block). As these kernels end like any other, COMMUNICATE calls `finish_all` then.
"""

from tileweave import lang as gl
from tileweave.tiles.matmul import OWN_WORDS, finish

LAG = gl.constexpr(8)


@gl.jit
def send_blocks(
    work, blocks, share, epoch, FETCH: gl.constexpr, SEND: gl.constexpr, TELL: gl.constexpr, STORES: gl.constexpr = 1
):
    """Send this CTA's share of all blocks, in STORES stores for each item. Returns when they are performed."""
    mm = work.matmul
    AHEAD: gl.constexpr = mm.ring.STAGES // 2
    items = blocks * share
    at, to = mm.ring.start(), mm.ring.start()
    for i in range(0, items + AHEAD + LAG):
        if i < items:
            gl.store_read_wait((mm.ring.STAGES - 1 - AHEAD) * STORES)
            FETCH(work, i // share, i % share, to)
            to = mm.ring.next(to)
        sent = i - AHEAD
        if (sent >= 0) & (sent < items):
            mm.ring.consumer_wait(at)
            SEND(work, sent // share, sent % share, at, epoch)
            at = mm.ring.next(at)
        if sent >= items:  # the last ones: nothing newer is in flight
            gl.store_wait(0)
        performed = sent - LAG
        if (performed >= 0) & ((performed + 1) % share == 0):
            gl.store_wait(LAG * STORES)
            gl.barrier()
            count_block(work, performed // share, epoch, TELL)


@gl.jit
def copy_blocks(work, blocks, share, epoch, COPY: gl.constexpr, TELL: gl.constexpr):
    """As `send_blocks`, through registers: COPY takes an item from here to there."""
    for block in range(0, blocks):
        for i in range(0, share):
            COPY(work, block, i, epoch)
        gl.barrier()
        count_block(work, block, epoch, TELL)


@gl.jit
def count_block(work, block, epoch, TELL: gl.constexpr):
    """This CTA's share of a block is performed, as all its threads know. The last one tells."""
    mm = work.matmul
    if gl.atomic_add(mm.state + OWN_WORDS + block, 1, sem="acq_rel", scope="gpu") == mm.COMM_SMS - 1:
        gl.atomic_xchg(mm.state + OWN_WORDS + block, 0, sem="relaxed", scope="gpu")
        TELL(work, block, epoch)


@gl.jit
def finish_all(mm, epoch):
    """The end of a communicator CTA as far as the epoch is concerned: it counts as the storers of a computing one."""
    for i in gl.static_range(mm.HALVES):
        finish(mm, epoch)


@gl.jit
def operand_buf(mm, at, like):
    """The buffer of A at a place in the ring, in the shape that descriptor `like` moves."""
    return gl.reinterpret(mm.a_bufs.index(at.slot), like.dtype, like.block_shape, like.layout)


@gl.jit
def place_buf(mm, at, J: gl.constexpr, like):
    """The J-th tile of A at a place in the ring, in the shape that descriptor `like` moves: the buffer of B takes some too.
    A communicator that carries as many at once keeps enough bytes in flight to hide the latency of memory."""
    if J == 0:
        return operand_buf(mm, at, like)
    else:
        bufs = gl.reinterpret(
            mm.b_bufs.index(at.slot), like.dtype, [mm.BN // mm.BM] + like.block_shape, like.layout
        )  # fmt: skip
        return bufs.index(J - 1)
