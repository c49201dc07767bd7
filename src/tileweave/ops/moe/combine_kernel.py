"""Grouped matmul + combine: rows of a finished tile go to the ranks whose tokens they are of.

Intra-SM, each row by itself. A rank's slot has a home for each row that its own tokens have anywhere, in the order of experts.
A storer sends what a part of a tile holds of a row, 128 bytes, to the home of that row by stores of 16 bytes. Behind their
tiles, once every rank has sent all its rows, the CTAs of a rank sum the rows of each own token, in float32, in the order of
its choices: the result depends on no timing. Factors of rows are multiplied into the accumulator, before it is rounded.

Two slots alternate by the epoch, which lives in `state` and is advanced by the last CTA. Besides those of the template:

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| state[SENT] | every storer of this rank, its parts so far are stored | nobody; the last one tells | acq_rel, gpu | the last one puts it back to 0 |
| flags[d][r] = epoch | rank r, its last storer, or its first CTA if there is no tile | all CTAs of rank d behind their tiles | release / acquire, sys | one writer, monotonic |
| slot e % 2 of rank d | storers of all ranks in call e | d's CTAs, behind the flags | flags | written again in call e + 2, by a rank that has ended call e + 1, in which it waited for d, which had ended call e before |

After a wait that timed out the sums are NaN.
"""

from tileweave import lang as gl
from tileweave.tiles.communicator import finish_all
from tileweave.tiles.grouped import (
    as_product,
    end_of,
    load_rows,
    locate_rows,
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

SENT = OWN_WORDS  # of `state`
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
    home: gl.tensor  # int32 [tokens, CHOICES]: the homes of an own token's rows, -1 for none
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
class Work:
    """What the roles share besides the matmul."""

    matmul: Matmul
    flags: gl.Flags
    way: Way
    w: gl.tensor_descriptor  # [experts, k, n] or, B_T, [experts, n, k]
    part_desc: gl.tensor_descriptor
    offsets: gl.tensor
    table: gl.tensor
    rows: gl.tensor
    n: gl.tensor
    GROUP: gl.constexpr

    @gl.constexpr_function
    def __init__(self, matmul, flags, way, w, part_desc, offsets, table, rows, n, GROUP):
        self.matmul, self.flags, self.way = matmul, flags, way
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
    rank_lines, slot_lines, row_slot, row_home, weights, slots, home, out, tokens, rows, n, k,
    WORLD: gl.constexpr, CHOICES: gl.constexpr, WEIGHTED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, C_BUFS: gl.constexpr, GROUP: gl.constexpr, B_T: gl.constexpr,
):  # fmt: skip
    """out [tokens, n] = for each own token the sum, over its rows at all ranks, of a row [k] times its expert's matrix.

    like_w_desc, part_desc: descriptors of which only the box counts. Grid: co-resident CTAs, one per SM.
    """
    gl.grid_dependency_wait()
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    n = n // 8 * 8  # as it is: the compiler learns that rows are aligned
    tiles = gl.load(table) * gl.cdiv(n, BN)
    mm = make_matmul(
        h_desc, like_w_desc, part_desc, flags, state, out, k, tiles, tiles, gl.to_tensor(1), BM, BN, BK, STAGES, C_BUFS,
        False, False, B_T, 0,
    )  # fmt: skip
    way = Way(places, rank_lines, slot_lines, row_slot, row_home, weights, slots, home, out, tokens, CHOICES)
    work = Work(mm, flags, way, w_desc, part_desc, offsets, table, rows, n, GROUP)
    epoch = this_epoch(mm)
    AHEAD: gl.constexpr = factors if WEIGHTED else nothing_ahead
    SCALE: gl.constexpr = weighted if WEIGHTED else unscaled
    if first_unit(mm) < tiles:
        run_matmul(
            work, locate_rows, nothing_before_load, load_rows, nobody_to_meet, nothing_more, as_product, send_rows, publish,
            no_communicator, 64, within_expert, AHEAD, SCALE,
        )  # fmt: skip
    else:
        if (tiles == 0) & (gl.program_id(0) == 0):
            gl.signal_all(flags, rank, epoch)
        finish_all(mm, epoch)
    collect(work, epoch)
