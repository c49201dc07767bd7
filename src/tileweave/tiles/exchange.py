"""What attention kernels between ranks share, besides tiles/communicator.py: flags of blocks of heads, buffers, the end.

A kernel's `work` has `k_slots` and `v_slots` (any rank's slots for K and V), `attention`, `matmul` (a `Sender`, by the name
that the communicator knows), `flags`, `epoch`, `blocks` (how many there are in this call), `FLAGS` (how many there are flags
for) and `ends` (storers and communicators of the grid). One that sends queries too has `q_slots`; one to which results come
back has `out_slots` [world, slot x source, batch x heads, rows, D], `out` [batch, all heads, rows, D], `heads` and `rows`.

| word | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| flags[d][(first + b) * WORLD + r] = epoch | rank r, `raise_flag` | rank d | release / acquire, sys | monotonic; those that calls of few blocks leave out are raised every REFRESH calls |
| queries.ready, in a communicator | its TMA loads of what has come back | the same CTA | mbarrier, CTA | store_read_wait before the buffer's next load |
| state[DONE] | every storer and communicator at its end | nobody; the last one advances the epoch | acq_rel, gpu | the last one puts it back to 0 |
| state[EPOCH] | the last one | next launch (kernel boundary) | stream order | read by all CTAs before they arrive at DONE |
| state[NEXT] | the template's counter of tiles | nobody | relaxed, gpu | 0 between launches |
"""

from tileweave import lang as gl
from tileweave.tiles.attention import query_buf
from tileweave.tiles.channel import Channel
from tileweave.tiles.matmul import DONE, EPOCH

NEXT = gl.constexpr(511)  # the last word of `state`: behind all counters
REFRESH = gl.constexpr(1 << 20)


@gl.aggregate
class Sender:
    """What communicators take of the CTA: the ring that they send through, their counters, how many they are."""

    ring: Channel
    state: gl.tensor
    COMM_SMS: gl.constexpr

    @gl.constexpr_function
    def __init__(self, ring, state, COMM_SMS):
        self.ring, self.state, self.COMM_SMS = ring, state, gl.constexpr(COMM_SMS)


@gl.jit
def moved(buf, like):
    """A buffer of the CTA in the shape that descriptor `like` moves."""
    return gl.reinterpret(buf, like.dtype, like.block_shape, like.layout)


@gl.jit
def await_block(work, block, source):
    """Loader: wait for a source's share of a block of heads. Whether it has come."""
    there = gl.wait(work.flags, block * work.flags.world + source, work.epoch)
    gl.fence_proxy_async()
    return there


@gl.jit
def load_from(work, buf, bar, IS_V: gl.constexpr, source, own, arrived):
    """Loader: start the load of a source's block of K or V: this rank's from `own`, what has come from `arrived` in its slots."""
    att, rank = work.attention, work.flags.rank
    if source == rank:
        gl.tma_load(att.v_desc if IS_V else att.k_desc, own, bar, buf)
    else:
        slots = work.v_slots if IS_V else work.k_slots
        gl.load_async(slots, rank, arrived, moved(buf, slots), bar)


@gl.jit
def small(work, at):
    """A buffer of the ring as one for queries."""
    att = work.attention
    like = att.q_desc
    return gl.reinterpret(
        att.kv_bufs.index(at.slot), like.dtype, [att.BN // att.ROWS] + like.block_shape, like.layout
    ).index(0)


@gl.jit
def fetch_q(work, where, at):
    """Communicator: start the load of ROWS rows of own q to a place in the ring."""
    att = work.attention
    bar = att.ring.ready_at(at)
    gl.mbarrier_expect(bar, att.ROWS * att.D * 2)
    gl.tma_load(att.q_desc, where, bar, small(work, at))


@gl.jit
def send_q(work, to, where, at):
    """Communicator: start the store of what `fetch_q` has brought to `where` in the slots of rank `to`."""
    gl.store_async(work.q_slots, to, where, moved(small(work, at), work.q_slots))


@gl.jit
def fetch_kv(work, is_v, where, at):
    """Communicator: start the load of a tile of own V, or K, to a place in the ring."""
    att = work.attention
    bar, buf = att.ring.ready_at(at), att.kv_bufs.index(at.slot)
    gl.mbarrier_expect(bar, att.BN * att.D * 2)
    if is_v:
        gl.tma_load(att.v_desc, where, bar, buf)
    else:
        gl.tma_load(att.k_desc, where, bar, buf)


@gl.jit
def send_kv(work, is_v, to, where, at):
    """Communicator: start the store of what `fetch_kv` has brought to `where` in the slots of rank `to`."""
    buf = work.attention.kv_bufs.index(at.slot)
    if is_v:
        gl.store_async(work.v_slots, to, where, moved(buf, work.v_slots))
    else:
        gl.store_async(work.k_slots, to, where, moved(buf, work.k_slots))


@gl.jit
def collect(work, count, RETURNED: gl.constexpr):
    """Communicator: `count` tiles of results that come back, from this rank's slot to `out`, through the query buffers: each
    is loaded while the one before is stored.

    RETURNED(work, i): the i-th one's block of heads, by which rank, head of all batches of that rank, row (beyond the
    end if there is no such tile), whether there is such a tile.
    """
    att, flags = work.attention, work.flags
    to, at, previous, met = att.queries.start(), att.queries.start(), -1, work.epoch == work.epoch
    for i in range(0, count + 1):
        gl.store_read_wait(0)
        if i < count:
            block, source, head, row, there = RETURNED(work, i)
            flag = (work.FLAGS + block) * flags.world + source
            if there & (flag != previous):
                met = gl.wait(flags, flag, work.epoch)
                gl.fence_proxy_async()
                previous = flag
            row = gl.where(met & there, row, work.rows)
            bar = att.queries.ready_at(to)
            gl.mbarrier_expect(bar, att.CONSUMERS * att.ROWS * att.D * 2)
            for part in gl.static_range(att.CONSUMERS):
                where = [(work.epoch & 1) * flags.world + source, head, row + part * att.ROWS, 0]
                gl.load_async(work.out_slots, flags.rank, where, moved(query_buf(att, to, part), work.out_slots), bar)
            to = att.queries.next(to)
        if i > 0:
            block, source, head, row, there = RETURNED(work, i - 1)
            att.queries.consumer_wait(at)
            for part in gl.static_range(att.CONSUMERS):
                where = [head // work.heads, source * work.heads + head % work.heads, row + part * att.ROWS, 0]
                gl.tma_store(work.out, where, query_buf(att, at, part))
            at = att.queries.next(at)
    gl.store_read_wait(0)


@gl.jit
def raise_flag(work, peer, first, block):
    """Tell a peer of a block, now and then with those that a call of so few blocks leaves out; `first` of its kind."""
    end = gl.where(work.epoch % REFRESH == 0, work.FLAGS, block + 1)
    for b in range(block, end, work.blocks):
        gl.signal(work.flags, peer, (first + b) * work.flags.world + work.flags.rank, work.epoch)


@gl.jit
def finish(work):
    """A storer's or communicator's end; the last one advances the epoch."""
    state = work.matmul.state
    if work.flags.world > 1:
        gl.barrier()
        if gl.atomic_add(state + DONE, 1, sem="acq_rel", scope="gpu") == work.ends - 1:
            gl.atomic_xchg(state + DONE, 0, sem="relaxed", scope="gpu")
            gl.atomic_xchg(state + EPOCH, work.epoch, sem="relaxed", scope="gpu")
