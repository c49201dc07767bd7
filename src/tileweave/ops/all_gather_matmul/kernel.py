"""all-gather + matmul, inter-SM: communicator CTAs push this rank's rows of A to the peers; own rows are multiplied first.

Rank r computes the tiles of its own rows, read from the ordinary tensor `a`, then those of ranks r+1, r+2, ... in turn, read
from a slot that their owners fill. So a communicator pushes the whole shard to rank r-1, which needs it first, then to r-2,
...: at any time each rank sends to one and receives from one. B is up to three matrices side by side, each of which has
whole columns of tiles, and a result of its own (`Column`). GATHERED: loaders store the A tiles that they pass, each tile of
the result a share of its row's, into an ordinary tensor.

DIRECT (intra-SM, for comparison): communicators copy the shard into their own rank's slot, and loaders read peers' slots.
LAST is False for a launch of communicators alone, behind which another one of the same call multiplies (no overlap).

Two slots alternate by the epoch; their rows are padded with zeros to whole K steps. Besides the tables of the template
and of the communicator:

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| flags[d][r * PER + i] = epoch | rank r, the last communicator that sent d of its i-th block | rank d's loaders, before a tile of these rows | release / acquire, sys; then a proxy fence | monotonic; those that calls of few blocks leave out are raised every REFRESH calls |
| slot e % 2 of rank d | peers in call e (TMA stores); DIRECT: d itself | d's loaders after flags; DIRECT: peers' loaders | flags | written again in call e + 2, by a rank that has ended call e + 1, in which it waited for every peer, each of which had ended call e before |
| ring, a use whose A tile goes to `gathered` | loader's TMA load | multipliers, and the loader before it stores | mbarrier, CTA | store_read_wait before the loader goes on |

A wait that times out makes the loader load from beyond the slot, which TMA fills with NaN: every role keeps its counts.
"""

from tileweave import lang as gl
from tileweave.tiles.communicator import finish_all, operand_buf, send_blocks
from tileweave.tiles.matmul import (
    Matmul,
    grouped_order,
    make_matmul,
    no_communicator,
    nobody_to_meet,
    nobody_to_tell,
    nothing_more,
    run_matmul,
    this_epoch,
)

REFRESH = gl.constexpr(1 << 20)


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
    rows: gl.tensor
    blocks: gl.tensor  # of a shard
    block_tiles: gl.tensor  # rows of tiles in one
    share: gl.tensor  # of a block: tiles for each communicator
    COLUMNS: gl.constexpr
    HAS_BIAS: gl.constexpr
    GATHERED: gl.constexpr
    DIRECT: gl.constexpr
    LAST: gl.constexpr
    PER: gl.constexpr  # flags of a source
    GROUP: gl.constexpr

    @gl.constexpr_function
    def __init__(
        self, matmul, flags, a, slots, gathered, c0, c1, c2, rows, blocks, block_tiles, share,
        COLUMNS, HAS_BIAS, GATHERED, DIRECT, LAST, PER, GROUP,
    ):  # fmt: skip
        self.matmul, self.flags, self.a, self.slots, self.gathered = matmul, flags, a, slots, gathered
        self.c0, self.c1, self.c2 = c0, c1, c2
        self.rows, self.blocks, self.block_tiles, self.share = rows, blocks, block_tiles, share
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
    return work.c2.end // work.matmul.BN


@gl.jit
def locate(work, t):
    """The t-th tile: whose rows it has, its row in these, its column; own rows come first."""
    per = row_tiles(work) * col_tiles(work)
    owner = (work.flags.rank + t // per) % work.flags.world
    i, j = grouped_order(t % per, row_tiles(work), col_tiles(work), work.GROUP)
    return owner, i * work.matmul.BM, i * work.matmul.BM, j * work.matmul.BN


@gl.jit
def load_column(work, c, at, bar, col, k):
    """Loader: a tile of B, if it is this matrix's."""
    if (col >= c.first) & (col < c.end):
        where = [col - c.first, k] if work.matmul.B_T else [k, col - c.first]
        gl.tma_load(c.b, where, bar, work.matmul.b_bufs.index(at.slot))


@gl.jit
def load_b(work, at, bar, col, k):
    """Loader: a tile of B."""
    load_column(work, work.c0, at, bar, col, k)
    if work.COLUMNS > 1:
        load_column(work, work.c1, at, bar, col, k)
    if work.COLUMNS > 2:
        load_column(work, work.c2, at, bar, col, k)


@gl.jit
def epilogue(work, part, at, HALF: gl.constexpr, owner, row, col, LAYOUT: gl.constexpr):
    """Multiplier: the bias."""
    if work.HAS_BIAS:
        bias, n, first = work.c0.bias, work.c0.n, work.c0.first
        if work.COLUMNS > 1:
            if col >= work.c1.first:
                bias, n, first = work.c1.bias, work.c1.n, work.c1.first
        if work.COLUMNS > 2:
            if col >= work.c2.first:
                bias, n, first = work.c2.bias, work.c2.n, work.c2.first
        cols = col - first + gl.arange(0, work.matmul.WIDTH, gl.SliceLayout(0, LAYOUT))
        part += gl.load(bias + cols, mask=cols < n, other=0.0).to(gl.float32)[None, :]
    return part, at


@gl.jit
def store_column(c, owner, row, col, buf):
    """Storer: one part, if it is this matrix's."""
    if (col >= c.first) & (col < c.end):
        gl.tma_store(c.out, [owner, row, col - c.first], buf)


@gl.jit
def store(work, owner, row, col, buf, epoch, met):
    """Storer: one part to its result."""
    store_column(work.c0, owner, row, col, buf)
    if work.COLUMNS > 1:
        store_column(work.c1, owner, row, col, buf)
    if work.COLUMNS > 2:
        store_column(work.c2, owner, row, col, buf)


# ---------------------------------------------------------------- what the all-gather adds


@gl.jit
def before_load(work, owner, row, epoch):
    """Loader: wait for the block of these rows; False after a timeout."""
    there = epoch == epoch
    if owner != work.flags.rank:
        there = gl.wait(work.flags, owner * work.PER + row // (work.block_tiles * work.matmul.BM), epoch)
        gl.fence_proxy_async()
    return there


@gl.jit
def load(work, at, bar, owner, row, col, step, epoch, there):
    """Loader: a K step, A from own rows or from a slot."""
    mm, flags = work.matmul, work.flags
    k = step * mm.BK
    load_b(work, at, bar, col, k)
    if owner == flags.rank:
        gl.tma_load(work.a, [row, k], bar, mm.a_bufs.index(at.slot))
    else:
        where = [(epoch & 1) * flags.world + owner, gl.where(there, row, work.rows), k]
        source = owner if work.DIRECT else flags.rank
        gl.load_async(work.slots, source, where, operand_buf(mm, at, work.slots), bar)
    if work.GATHERED:
        if step % col_tiles(work) == col // mm.BN:
            mm.ring.consumer_wait(at)
            gl.tma_store(work.gathered, [owner, row, k], operand_buf(mm, at, work.gathered))
            gl.store_read_wait(0)


@gl.jit
def tile_of(work, block, i):
    """(row, k) of this CTA's i-th tile of a block, which is counted over all receivers; from beyond the end where the
    communicators do not divide the block."""
    mm = work.matmul
    t = i * mm.COMM_SMS + gl.program_id(0)
    row = (block % work.blocks * work.block_tiles + t // mm.k_steps) * mm.BM
    return gl.where(t < work.block_tiles * mm.k_steps, row, work.rows), t % mm.k_steps * mm.BK


@gl.jit
def receiver(work, block):
    """Whom a block goes to: the rank before this one first."""
    distance = 0 if work.DIRECT else 1 + block // work.blocks
    return (work.flags.rank - distance + work.flags.world) % work.flags.world


@gl.jit
def fetch(work, block, i, at):
    """Communicator: a tile of own rows."""
    mm = work.matmul
    row, k = tile_of(work, block, i)
    gl.mbarrier_expect(mm.ring.ready_at(at), mm.BM * mm.BK * 2)
    gl.tma_load(work.a, [row, k], mm.ring.ready_at(at), mm.a_bufs.index(at.slot))


@gl.jit
def send(work, block, i, at, epoch):
    """Communicator: push it into this rank's place in a slot."""
    row, k = tile_of(work, block, i)
    where = [(epoch & 1) * work.flags.world + work.flags.rank, row, k]
    gl.store_async(work.slots, receiver(work, block), where, operand_buf(work.matmul, at, work.slots))


@gl.jit
def tell(work, block, epoch):
    """Communicator: raise the flag of a block, now and then with those that a call of so few blocks leaves out."""
    first = work.flags.rank * work.PER + block % work.blocks
    end = gl.where(epoch % REFRESH == 0, (work.flags.rank + 1) * work.PER, first + 1)
    for flag in range(first, end, work.blocks):
        if work.DIRECT:
            gl.signal_all(work.flags, flag, epoch)
        else:
            gl.signal(work.flags, receiver(work, block), flag, epoch)


@gl.jit
def communicate(work):
    """Communicator: all blocks to one receiver after the other."""
    epoch = this_epoch(work.matmul)
    receivers = 1 if work.DIRECT else work.flags.world - 1
    send_blocks(work, receivers * work.blocks, work.share, epoch, fetch, send, tell)
    if work.LAST:
        finish_all(work.matmul, epoch)


# ---------------------------------------------------------------- the kernel


@gl.jit
def column(b, out, bias, first, n, BN: gl.constexpr):
    """The matrix whose columns begin at `first`."""
    return Column(b, out, bias, first, first + gl.cdiv(n, BN) * BN, n)


@gl.jit(do_not_specialize=[
    "rank", "n0", "n1", "n2", "flags_stride", "timeout_us", "rows", "k", "whole", "split", "blocks", "block_tiles", "share",
])  # fmt: skip
def all_gather_matmul_kernel(
    rank, a_desc, slots_desc, gathered_desc, b0, b1, b2, out0, out1, out2, bias0, bias1, bias2, scratch,
    flags_ptr, flags_stride, state, timeout_us, n0, n1, n2, rows, k, whole, split, blocks, block_tiles, share,
    WORLD: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, C_BUFS: gl.constexpr,
    SHARED: gl.constexpr, GROUP: gl.constexpr, B_T: gl.constexpr, COLUMNS: gl.constexpr, HAS_BIAS: gl.constexpr,
    GATHERED: gl.constexpr, DIRECT: gl.constexpr, LAST: gl.constexpr, PER: gl.constexpr, COMM_SMS: gl.constexpr,
):  # fmt: skip
    """out_i [WORLD, rows, n_i] = all ranks' a [rows, k] @ this rank's b_i [k, n_i]. Grid: co-resident CTAs, one per SM."""
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    c0 = column(b0, out0, bias0, gl.to_tensor(0), n0, BN)
    c1 = column(b1, out1, bias1, c0.end, n1, BN)
    c2 = column(b2, out2, bias2, c1.end, n2, BN)
    tiles = gl.cdiv(rows, BM) * (c2.end // BN) * WORLD
    mm = make_matmul(
        a_desc, b0, out0, flags, state, scratch, k, tiles, whole, split, BM, BN, BK, STAGES, C_BUFS, SHARED,
        False, B_T, COMM_SMS,
    )  # fmt: skip
    work = Work(
        mm, flags, a_desc, slots_desc, gathered_desc, c0, c1, c2, rows, blocks, block_tiles, share,
        COLUMNS, HAS_BIAS, GATHERED, DIRECT, LAST, PER, GROUP,
    )  # fmt: skip
    gl.grid_dependency_wait()
    COMMUNICATE: gl.constexpr = communicate if COMM_SMS > 0 else no_communicator
    run_matmul(
        work, locate, before_load, load, nobody_to_meet, nothing_more, epilogue, store, nobody_to_tell, COMMUNICATE, 64
    )  # fmt: skip
