"""all-gather + matmul, inter-SM: this rank's rows of A are pushed to the peers; own rows are multiplied first.

Rank r computes the tiles of its own rows, read from the ordinary tensor `a`, then those of ranks r+1, r+2, ... in turn, read
from a slot that their owners fill. So r's shard goes to rank r-1 first, which needs it first, then to r-2, ...: at any time
each rank sends to one and receives from one. B is up to three matrices side by side, each of which has
whole columns of tiles, and a result of its own (`Column`). GATHERED: loaders store the A tiles that they pass, each tile of
the result a share of its row's, into an ordinary tensor. SCALED: 8-bit operands, whose scales go along with the rows.
BLOCKS: operands with scales of blocks along K, of which those of a tile of A go along with the tile (`block_scales`).

JOINED (one shot), for few rows: all ranks' rows, this rank's too, lie one behind the other in a slot, and are multiplied as
one matrix, whose tiles have rows of several ranks and wait for all of these.

Communicator CTAs push, by TMA or (BY_REGISTERS) by loads and stores of 16 bytes, (MULTIMEM) of which one reaches all
ranks; or the copy engine does (below).
DIRECT (intra-SM, for comparison): communicators copy the shard into their own rank's slot, and loaders read peers' slots.
LAST is False for a launch of communicators alone, behind which another one of the same call multiplies (no overlap).

Two slots alternate by the epoch; their rows are padded with zeros to whole K steps. Besides the tables of the template
and of the communicator:

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| flags[d][r * PER + i] = epoch | rank r, the last communicator that sent d (JOINED: maybe itself) its i-th block | rank d's loaders, before a tile of these rows | release / acquire, sys; then a proxy fence | monotonic; those that calls of few blocks leave out are raised every REFRESH calls |
| slot e % 2 of rank d | peers in call e (TMA or register stores; MULTIMEM: through another address, hence an alias fence behind the wait); DIRECT: d itself | d's loaders after flags; DIRECT: peers' loaders | flags | written again in call e + 2, by a rank that has ended call e + 1, in which it waited for every peer, each of which had ended call e before |
| scales in slot e % 2 of rank d | as the rows of their block, by the communicator that tells of it | d's multipliers, for whom its loader has waited | flags; then ring.ready | as the rows |
| BLOCKS: scales in slot e % 2 of rank d | as the rows, by the communicator of the tile, ahead of its part in the block's count | d's loaders; DIRECT: peers' loaders, as for the rows | flags | as the rows |
| ring, a use whose A tile goes to `gathered` | loader's TMA load | multipliers, and the loader before it stores | mbarrier, CTA | store_read_wait before the loader goes on |

A wait that times out makes the loader load from beyond the slot, which TMA fills with NaN: every role keeps its counts.
Of 16-bit words, also where the operands have 8 bits: the upper half of any such NaN is one of theirs. Multipliers do not know,
and may then read a scale that is being written: NaN times whatever it is remains NaN. BLOCKS: what is loaded from beyond
the slot is scales too, as 4-bit operands have no NaN.

**Copy engine**, with a channel of its own. The host enqueues the copies, so it cannot know the epoch, nor which of two slots
it leads to: there is one (SLOTS = 1), which a source writes again when its receivers have said that they are done. On the
call's stream `await_places_kernel`, of one CTA, is ahead of the matmul, which has no communicators; on a second stream the
copies run beside it: to r-1 first, block by block, behind each the word or words that are its flag.

| word | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| flags[r][WORLD * PER + d] = epoch | rank d, the last storer that has parts of r's rows: all loads of them have completed | `await_places_kernel` of r in call e + 1 | release / acquire, sys | monotonic |
| state[OWN_WORDS + r] | rank d's storers, their parts of r's rows | nobody; the last one tells r | acq_rel, gpu | the last one puts it back to 0 |
| the place of r at rank d | r's copies in call e, behind `await_places_kernel` | d's loaders after flags | flags | as the first line says |
| state[OWN_WORDS + WORLD + i] = epoch, i < PER | `await_places_kernel` | the copies behind it | stream order | the stream goes on after the copies |
| flags[d][r * PER + i] = epoch | r's copy of that word; of all words from i on with the last block's | rank d's loaders, before a tile of these rows | behind the block's copy on one stream / acquire, sys; then a proxy fence | monotonic, and none is left out |
"""

from tileweave import lang as gl
from tileweave.tiles.block_scales import (
    RowScales,
    fetch_row_scales,
    load_row_scales,
    load_scale,
    load_scales,
    make_block_scales,
    send_row_scales,
)
from tileweave.tiles.columns import Column, col_tiles, column, load_b, store
from tileweave.tiles.communicator import copy_blocks, finish_all, operand_buf, place_buf, send_blocks
from tileweave.tiles.matmul import (
    EPOCH,
    OWN_WORDS,
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
class Pointers:
    """Memory of which TMA knows nothing, or that goes through registers. Distances are in lines of 16 bytes."""

    a: gl.tensor  # this rank's rows as 16-bit words, `k_lines` long
    a_lines: gl.tensor  # and `a_lines` apart
    k_lines: gl.tensor
    scale_a: gl.tensor  # of these rows, `step_a` apart: 0 if one is that of all
    step_a: gl.tensor
    places: gl.tensor  # rank 0's first place for the rows of a source, as 16-bit words,
    scales: gl.tensor  # and for their scales
    everywhere: gl.tensor  # the places of all ranks at once
    rank_lines: gl.tensor
    place_lines: gl.tensor

    @gl.constexpr_function
    def __init__(self, a, a_lines, k_lines, scale_a, step_a, places, scales, everywhere, rank_lines, place_lines):
        self.a, self.a_lines, self.k_lines, self.scale_a, self.step_a = a, a_lines, k_lines, scale_a, step_a
        self.places, self.scales, self.everywhere = places, scales, everywhere
        self.rank_lines, self.place_lines = rank_lines, place_lines


@gl.aggregate
class Work:
    """What the roles share besides the matmul."""

    matmul: Matmul
    flags: gl.Flags
    a: gl.tensor_descriptor  # [rows, k], this rank's rows
    slots: gl.tensor_descriptor  # [world, slot x source, rows, k in whole steps], any rank's, as 16-bit words
    gathered: gl.tensor_descriptor  # [world, rows, k]; JOINED: [1, world * rows, k], as are the results
    joined: gl.tensor_descriptor  # JOINED: [world, slot, world * rows, k in whole steps], the slots once more,
    slot_places: gl.tensor  # how many places the second slot is from the first
    at: Pointers
    epoch: gl.tensor  # read where multipliers need it: SCALED
    row_scales: RowScales  # BLOCKS
    c0: Column
    c1: Column
    c2: Column
    rows: gl.tensor
    blocks: gl.tensor  # of a shard
    block_tiles: gl.tensor  # rows of tiles in one
    share: gl.tensor  # of a block: items for each communicator
    COLUMNS: gl.constexpr
    HAS_BIAS: gl.constexpr
    SCALED: gl.constexpr
    BLOCKS: gl.constexpr
    RECEIVERS: gl.constexpr  # ranks that are sent this rank's rows
    BY_COLUMN: gl.constexpr  # a scale for each column of B
    GATHERED: gl.constexpr
    DIRECT: gl.constexpr
    BY_REGISTERS: gl.constexpr
    MULTIMEM: gl.constexpr
    LAST: gl.constexpr
    SLOTS: gl.constexpr
    PER: gl.constexpr  # flags of a source
    GROUP: gl.constexpr

    @gl.constexpr_function
    def __init__(
        self, matmul, flags, a, slots, gathered, joined, slot_places, at, epoch, row_scales, c0, c1, c2, rows, blocks, block_tiles,
        share, COLUMNS, HAS_BIAS, SCALED, BLOCKS, RECEIVERS, BY_COLUMN, GATHERED, DIRECT, BY_REGISTERS, MULTIMEM, LAST, SLOTS, PER, GROUP,
    ):  # fmt: skip
        self.matmul, self.flags, self.a, self.slots, self.gathered = matmul, flags, a, slots, gathered
        self.joined, self.slot_places, self.RECEIVERS = joined, slot_places, gl.constexpr(RECEIVERS)
        self.at, self.epoch, self.SLOTS = at, epoch, gl.constexpr(SLOTS)
        self.row_scales, self.BLOCKS = row_scales, gl.constexpr(BLOCKS)
        self.SCALED, self.BY_COLUMN = gl.constexpr(SCALED), gl.constexpr(BY_COLUMN)
        self.BY_REGISTERS, self.MULTIMEM = gl.constexpr(BY_REGISTERS), gl.constexpr(MULTIMEM)
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
def locate(work, t):
    """The t-th tile: whose rows it has, its row in these, its column; own rows come first, unless there are few."""
    per = row_tiles(work) * col_tiles(work)
    owner, i, j = t // per, 0, t % per
    if row_tiles(work) == 1:  # columns of B for all owners in turn, lest they come from device memory for each
        owner, j = t % work.flags.world, t // work.flags.world
    else:
        i, j = grouped_order(t % per, row_tiles(work), col_tiles(work), work.GROUP)
    return (work.flags.rank + owner) % work.flags.world, i * work.matmul.BM, i * work.matmul.BM, j * work.matmul.BN


@gl.jit
def scaled(work, part, owner, row, scale, cols, n, LAYOUT: gl.constexpr):
    """A product of 8-bit operands times the scales of its rows and columns."""
    rows = row + gl.arange(0, work.matmul.ROWS, gl.SliceLayout(1, LAYOUT))
    scale_a, step_a = work.at.scale_a, work.at.step_a
    if owner != work.flags.rank:
        source = owner if work.DIRECT else work.flags.rank
        scale_a, step_a = work.at.scales + lines_to(work, source, owner, work.epoch) * 4, step_a * 0 + 1
    of_rows = gl.load(scale_a + rows * step_a, mask=rows < work.rows, other=0.0)
    if work.BY_COLUMN:
        part = part * gl.load(scale + cols, mask=cols < n, other=0.0)[None, :]
    else:
        of_rows = of_rows * gl.load(scale)
    return part * of_rows[:, None]


@gl.jit
def finish_column(work, c, part, owner, row, col, LAYOUT: gl.constexpr):
    """Multiplier: scales and bias, if the part is this matrix's."""
    if (col >= c.first) & (col < c.end):
        cols = col - c.first + gl.arange(0, work.matmul.WIDTH, gl.SliceLayout(0, LAYOUT))
        n = c.n // 8 * 8  # which it is a multiple of, as the compiler may know: neighbours are loaded at once
        if work.SCALED:
            part = scaled(work, part, owner, row, c.scale, cols, n, LAYOUT)
        if work.HAS_BIAS:
            part += gl.load(c.bias + cols, mask=cols < n, other=0.0).to(gl.float32)[None, :]
    return part


@gl.jit
def epilogue(work, part, at, HALF: gl.constexpr, owner, row, col, LAYOUT: gl.constexpr):
    """Multiplier: scales and bias."""
    if work.HAS_BIAS or work.SCALED:
        part = finish_column(work, work.c0, part, owner, row, col, LAYOUT)
        if work.COLUMNS > 1:
            part = finish_column(work, work.c1, part, owner, row, col, LAYOUT)
        if work.COLUMNS > 2:
            part = finish_column(work, work.c2, part, owner, row, col, LAYOUT)
    return part, at


# ---------------------------------------------------------------- what the all-gather adds


@gl.jit
def place(work, source, epoch):
    """Which place of a rank has the rows of a source in this call."""
    return (epoch & (work.SLOTS - 1)) * work.slot_places + source


@gl.jit
def lines_to(work, rank, source, epoch):
    """How far `rank`'s place for the rows of a source is from rank 0's first one."""
    return rank.to(gl.int64) * work.at.rank_lines + place(work, source, epoch).to(gl.int64) * work.at.place_lines


@gl.jit
def before_load(work, owner, row, epoch):
    """Loader: wait for the block of these rows; False after a timeout."""
    there = epoch == epoch
    if owner != work.flags.rank:
        there = gl.wait(work.flags, owner * work.PER + row // (work.block_tiles * work.matmul.BM), epoch)
        if work.MULTIMEM:
            gl.fence_proxy_alias()
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
        where = [place(work, owner, epoch), gl.where(there, row, work.rows), step * work.slots.block_shape[3]]
        source = owner if work.DIRECT else flags.rank
        gl.load_async(work.slots, source, where, operand_buf(mm, at, work.slots), bar)
    keep(work, at, owner, row, col, step)


@gl.jit
def load_scales_of(work, scales, at, bar, owner, row, col, step, epoch, there):
    """Loader, BLOCKS: a K step's scales, A's of own rows or from a slot."""
    if owner == work.flags.rank:
        load_scales(work, scales, at, bar, owner, row, col, step, epoch, there)
    else:
        load_scale(scales.b_desc, scales.b_bufs.index(at.slot), bar, col, step)
        source, rows = owner if work.DIRECT else work.flags.rank, gl.where(there, row, work.rows)
        load_row_scales(work.row_scales, at, bar, source, place(work, owner, epoch), rows, step)


@gl.jit
def keep(work, at, owner, row, col, step):
    """Loader, GATHERED: store a tile of A that it passes, if it is this column's to store."""
    mm = work.matmul
    if work.GATHERED:
        if step % col_tiles(work) == col // mm.BN:
            mm.ring.consumer_wait(at)
            gl.tma_store(work.gathered, [owner, row, step * mm.BK], operand_buf(mm, at, work.gathered))
            gl.store_read_wait(0)


@gl.jit
def locate_joined(work, t):
    """JOINED: the t-th tile of all rows, which the results have as one."""
    mm, rows = work.matmul, work.rows * work.flags.world
    i, j = grouped_order(t, gl.cdiv(rows, mm.BM), col_tiles(work), work.GROUP)
    return gl.to_tensor(0), i * mm.BM, i * mm.BM, j * mm.BN


@gl.jit
def before_load_joined(work, owner, row, epoch):
    """Loader, JOINED: wait for all ranks that have rows of the tile; False after a timeout."""
    first = row // work.rows
    last = (gl.minimum(row + work.matmul.BM, work.rows * work.flags.world) - 1) // work.rows
    there = gl.wait_all(work.flags, first * work.PER, last - first + 1, epoch, step=work.PER)
    gl.fence_proxy_async()
    return there


@gl.jit
def load_joined(work, at, bar, owner, row, col, step, epoch, there):
    """Loader, JOINED: a K step, A from the slot."""
    load_b(work, at, bar, col, step * work.matmul.BK)
    where = [epoch & 1, gl.where(there, row, work.rows * work.flags.world), step * work.joined.block_shape[3]]
    gl.load_async(work.joined, work.flags.rank, where, operand_buf(work.matmul, at, work.joined), bar)
    keep(work, at, owner, row, col, step)


@gl.jit
def tile_of(work, block, t):
    """(row, K step) of the t-th tile of a block; from beyond the end where the communicators do not divide the block."""
    row = (block % work.blocks * work.block_tiles + t // work.matmul.k_steps) * work.matmul.BM
    return gl.where(t < work.block_tiles * work.matmul.k_steps, row, work.rows), t % work.matmul.k_steps


@gl.jit
def receiver(work, block):
    """Whom a block goes to: the rank before this one first, JOINED: this one last."""
    distance = 0 if work.DIRECT else 1 + block // work.blocks
    return (work.flags.rank - distance + work.flags.world) % work.flags.world


@gl.jit
def fetch(work, block, i, at):
    """Communicator: as many tiles of own rows as operands leave room for."""
    mm = work.matmul
    TILES: gl.constexpr = 1 + mm.BN // mm.BM  # in a place of the ring, with what is meant for B
    TILE_BYTES: gl.constexpr = mm.BM * mm.BK * (work.a.dtype.primitive_bitwidth // 8)
    BESIDE: gl.constexpr = mm.BM * 4 * work.row_scales.own.block_shape[1] if work.BLOCKS else 0
    gl.mbarrier_expect(mm.ring.ready_at(at), TILES * (TILE_BYTES + BESIDE))
    for j in gl.static_range(TILES):
        row, step = tile_of(work, block, (i * mm.COMM_SMS + gl.program_id(0)) * TILES + j)
        gl.tma_load(work.a, [row, step * mm.BK], mm.ring.ready_at(at), place_buf(mm, at, j, work.a))
        if work.BLOCKS:
            fetch_row_scales(work.row_scales, at, j, mm.ring.ready_at(at), row, step)


@gl.jit
def send(work, block, i, at, epoch):
    """Communicator: push them into this rank's place in a slot."""
    TILES: gl.constexpr = 1 + work.matmul.BN // work.matmul.BM
    for j in gl.static_range(TILES):
        row, step = tile_of(work, block, (i * work.matmul.COMM_SMS + gl.program_id(0)) * TILES + j)
        where = [place(work, work.flags.rank, epoch), row, step * work.slots.block_shape[3]]
        gl.store_async(work.slots, receiver(work, block), where, place_buf(work.matmul, at, j, work.slots))
        if work.BLOCKS:
            send_row_scales(work.row_scales, at, j, receiver(work, block), where[0], row, step)


@gl.jit
def copy_tile(work, block, i, epoch):
    """Communicator, BY_REGISTERS: a tile of own rows, 128 bytes wide, 16 bytes of a thread at a time."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    row, step = tile_of(work, block, i * work.matmul.COMM_SMS + gl.program_id(0))
    rows = row + gl.arange(0, work.matmul.BM, gl.SliceLayout(1, L))[:, None]
    cols = step * 64 + gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    own = work.at.a + rows.to(gl.int64) * (work.at.a_lines * 8) + cols
    x = gl.load(own, mask=(rows < work.rows) & (cols < work.at.k_lines * 8), other=0.0)
    to = work.at.places + lines_to(work, receiver(work, block), work.flags.rank, epoch) * 8
    gl.store(to + rows.to(gl.int64) * (work.matmul.k_steps * 64) + cols, x, mask=rows < work.rows)


@gl.jit
def broadcast_tile(work, block, i, epoch):
    """Communicator, MULTIMEM: the same to all ranks, whose places have room for whole tiles."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    row, step = tile_of(work, block, i * work.matmul.COMM_SMS + gl.program_id(0))
    if row < work.rows:
        rows = row + gl.arange(0, work.matmul.BM, gl.SliceLayout(1, L))[:, None]
        cols = step * 64 + gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
        own = work.at.a + rows.to(gl.int64) * (work.at.a_lines * 8) + cols
        x = gl.load(own, mask=(rows < work.rows) & (cols < work.at.k_lines * 8), other=0.0)
        to = work.at.everywhere + place(work, work.flags.rank, epoch).to(gl.int64) * work.at.place_lines * 8
        gl.multimem_store(to + rows.to(gl.int64) * (work.matmul.k_steps * 64) + cols, x)


@gl.jit
def send_scales(work, block, epoch):
    """Communicator: the scales of a block's rows, all of which are performed."""
    if work.SCALED:
        LANES: gl.constexpr = 32 * gl.num_warps()
        first = block % work.blocks * work.block_tiles * work.matmul.BM
        end = gl.minimum(first + work.block_tiles * work.matmul.BM, work.rows)
        for peer in range(work.flags.world - 1 if work.MULTIMEM else 1):
            to = lines_to(work, receiver(work, block + peer * work.blocks), work.flags.rank, epoch) * 4
            for row in range(first, end, LANES):
                rows = row + gl.arange(0, LANES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
                scales = gl.load(work.at.scale_a + rows * work.at.step_a, mask=rows < end, other=0.0)
                gl.store(work.at.scales + to + rows, scales, mask=rows < end)
        gl.barrier()


@gl.jit
def tell(work, block, epoch):
    """Communicator: raise the flag of a block, now and then with those that a call of so few blocks leaves out."""
    send_scales(work, block, epoch)
    first = work.flags.rank * work.PER + block % work.blocks
    end = gl.where(epoch % REFRESH == 0, (work.flags.rank + 1) * work.PER, first + 1)
    for flag in range(first, end, work.blocks):
        if work.DIRECT or work.MULTIMEM:
            gl.signal_all(work.flags, flag, epoch)
        else:
            gl.signal(work.flags, receiver(work, block), flag, epoch)


@gl.jit
def communicate(work):
    """Communicator: all blocks to one receiver after the other."""
    epoch = this_epoch(work.matmul)
    blocks = work.blocks * (1 if work.DIRECT or work.MULTIMEM else work.RECEIVERS)
    if work.MULTIMEM:
        copy_blocks(work, blocks, work.share, epoch, broadcast_tile, tell)
    elif work.BY_REGISTERS:
        copy_blocks(work, blocks, work.share, epoch, copy_tile, tell)
    else:
        STORES: gl.constexpr = (1 + work.matmul.BN // work.matmul.BM) * (2 if work.BLOCKS else 1)
        send_blocks(work, blocks, work.share, epoch, fetch, send, tell, STORES)
    if work.LAST:
        finish_all(work.matmul, epoch)


@gl.jit
def give_back(work, owner, count, epoch):
    """Storer, copy engine: count parts; with the last one of a source's rows it may write them again."""
    if owner != work.flags.rank:
        mm = work.matmul
        parts = row_tiles(work) * col_tiles(work) * (mm.BN // mm.WIDTH) * mm.HALVES
        used = mm.state + OWN_WORDS + owner
        if (count > 0) & (gl.atomic_add(used, count, sem="acq_rel", scope="gpu") == parts - count):
            gl.atomic_xchg(used, 0, sem="relaxed", scope="gpu")
            gl.signal(work.flags, owner, work.flags.world * work.PER + work.flags.rank, epoch)


# ---------------------------------------------------------------- the kernels


@gl.jit(do_not_specialize=["rank", "flags_stride", "timeout_us"])
def await_places_kernel(rank, flags_ptr, flags_stride, state, timeout_us, WORLD: gl.constexpr, PER: gl.constexpr):
    """Ahead of the copies of a call: every peer is done with what the last call's have left. Then the words that these
    send are this call's epoch. Grid: one CTA."""
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    gl.grid_dependency_wait()
    epoch = gl.load(state + EPOCH) + 1
    gl.wait_all(flags, WORLD * PER, WORLD, epoch - 1, skip=WORLD * PER + rank)
    for i in gl.static_range(PER):
        gl.store(state + OWN_WORDS + WORLD + i, epoch)


@gl.jit(do_not_specialize=[
    "rank", "a_lines", "step_a", "everywhere", "rank_lines", "place_lines", "slot_places", "n0", "n1", "n2",
    "flags_stride", "timeout_us", "rows", "k", "whole", "split", "blocks", "block_tiles", "share",
])  # fmt: skip
def all_gather_matmul_kernel(
    rank, a_desc, slots_desc, gathered_desc, a, scale_a, step_a, b0, b1, b2, out0, out1, out2, bias0, bias1, bias2,
    scale0, scale1, scale2, scratch, a_lines, places, scales, everywhere, rank_lines,
    place_lines, joined_desc, slot_places, scales_a_desc, scales_b_desc, scale_slots_desc, flags_ptr, flags_stride, state, timeout_us, n0, n1, n2, rows, k, whole, split, blocks, block_tiles, share,
    WORLD: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, C_BUFS: gl.constexpr,
    SHARED: gl.constexpr, GROUP: gl.constexpr, B_T: gl.constexpr, COLUMNS: gl.constexpr, HAS_BIAS: gl.constexpr,
    SCALED: gl.constexpr, BY_COLUMN: gl.constexpr, GATHERED: gl.constexpr, DIRECT: gl.constexpr, BY_REGISTERS: gl.constexpr, MULTIMEM: gl.constexpr,
    LAST: gl.constexpr, SLOTS: gl.constexpr, PER: gl.constexpr, COMM_SMS: gl.constexpr,
):  # fmt: skip
    """out_i [WORLD, rows, n_i] = all ranks' a [rows, k] @ this rank's b_i [k, n_i]. Grid: co-resident CTAs, one per SM.

    Unless JOINED, joined_desc and slot_places are None; unless BLOCKS, the descriptors of scales.
    """
    JOINED: gl.constexpr = joined_desc is not None
    BLOCKS: gl.constexpr = scales_a_desc is not None
    RECEIVERS: gl.constexpr = WORLD if JOINED else WORLD - 1
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    c0 = column(b0, out0, bias0, scale0, gl.to_tensor(0), n0, BN)
    c1 = column(b1, out1, bias1, scale1, c0.end, n1, BN)
    c2 = column(b2, out2, bias2, scale2, c1.end, n2, BN)
    tiles = gl.cdiv(rows, BM) * (c2.end // BN) * WORLD
    if JOINED:
        tiles = gl.cdiv(rows * WORLD, BM) * (c2.end // BN)
    else:
        joined_desc, slot_places = slots_desc, gl.to_tensor(WORLD)
    mm = make_matmul(
        a_desc, b0, out0, flags, state, scratch, k, tiles, whole, split, BM, BN, BK, STAGES, C_BUFS, SHARED,
        False, B_T, COMM_SMS,
    )  # fmt: skip
    block_scales, row_scales = None, RowScales(a_desc, slots_desc, mm.a_bufs, mm.b_bufs)  # at which nobody looks
    if BLOCKS:
        block_scales = make_block_scales(mm, scales_a_desc, scales_b_desc)
        row_scales = RowScales(scales_a_desc, scale_slots_desc, block_scales.a_bufs, block_scales.b_bufs)
    k_lines = k * (a_desc.dtype.primitive_bitwidth // 8) // 16
    all_places = gl.multicast_pointer(everywhere, a.dtype.element_ty) if MULTIMEM else places
    at = Pointers(a, a_lines, k_lines, scale_a, step_a, places, scales, all_places, rank_lines, place_lines)
    gl.grid_dependency_wait()
    epoch = this_epoch(mm) if SCALED else rows
    work = Work(
        mm, flags, a_desc, slots_desc, gathered_desc, joined_desc, slot_places, at, epoch, row_scales, c0, c1, c2, rows, blocks,
        block_tiles, share, COLUMNS, HAS_BIAS, SCALED, BLOCKS, RECEIVERS, BY_COLUMN, GATHERED, DIRECT, BY_REGISTERS, MULTIMEM, LAST, SLOTS, PER, GROUP,
    )  # fmt: skip
    COMMUNICATE: gl.constexpr = communicate if COMM_SMS > 0 else no_communicator
    PUBLISH: gl.constexpr = give_back if SLOTS == 1 else nobody_to_tell
    LOCATE: gl.constexpr = locate_joined if JOINED else locate
    BEFORE_LOAD: gl.constexpr = before_load_joined if JOINED else before_load
    LOAD: gl.constexpr = load_joined if JOINED else load
    run_matmul(
        work, LOCATE, BEFORE_LOAD, LOAD, nobody_to_meet, nothing_more, epilogue, store, PUBLISH, COMMUNICATE, 64,
        scales=block_scales, LOAD_SCALES=load_scales_of,
    )  # fmt: skip
