"""all-gather + matmul, inter-SM: communicator CTAs push this rank's rows of A to all ranks, own rows are multiplied first.

The communicators bring tiles of the ordinary tensor `a` to shared memory and broadcast them into slot e % 2 of every
rank, this one included, so that the loaders read one tensor only. A source's part of a slot has whole tiles of rows:
a tile at its end must not reach into the next source's part, which may not have come.

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| ring.ready / empty | loader's TMA / multiplier | multiplier / loader | mbarrier, CTA | Channel's phases |
| ring.ready, of a communicator CTA | its TMA load of a tile of `a` | itself | mbarrier, CTA | store_read_wait: the broadcasts of the slot's last use have read it |
| result.ready / empty | multiplier, tile is in `c_buf` / storer, its bulk store has read it | storer / multiplier | mbarrier, CTA | one buffer, one tile at a time |
| state[SENT] | every communicator CTA, its broadcasts performed | nobody; the last one publishes | acq_rel, gpu | the last one puts it back to 0 |
| flags[d][r] = epoch | rank r, its last communicator CTA | rank d's loaders, before a tile of r's rows | release / acquire, sys; then a proxy fence | monotonic |
| state[DONE] | every CTA at its end | nobody; the last one advances the epoch | acq_rel, gpu | the last one puts it back to 0 |
| state[EPOCH] | the last CTA | next launch (kernel boundary) | stream order | read by all CTAs before they arrive at DONE |
| slot e % 2 of rank d | peers in call e (TMA stores) | d after flags | flags | a peer stores again in call e + 2, after all flags of call e + 1, hence after d ended call e |
"""

from tileweave import lang as gl
from tileweave.tiles.channel import Channel, make_channel
from tileweave.tiles.matmul import Matmul, first_tile, grouped_order, make_matmul, run_matmul, tile_step

EPOCH, DONE, SENT = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # words of `state`, this rank's own memory


@gl.aggregate
class Work:
    """What the roles share besides the matmul, whose A is this rank's slots, `[slots and sources and rows, k]`."""

    matmul: Matmul
    flags: gl.Flags
    state: gl.tensor
    epoch: gl.tensor
    a: gl.tensor_descriptor  # [rows, k], this rank's rows
    slots: gl.tensor_descriptor  # [world, as the matmul's A], any rank's
    first: gl.tensor  # row at which the slot of this call begins
    out: gl.tensor_descriptor  # [world, rows, n], the result
    c_buf: gl.shared_memory_descriptor
    result: Channel
    row_tiles: gl.tensor  # of one rank's rows
    col_tiles: gl.tensor

    @gl.constexpr_function
    def __init__(self, matmul, flags, state, epoch, a, slots, first, out, c_buf, result, row_tiles, col_tiles):
        self.matmul, self.flags, self.state, self.epoch = matmul, flags, state, epoch
        self.a, self.slots, self.first, self.out = a, slots, first, out
        self.c_buf, self.result, self.row_tiles, self.col_tiles = c_buf, result, row_tiles, col_tiles


@gl.jit
def locate(work, t):
    """The t-th tile: whose rows it has, its row in the slots, its row and column in that rank's part of the result."""
    per = work.row_tiles * work.col_tiles
    owner = (work.flags.rank + t // per) % work.flags.world
    i, j = grouped_order(t % per, work.row_tiles, work.col_tiles, 8)
    a_row = work.first + (owner * work.row_tiles + i) * work.matmul.BM
    return owner, a_row, i * work.matmul.BM, j * work.matmul.BN


@gl.jit
def before_load(work, owner, row):
    """Loader: the owner's rows are there."""
    gl.wait(work.flags, owner, work.epoch)
    gl.fence_proxy_async()


@gl.jit
def epilogue(work, acc, done, owner, row, col, LAYOUT: gl.constexpr):
    """Multiplier's end of a tile: leave it in c_buf."""
    work.result.producer_wait(done)
    work.c_buf.reshape([work.matmul.BM, work.matmul.BN]).store(acc.to(work.out.dtype))
    gl.fence_async_shared()
    work.result.publish(done)


@gl.jit
def store_role(work, LOCATE: gl.constexpr):
    """Storer: carry the result away."""
    n = 0
    for t in range(first_tile(work.matmul), work.matmul.tiles, tile_step(work.matmul)):
        owner, a_row, row, col = LOCATE(work, t)
        work.result.consumer_wait(n)
        gl.tma_store(work.out, [owner, row, col], work.c_buf)
        gl.store_read_wait(0)
        work.result.release(n)
        n += 1
    finish(work)


@gl.jit
def finish(work):
    """A CTA's end; the last one advances the epoch."""
    if gl.atomic_add(work.state + DONE, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:
        gl.atomic_xchg(work.state + DONE, 0, sem="relaxed", scope="gpu")
        gl.atomic_xchg(work.state + EPOCH, work.epoch, sem="relaxed", scope="gpu")


@gl.jit
def fetch(work, t, n):
    """Communicator: start the load of tile t of `a` into the ring's use n."""
    mm = work.matmul
    bar = mm.ring.ready_at(n)
    gl.mbarrier_expect(bar, mm.BM * mm.BK * 2)
    gl.tma_load(work.a, [t // mm.k_steps * mm.BM, t % mm.k_steps * mm.BK], bar, mm.a_bufs.index(mm.ring.slot(n)))


@gl.jit
def communicate(work):
    """Communicator: push this CTA's share of the tiles of `a` to all ranks, one load ahead; the last CTA tells them."""
    mm = work.matmul
    tiles = work.row_tiles * mm.k_steps
    n = 0
    for t in range(gl.program_id(0), tiles, mm.COMM_SMS):
        if n == 0:
            fetch(work, t, 0)
        if t + mm.COMM_SMS < tiles:
            gl.store_read_wait((mm.ring.STAGES - 2) * work.flags.world)  # a broadcast is a store per rank
            fetch(work, t + mm.COMM_SMS, n + 1)
        mm.ring.consumer_wait(n)
        buf = mm.a_bufs.index(mm.ring.slot(n)).reshape([1, mm.BM, mm.BK])
        row = work.first + (work.flags.rank * work.row_tiles + t // mm.k_steps) * mm.BM
        gl.broadcast_async(work.slots, work.flags.world, [row, t % mm.k_steps * mm.BK], buf)
        n += 1
    gl.store_read_wait(0)
    gl.store_wait(0)
    gl.barrier()
    if gl.atomic_add(work.state + SENT, 1, sem="acq_rel", scope="gpu") == mm.COMM_SMS - 1:
        gl.atomic_xchg(work.state + SENT, 0, sem="relaxed", scope="gpu")
        gl.signal_all(work.flags, work.flags.rank, work.epoch)
    finish(work)


@gl.jit(do_not_specialize=["rank", "slot_rows", "flags_stride", "timeout_us", "rows", "k"])
def all_gather_matmul_kernel(
    rank, a_desc, own_desc, slots_desc, slot_rows, b_desc, out_desc, flags_ptr, flags_stride, state, timeout_us,
    rows, n, k, WORLD: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    COMM_SMS: gl.constexpr,
):  # fmt: skip
    """out [WORLD, rows, n] = all ranks' a [rows, k] @ this rank's b [k, n]. Grid: co-resident CTAs, above COMM_SMS."""
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    row_tiles, col_tiles = gl.cdiv(rows, BM), gl.cdiv(n, BN)
    mm = make_matmul(own_desc, b_desc, k, row_tiles * col_tiles * WORLD, BM, BN, BK, STAGES, False, False, COMM_SMS)
    c_buf = gl.allocate_shared_memory(out_desc.dtype, [1, BM, BN], out_desc.layout)
    epoch = gl.load(state + EPOCH) + 1
    work = Work(
        mm, flags, state, epoch, a_desc, slots_desc, (epoch & 1) * slot_rows, out_desc, c_buf, make_channel(1),
        row_tiles, col_tiles,
    )  # fmt: skip
    run_matmul(work, locate, before_load, epilogue, store_role, communicate)
