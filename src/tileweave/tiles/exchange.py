"""What attention kernels between ranks share, besides tiles/communicator.py: flags of blocks of heads, buffers, the end.

A kernel's `work` has `k_slots` and `v_slots` (any rank's slots for K and V), `attention`, `matmul` (a `Sender`, by the name that the communicator knows), `flags`, `epoch`, `blocks`
(how many there are in this call), `FLAGS` (how many there are flags for) and `ends` (storers and communicators of the grid).

| word | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| flags[d][(first + b) * WORLD + r] = epoch | rank r, `raise_flag` | rank d | release / acquire, sys | monotonic; those that calls of few blocks leave out are raised every REFRESH calls |
| state[DONE] | every storer and communicator at its end | nobody; the last one advances the epoch | acq_rel, gpu | the last one puts it back to 0 |
| state[EPOCH] | the last one | next launch (kernel boundary) | stream order | read by all CTAs before they arrive at DONE |
| state[NEXT] | the template's counter of tiles | nobody | relaxed, gpu | 0 between launches |
"""

from tileweave import lang as gl
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
def load_arrived(work, buf, bar, IS_V: gl.constexpr, where):
    """Loader: start the load of a block of K or V that has come to `where` in this rank's slots."""
    if IS_V:
        gl.load_async(work.v_slots, work.flags.rank, where, moved(buf, work.v_slots), bar)
    else:
        gl.load_async(work.k_slots, work.flags.rank, where, moved(buf, work.k_slots), bar)


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
