"""all-gather + matmul, inter-SM: communicator CTAs push this rank's rows of A to the peers; own rows are multiplied first.

Rank r computes the tiles of its own rows, read from the ordinary tensor `a`, then those of ranks r+1, r+2, ... in turn, read
from a slot that their owners fill. So a communicator pushes the whole shard to rank r-1 first, which needs it first, then to
r-2, ...: at any time each rank sends to one and receives from one. B is up to four matrices side by side, each of which has
whole columns of tiles, and a result of its own (`Column`). GATHERED: loaders store the A tiles that they pass, a share each,
into an ordinary tensor.

DIRECT (intra-SM, for comparison): communicators copy the shard into their own rank's slot, and loaders read peers' slots.
LAST is False for a launch of communicators alone, behind which another one of the same call multiplies (no overlap).

A shard travels in blocks of `block_tiles` rows of tiles; a block's tiles, for one receiver, are `block_items` items, dealt to
the communicators in turn. Rows of a slot are padded with zeros to whole K steps; beyond its end a slot reads NaN.
Two slots alternate by the epoch. Besides the template's:

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| ring.ready, of a communicator CTA | its TMA load of a tile of `a` | itself | mbarrier, CTA | store_read_wait: the push of the buffer's last use has read it |
| state[SENT + s] | every communicator CTA, its items of block s performed | nobody; the last one publishes | acq_rel, gpu | the last one puts it back to 0 |
| flags[d][r * per + i] = epoch | rank r, the last communicator that sent of its block i to d | rank d's loaders, before a tile of these rows | release / acquire, sys; then a proxy fence | monotonic; flags that calls of few blocks leave out are raised every REFRESH calls |
| slot e % 2 of rank d | peers in call e (TMA stores); DIRECT: d itself | d's loaders after flags; DIRECT: peers' loaders | flags | it is written again in call e + 2, by a rank that has ended call e + 1, in which it waited for every peer, each of which had ended call e before |
| ring, a use whose A tile is stored to `gathered` | loader's TMA load | multipliers, and the loader before its store | mbarrier, CTA | store_read_wait, before the loader goes on |

A wait that times out makes the loader load from beyond the slot, which TMA fills with NaN: every role keeps its counts.
"""

from tileweave import lang as gl
from tileweave.tiles.matmul import (
    OWN_WORDS,
    Matmul,
    finish,
    grouped_order,
    make_matmul,
    no_communicator,
    nobody_to_meet,
    nobody_to_tell,
    nothing_more,
    run_matmul,
    this_epoch,
)

SENT = OWN_WORDS  # of `state`: one word per receiver and block
LAG = gl.constexpr(8)  # items that a communicator starts before it asks whether the first of them is performed
REFRESH = gl.constexpr(1 << 20)  # calls after which every flag is raised


@gl.aggregate
class Column:
    """One matrix B: [k, n] or its transpose, the result [world, rows, n] that it leads to, and a bias [n]. It has the
    columns from `first` to `end` of all, which are padded to whole tiles."""

    b: gl.tensor_descriptor
    out: gl.tensor_descriptor
    bias: gl.tensor
    first: gl.tensor
    end: gl.tensor
    n: gl.tensor

    @gl.constexpr_function
    def __init__(self, b, out, bias, first, end, n):
        self.b, self.out, self.bias, self.first, self.end, self.n = b, out, bias, first, end, n


@gl.aggregate
class Work:
    """What the roles share besides the matmul."""

    matmul: Matmul
    flags: gl.Flags
    a: gl.tensor_descriptor  # [rows, k], this rank's rows
    slots: gl.tensor_descriptor  # [world, slot x source, rows, k in whole steps], any rank's
    gathered: gl.tensor_descriptor  # [world, rows, k]
    c0: Column
    c1: Column
    c2: Column
    c3: Column
    rows: gl.tensor
    block_tiles: gl.tensor
    COLUMNS: gl.constexpr
    HAS_BIAS: gl.constexpr
    GATHERED: gl.constexpr
    DIRECT: gl.constexpr
    LAST: gl.constexpr
    PER: gl.constexpr  # flags of a source
    GROUP: gl.constexpr

    @gl.constexpr_function
    def __init__(
        self, matmul, flags, a, slots, gathered, c0, c1, c2, c3, rows, block_tiles,
        COLUMNS, HAS_BIAS, GATHERED, DIRECT, LAST, PER, GROUP,
    ):  # fmt: skip
        self.matmul, self.flags, self.a, self.slots, self.gathered = matmul, flags, a, slots, gathered
        self.c0, self.c1, self.c2, self.c3 = c0, c1, c2, c3
        self.rows, self.block_tiles = rows, block_tiles
        self.COLUMNS, self.HAS_BIAS = gl.constexpr(COLUMNS), gl.constexpr(HAS_BIAS)
        self.GATHERED, self.DIRECT, self.LAST = gl.constexpr(GATHERED), gl.constexpr(DIRECT), gl.constexpr(LAST)
        self.PER, self.GROUP = gl.constexpr(PER), gl.constexpr(GROUP)


# ---------------------------------------------------------------- the matmul of one GPU


@gl.jit
def row_tiles(work):
    """Tiles of one rank's rows, one below the other."""
    return gl.cdiv(work.rows, work.matmul.BM)


@gl.jit
def col_tiles(work):
    """Tiles side by side, of all matrices."""
    return work.c3.end // work.matmul.BN


@gl.jit
def locate(work, t):
    """The t-th tile: whose rows it has, its row in these, its column; own rows come first."""
    per = row_tiles(work) * col_tiles(work)
    owner = (work.flags.rank + t // per) % work.flags.world
    i, j = grouped_order(t % per, row_tiles(work), col_tiles(work), work.GROUP)
    return owner, i * work.matmul.BM, i * work.matmul.BM, j * work.matmul.BN


@gl.jit
def load_b(work, c, col, k, bar, buf):
    """Loader: a tile of B, if it is this matrix's."""
    mine = (col >= c.first) & (col < c.end)
    if work.matmul.B_T:
        gl.tma_load(c.b, [col - c.first, k], bar, buf, pred=mine)
    else:
        gl.tma_load(c.b, [k, col - c.first], bar, buf, pred=mine)


@gl.jit
def add_bias(c, part, col, LAYOUT: gl.constexpr):
    """Multiplier: `part` plus the bias, if it is this matrix's."""
    cols = col - c.first + gl.arange(0, part.shape[1], gl.SliceLayout(0, LAYOUT))
    return part + gl.load(c.bias + cols, mask=(cols >= 0) & (cols < c.n), other=0.0).to(gl.float32)[None, :]


@gl.jit
def epilogue(work, part, at, HALF: gl.constexpr, owner, row, col, LAYOUT: gl.constexpr):
    """Multiplier: the bias."""
    if work.HAS_BIAS:
        part = add_bias(work.c0, part, col, LAYOUT)
        if work.COLUMNS > 1:
            part = add_bias(work.c1, part, col, LAYOUT)
        if work.COLUMNS > 2:
            part = add_bias(work.c2, part, col, LAYOUT)
        if work.COLUMNS > 3:
            part = add_bias(work.c3, part, col, LAYOUT)
    return part, at


@gl.jit
def store_to(c, owner, row, col, buf):
    """Storer: one part, if it is this matrix's."""
    if (col >= c.first) & (col < c.end):
        gl.tma_store(c.out, [owner, row, col - c.first], buf)


@gl.jit
def store(work, owner, row, col, buf, epoch, met):
    """Storer: one part to its result."""
    store_to(work.c0, owner, row, col, buf)
    if work.COLUMNS > 1:
        store_to(work.c1, owner, row, col, buf)
    if work.COLUMNS > 2:
        store_to(work.c2, owner, row, col, buf)
    if work.COLUMNS > 3:
        store_to(work.c3, owner, row, col, buf)


# ---------------------------------------------------------------- and what the all-gather adds


@gl.jit
def before_load(work, owner, row, epoch):
    """Loader: the block of these rows is there; False after a timeout."""
    there = epoch == epoch
    if owner != work.flags.rank:
        there = gl.wait(work.flags, owner * work.PER + row // (work.block_tiles * work.matmul.BM), epoch)
        gl.fence_proxy_async()
    return there


@gl.jit
def a_buf(work, at, like):
    """The operand buffer of A at a place in the ring, in the shape that descriptor `like` moves."""
    return gl.reinterpret(work.matmul.a_bufs.index(at.slot), like.dtype, like.block_shape, like.layout)


@gl.jit
def load(work, at, bar, owner, row, col, step, epoch, there):
    """Loader: a K step, of own rows or from a slot. The tiles of A's rows share the work of keeping them: one step in turn."""
    mm, flags = work.matmul, work.flags
    k = step * mm.BK
    if owner == flags.rank:
        gl.tma_load(work.a, [row, k], bar, mm.a_bufs.index(at.slot))
    else:
        where = [(epoch & 1) * flags.world + owner, gl.where(there, row, work.rows), k]
        gl.load_async(work.slots, owner if work.DIRECT else flags.rank, where, a_buf(work, at, work.slots), bar)
    load_b(work, work.c0, col, k, bar, mm.b_bufs.index(at.slot))
    if work.COLUMNS > 1:
        load_b(work, work.c1, col, k, bar, mm.b_bufs.index(at.slot))
    if work.COLUMNS > 2:
        load_b(work, work.c2, col, k, bar, mm.b_bufs.index(at.slot))
    if work.COLUMNS > 3:
        load_b(work, work.c3, col, k, bar, mm.b_bufs.index(at.slot))
    if work.GATHERED:
        if step % col_tiles(work) == col // mm.BN:
            mm.ring.consumer_wait(at)
            gl.tma_store(work.gathered, [owner, row, k], a_buf(work, at, work.gathered))
            gl.store_read_wait(0)


@gl.jit
def blocks(work):
    """Blocks of the shard."""
    return gl.cdiv(row_tiles(work), work.block_tiles)


@gl.jit
def receiver(work, block):
    """Who gets the block-th block that this rank sends, counted over all receivers."""
    distance = 0 if work.DIRECT else 1 + block // blocks(work)
    return (work.flags.rank - distance + work.flags.world) % work.flags.world


@gl.jit
def tile_of(work, item):
    """(row, k) of an item's tile in the shard; beyond its end in a last block that is not full."""
    t = item % (blocks(work) * work.block_tiles * work.matmul.k_steps)
    return t // work.matmul.k_steps * work.matmul.BM, t % work.matmul.k_steps * work.matmul.BK


@gl.jit
def fetch(work, item, at):
    """Communicator: start the load of an item's tile of `a` to a place in the ring."""
    mm = work.matmul
    row, k = tile_of(work, item)
    gl.mbarrier_expect(mm.ring.ready_at(at), mm.BM * mm.BK * 2)
    gl.tma_load(work.a, [row, k], mm.ring.ready_at(at), mm.a_bufs.index(at.slot))


@gl.jit
def publish(work, item, block_items, epoch):
    """Communicator: if `item`, which is performed, is the last of its block in this CTA, count; the last CTA tells."""
    block, me, step = item // block_items, gl.program_id(0), work.matmul.COMM_SMS
    if (item >= 0) & (block != (item + step) // block_items):
        gl.store_wait(LAG)
        gl.barrier()
        mine = gl.cdiv((block + 1) * block_items - me, step) - gl.cdiv(block * block_items - me, step)
        sent = work.matmul.state + SENT + block
        if gl.atomic_add(sent, mine, sem="acq_rel", scope="gpu") == block_items - mine:
            gl.atomic_xchg(sent, 0, sem="relaxed", scope="gpu")
            first = block % blocks(work)
            end = gl.where(epoch % REFRESH == 0, work.PER, first + 1)
            for i in range(first, end, blocks(work)):
                if work.DIRECT:
                    gl.signal_all(work.flags, work.flags.rank * work.PER + i, epoch)
                else:
                    gl.signal(work.flags, receiver(work, block), work.flags.rank * work.PER + i, epoch)


@gl.jit
def communicate(work):
    """Communicator: push this CTA's items, half a ring of loads ahead."""
    mm, flags = work.matmul, work.flags
    epoch = this_epoch(mm)
    AHEAD: gl.constexpr = mm.ring.STAGES // 2
    me, step = gl.program_id(0), mm.COMM_SMS
    block_items = work.block_tiles * mm.k_steps
    items = blocks(work) * block_items * (1 if work.DIRECT else flags.world - 1)
    at, to = mm.ring.start(), mm.ring.start()
    for i in gl.static_range(AHEAD):
        if me + i * step < items:
            fetch(work, me + i * step, to)
        to = mm.ring.next(to)
    for item in range(me, items + LAG * step, step):
        if item < items:
            if item + AHEAD * step < items:
                gl.store_read_wait(mm.ring.STAGES - 1 - AHEAD)
                fetch(work, item + AHEAD * step, to)
            to = mm.ring.next(to)
            mm.ring.consumer_wait(at)
            row, k = tile_of(work, item)
            where = [(epoch & 1) * flags.world + flags.rank, row, k]
            gl.store_async(work.slots, receiver(work, item // block_items), where, a_buf(work, at, work.slots))
            at = mm.ring.next(at)
        else:
            gl.store_wait(0)
        publish(work, item - LAG * step, block_items, epoch)
    if work.LAST:
        for i in gl.static_range(mm.HALVES):  # as the storers of a computing CTA
            finish(mm, epoch)


# ---------------------------------------------------------------- the kernel


@gl.jit
def column(b, out, bias, first, n, BN: gl.constexpr):
    """The matrix whose columns begin at `first`."""
    return Column(b, out, bias, first, first + gl.cdiv(n, BN) * BN, n)


@gl.jit(do_not_specialize=[
    "rank", "n0", "n1", "n2", "n3", "flags_stride", "timeout_us", "rows", "k", "whole", "split", "block_tiles",
])  # fmt: skip
def all_gather_matmul_kernel(
    rank, a_desc, slots_desc, gathered_desc, b0, b1, b2, b3, out0, out1, out2, out3, bias0, bias1, bias2, bias3, scratch,
    flags_ptr, flags_stride, state, timeout_us, n0, n1, n2, n3, rows, k, whole, split, block_tiles, WORLD: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, C_BUFS: gl.constexpr,
    SHARED: gl.constexpr, GROUP: gl.constexpr, B_T: gl.constexpr, COLUMNS: gl.constexpr, HAS_BIAS: gl.constexpr,
    GATHERED: gl.constexpr, DIRECT: gl.constexpr, LAST: gl.constexpr, PER: gl.constexpr, COMM_SMS: gl.constexpr,
):  # fmt: skip
    """out_i [WORLD, rows, n_i] = all ranks' a [rows, k] @ this rank's b_i [k, n_i]. Grid: co-resident CTAs, one per SM."""
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    c0 = column(b0, out0, bias0, gl.to_tensor(0), n0, BN)
    c1 = column(b1, out1, bias1, c0.end, n1, BN)
    c2 = column(b2, out2, bias2, c1.end, n2, BN)
    c3 = column(b3, out3, bias3, c2.end, n3, BN)
    tiles = gl.cdiv(rows, BM) * (c3.end // BN) * WORLD
    mm = make_matmul(
        a_desc, b0, out0, flags, state, scratch, k, tiles, whole, split, BM, BN, BK, STAGES, C_BUFS, SHARED,
        False, B_T, COMM_SMS,
    )  # fmt: skip
    work = Work(
        mm, flags, a_desc, slots_desc, gathered_desc, c0, c1, c2, c3, rows, block_tiles,
        COLUMNS, HAS_BIAS, GATHERED, DIRECT, LAST, PER, GROUP,
    )  # fmt: skip
    if COMM_SMS > 0:
        run_matmul(
            work, locate, before_load, load, nobody_to_meet, nothing_more, epilogue, store, nobody_to_tell, communicate
        )
    else:
        run_matmul(
            work, locate, before_load, load, nobody_to_meet, nothing_more, epilogue, store, nobody_to_tell,
            no_communicator,
        )  # fmt: skip
