"""matmul + reduce-scatter, intra-SM: a finished tile goes straight into its owner's memory; the owner's own tiles come last.

Rank r computes the tiles of ranks r+1, r+2, ..., r in turn. A foreign tile is sent to a slot of its owner: added there
by TMA (in the message type), or, DETERMINISTIC, stored in a place of its source. An own tile's accumulator takes in
what the peers have sent (prefetched by the storer while the tile is being multiplied), in float32, then scale and bias,
and is written to the result, an ordinary tensor. So there is no separate reduction pass, and W = 1 is a plain matmul.

Two slots alternate by the epoch, which lives in `state` and is advanced by the last CTA.

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| ring.ready / empty | loader's TMA / multiplier | multiplier / loader | mbarrier, CTA | Channel's phases |
| result.ready / empty | multiplier, tile is in `c_buf` / storer, its bulk store has read it | storer / multiplier | mbarrier, CTA | one buffer, one tile at a time |
| partial.ready / empty | storer's TMA load of a peer's sum / multiplier | multiplier (and storer, which then zeroes the slot) / storer | mbarrier, CTA | as above |
| state[SENT + d] | every CTA of this rank, one per tile for rank d performed | nobody; the last one publishes | acq_rel, gpu | the last one puts it back to 0 |
| flags[d][r] = epoch | rank r, the last CTA that sent a tile to d | storers of rank d that have own tiles, before the first | release / acquire, sys; then a proxy fence | monotonic |
| state[DONE] | every CTA at its end | nobody; the last one advances the epoch | acq_rel, gpu | the last one puts it back to 0 |
| state[EPOCH] | the last CTA | next launch (kernel boundary) | stream order | read by all CTAs before they arrive at DONE |
| adding slot e % 2 of rank d | peers in call e (TMA adds) | d after flags | flags | d zeroes each tile once read, by generic stores; the ends of the launches e of d and e + 1 of the peer are the fences to the next adds. A peer adds again in call e + 2 only after it has finished call e + 1, hence after d entered e + 1, hence after d ended call e |
| staging slot e % 2 of rank d | peers in call e (TMA stores) | d after flags | flags | as above, without zeroing |

A wait that times out makes the storer load from beyond the slot, which TMA fills with NaN: every role keeps its counts.
"""

from tileweave import lang as gl
from tileweave.tiles.channel import Channel, make_channel
from tileweave.tiles.matmul import (
    Matmul,
    first_tile,
    grouped_order,
    make_matmul,
    no_communicator,
    nothing_before_load,
    run_matmul,
    tile_step,
)

# Words of `state`, this rank's own memory.
EPOCH = gl.constexpr(0)
DONE = gl.constexpr(1)
SENT = gl.constexpr(2)


@gl.aggregate
class Work:
    """What the roles share besides the matmul."""

    matmul: Matmul
    flags: gl.Flags
    state: gl.tensor
    slots: gl.tensor_descriptor  # [world, slot (x source), rows, n], any rank's
    own_slots: gl.tensor  # this rank's adding slots as a pointer,
    slot_stride: gl.tensor  # and the distance of the two, in elements
    out: gl.tensor_descriptor  # [rows, n], the result
    bias: gl.tensor
    c_buf: gl.shared_memory_descriptor
    result: Channel
    partial: Channel
    rows: gl.tensor
    n: gl.tensor
    DETERMINISTIC: gl.constexpr
    HAS_BIAS: gl.constexpr
    AVERAGE: gl.constexpr
    GROUP: gl.constexpr

    @gl.constexpr_function
    def __init__(
        self, matmul, flags, state, slots, own_slots, slot_stride, out, bias, c_buf, result, partial, rows, n,
        DETERMINISTIC, HAS_BIAS, AVERAGE, GROUP,
    ):  # fmt: skip
        self.matmul = matmul
        self.flags = flags
        self.state = state
        self.slots = slots
        self.own_slots = own_slots
        self.slot_stride = slot_stride
        self.out = out
        self.bias = bias
        self.c_buf = c_buf
        self.result = result
        self.partial = partial
        self.rows = rows
        self.n = n
        self.DETERMINISTIC = gl.constexpr(DETERMINISTIC)
        self.HAS_BIAS = gl.constexpr(HAS_BIAS)
        self.AVERAGE = gl.constexpr(AVERAGE)
        self.GROUP = gl.constexpr(GROUP)


@gl.jit
def tiles_per_owner(work):
    """Tiles of one rank's rows."""
    return gl.cdiv(work.rows, work.matmul.BM) * gl.cdiv(work.n, work.matmul.BN)


@gl.jit
def locate(work, t):
    """The t-th tile: its owner, its row in A, its row and column in the owner's result."""
    per = tiles_per_owner(work)
    owner = (work.flags.rank + 1 + t // per) % work.flags.world
    i, j = grouped_order(t % per, gl.cdiv(work.rows, work.matmul.BM), gl.cdiv(work.n, work.matmul.BN), work.GROUP)
    row = i * work.matmul.BM
    return owner, owner * work.rows + row, row, j * work.matmul.BN


@gl.jit
def partials(work):
    """How many tiles of peers an own tile takes in: their sum, or one of each."""
    return (work.flags.world - 1) if work.DETERMINISTIC else min(work.flags.world - 1, 1)


@gl.jit
def epilogue(work, acc, done, owner, row, col, LAYOUT: gl.constexpr):
    """Multiplier's end of a tile: take in the peers' partial sums if it is an own one, leave it in c_buf."""
    mm = work.matmul
    tile = work.c_buf.reshape([mm.BM, mm.BN])
    if work.AVERAGE:  # before parts are sent and summed: a mean that the type can hold does not overflow on the way
        acc = acc * (1.0 / work.flags.world)
    if owner == work.flags.rank:
        first = (done - owned_before(work)) * partials(work)
        for i in range(partials(work)):
            work.partial.consumer_wait(first + i)
            acc += tile.load(LAYOUT).to(gl.float32)
            gl.fence_async_shared()
            work.partial.release(first + i)
        if work.HAS_BIAS:
            cols = col + gl.arange(0, mm.BN, gl.SliceLayout(0, LAYOUT))
            acc += gl.load(work.bias + cols, mask=cols < work.n, other=0.0).to(gl.float32)[None, :]
    work.result.producer_wait(done)
    tile.store(acc.to(work.out.dtype))
    gl.fence_async_shared()
    work.result.publish(done)


@gl.jit
def owned_before(work):
    """How many foreign tiles this CTA has, which all come before its own ones."""
    mm = work.matmul
    foreign = tiles_per_owner(work) * (work.flags.world - 1)
    return gl.cdiv(gl.maximum(foreign - first_tile(mm), 0), tile_step(mm))


@gl.jit
def send_tile(work, owner, row, col, slot):
    """Storer: one finished tile from c_buf to its owner; returns when c_buf may be reused."""
    flags = work.flags
    if work.DETERMINISTIC:
        gl.store_async(work.slots, owner, [slot * flags.world + flags.rank, row, col], work.c_buf)
    else:
        gl.store_add_async(work.slots, owner, [slot, row, col], work.c_buf)
    gl.store_read_wait(0)


@gl.jit
def publish(work, owner, epoch):
    """Count a tile as performed; the last one for its owner raises the owner's flag."""
    gl.store_wait(0)
    gl.barrier()
    sent = work.state + SENT + owner
    if gl.atomic_add(sent, 1, sem="acq_rel", scope="gpu") == tiles_per_owner(work) - 1:
        gl.atomic_xchg(sent, 0, sem="relaxed", scope="gpu")
        gl.signal(work.flags, owner, work.flags.rank, epoch)


@gl.jit
def collect(work, epoch):
    """Wait until every peer has sent all its tiles; False after a timeout."""
    met = epoch == epoch
    for i in range(1, work.flags.world):
        met = met & gl.wait(work.flags, (work.flags.rank + i) % work.flags.world, epoch)
    gl.fence_proxy_async()
    return met


@gl.jit
def zero_slot(work, slot, row, col):
    """Leave an adding slot's tile as the next call needs it."""
    ROWS: gl.constexpr = 4
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 1], [1, 0])
    mm = work.matmul
    cols = col + gl.arange(0, mm.BN, gl.SliceLayout(0, L))
    zeros = gl.zeros([ROWS, mm.BN], work.out.dtype, L)
    base = work.own_slots + slot.to(gl.int64) * work.slot_stride + row.to(gl.int64) * work.n
    for r in range(0, mm.BM, ROWS):
        i = r + gl.arange(0, ROWS, gl.SliceLayout(1, L))
        where = i[:, None] * work.n + cols[None, :]
        gl.store(base + where, zeros, mask=(row + i < work.rows)[:, None] & (cols < work.n)[None, :])


@gl.jit
def finish_tile(work, n, first, slot, row, col, met):
    """Storer: bring the peers' partial sums of one own tile, then carry the result away."""
    mm = work.matmul
    flags = work.flags
    NBYTES: gl.constexpr = mm.BM * mm.BN * work.out.dtype.primitive_bitwidth // 8
    from_row = gl.where(met, row, work.rows)
    for i in range(partials(work)):
        place = slot
        if work.DETERMINISTIC:
            place = slot * flags.world + (flags.rank + 1 + i) % flags.world
        work.partial.producer_wait(first + i)
        gl.mbarrier_expect(work.partial.ready_at(first + i), NBYTES)
        gl.load_async(work.slots, flags.rank, [place, from_row, col], work.c_buf, work.partial.ready_at(first + i))
    if flags.world > 1 and not work.DETERMINISTIC:
        work.partial.consumer_wait(first)
        if met:  # else a late peer may still be adding, and nobody will use the slot again
            zero_slot(work, slot, row, col)
    work.result.consumer_wait(n)
    gl.tma_store(work.out, [row, col], work.c_buf.reshape([mm.BM, mm.BN]))
    gl.store_read_wait(0)
    work.result.release(n)


@gl.jit
def store_role(work, LOCATE: gl.constexpr):
    """Storer: send the foreign tiles, wait for the peers, finish the own ones, advance the epoch."""
    mm = work.matmul
    epoch = gl.load(work.state + EPOCH) + 1
    slot = epoch & 1
    foreign = owned_before(work)
    n = 0
    for t in range(first_tile(mm), tiles_per_owner(work) * (work.flags.world - 1), tile_step(mm)):
        owner, a_row, row, col = LOCATE(work, t)
        work.result.consumer_wait(n)
        send_tile(work, owner, row, col, slot)
        work.result.release(n)
        publish(work, owner, epoch)
        n += 1
    own = first_tile(mm) + foreign * tile_step(mm)
    if own < mm.tiles:
        met = collect(work, epoch)
        for t in range(own, mm.tiles, tile_step(mm)):
            owner, a_row, row, col = LOCATE(work, t)
            finish_tile(work, n, (n - foreign) * partials(work), slot, row, col, met)
            n += 1
    if gl.atomic_add(work.state + DONE, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:
        gl.atomic_xchg(work.state + DONE, 0, sem="relaxed", scope="gpu")
        gl.atomic_xchg(work.state + EPOCH, epoch, sem="relaxed", scope="gpu")


@gl.jit(do_not_specialize=["rank", "slot_stride", "flags_stride", "timeout_us", "rows", "k"])
def matmul_reduce_scatter_kernel(
    rank,
    a_desc,
    b_desc,
    out_desc,
    slots_desc,
    own_slots,
    slot_stride,
    bias,
    flags_ptr,
    flags_stride,
    state,
    timeout_us,
    rows,
    n,
    k,
    WORLD: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    A_T: gl.constexpr,
    B_T: gl.constexpr,
    DETERMINISTIC: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    AVERAGE: gl.constexpr,
):
    """Rows [rows, n] of this rank of sum over ranks of a [WORLD * rows, k] @ b [k, n]. Grid: co-resident CTAs, one per SM."""
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    tiles = gl.cdiv(rows, BM) * gl.cdiv(n, BN) * WORLD
    mm = make_matmul(a_desc, b_desc, k, tiles, BM, BN, BK, STAGES, A_T, B_T, 0)
    c_buf = gl.allocate_shared_memory(out_desc.dtype, [1, 1, BM, BN], slots_desc.layout)
    work = Work(
        mm, flags, state, slots_desc, own_slots, slot_stride, out_desc, bias, c_buf, make_channel(1), make_channel(1),
        rows, n, DETERMINISTIC, HAS_BIAS, AVERAGE, GROUP,
    )  # fmt: skip
    run_matmul(work, locate, nothing_before_load, epilogue, store_role, no_communicator)
