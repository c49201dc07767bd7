"""Grouped matmul + combine: rows of a finished tile go to the ranks whose tokens they are of.

Intra-SM, without communicators, each row by itself. A rank's slot has a home for each row that its own tokens have anywhere, in the order of experts. A storer sends what a
part of a tile holds of a row, 128 bytes, to the home of that row by stores of 16 bytes. Behind their tiles, once every
rank has sent all its rows, the CTAs of a rank sum the rows of each own token, in float32, in the order of its choices: the
result depends on no timing. Factors of rows are multiplied into the accumulator, before it is rounded.

INTER, with communicators, all rows of a token at a rank as one: their sum. Columns go in CHUNKS, all tiles of one ahead of the
next's. Storers leave rows in this rank's own memory; when a chunk is there, communicators sum it over the rows of each token,
in float32, in the order of rows, and send the sum to the place of this rank and of the token's slot. So a home is one of
such places, of which a token has as many as ranks with rows of it, and what is behind the tiles stays as it is.

Two slots alternate by the epoch, which lives in `state` and is advanced by the last CTA. Besides those of the template:

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| state[SENT] | every storer of this rank, its parts so far are stored | nobody; the last one tells | acq_rel, gpu | the last one puts it back to 0 |
| flags[d][r] = epoch | rank r, its last storer, or its first CTA if there is no tile; INTER: its last communicator | all CTAs of rank d behind their tiles | release / acquire, sys | one writer, monotonic |
| INTER: state[SENT] | every communicator of this rank, all its sums are stored | nobody; the last one tells | acq_rel, gpu | as above |
| INTER: state[STORED + chunk] | every storer of this rank, its parts of the chunk performed | nobody; the last one tells | acq_rel, gpu | as above |
| INTER: flags[r][WORLD + chunk] = epoch | rank r, the last storer of a chunk | its communicators, before they read the chunk | release / acquire, sys | monotonic, one rank's own; skipped where there is no tile |
| INTER: rows of rank r | its storers (TMA stores; rows next to another expert's from registers) | its communicators, behind the flag of the chunk | flags | belongs to one launch |
| slot e % 2 of rank d | storers, INTER communicators, of all ranks in call e | d's CTAs, behind the flags | flags | written again in call e + 2, by a rank that has ended call e + 1, in which it waited for d, which had ended call e before |

After a wait that timed out the sums are NaN.
"""

from tileweave import lang as gl
from tileweave.tiles.communicator import finish_all
from tileweave.tiles.grouped import (
    as_product,
    end_of,
    entry_of,
    load_rows,
    locate_rows,
    row_tile,
    store_part,
    within_expert,
)
from tileweave.tiles.matmul import (
    OWN_WORDS,
    Matmul,
    first_unit,
    make_matmul,
    no_communicator,
    nobody_to_meet,
    nothing_ahead,
    nothing_before_load,
    nothing_more,
    run_matmul,
    this_epoch,
    unscaled,
)
from tileweave.tiles.phases import count_up

SENT = OWN_WORDS  # of `state`,
STORED = gl.constexpr(SENT.value + 1)  # and CHUNKS words from here
CHUNKS = gl.constexpr(4)  # of columns, at most
AT_ONCE = gl.constexpr(2)  # tokens that a CTA sums at a time


@gl.aggregate
class Way:
    """Where rows go, and what is made of them there. Distances are in lines of 16 bytes."""

    places: gl.tensor  # rank 0's first slot,
    rank_lines: gl.tensor  # the distance of two ranks' slots,
    slot_lines: gl.tensor  # and of a rank's two
    row_slot: gl.tensor  # int32 [rows]: source * slots + something: the rank whose token a row is of,
    row_home: gl.tensor  # int32 [rows]: and its home there
    weights: gl.tensor  # float32 [rows]
    slots: gl.tensor
    home: gl.tensor  # int32 [tokens, CHOICES]: the homes of an own token's rows, INTER sums, -1 for none
    out: gl.tensor  # [tokens, n]
    tokens: gl.tensor
    CHOICES: gl.constexpr

    @gl.constexpr_function
    def __init__(
        self, places, rank_lines, slot_lines, row_slot, row_home, weights, slots, home, out, tokens, CHOICES
    ):  # fmt: skip
        self.places, self.rank_lines, self.slot_lines = places, rank_lines, slot_lines
        self.row_slot, self.row_home, self.weights, self.slots = row_slot, row_home, weights, slots
        self.home, self.out, self.tokens, self.CHOICES = home, out, tokens, gl.constexpr(CHOICES)


@gl.aggregate
class Kept:
    """INTER: rows that stay here until they are summed."""

    desc: gl.tensor_descriptor  # [rows, n]
    rows: gl.tensor
    order: gl.tensor  # int32 [rows]: rows by `row_slot`, those of one in their order,
    begins: gl.tensor  # int32 [world * slots + 1]: and where those of each begin in it

    @gl.constexpr_function
    def __init__(self, desc, rows, order, begins):
        self.desc, self.rows, self.order, self.begins = desc, rows, order, begins


@gl.aggregate
class Work:
    """What the roles share besides the matmul."""

    matmul: Matmul
    flags: gl.Flags
    way: Way
    kept: Kept
    w: gl.tensor_descriptor  # [experts, k, n] or, B_T, [experts, n, k]
    part_desc: gl.tensor_descriptor
    offsets: gl.tensor
    table: gl.tensor
    rows: gl.tensor
    n: gl.tensor
    GROUP: gl.constexpr

    @gl.constexpr_function
    def __init__(self, matmul, flags, way, kept, w, part_desc, offsets, table, rows, n, GROUP):
        self.matmul, self.flags, self.way, self.kept = matmul, flags, way, kept
        self.w, self.part_desc = w, part_desc
        self.offsets, self.table, self.rows, self.n = offsets, table, rows, n
        self.GROUP = gl.constexpr(GROUP)


@gl.jit
def factors(work, expert, row, col, LAYOUT: gl.constexpr):
    """AHEAD: the weights of a multiplier's rows."""
    rows = row + gl.arange(0, work.matmul.ROWS, gl.SliceLayout(1, LAYOUT))
    return gl.load(work.way.weights + rows, mask=rows < work.rows, other=0.0)


@gl.jit
def weighted(work, acc, ahead):
    """SCALE: rows times their weights."""
    return acc * ahead[:, None]


@gl.jit
def slot_of(work, rank, epoch):
    """Rank's slot of a call, as the distance in elements from `places`."""
    way = work.way
    return (rank.to(gl.int64) * way.rank_lines + (epoch & 1).to(gl.int64) * way.slot_lines) * 8


@gl.jit
def send_rows(work, expert, row, col, buf, epoch, met):
    """STORE: what of a part is the expert's, row by row to where it belongs."""
    mm, way, like = work.matmul, work.way, work.part_desc
    STEP: gl.constexpr = 8  # rows of 128 bytes that are swizzled together
    LANES: gl.constexpr = mm.WIDTH // 8
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    steps = gl.reinterpret(buf, like.dtype, [mm.ROWS // STEP, STEP, mm.WIDTH], like.layout)
    cols = col + gl.arange(0, mm.WIDTH, gl.SliceLayout(0, L))
    end = gl.minimum(end_of(work.offsets, expert, work.rows), row + mm.ROWS)
    for i in range(0, gl.cdiv(end - row, STEP)):
        rows = row + i * STEP + gl.arange(0, STEP, gl.SliceLayout(1, L))
        there = rows < end
        rank = gl.load(way.row_slot + rows, mask=there, other=0) // way.slots
        home = gl.load(way.row_home + rows, mask=there, other=0)
        where = slot_of(work, rank, epoch) + home.to(gl.int64) * work.n
        mask = there[:, None] & (cols < work.n)[None, :]
        gl.store(way.places + where[:, None] + cols[None, :], steps.index(i).load(L), mask=mask)


@gl.jit
def publish(work, expert, count, epoch):
    """PUBLISH: count parts as stored, by all threads, as a storer's wait behind each part is a barrier; the last CTA tells
    all ranks."""
    mm = work.matmul
    if count_up(mm, SENT, count, mm.tiles * mm.HALVES * (mm.BN // mm.WIDTH)):
        gl.signal_all(work.flags, work.flags.rank, epoch)


# ---------------------------------------------------------------- what INTER adds


@gl.jit
def chunk_tiles(work, chunk):
    """How many columns of tiles a chunk has, as all but the last have them; how many row tiles there are; and what this
    chunk has, 1 at least, also where it has none."""
    mm = work.matmul
    cols = gl.cdiv(work.n, mm.BN)
    wide = gl.cdiv(cols, CHUNKS)
    return wide, mm.tiles // cols, gl.maximum(gl.minimum(wide, cols - chunk * wide), 1)


@gl.jit
def locate_in_chunks(work, t):
    """LOCATE: the t-th tile's expert and chunk as one number, its row in the operand and in the result, its column."""
    mm = work.matmul
    wide, row_tiles, width = chunk_tiles(work, 0)
    chunk = gl.minimum(t // gl.maximum(row_tiles * wide, 1), CHUNKS - 1)
    wide, row_tiles, width = chunk_tiles(work, chunk)
    i, j = row_tile(t - chunk * wide * row_tiles, row_tiles * width, width, work.GROUP)
    entry = entry_of(work.table, i)
    row = gl.load(entry + 1)
    return gl.load(entry) * CHUNKS + chunk, row, row, (chunk * wide + j) * mm.BN


@gl.jit
def load_in_chunks(work, at, bar, owner, row, col, step, epoch, there):
    """LOAD: a K step."""
    load_rows(work, at, bar, owner // CHUNKS, row, col, step, epoch, there)


@gl.jit
def within_in_chunks(work, owner, row, steps):
    """WITHIN: how many K steps a multiplier's rows take."""
    return within_expert(work, owner // CHUNKS, row, steps)


@gl.jit
def keep_rows(work, owner, row, col, buf, epoch, met):
    """STORE: what of a part is the expert's, to this rank's own rows."""
    end = end_of(work.offsets, owner // CHUNKS, work.rows)
    store_part(work.matmul, work.kept.desc, work.kept.rows, end, work.n, row, col, buf)


@gl.jit
def tell_communicators(work, owner, count, epoch):
    """PUBLISH: count parts of a chunk as performed; the last CTA tells this rank's communicators."""
    mm = work.matmul
    chunk = owner % CHUNKS
    wide, row_tiles, width = chunk_tiles(work, chunk)
    gl.store_wait(0)
    gl.barrier()
    if count_up(mm, STORED + chunk, count, row_tiles * width * mm.HALVES * (mm.BN // mm.WIDTH)):
        gl.signal(work.flags, work.flags.rank, work.flags.world + chunk, epoch)


@gl.jit
def slots_in_use(work, to):
    """Of how many tokens of a rank there are rows here: its first so many slots."""
    begins = work.kept.begins + to * work.way.slots
    end = gl.load(begins + work.way.slots)
    count = end * 0
    if end > gl.load(begins):
        last = gl.load(work.kept.order + end - 1)
        count = gl.load(work.way.row_slot + last) - to * work.way.slots + 1
    return count


@gl.jit
def sum_rows(work, start, stop, cols, end, met, L: gl.constexpr):
    """Sums of the rows that `start` to `stop` of `order` name, in columns ahead of `end`."""
    AHEAD: gl.constexpr = 4
    total = gl.zeros([start.shape[0], cols.shape[0]], gl.float32, L)
    for i in range(0, gl.max(stop - start, 0), AHEAD):
        for j in gl.static_range(AHEAD):  # unrolled, so that the loads of these rows are in flight together
            there = start + i + j < stop
            row = gl.load(work.kept.order + start + i + j, mask=there, other=0)
            where = (row.to(gl.int64) * work.n)[:, None] + cols[None, :]
            mask = (met & there)[:, None] & (cols < end)[None, :]
            total += gl.load(work.kept.rows + where, mask=mask, other=0.0).to(gl.float32)
    return total


@gl.jit
def send_sums(work, to, first, end, met, epoch):
    """Communicator: columns `first` to `end` of its share of the sums for a rank."""
    way, rank = work.way, work.flags.rank
    ROWS: gl.constexpr = 2 * gl.num_warps()
    COLS: gl.constexpr = 256
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    count = slots_in_use(work, to)
    for i in range(gl.program_id(0) * ROWS, count, work.matmul.COMM_SMS * ROWS):
        slot = i + gl.arange(0, ROWS, gl.SliceLayout(1, L))
        begins = work.kept.begins + to * way.slots + slot
        start = gl.load(begins, mask=slot < count, other=0)
        stop = gl.load(begins + 1, mask=slot < count, other=0)
        there = slot_of(work, to, epoch) + (rank * way.slots + slot).to(gl.int64) * work.n
        for col in range(first, end, COLS):
            cols = col + gl.arange(0, COLS, gl.SliceLayout(0, L))
            total = sum_rows(work, start, stop, cols, end, met, L)
            mask = (slot < count)[:, None] & (cols < end)[None, :]
            gl.store(way.places + there[:, None] + cols[None, :], total.to(way.out.dtype.element_ty), mask=mask)


@gl.jit
def send_chunk(work, chunk, epoch):
    """Communicator: its share of a chunk's sums, to the next ranks first."""
    flags = work.flags
    wide, row_tiles, width = chunk_tiles(work, chunk)
    first = chunk * wide * work.matmul.BN
    if first < work.n:
        end = gl.minimum(first + wide * work.matmul.BN, work.n)
        met = gl.wait(flags, flags.world + chunk, epoch)
        for distance in range(1, flags.world + 1):
            send_sums(work, (flags.rank + distance) % flags.world, first, end, met, epoch)


@gl.jit
def communicate(work):
    """COMMUNICATE: chunk by chunk; the last CTA tells all ranks."""
    mm = work.matmul
    epoch = this_epoch(mm)
    if mm.tiles > 0:
        for chunk in range(0, CHUNKS):
            send_chunk(work, chunk, epoch)
    gl.barrier()
    if count_up(mm, SENT, 1, mm.COMM_SMS):
        gl.signal_all(work.flags, work.flags.rank, epoch)
    finish_all(mm, epoch)


# ---------------------------------------------------------------- behind the tiles


@gl.jit
def sum_tokens(work, first, col, met, epoch, L: gl.constexpr):
    """Sums of the rows of AT_ONCE own tokens, from `first` on, in columns from `col` on."""
    way = work.way
    COLS: gl.constexpr = 256 * gl.num_warps()
    tokens = first + gl.arange(0, AT_ONCE, gl.SliceLayout(1, L))
    cols = col + gl.arange(0, COLS, gl.SliceLayout(0, L))
    inside = (cols < work.n)[None, :]
    slot = way.places + slot_of(work, work.flags.rank, epoch)
    total = gl.full([AT_ONCE, COLS], gl.where(met, 0.0, float("nan")), gl.float32, L)
    AHEAD: gl.constexpr = min(way.CHOICES, 8)
    for choice in range(0, way.CHOICES, AHEAD):
        for j in gl.static_range(AHEAD):  # unrolled, so that the loads of these rows are in flight together
            known = (tokens < way.tokens) & (choice + j < way.CHOICES)
            home = gl.load(way.home + tokens * way.CHOICES + choice + j, mask=known, other=-1)
            there = (met & (home >= 0))[:, None] & inside
            where = (home.to(gl.int64) * work.n)[:, None] + cols[None, :]
            total += gl.load(slot + where, mask=there, other=0.0).to(gl.float32)
    here = (tokens.to(gl.int64) * work.n)[:, None] + cols[None, :]
    mask = (tokens < way.tokens)[:, None] & inside
    gl.store(way.out + here, total.to(way.out.dtype.element_ty), mask=mask)


@gl.jit
def collect(work, epoch):
    """All CTAs, behind their tiles: the sums of own tokens, once all ranks have sent their rows."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, gl.num_warps()], [1, 0])
    COLS: gl.constexpr = 256 * gl.num_warps()
    met = gl.wait_all(work.flags, 0, work.flags.world, epoch)
    pieces = gl.cdiv(work.n, COLS)
    for item in range(gl.program_id(0), gl.cdiv(work.way.tokens, AT_ONCE) * pieces, gl.num_programs(0)):
        sum_tokens(work, item // pieces * AT_ONCE, item % pieces * COLS, met, epoch, L)


@gl.jit(do_not_specialize=[
    "rank", "flags_stride", "timeout_us", "rank_lines", "slot_lines", "slots", "tokens", "rows", "n", "k",
])  # fmt: skip
def moe_matmul_combine_kernel(
    rank, h_desc, w_desc, like_w_desc, part_desc, offsets, table, flags_ptr, flags_stride, state, timeout_us, places,
    rank_lines, slot_lines, row_slot, row_home, weights, slots, home, out, kept_desc, kept, order, begins, tokens, rows,
    n, k, WORLD: gl.constexpr, CHOICES: gl.constexpr, COMM_SMS: gl.constexpr, WEIGHTED: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, C_BUFS: gl.constexpr,
    GROUP: gl.constexpr, B_T: gl.constexpr,
):  # fmt: skip
    """out [tokens, n] = for each own token the sum, over its rows at all ranks, of a row [k] times its expert's matrix.

    like_w_desc, part_desc: descriptors of which only the box counts. Without communicators kept_desc, kept, order and
    begins are None; with them row_home is. Grid: co-resident CTAs, one per SM.
    """
    INTER: gl.constexpr = COMM_SMS > 0
    gl.grid_dependency_wait()
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    n = n // 8 * 8  # as it is: the compiler learns that rows are aligned
    tiles = gl.load(table) * gl.cdiv(n, BN)
    mm = make_matmul(
        h_desc, like_w_desc, part_desc, flags, state, out, k, tiles, tiles, gl.to_tensor(1), BM, BN, BK, STAGES, C_BUFS,
        False, False, B_T, COMM_SMS,
    )  # fmt: skip
    if INTER:
        row_home = row_slot  # nobody looks at it, nor, else, at these
    else:
        kept_desc, kept, order, begins = part_desc, out, row_slot, row_slot
    way = Way(places, rank_lines, slot_lines, row_slot, row_home, weights, slots, home, out, tokens, CHOICES)
    kept_rows = Kept(kept_desc, kept, order, begins)
    work = Work(mm, flags, way, kept_rows, w_desc, part_desc, offsets, table, rows, n, GROUP)
    epoch = this_epoch(mm)
    AHEAD: gl.constexpr = factors if WEIGHTED else nothing_ahead
    SCALE: gl.constexpr = weighted if WEIGHTED else unscaled
    LOCATE: gl.constexpr = locate_in_chunks if INTER else locate_rows
    LOAD: gl.constexpr = load_in_chunks if INTER else load_rows
    STORE: gl.constexpr = keep_rows if INTER else send_rows
    PUBLISH: gl.constexpr = tell_communicators if INTER else publish
    COMMUNICATE: gl.constexpr = communicate if INTER else no_communicator
    WITHIN: gl.constexpr = within_in_chunks if INTER else within_expert
    if first_unit(mm) < tiles:
        run_matmul(
            work, LOCATE, nothing_before_load, LOAD, nobody_to_meet, nothing_more, as_product, STORE, PUBLISH,
            COMMUNICATE, 64, WITHIN, AHEAD, SCALE,
        )  # fmt: skip
    else:
        if not INTER:
            if (tiles == 0) & (gl.program_id(0) == 0):
                gl.signal_all(flags, rank, epoch)
        finish_all(mm, epoch)
    collect(work, epoch)
