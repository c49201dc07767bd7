"""Dispatch + grouped matmul, inter-SM: tokens are pushed to the rows of their experts; a tile starts when its rows are in.

A rank's rows lie in a slot of its parallel memory, in expert order, each row tile at a multiple of BM, so that no tile
reads what may still be written for another; rows are padded with zeros to whole K steps. Communicators push each own
token once to each rank that wants it (themselves included), to the first of its rows there, in the order of these rows, in
blocks that are dealt to them round by round. And they go through the row tiles: they wait until the tokens of a tile are
in, copy those rows of it that are further rows of a token from the first one, and say that the tile is there. At first
nearly all rows are the first ones of their tokens, at last hardly any, so each of them does both, in the order in which
tiles need it. Rows go by TMA through the memory that is meant for operands, several at once, each in as few boxes as hold
it. The other CTAs are a grouped matmul (tiles/grouped.py); GATED, a tile is multiplied by both matrices at once, into an
accumulator twice as wide, whose halves become one before it leaves. Whose row is whose is known before the launch, on the
device.

A flag that counts within a call has the values epoch * STEPS + count. One slot is enough: a call is behind the exchange
of its counts on every rank's stream, so who sends knows that every peer has ended the call before. Besides the tables of
the template:

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| flags[d][r * PER + c]: rounds done | communicator c of rank r, its blocks for d in these rounds are stored | communicators of rank d, before a tile with tokens of these rounds | release / acquire, sys | monotonic; all are raised every REFRESH calls, as calls of few tokens or communicators leave some out |
| flags[r][WORLD * PER + c]: tiles there | communicator c of rank r, its tiles so far are complete | loaders of rank r, before a tile | release / acquire, sys; then a proxy fence | as above |
| carried.ready | the TMA load of a box of a row | this communicator, before it stores the box | mbarrier, CTA | store_read_wait: the store of the buffer's last use has read it |
| the slot of rank d | communicators of all ranks | d's communicators; d's loaders; all by TMA | flags, then a proxy fence | written again in the next call, by a rank that has taken part in an exchange which d begins when it has ended this one |

A wait that times out makes the loader load from beyond the slot, which TMA fills with NaN: every role keeps its counts.
"""

from tileweave import lang as gl
from tileweave.tiles.channel import Channel, make_channel
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
BLOCK_ROWS = gl.constexpr(32)  # a block of tokens has whole ones of these
LOOK = gl.constexpr(12)  # row tiles that a communicator sends further ahead, at most


@gl.aggregate
class Travel:
    """What goes where. A line is what a row has of a K step; a box, some lines of one row."""

    x: gl.tensor_descriptor  # [1, tokens, lines, BK]: this rank's tokens
    rows: gl.tensor_descriptor  # [world, most, lines, BK]: all ranks' slots
    tokens: gl.tensor
    send_token: gl.tensor  # int32 [world, tokens]: what goes to a rank, in order,
    send_place: gl.tensor  # to which row of its slot
    sent: gl.tensor  # int32 [world]: how many go
    row_slot: gl.tensor  # int32 [rows]: source * slots + number of the token among those that this source sends here
    from_row: gl.tensor  # int32 [rows]: where in the slot the first row of the same token lies
    slots: gl.tensor
    block: gl.tensor  # tokens in a block

    @gl.constexpr_function
    def __init__(
        self, x, rows, tokens, send_token, send_place, sent, row_slot, from_row, slots, block,
    ):  # fmt: skip
        self.x, self.rows, self.tokens = x, rows, tokens
        self.send_token, self.send_place, self.sent = send_token, send_place, sent
        self.row_slot, self.from_row, self.slots, self.block = row_slot, from_row, slots, block


@gl.aggregate
class Work:
    """What the roles share besides the matmul."""

    matmul: Matmul
    flags: gl.Flags
    rows_desc: gl.tensor_descriptor  # [world, 1, most, k in whole steps]
    travel: Travel
    carried: Channel  # of boxes, between a communicator's loads and its stores
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
        self, matmul, flags, rows_desc, travel, carried, w, w_gate, out, out_ptr, offsets, table, rows, most, n, GATED, COMM_SMS,
        PER, GROUP,
    ):  # fmt: skip
        self.matmul, self.flags, self.rows_desc = matmul, flags, rows_desc
        self.travel, self.carried = travel, carried
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
def box_buf(work, at, like):
    """The buffer of a box, in the shape that descriptor `like` moves."""
    shape: gl.constexpr = [work.carried.STAGES] + like.block_shape
    return gl.reinterpret(work.matmul.b_bufs, like.dtype, shape, like.layout).index(at.slot)


@gl.jit
def has_to_go(row, targets, i, AGAIN: gl.constexpr):
    """Whether the i-th row of a list is not where it belongs: AGAIN, the first row of a token is."""
    if AGAIN:
        return row != targets + i
    else:
        return row >= 0


@gl.jit
def carry(work, source, rank, numbers, to, targets, count, AGAIN: gl.constexpr, at, ahead):
    """Communicator: `count` rows, those of `rank` in `source` whose numbers are in a list, to the rows of `to`'s slot that
    are in the list `targets` or, AGAIN, to those from number `targets` on. When this returns, the stores are performed, as all
    threads know; returns the next place in the channel, which `at` and `ahead` both are: Triton would take two names for
    one variable."""
    mm, ring, like = work.matmul, work.carried, work.travel.rows
    AHEAD: gl.constexpr = max(ring.STAGES - 3, ring.STAGES // 2)
    LINES: gl.constexpr = like.block_shape[2]
    for line in range(0, mm.k_steps, LINES):
        for i in range(0, count + AHEAD):
            if i < count:
                row = gl.load(numbers + i)
                if has_to_go(row, targets, i, AGAIN):
                    gl.store_read_wait(ring.STAGES - 1 - AHEAD)
                    gl.mbarrier_expect(ring.ready_at(ahead), LINES * mm.BK * (like.dtype.primitive_bitwidth // 8))
                    gl.load_async(source, rank, [row, line, 0], box_buf(work, ahead, source), ring.ready_at(ahead))
                    ahead = ring.next(ahead)
            if i >= AHEAD:
                if has_to_go(gl.load(numbers + i - AHEAD), targets, i - AHEAD, AGAIN):
                    target = targets + i - AHEAD if AGAIN else gl.load(targets + i - AHEAD)
                    ring.consumer_wait(at)
                    gl.store_async(like, to, [target, line, 0], box_buf(work, at, like))
                    at = ring.next(at)
    gl.store_wait(0)
    gl.barrier()
    return at


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
def send(work, me, i, epoch, at):
    """Communicator: its block of round `i` to each rank in turn, its own last, so that all receivers get on; returns the next
    place in the channel."""
    tr, flags = work.travel, work.flags
    for distance in range(1, flags.world + 1):
        to = (flags.rank + distance) % flags.world
        count = gl.load(tr.sent + to)
        before = i * work.COMM_SMS * tr.block
        if before < count:
            first = before + me * tr.block
            some = gl.maximum(gl.minimum(count - first, tr.block), 0)
            begin = to * tr.tokens + first
            at = carry(work, tr.x, 0, tr.send_token + begin, to, tr.send_place + begin, some, False, at, at)
            gl.signal(flags, to, flags.rank * work.PER + me, epoch * STEPS + i + 1)
    return at


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
def place(work, me, i, epoch, at):
    """Communicator: row tile `i`, of whose rows it copies those that are not the first ones of their tokens; returns the
    next place in the channel."""
    tr, flags = work.travel, work.flags
    entry = entry_of(work.table, i)
    row = gl.load(entry + 1)
    end = gl.minimum(gl.load(entry + 2), row + work.matmul.BM)
    await_tokens(work, row, end, epoch)
    gl.fence_proxy_async()
    at = carry(
        work, tr.rows, flags.rank, tr.from_row + row, flags.rank, i * work.matmul.BM, end - row, True, at, at
    )  # fmt: skip
    gl.signal(flags, flags.rank, flags.world * work.PER + me, epoch * STEPS + i // work.COMM_SMS + 1)
    return at


@gl.jit
def communicate(work):
    """Communicator: its row tiles, one after the other, and ahead of each what is due up to its next one and, the further
    it has come, beyond: ranks whose tiles take longer are not waited for then. Of the tiles that anybody waits for, on
    whatever rank, the first one is waited for in vain by nobody: who waits for that or a later one, or has no more, has
    sent what it takes."""
    epoch, flags = this_epoch(work.matmul), work.flags
    me, i, at = gl.program_id(0), gl.program_id(0) * 0, work.carried.start()
    tiles = gl.load(work.table)
    turns = gl.cdiv(gl.maximum(tiles - me, 0), work.COMM_SMS)
    for turn in range(turns + 1):
        tile = me + turn * work.COMM_SMS
        ahead = gl.where(turn < turns, tile + work.COMM_SMS + gl.minimum(tile, LOOK), NO_TILE - 1)
        while due(work, i) <= ahead:
            at = send(work, me, i, epoch, at)
            i += 1
        if turn < turns:
            at = place(work, me, tile, epoch, at)
    if epoch % REFRESH == 0:
        for flag in range(me, work.PER, work.COMM_SMS):
            for to in range(flags.world):
                gl.signal(flags, flags.rank * 0 + to, flags.rank * work.PER + flag, epoch * STEPS + STEPS - 1)
            gl.signal(flags, flags.rank, flags.world * work.PER + flag, epoch * STEPS + STEPS - 1)
    finish_all(work.matmul, epoch)


@gl.jit(do_not_specialize=[
    "rank", "flags_stride", "timeout_us", "tokens", "slots", "block", "rows", "most", "n", "k",
])  # fmt: skip
def moe_dispatch_matmul_kernel(
    rank, x, x_like, rows_desc, boxes_desc, w, w_gate, w_like, out_desc, out, offsets, table, flags_ptr, flags_stride,
    state, timeout_us, tokens, send_token, send_place, sent, row_slot, from_row, slots, block, rows, most, n, k, WORLD: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
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
    travel = Travel(x, boxes_desc, tokens, send_token, send_place, sent, row_slot, from_row, slots, block)
    carried = make_channel(STAGES * mm.ACC // boxes_desc.block_shape[2], 1)
    work = Work(
        mm, flags, rows_desc, travel, carried, w, w_gate, out_desc, out, offsets, table, rows, most, n, GATED, COMM_SMS, PER, GROUP,
    )  # fmt: skip
    ACTIVATE: gl.constexpr = gated if GATED else activated if SILU else unscaled
    if first_unit(mm) < tiles:
        run_matmul(
            work, locate, before_load, load, nobody_to_meet, nothing_more, as_product, store, nobody_to_tell, communicate, 64,
            within, nothing_ahead, ACTIVATE,
        )  # fmt: skip
    else:  # without a tile a storer would not know that the other roles have read the epoch
        finish_all(mm, this_epoch(mm))
