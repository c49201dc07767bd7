"""matmul + reduce-scatter, intra-SM: a finished part of a tile goes straight into its owner's memory; own tiles come last.

Rank r computes the tiles of ranks r+1, r+2, ..., r in turn. A part of a foreign tile is sent to a slot of its owner:
added there by TMA (in the message type), or, DETERMINISTIC, stored in a place of its source. An own tile's accumulator
takes in what the peers have sent (loaded through the operand ring behind the tile's last K step), in float32, then bias,
and is written to the result, an ordinary tensor. So there is no separate reduction pass, and W = 1 is a plain matmul.

ONE_SHOT, for few rows: tiles are those of the whole product, and may have rows of several ranks. A part is stored to each
of these, also to this one, in a place of its source; rows that are another's lie beyond the slot, and TMA leaves them out.
Behind the tile loop a rank sums its rows over the sources (`sums`).

INTER (inter-SM): storers leave parts of foreign tiles at `home`, this rank's own memory, and the COMM_SMS communicators
send them from there, in strips of a tile's rows and a part's width. Tiles go in blocks of `block_tiles`, and what hooks of
the template get as the owner is a phase: number of the block among its owner's, times WORLD, plus the owner.

Two slots alternate by the epoch, which lives in `state` and is advanced by the last CTA. Besides the tables of the
template and of the communicator (which counts blocks in state[SENT...]):

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| state[SENT + d]; INTER: state[LAST_WORD - phase] | every storer of this rank, its parts for rank d, or of the phase, performed | nobody; the last one publishes | acq_rel, gpu | the last one puts it back to 0 |
| flags[d][r] = epoch | rank r, the last storer that sent a part to d | loaders and storers of rank d that have own tiles, before the first | release / acquire, sys; then a proxy fence | monotonic |
| ONE_SHOT: state[SENT + r]; flags[d][r] = epoch | rank r, every storer, all its parts performed; the last one, to all | all CTAs of d behind their tiles, see `sums` | as above | as above |
| INTER: flags[r][LAST_FLAG - phase] = epoch | rank r, the last storer that left a part of the phase at home | its communicators, before they fetch | release / acquire, sys; then a proxy fence | monotonic, one rank's own |
| INTER: flags[d][block * WORLD + r] = epoch | rank r, the last communicator that sent d a part of the block | as above, before own tiles of the block | release / acquire, sys; then a proxy fence | monotonic, one writer whatever the number of blocks |
| home | storers (TMA stores) | communicators after LAST_FLAG - phase | flags | belongs to one launch |
| ring, uses behind an own tile's K steps | loader's TMA load of a peer's part or sum / multiplier | multiplier / loader | mbarrier, CTA | Channel's phases |
| adding slot e % 2 of rank d | peers in call e (TMA adds) | d after flags | flags | d zeroes each part once the multiplier has it, by generic stores; the ends of the launches e of d and e + 1 of the peer are the fences to the next adds. A peer adds again in call e + 2 only after it has finished call e + 1, hence after d entered e + 1, hence after d ended call e |
| staging slot e % 2 of rank d | peers in call e (TMA stores); ONE_SHOT: d as well | d after flags | flags | as above, without zeroing |

A wait that times out makes the loader load from beyond the slot, which TMA fills with NaN: every role keeps its counts.
"""

from tileweave import lang as gl
from tileweave.tiles.block_scales import make_block_scales
from tileweave.tiles.communicator import finish_all, send_blocks
from tileweave.tiles.matmul import (
    FIRST_SHARE,
    OWN_WORDS,
    Matmul,
    all_steps,
    grouped_order,
    load_operands,
    make_matmul,
    more,
    no_communicator,
    nobody_to_meet,
    nothing_ahead,
    nothing_before_load,
    nothing_more,
    part_buf,
    run_matmul,
    take_part,
    this_epoch,
    unscaled,
)
from tileweave.tiles.phases import count_up
from tileweave.tiles.sums import Extras, Sums, hand_out

SENT = OWN_WORDS  # of `state`: one word per rank
LAST_WORD = gl.constexpr(127)  # of `state`,
LAST_FLAG = gl.constexpr(FIRST_SHARE.value - 1)  # and of an op's flags


@gl.aggregate
class Work:
    """What the roles share besides the matmul."""

    matmul: Matmul
    flags: gl.Flags
    slots: gl.tensor_descriptor  # [world, slot (x source), rows, n], any rank's
    own_slots: gl.tensor  # this rank's adding slots as a pointer,
    slot_stride: gl.tensor  # and the distance of the two, in elements
    out: gl.tensor_descriptor  # [rows, n], the result
    bias: gl.tensor
    scale_a: gl.tensor  # of the rows of A, `step_a` apart: 0 if one scale is that of all,
    step_a: gl.tensor
    scale_b: gl.tensor  # and of the columns of B
    step_b: gl.tensor
    rows: gl.tensor
    n: gl.tensor
    home: gl.tensor_descriptor  # INTER: [1, world, rows, n], parts of foreign tiles on their way
    blocks: gl.tensor  # of one owner
    block_tiles: gl.tensor
    share: gl.tensor  # of a block: strips for each communicator
    DETERMINISTIC: gl.constexpr
    HAS_BIAS: gl.constexpr
    SCALED: gl.constexpr
    AVERAGE: gl.constexpr
    GROUP: gl.constexpr
    INTER: gl.constexpr

    @gl.constexpr_function
    def __init__(
        self, matmul, flags, slots, own_slots, slot_stride, out, bias,
        scale_a, step_a, scale_b, step_b, rows, n, home, blocks, block_tiles, share,
        DETERMINISTIC, HAS_BIAS, SCALED, AVERAGE, GROUP, INTER,
    ):  # fmt: skip
        self.matmul, self.flags = matmul, flags
        self.slots, self.own_slots, self.slot_stride = slots, own_slots, slot_stride
        self.out, self.bias, self.rows, self.n = out, bias, rows, n
        self.scale_a, self.step_a, self.scale_b, self.step_b = scale_a, step_a, scale_b, step_b
        self.home, self.blocks, self.block_tiles, self.share = home, blocks, block_tiles, share
        self.SCALED, self.INTER = gl.constexpr(SCALED), gl.constexpr(INTER)
        self.DETERMINISTIC, self.HAS_BIAS = gl.constexpr(DETERMINISTIC), gl.constexpr(HAS_BIAS)
        self.AVERAGE, self.GROUP = gl.constexpr(AVERAGE), gl.constexpr(GROUP)


@gl.jit
def tiles_per_owner(work):
    """Tiles of one rank's rows."""
    return gl.cdiv(work.rows, work.matmul.BM) * gl.cdiv(work.n, work.matmul.BN)


@gl.jit
def owner_of(work, phase):
    """Whose the tiles of a phase are."""
    return phase % work.flags.world if work.INTER else phase


@gl.jit
def locate(work, t):
    """The t-th tile: its phase, its row in A, its row and column in the owner's result."""
    per = tiles_per_owner(work)
    owner = (work.flags.rank + 1 + t // per) % work.flags.world
    i, j = grouped_order(t % per, gl.cdiv(work.rows, work.matmul.BM), gl.cdiv(work.n, work.matmul.BN), work.GROUP)
    row = i * work.matmul.BM
    phase = owner
    if work.INTER:
        phase = t % per // work.block_tiles * work.flags.world + owner
    return phase, owner * work.rows + row, row, j * work.matmul.BN


@gl.jit
def partials(work):
    """How many parts of peers a part of an own tile takes in: their sum, or one of each."""
    return (work.flags.world - 1) if work.DETERMINISTIC else min(work.flags.world - 1, 1)


@gl.jit
def meet(work, phase, epoch):
    """Before own tiles of a phase are finished: every peer has sent all its parts of them; False after a timeout."""
    met = work.flags.rank >= 0
    if owner_of(work, phase) == work.flags.rank:
        first = phase - work.flags.rank if work.INTER else 0
        met = gl.wait_all(work.flags, first, work.flags.world, epoch, skip=phase)
        gl.fence_proxy_async()
    return met


@gl.jit
def load_more(work, at, phase, row, col, epoch, met):
    """Loader: behind the K steps of an own tile, what the peers have sent for a part of it."""
    mm, flags = work.matmul, work.flags
    if owner_of(work, phase) == flags.rank:
        for i in range(partials(work)):
            place = epoch & 1
            if work.DETERMINISTIC:
                place = place * flags.world + (flags.rank + 1 + i) % flags.world
            mm.ring.producer_wait(at)
            bar = mm.ring.ready_at(at)
            gl.mbarrier_expect(bar, mm.BM * mm.WIDTH * (work.out.dtype.primitive_bitwidth // 8))
            for half in gl.static_range(mm.HALVES):
                where = [place, gl.where(met, row, work.rows) + half * mm.ROWS, col]
                gl.load_async(work.slots, flags.rank, where, part_buf(mm, at, half, work.slots), bar)
            at = more(mm).next(at)
    return at


@gl.jit
def factors(work, phase, row, col, LAYOUT: gl.constexpr):
    """Multiplier: the scales of a tile's rows and columns or, TENSOR, of a part's."""
    COLS: gl.constexpr = work.matmul.WIDTH if work.matmul.TENSOR else work.matmul.BN
    rows = owner_of(work, phase) * work.rows + row + gl.arange(0, work.matmul.ROWS, gl.SliceLayout(1, LAYOUT))
    cols = col + gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
    of_rows = gl.load(work.scale_a + rows * work.step_a, mask=rows < work.rows * work.flags.world, other=0.0)
    of_cols = gl.load(work.scale_b + cols * work.step_b, mask=cols < work.n, other=0.0)
    return of_rows, of_cols


@gl.jit
def scaled(work, acc, ahead):
    """Multiplier: a product of 8-bit operands times its factors."""
    of_rows, of_cols = ahead
    return acc * of_rows[:, None] * of_cols[None, :]


@gl.jit
def epilogue(work, part, at, HALF: gl.constexpr, phase, row, col, LAYOUT: gl.constexpr):
    """Multiplier: a part of an own tile takes in what the peers have sent, and the bias."""
    owner = owner_of(work, phase)
    if work.AVERAGE:  # before parts are sent and summed: a mean that the type can hold does not overflow on the way
        part = part * (1.0 / work.flags.world)
    if owner == work.flags.rank:
        for i in range(partials(work)):
            part = take_part(work.matmul, part, at, HALF, work.slots, LAYOUT)
            at = more(work.matmul).next(at)
        if work.HAS_BIAS:
            cols = col + gl.arange(0, work.matmul.WIDTH, gl.SliceLayout(0, LAYOUT))
            part += gl.load(work.bias + cols, mask=cols < work.n, other=0.0).to(gl.float32)[None, :]
    return part, at


@gl.jit
def zero_part(work, row, col, epoch):
    """Leave a part of the adding slot as the next call needs it."""
    LANES: gl.constexpr = work.matmul.WIDTH // 8
    ROWS: gl.constexpr = 32 // LANES * 2
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [1, 1], [1, 0])
    cols = col + gl.arange(0, work.matmul.WIDTH, gl.SliceLayout(0, L))
    zeros = gl.zeros([ROWS, work.matmul.WIDTH], work.out.dtype, L)
    base = work.own_slots + (epoch & 1).to(gl.int64) * work.slot_stride + row.to(gl.int64) * work.n
    for r in range(0, work.matmul.ROWS, ROWS):
        i = r + gl.arange(0, ROWS, gl.SliceLayout(1, L))
        where = i[:, None] * work.n + cols[None, :]
        gl.store(base + where, zeros, mask=(row + i < work.rows)[:, None] & (cols < work.n)[None, :])


@gl.jit
def send(work, owner, row, col, buf, epoch):
    """One part to the slot of its owner."""
    slot = epoch & 1
    if work.DETERMINISTIC:
        gl.store_async(work.slots, owner, [slot * work.flags.world + work.flags.rank, row, col], buf)
    else:
        gl.store_add_async(work.slots, owner, [slot, row, col], buf)


@gl.jit
def store(work, phase, row, col, buf, epoch, met):
    """Storer: one part to its owner or, INTER, home; if that is this rank, to the result."""
    mm, flags, owner = work.matmul, work.flags, owner_of(work, phase)
    if owner == flags.rank:
        gl.tma_store(work.out, [row, col], buf.reshape([mm.ROWS, mm.WIDTH]))
        if flags.world > 1 and not work.DETERMINISTIC:
            if met:  # else a late peer may still be adding, and nobody will use the slot again
                zero_part(work, row, col, epoch)
    elif work.INTER:
        gl.tma_store(work.home, [0, owner, row, col], buf)
    else:
        send(work, owner, row, col, buf, epoch)


@gl.jit
def locate_in_whole(work, t):
    """ONE_SHOT: the t-th tile of the whole product, its row counted from this rank's first."""
    mm, own = work.matmul, work.flags.rank * work.rows
    tall, wide = gl.cdiv(work.rows * work.flags.world, mm.BM), gl.cdiv(work.n, mm.BN)
    i, j = grouped_order(t, tall, wide, work.GROUP)
    return work.flags.rank, i * mm.BM, i * mm.BM - own, j * mm.BN


@gl.jit
def averaged(work, part, at, HALF: gl.constexpr, phase, row, col, LAYOUT: gl.constexpr):
    """Multiplier, ONE_SHOT: as `epilogue` begins."""
    if work.AVERAGE:
        part = part * (1.0 / work.flags.world)
    return part, at


@gl.jit
def store_to_owners(work, phase, row, col, buf, epoch, met):
    """Storer, ONE_SHOT: one part to every rank that owns rows of it. A TMA store may not begin before a tensor, so a place
    has ROWS rows more, above those that are summed, which take what is not its owner's."""
    rank, rows = work.flags.rank, work.rows
    first = rank * rows + row
    last = gl.minimum(first + work.matmul.ROWS, rows * work.flags.world) - 1
    owners = last // rows - first // rows + 1
    for i in range(owners):
        owner = first // rows + (rank + i) % owners
        send(work, owner, work.matmul.ROWS + first - owner * rows, col, buf, epoch)


@gl.jit
def publish_to_all(work, phase, count, epoch):
    """Count parts as performed, whoever has their rows; the last CTA tells all ranks."""
    mm = work.matmul
    gl.store_wait(0)
    gl.barrier()
    if count_up(mm, SENT + phase, count, mm.tiles * (mm.BN // mm.WIDTH) * mm.HALVES):
        gl.signal_all(work.flags, work.flags.rank, epoch)


@gl.jit
def tiles_in(work, block):
    """Tiles of an owner's block, the last of which may have fewer."""
    return gl.minimum(tiles_per_owner(work) - block * work.block_tiles, work.block_tiles)


@gl.jit
def publish(work, phase, count, epoch):
    """Count parts as performed; the last CTA for their owner raises its flag or, INTER, that of the communicators."""
    owner = owner_of(work, phase)
    if owner != work.flags.rank:
        gl.store_wait(0)
        gl.barrier()
        sent = work.matmul.state + (LAST_WORD - phase if work.INTER else SENT + owner)
        tiles = tiles_in(work, phase // work.flags.world) if work.INTER else tiles_per_owner(work)
        all_parts = tiles * (work.matmul.BN // work.matmul.WIDTH) * work.matmul.HALVES
        if (count > 0) & (gl.atomic_add(sent, count, sem="acq_rel", scope="gpu") == all_parts - count):
            gl.atomic_xchg(sent, 0, sem="relaxed", scope="gpu")
            if work.INTER:
                gl.signal(work.flags, work.flags.rank, LAST_FLAG - phase, epoch)
            else:
                gl.signal(work.flags, owner, work.flags.rank, epoch)


@gl.jit
def strip(work, block, i):
    """Phase, row and column of this communicator's i-th strip of a block, which is counted over all receivers, the next
    rank first; from beyond the end where the communicators do not divide the block."""
    mm = work.matmul
    item = i * mm.COMM_SMS + gl.program_id(0)
    t, first = item // (mm.BN // mm.WIDTH), block % work.blocks * work.block_tiles
    there = t < tiles_in(work, block % work.blocks)
    t = block // work.blocks * tiles_per_owner(work) + first + gl.where(there, t, 0)
    phase, a_row, row, col = locate(work, t)
    return phase, gl.where(there, row, work.rows), col + item % (mm.BN // mm.WIDTH) * mm.WIDTH


@gl.jit
def fetch_strip(work, block, i, at):
    """Communicator: bring a strip from home, when its block is there."""
    mm = work.matmul
    phase, row, col = strip(work, block, i)
    if i == 0:
        gl.wait(work.flags, LAST_FLAG - phase, this_epoch(mm))
        gl.fence_proxy_async()
    gl.mbarrier_expect(mm.ring.ready_at(at), mm.BM * mm.WIDTH * (work.out.dtype.primitive_bitwidth // 8))
    for half in gl.static_range(mm.HALVES):
        where = [0, owner_of(work, phase), row + half * mm.ROWS, col]
        gl.tma_load(work.home, where, mm.ring.ready_at(at), part_buf(mm, at, half, work.home))


@gl.jit
def send_strip(work, block, i, at, epoch):
    """Communicator: send it, part by part."""
    phase, row, col = strip(work, block, i)
    for half in gl.static_range(work.matmul.HALVES):
        buf = part_buf(work.matmul, at, half, work.slots)
        send(work, owner_of(work, phase), row + half * work.matmul.ROWS, col, buf, epoch)


@gl.jit
def tell(work, block, epoch):
    """Communicator: raise the owner's flag of a block."""
    phase, row, col = strip(work, block, 0)
    gl.signal(work.flags, owner_of(work, phase), block % work.blocks * work.flags.world + work.flags.rank, epoch)


@gl.jit
def communicate(work):
    """Communicator: all blocks of one owner after those of the other."""
    epoch = this_epoch(work.matmul)
    send_blocks(work, (work.flags.world - 1) * work.blocks, work.share, epoch, fetch_strip, send_strip, tell)
    finish_all(work.matmul, epoch)


@gl.jit(
    do_not_specialize=[
        "rank", "slot_stride", "step_a", "step_b", "flags_stride", "timeout_us", "rows", "k", "whole", "split",
        "blocks", "block_tiles", "share",
    ]
)  # fmt: skip
def matmul_reduce_scatter_kernel(
    rank, a_desc, b_desc, out_desc, slots_desc, own_slots, slot_stride, bias, scale_a, step_a, scale_b, step_b,
    scratch, out, flags_ptr, flags_stride, state, timeout_us, rows, n, k, whole, split, home_desc, blocks, block_tiles, share,
    WORLD: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, C_BUFS: gl.constexpr, SHARED: gl.constexpr, GROUP: gl.constexpr, A_T: gl.constexpr,
    B_T: gl.constexpr, DETERMINISTIC: gl.constexpr, HAS_BIAS: gl.constexpr, SCALED: gl.constexpr, AVERAGE: gl.constexpr,
    COMM_SMS: gl.constexpr, COLS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Rows [rows, n] of this rank of sum over ranks of a [WORLD * rows, k] @ b [k, n]. Grid: co-resident CTAs, one per SM.

    Without communicators home_desc, blocks, block_tiles and share are None. COLS, columns of a row that a CTA sums at
    once, is 0 but for ONE_SHOT, which has `out` besides its descriptor, else None. BLOCKS: scale_a and scale_b are
    descriptors of scales of blocks along K.
    """
    INTER: gl.constexpr = COMM_SMS > 0
    ONE_SHOT: gl.constexpr = COLS > 0
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    tiles = gl.cdiv(rows, BM) * gl.cdiv(n, BN) * WORLD
    if ONE_SHOT:
        tiles = gl.cdiv(rows * WORLD, BM) * gl.cdiv(n, BN)
    mm = make_matmul(
        a_desc, b_desc, slots_desc, flags, state, scratch, k, tiles, whole, split, BM, BN, BK, STAGES, C_BUFS, SHARED,
        A_T, B_T, COMM_SMS,
    )  # fmt: skip
    scales = None
    if BLOCKS:
        scales = make_block_scales(mm, scale_a, scale_b)
        scale_a, scale_b = bias, bias
    if not INTER:  # nobody looks at them
        home_desc, blocks, block_tiles, share = slots_desc, rows, rows, rows
    work = Work(
        mm, flags, slots_desc, own_slots, slot_stride, out_desc, bias, scale_a, step_a, scale_b, step_b, rows, n,
        home_desc, blocks, block_tiles, share, DETERMINISTIC, HAS_BIAS, SCALED, AVERAGE, GROUP, INTER,
    )  # fmt: skip
    gl.grid_dependency_wait()
    COMMUNICATE: gl.constexpr = communicate if INTER else no_communicator
    AHEAD: gl.constexpr = factors if SCALED else nothing_ahead
    SCALE: gl.constexpr = scaled if SCALED else unscaled
    if ONE_SHOT:
        epoch = this_epoch(mm)
        run_matmul(
            work, locate_in_whole, nothing_before_load, load_operands, nobody_to_meet, nothing_more, averaged,
            store_to_owners, publish_to_all, no_communicator, 64, all_steps, AHEAD, SCALE, scales=scales,
        )  # fmt: skip
        LINE: gl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth  # elements of a 16-byte access
        n = n // 8 * 8  # as it is: the compiler learns that rows are aligned
        extras = Extras(out, out, bias, out, out, rows, rows, n, HAS_BIAS, False, False, COLS)
        hand_out(Sums(flags, extras, own_slots, slot_stride // LINE), epoch)
    else:
        run_matmul(
            work, locate, nothing_before_load, load_operands, meet, load_more, epilogue, store, publish, COMMUNICATE,
            64, all_steps, AHEAD, SCALE, scales=scales,
        )  # fmt: skip
