"""Dispatch + grouped matmul, inter-SM: tokens are pushed to the rows of their experts; a tile starts when its rows are in.

A rank's rows lie in a slot of its parallel memory, in expert order, each row tile at a multiple of BM, so that no tile
reads what may still be written for another; rows are padded with zeros to whole K steps. Communicators push each own
token once to each rank that wants it (themselves included), to the first of its rows there, in the order of these rows, in
blocks that are dealt to them round by round. And they go through the row tiles: they wait until the tokens of a tile are
in, copy those rows of it that are further rows of a token from the first one, and say that the tile is there. At first
nearly all rows are the first ones of their tokens, at last hardly any, so each of them does both, in the order in which
tiles need it. The other CTAs are a grouped matmul (tiles/grouped.py); GATED, a tile is multiplied by both matrices at once,
into an accumulator twice as wide, whose halves become one before it leaves. Whose row is whose is known before the launch,
on the device.

A flag that counts within a call has the values epoch * STEPS + count. One slot is enough: a call is behind the exchange
of its counts on every rank's stream, so who sends knows that every peer has ended the call before. Besides the tables of
the template:

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| flags[d][r * PER + c]: rounds done | communicator c of rank r, its blocks for d in these rounds are stored | communicators of rank d, before a tile with tokens of these rounds | release / acquire, sys | monotonic; all are raised every REFRESH calls, as calls of few tokens or communicators leave some out |
| flags[r][WORLD * PER + c]: tiles there | communicator c of rank r, its tiles so far are complete | loaders of rank r, before a tile | release / acquire, sys; then a proxy fence | as above |
| the slot of rank d | communicators of all ranks | d's communicators; d's loaders, by TMA | flags | written again in the next call, by a rank that has taken part in an exchange which d begins when it has ended this one |

A wait that times out makes the loader load from beyond the slot, which TMA fills with NaN: every role keeps its counts.
"""

from tileweave import lang as gl
from tileweave.tiles.communicator import finish_all
from tileweave.tiles.grouped import as_product, end_of, entry_of, load_matrix, row_tile, store_part
from tileweave.tiles.matmul import (
    Matmul,
    first_unit,
    make_matmul,
    nobody_to_meet,
    nobody_to_tell,
    nothing_ahead,
    nothing_more,
    run_matmul,
    this_epoch,
    unscaled,
)

STEPS = gl.constexpr(4096)
REFRESH = gl.constexpr(1 << 16)
MOST_RANKS = gl.constexpr(64)  # a power of two
NO_TILE = gl.constexpr((1 << 31) - 1)
EXPERTS = gl.constexpr(1024)  # of a rank, at most: what the template gets as an owner is row tile * EXPERTS + expert
BLOCK_ROWS = gl.constexpr(32)  # rows that are copied at once
LOOK = gl.constexpr(64)  # row tiles that a communicator sends ahead, at most


@gl.aggregate
class Travel:
    """What goes where. Distances are in lines of 16 bytes."""

    x: gl.tensor  # this rank's tokens [tokens, k_lines]
    tokens: gl.tensor
    k_lines: gl.tensor
    padded_lines: gl.tensor  # of a row in a slot
    places: gl.tensor  # rank 0's slot,
    rank_lines: gl.tensor  # and the distance of two ranks'
    send_token: gl.tensor  # int32 [world, tokens]: what goes to a rank, in order,
    send_place: gl.tensor  # to which row of its slot
    sent: gl.tensor  # int32 [world]: how many go
    row_slot: gl.tensor  # int32 [rows]: source * slots + number of the token among those that this source sends here
    from_row: gl.tensor  # int32 [rows]: where in the slot the first row of the same token lies
    slots: gl.tensor
    block: gl.tensor  # tokens in a block

    @gl.constexpr_function
    def __init__(
        self, x, tokens, k_lines, padded_lines, places, rank_lines, send_token, send_place, sent, row_slot,
        from_row, slots, block,
    ):  # fmt: skip
        self.x, self.tokens, self.k_lines, self.padded_lines = x, tokens, k_lines, padded_lines
        self.places, self.rank_lines = places, rank_lines
        self.send_token, self.send_place, self.sent = send_token, send_place, sent
        self.row_slot, self.from_row, self.slots, self.block = row_slot, from_row, slots, block


@gl.aggregate
class Work:
    """What the roles share besides the matmul."""

    matmul: Matmul
    flags: gl.Flags
    rows_desc: gl.tensor_descriptor  # [world, 1, most, k in whole steps]
    travel: Travel
    w: gl.tensor_descriptor  # [experts, k, n] or, B_T, [experts, n, k],
    w_gate: gl.tensor_descriptor  # GATED: and as many that gate its products
    out: gl.tensor_descriptor  # [rows, n]
    out_ptr: gl.tensor
    offsets: gl.tensor
    table: gl.tensor
    rows: gl.tensor
    most: gl.tensor
    n: gl.tensor
    GATED: gl.constexpr
    COMM_SMS: gl.constexpr
    PER: gl.constexpr
    GROUP: gl.constexpr

    @gl.constexpr_function
    def __init__(
        self, matmul, flags, rows_desc, travel, w, w_gate, out, out_ptr, offsets, table, rows, most, n, GATED, COMM_SMS,
        PER, GROUP,
    ):  # fmt: skip
        self.matmul, self.flags, self.rows_desc, self.travel = matmul, flags, rows_desc, travel
        self.w, self.w_gate, self.out, self.out_ptr = w, w_gate, out, out_ptr
        self.offsets, self.table, self.rows, self.most, self.n = offsets, table, rows, most, n
        self.GATED, self.COMM_SMS = gl.constexpr(GATED), gl.constexpr(COMM_SMS)
        self.PER, self.GROUP = gl.constexpr(PER), gl.constexpr(GROUP)


# ---------------------------------------------------------------- the grouped matmul


@gl.jit
def locate(work, t):
    """The t-th tile: row tile and expert, its row in the slot and in the result, its column."""
    i, j = row_tile(t, work.matmul.tiles, gl.cdiv(work.n, work.matmul.BN), work.GROUP)
    entry = entry_of(work.table, i)
    row = gl.load(entry + 1)
    return i * EXPERTS + gl.load(entry), i * work.matmul.BM, row, j * work.matmul.BN


@gl.jit
def before_load(work, owner, row, epoch):
    """Loader: wait for the rows of a tile; False after a timeout."""
    i = owner // EXPERTS
    flag = work.flags.world * work.PER + i % work.COMM_SMS
    there = gl.wait(work.flags, flag, epoch * STEPS + i // work.COMM_SMS + 1)
    gl.fence_proxy_async()
    return there


@gl.jit
def load(work, at, bar, owner, a_row, col, step, epoch, there):
    """Loader: a K step."""
    mm, like = work.matmul, work.rows_desc
    k = step * mm.BK
    buf = gl.reinterpret(mm.a_bufs.index(at.slot), like.dtype, like.block_shape, like.layout)
    gl.load_async(like, work.flags.rank, [0, gl.where(there, a_row, work.most), k], buf, bar)
    load_matrix(mm, work.w, at, bar, owner % EXPERTS, col, k)
    if work.GATED:
        load_matrix(mm, work.w_gate, at, bar, owner % EXPERTS, col, k, 1)


@gl.jit
def within(work, owner, row, steps):
    """Multiplier: how many K steps its rows take, none if all of them are beyond the expert's."""
    return gl.where(row < end_of(work.offsets, owner % EXPERTS, work.rows), steps, 0)


@gl.jit
def silu(x):
    """x times the logistic function of x."""
    return x / (1.0 + gl.exp2(x * -1.4426950408889634))


@gl.jit
def gated(work, acc, ahead):
    """SCALE: the products with w, left, and with w_gate, right of them, as one."""
    sides = acc if work.matmul.TENSOR else gl.columns(acc, work.matmul.BN)
    return silu(sides[1]) * sides[0]


@gl.jit
def activated(work, acc, ahead):
    """SCALE: silu of a product."""
    return silu(acc)


@gl.jit
def store(work, owner, row, col, buf, epoch, met):
    """Storer: what of a part is the expert's."""
    end = end_of(work.offsets, owner % EXPERTS, work.rows)
    store_part(work.matmul, work.out, work.out_ptr, end, work.n, row, col, buf)


# ---------------------------------------------------------------- what dispatch adds


@gl.jit
def slot_of(work, rank):
    """A rank's slot."""
    return work.travel.places + rank.to(gl.int64) * work.travel.rank_lines * 8


@gl.jit
def copy_rows(work, source, from_rows, from_lines, target, to_rows, there, L: gl.constexpr):
    """Copy rows, `from_lines` apart in `source`, to a slot, 16 bytes of a thread at a time, with zeros behind their end."""
    tr = work.travel
    WIDE: gl.constexpr = 512
    from_words, to_words = from_rows.to(gl.int64) * from_lines, to_rows.to(gl.int64) * tr.padded_lines
    for col in range(0, tr.padded_lines * 8, WIDE):
        cols = col + gl.arange(0, WIDE, gl.SliceLayout(0, L))
        inside = (cols < tr.k_lines * 8)[None, :]
        x = gl.load(source + from_words[:, None] * 8 + cols[None, :], mask=there[:, None] & inside, other=0.0)
        mask = there[:, None] & (cols < tr.padded_lines * 8)[None, :]
        gl.store(target + to_words[:, None] * 8 + cols[None, :], x, mask=mask)


@gl.jit
def send_block(work, to, first, end):
    """Communicator: tokens `first` to `end` of those that go to a rank."""
    tr = work.travel
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    for i in range(first, end, BLOCK_ROWS):
        numbers = i + gl.arange(0, BLOCK_ROWS, gl.SliceLayout(1, L))
        there = numbers < end
        tokens = gl.load(tr.send_token + to * tr.tokens + numbers, mask=there, other=0)
        places = gl.load(tr.send_place + to * tr.tokens + numbers, mask=there, other=0)
        copy_rows(work, tr.x, tokens, tr.k_lines, slot_of(work, to), places, there, L)


@gl.jit
def due(work, i):
    """Communicator: the row tile before which round `i` has to be sent: that of its first row, whose receiver needs it
    first; no tile's if nothing is left."""
    tr, flags = work.travel, work.flags
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    to = gl.arange(0, MOST_RANKS, L)
    sent = gl.load(tr.sent + to, mask=to < flags.world, other=0)
    first = i * work.COMM_SMS * tr.block
    some = first < sent
    places = gl.load(tr.send_place + to * tr.tokens + first, mask=some, other=0)
    return gl.min(gl.where(some, places // work.matmul.BM, NO_TILE), 0)


@gl.jit
def send(work, me, i, epoch):
    """Communicator: its block of round `i` to each rank in turn, its own last, so that all receivers get on."""
    tr, flags = work.travel, work.flags
    for distance in range(1, flags.world + 1):
        to = (flags.rank + distance) % flags.world
        count = gl.load(tr.sent + to)
        before = i * work.COMM_SMS * tr.block
        if before < count:
            first = before + me * tr.block
            send_block(work, to, first, gl.minimum(first + tr.block, count))
            gl.barrier()
            gl.signal(flags, to, flags.rank * work.PER + me, epoch * STEPS + i + 1)


@gl.jit
def await_tokens(work, row, end, epoch):
    """Communicator: wait for the tokens of rows `row` to `end`, a tile's."""
    tr = work.travel
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rows = row + gl.arange(0, work.matmul.BM, L)
    slot = gl.load(tr.row_slot + rows, mask=rows < end, other=-1)
    for source in range(work.flags.world):
        mine = (slot >= source * tr.slots) & (slot < (source + 1) * tr.slots)
        last = gl.max(gl.where(mine, slot - source * tr.slots, -1), 0)
        if last >= 0:
            done = epoch * STEPS + last // (tr.block * work.COMM_SMS) + 1
            gl.wait_all(work.flags, source * work.PER, work.COMM_SMS, done)


@gl.jit
def copy_again(work, at, row, end):
    """Communicator: rows of the tile that lies from `at` on in the slot which are not the first ones of their tokens."""
    tr = work.travel
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    slot = slot_of(work, work.flags.rank)
    for i in range(row, end, BLOCK_ROWS):
        rows = i + gl.arange(0, BLOCK_ROWS, gl.SliceLayout(1, L))
        first = gl.load(tr.from_row + rows, mask=rows < end, other=0)
        target = at + rows - row
        again = (rows < end) & (first != target)
        if gl.max(again.to(gl.int32), 0) > 0:
            copy_rows(work, slot, first, tr.padded_lines, slot, target, again, L)


@gl.jit
def place(work, me, i, epoch):
    """Communicator: row tile `i`."""
    flags = work.flags
    entry = entry_of(work.table, i)
    row = gl.load(entry + 1)
    end = gl.minimum(gl.load(entry + 2), row + work.matmul.BM)
    await_tokens(work, row, end, epoch)
    copy_again(work, i * work.matmul.BM, row, end)
    gl.barrier()
    gl.signal(flags, flags.rank, flags.world * work.PER + me, epoch * STEPS + i // work.COMM_SMS + 1)


@gl.jit
def communicate(work):
    """Communicator: its row tiles, one after the other, and ahead of each what is due up to its next one and, the further
    it has come, beyond: ranks whose tiles take longer are not waited for then. Of the tiles that anybody waits for, on
    whatever rank, the first one is waited for in vain by nobody: who waits for that or a later one, or has no more, has
    sent what it takes."""
    epoch, flags = this_epoch(work.matmul), work.flags
    me, i = gl.program_id(0), gl.program_id(0) * 0
    tiles = gl.load(work.table)
    turns = gl.cdiv(gl.maximum(tiles - me, 0), work.COMM_SMS)
    for turn in range(turns + 1):
        tile = me + turn * work.COMM_SMS
        ahead = gl.where(turn < turns, tile + work.COMM_SMS + gl.minimum(tile, LOOK), NO_TILE - 1)
        while due(work, i) <= ahead:
            send(work, me, i, epoch)
            i += 1
        if turn < turns:
            place(work, me, tile, epoch)
    if epoch % REFRESH == 0:
        for flag in range(me, work.PER, work.COMM_SMS):
            for to in range(flags.world):
                gl.signal(flags, flags.rank * 0 + to, flags.rank * work.PER + flag, epoch * STEPS + STEPS - 1)
            gl.signal(flags, flags.rank, flags.world * work.PER + flag, epoch * STEPS + STEPS - 1)
    finish_all(work.matmul, epoch)


@gl.jit(do_not_specialize=[
    "rank", "flags_stride", "timeout_us", "tokens", "k_lines", "padded_lines", "rank_lines", "slots", "block",
    "rows", "most", "n", "k",
])  # fmt: skip
def moe_dispatch_matmul_kernel(
    rank, x, x_like, rows_desc, w, w_gate, w_like, out_desc, out, offsets, table, flags_ptr, flags_stride, state,
    timeout_us, tokens, k_lines, padded_lines, places, rank_lines, send_token, send_place, sent, row_slot, from_row,
    slots, block, rows, most, n, k, WORLD: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, C_BUFS: gl.constexpr, GROUP: gl.constexpr, B_T: gl.constexpr, GATED: gl.constexpr,
    SILU: gl.constexpr, COMM_SMS: gl.constexpr, PER: gl.constexpr,
):  # fmt: skip
    """out [rows, n] = the tokens of all ranks that this rank's experts want, in their order, times w, and what is made of
    that: GATED by their product with w_gate, or SILU.

    x_like, w_like: descriptors of which only the box counts. Grid: co-resident CTAs, one per SM.
    """
    gl.grid_dependency_wait()
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    tiles = gl.load(table) * gl.cdiv(n, BN)
    mm = make_matmul(
        x_like, w_like, out_desc, flags, state, out, k, tiles, tiles, gl.to_tensor(1), BM, BN, BK, STAGES, C_BUFS, False,
        False, B_T, COMM_SMS,
    )  # fmt: skip
    travel = Travel(
        x, tokens, k_lines, padded_lines, places, rank_lines, send_token, send_place, sent, row_slot,
        from_row, slots, block,
    )  # fmt: skip
    work = Work(
        mm, flags, rows_desc, travel, w, w_gate, out_desc, out, offsets, table, rows, most, n, GATED, COMM_SMS, PER, GROUP,
    )  # fmt: skip
    ACTIVATE: gl.constexpr = gated if GATED else activated if SILU else unscaled
    if first_unit(mm) < tiles:
        run_matmul(
            work, locate, before_load, load, nobody_to_meet, nothing_more, as_product, store, nobody_to_tell, communicate, 64,
            within, nothing_ahead, ACTIVATE,
        )  # fmt: skip
    else:  # without a tile a storer would not know that the other roles have read the epoch
        finish_all(mm, this_epoch(mm))
