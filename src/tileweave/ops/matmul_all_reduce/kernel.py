"""matmul + all-reduce, intra-SM: finished parts go where they are summed, and from there to every rank.

SHOTS says how often an element travels:

    0   never: a plain matmul into the result, for a world of one and for a reduction behind it
    1   every rank multiplies the whole product and sends its parts to a place per source of all ranks' slots, its own
        included. Behind the tile loop every rank sums the places in rank order in float32 (`hand_out`)
    2   rank r owns `rows` rows from r * rows on. Parts go to a place per source of their owner; own tiles take in what
        the peers have sent (through the operand ring, behind the last K step), in float32. A finished part takes the
        place of its own source in the owner's slot. Meanwhile a mover, a warp of every CTA, brings the peers' finished
        parts from there to the result. Tiles go in chunks, of every chunk the owners' r+1, r+2, ..., r in turn: while
        one is multiplied the one before travels

Bias and residual are added in float32, one shot: to the sum, else by the owner. NORM wants whole rows, so then also two
shots end with `hand_out`, which fetches rows from their owners, instead of movers. What `hand_out` and movers fetch they
pull: it comes straight to the result, and the owner's slot holds it once for all peers.

Two slots alternate by the epoch, which lives in `state` and is advanced by the last CTA. A phase is (chunk, owner), of
number chunk * WORLD + owner; one shot has but one, of this rank's number. Besides the template's:

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| state[SENT + phase] | every storer of this rank, its parts of the phase performed | nobody; the last one tells | acq_rel, gpu | the last one puts it back to 0 |
| flags[d][chunk * WORLD + r] = epoch | rank r, the last storer that sent a part of the chunk to d; one shot: to all | one shot: all CTAs of rank d behind their tile loop; two shots: its loaders and storers, before own tiles of the chunk | release / acquire, sys; before TMA a proxy fence | one writer, monotonic: whatever a flag means in a call |
| flags[d][(chunks + chunk) * WORLD + r] = epoch | two shots: rank r, the last storer of its own tiles of the chunk | movers of rank d; NORM: all CTAs of d behind their tile loop | release / acquire, sys; before TMA a proxy fence | as above |
| ring, uses behind an own tile's K steps | loader's TMA load of a peer's part or of the residual / multiplier | multiplier / loader | mbarrier, CTA | Channel's phases |
| moves.ready | mover's TMA load | mover, before it stores | mbarrier, CTA | store_read_wait: the stores of the buffer's last use have read it |
| slot e % 2 of rank d | all ranks in call e (TMA stores) | d after flags; two shots, its own place: all ranks after flags | flags | written again in call e + 2, by a rank that has ended call e + 1, in which it waited for every peer, each of which had ended call e before |

After a wait that timed out loaders and movers load from beyond the slot, which TMA fills with NaN, and `hand_out` sums
NaN: every role keeps its counts.
"""

from tileweave import lang as gl
from tileweave.tiles.channel import Channel, make_channel
from tileweave.tiles.matmul import (
    OWN_WORDS,
    Matmul,
    grouped_order,
    load_operands,
    load_role,
    make_matmul,
    multiply_role,
    no_communicator,
    nothing_before_load,
    part_buf,
    run_matmul,
    store_role,
    take_part,
    this_epoch,
)

SENT = OWN_WORDS  # of `state`: one word per phase
INFINITY = gl.constexpr(float("inf"))


LINE = gl.constexpr(8)  # elements of a 16-byte access
MOVES = gl.constexpr(2)  # buffers of a mover


@gl.aggregate
class Extras:
    """What is made of the sum, [m, n]: `total` = sum + bias + residual, and `normed` = RMSNorm(total) * weight."""

    total: gl.tensor
    normed: gl.tensor
    bias: gl.tensor
    residual: gl.tensor
    weight: gl.tensor
    eps: gl.tensor
    m: gl.tensor
    n: gl.tensor
    HAS_BIAS: gl.constexpr
    HAS_RESIDUAL: gl.constexpr
    NORM: gl.constexpr
    COLS: gl.constexpr  # that a CTA takes at once

    @gl.constexpr_function
    def __init__(self, total, normed, bias, residual, weight, eps, m, n, HAS_BIAS, HAS_RESIDUAL, NORM, COLS):
        self.total, self.normed, self.bias, self.residual, self.weight = total, normed, bias, residual, weight
        self.eps, self.m, self.n = eps, m, n
        self.HAS_BIAS, self.HAS_RESIDUAL = gl.constexpr(HAS_BIAS), gl.constexpr(HAS_RESIDUAL)
        self.NORM, self.COLS = gl.constexpr(NORM), gl.constexpr(COLS)


@gl.aggregate
class Work:
    """What the roles share besides the matmul."""

    matmul: Matmul
    flags: gl.Flags
    extras: Extras
    out: gl.tensor_descriptor  # [m, n], the result,
    residual: gl.tensor_descriptor  # and the residual
    slots: gl.tensor_descriptor  # [world, slot x source, rows, n], any rank's,
    places: gl.tensor  # the same as a pointer,
    rank_lines: gl.tensor  # the distance of two ranks in lines of LINE elements,
    place_lines: gl.tensor  # and that of two places
    moves: Channel
    move_bufs: gl.shared_memory_descriptor
    rows: gl.tensor  # of an owner; one shot: all
    n: gl.tensor
    chunk_tiles: gl.tensor  # of one owner
    chunks: gl.tensor
    SHOTS: gl.constexpr
    GROUP: gl.constexpr

    @gl.constexpr_function
    def __init__(
        self, matmul, flags, extras, out, residual, slots, places, rank_lines, place_lines, moves, move_bufs,
        rows, n, chunk_tiles, chunks, SHOTS, GROUP,
    ):  # fmt: skip
        self.matmul, self.flags, self.extras = matmul, flags, extras
        self.out, self.residual = out, residual
        self.slots, self.places, self.rank_lines, self.place_lines = slots, places, rank_lines, place_lines
        self.moves, self.move_bufs = moves, move_bufs
        self.rows, self.n, self.chunk_tiles, self.chunks = rows, n, chunk_tiles, chunks
        self.SHOTS, self.GROUP = gl.constexpr(SHOTS), gl.constexpr(GROUP)


# ---------------------------------------------------------------- the matmul of one GPU


@gl.jit
def tile_at(work, t):
    """Row and column of the t-th tile of an owner."""
    mm = work.matmul
    i, j = grouped_order(t, gl.cdiv(work.rows, mm.BM), gl.cdiv(work.n, mm.BN), work.GROUP)
    return i * mm.BM, j * mm.BN


@gl.jit
def no_more(work, part, at, HALF: gl.constexpr, owner, row, col, LAYOUT: gl.constexpr):
    """EPILOGUE that takes nothing in."""
    return part, at


@gl.jit
def add_bias(extras, part, col, LAYOUT: gl.constexpr):
    """`part`, at a column of the result, plus bias."""
    if extras.HAS_BIAS:
        cols = col + gl.arange(0, part.shape[1], gl.SliceLayout(0, LAYOUT))
        part += gl.load(extras.bias + cols, mask=cols < extras.n, other=0.0).to(gl.float32)[None, :]
    return part


@gl.jit
def normalize(extras, row, squares, L: gl.constexpr):
    """RMSNorm of a row of `total`, whose squares add up to `squares`, into `normed`."""
    scale = gl.exp2(-0.5 * gl.log2(squares / (extras.n * 1.0) + extras.eps))
    start = row.to(gl.int64) * extras.n
    for col in range(0, extras.n, extras.COLS):
        cols = col + gl.arange(0, extras.COLS, gl.SliceLayout(0, L))[None, :]
        keep = cols < extras.n
        x = gl.load(extras.total + start + cols, mask=keep, other=0.0).to(gl.float32)  # what this very thread stored
        x = x * scale * gl.load(extras.weight + cols, mask=keep, other=0.0).to(gl.float32)
        gl.store(extras.normed + start + cols, x.to(extras.normed.dtype.element_ty), mask=keep)


@gl.jit
def finish_rows(work, met, epoch, TAKE: gl.constexpr):
    """All CTAs: rows of the result, of which TAKE gives the elements, and what is made of them; those of the next rank's
    owner first."""
    extras = work.extras
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, gl.num_warps()], [1, 0])
    pieces = 1 if extras.NORM else gl.cdiv(work.n, extras.COLS)
    for item in range(gl.program_id(0), extras.m * pieces, gl.num_programs(0)):
        row = (item // pieces + (work.flags.rank + 1) * work.rows) % extras.m
        start = item % pieces * extras.COLS
        squares = gl.zeros([1, extras.COLS], gl.float32, L)
        for col in range(start, work.n if extras.NORM else start + extras.COLS, extras.COLS):
            cols = col + gl.arange(0, extras.COLS, gl.SliceLayout(0, L))[None, :]
            keep = cols < work.n
            here = row.to(gl.int64) * work.n + cols
            total = TAKE(work, row, cols, keep, met, epoch, L)
            if work.SHOTS == 1:
                total = add_bias(extras, total, col, L)
                if extras.HAS_RESIDUAL:
                    total += gl.load(extras.residual + here, mask=keep, other=0.0).to(gl.float32)
            total = total.to(extras.total.dtype.element_ty)
            gl.store(extras.total + here, total, mask=keep)
            x = total.to(gl.float32)
            squares += gl.where(keep, x * x, 0.0)
        if extras.NORM:
            normalize(extras, row, gl.sum(gl.sum(squares, 1), 0), L)


# ---------------------------------------------------------------- what the all-reduce adds


@gl.jit
def tiles_of(work, chunk):
    """Tiles of each owner in a chunk: its first, and how many; one at least, also beyond the last chunk."""
    per = gl.cdiv(work.rows, work.matmul.BM) * gl.cdiv(work.n, work.matmul.BN)
    first = chunk * work.chunk_tiles
    return first, gl.maximum(gl.minimum(work.chunk_tiles, per - first), 1)


@gl.jit
def locate(work, t):
    """The t-th tile: its phase, its row in A, its row and column in the owner's rows."""
    flags = work.flags
    if work.SHOTS < 2:
        row, col = tile_at(work, t)
        return flags.rank, row, row, col
    else:
        chunk = t // (work.chunk_tiles * flags.world)
        first, count = tiles_of(work, chunk)
        t -= first * flags.world
        owner = (flags.rank + 1 + t // count) % flags.world
        row, col = tile_at(work, first + t % count)
        return chunk * flags.world + owner, owner * work.rows + row, row, col


@gl.jit
def is_own(work, phase):
    """Whether this rank sums the tiles of a phase."""
    return (work.SHOTS == 2) & (phase % work.flags.world == work.flags.rank)


@gl.jit
def meet(work, phase, epoch):
    """Before own tiles are finished: every peer has sent all its parts of this chunk; False after a timeout."""
    met = epoch == epoch
    if is_own(work, phase):
        met = gl.wait_all(work.flags, phase - work.flags.rank, work.flags.world, epoch, skip=phase)
        gl.fence_proxy_async()
    return met


@gl.jit
def more_parts(work):
    """How many parts a part of an own tile takes in: one of every peer, and of the residual."""
    return work.flags.world - 1 + (1 if work.extras.HAS_RESIDUAL else 0)


@gl.jit
def load_more(work, at, phase, row, col, epoch, met):
    """Loader: behind the K steps of an own tile, what the peers have sent for a part of it, in rank order; the residual."""
    mm, flags = work.matmul, work.flags
    if is_own(work, phase):
        for i in range(more_parts(work)):
            place = (epoch & 1) * flags.world + i + (i >= flags.rank).to(gl.int32)
            mm.ring.producer_wait(at)
            bar = mm.ring.ready_at(at)
            gl.mbarrier_expect(bar, mm.BM * mm.WIDTH * 2)
            for half in gl.static_range(mm.HALVES):
                buf = part_buf(mm, at, half, work.slots)
                if i < flags.world - 1:
                    where = [place, gl.where(met, row, work.rows) + half * mm.ROWS, col]
                    gl.load_async(work.slots, flags.rank, where, buf, bar)
                else:
                    here = [flags.rank * work.rows + row + half * mm.ROWS, col]
                    gl.tma_load(work.residual, here, bar, buf.reshape([mm.ROWS, mm.WIDTH]))
            at = mm.ring.next(at)
    return at


@gl.jit
def epilogue(work, part, at, HALF: gl.constexpr, phase, row, col, LAYOUT: gl.constexpr):
    """Multiplier: a part of an own tile takes in what the peers have sent, residual and bias."""
    if is_own(work, phase):
        for i in range(more_parts(work)):
            part = take_part(work.matmul, part, at, HALF, work.slots, LAYOUT)
            at = work.matmul.ring.next(at)
        part = add_bias(work.extras, part, col, LAYOUT)
    return part, at


@gl.jit
def store(work, phase, row, col, buf, epoch, met):
    """Storer: one part to its owner, an own one to the result as well; one shot: to all ranks."""
    mm, flags = work.matmul, work.flags
    place = (epoch & 1) * flags.world + flags.rank
    if work.SHOTS == 1:
        for i in range(flags.world):
            gl.store_async(work.slots, (flags.rank + 1 + i) % flags.world, [place, row, col], buf)
    if work.SHOTS == 2:
        gl.store_async(work.slots, phase % flags.world, [place, row, col], buf)
    if work.SHOTS == 0:
        gl.tma_store(work.out, [row, col], buf.reshape([mm.ROWS, mm.WIDTH]))
    elif not work.extras.NORM:
        if is_own(work, phase):
            gl.tma_store(work.out, [flags.rank * work.rows + row, col], buf.reshape([mm.ROWS, mm.WIDTH]))


@gl.jit
def publish(work, phase, count, epoch):
    """Count parts as performed; the last CTA tells their owner, or, where all ranks want them, all."""
    mm, flags = work.matmul, work.flags
    if work.SHOTS > 0:
        gl.store_wait(0)
        gl.barrier()
        chunk = phase // flags.world
        first, tiles = tiles_of(work, chunk)
        all_parts = tiles * (mm.BN // mm.WIDTH) * mm.HALVES
        sent = mm.state + SENT + phase
        if (count > 0) & (gl.atomic_add(sent, count, sem="acq_rel", scope="gpu") == all_parts - count):
            gl.atomic_xchg(sent, 0, sem="relaxed", scope="gpu")
            if phase % flags.world == flags.rank:
                gl.signal_all(flags, (work.SHOTS - 1) * work.chunks * flags.world + phase, epoch)
            else:
                gl.signal(flags, phase % flags.world, chunk * flags.world + flags.rank, epoch)


@gl.jit
def move_tile(work, owner, row, col, epoch, there, at, to):
    """Mover: a finished tile of a peer to the result, part by part; returns the next places in its ring."""
    mm = work.matmul
    place = (epoch & 1) * work.flags.world + owner
    PARTS: gl.constexpr = mm.HALVES * (mm.BN // mm.WIDTH)
    for i in range(PARTS + 1):
        if i < PARTS:
            gl.store_read_wait(0)
            from_row = gl.where(there, row, work.rows) + i % mm.HALVES * mm.ROWS
            where = [place, from_row, col + i // mm.HALVES * mm.WIDTH]
            gl.mbarrier_expect(work.moves.ready_at(to), mm.ROWS * mm.WIDTH * 2)
            gl.load_async(work.slots, owner, where, work.move_bufs.index(to.slot), work.moves.ready_at(to))
            to = work.moves.next(to)
        if i > 0:
            work.moves.consumer_wait(at)
            rows = owner * work.rows + row + (i - 1) % mm.HALVES * mm.ROWS
            buf = work.move_bufs.index(at.slot).reshape([mm.ROWS, mm.WIDTH])
            gl.tma_store(work.out, [rows, col + (i - 1) // mm.HALVES * mm.WIDTH], buf)
            at = work.moves.next(at)
    return at, to


@gl.jit
def move_role(work, epoch):
    """Mover: this CTA's share of every chunk's finished tiles, those of the next rank first."""
    flags = work.flags
    at, to, previous = work.moves.start(), work.moves.start(), -1
    there = epoch == epoch
    for chunk in range(work.chunks):
        first, count = tiles_of(work, chunk)
        for u in range(gl.program_id(0), count * (flags.world - 1), gl.num_programs(0)):
            owner = (flags.rank + 1 + u // count) % flags.world
            phase = chunk * flags.world + owner
            if phase != previous:
                there = gl.wait(flags, work.chunks * flags.world + phase, epoch)
                gl.fence_proxy_async()
                previous = phase
            row, col = tile_at(work, first + u % count)
            at, to = move_tile(work, owner, row, col, epoch, there, at, to)
    gl.store_read_wait(0)


@gl.jit
def run_with_movers(
    work, epoch, LOCATE: gl.constexpr, BEFORE_LOAD: gl.constexpr, LOAD: gl.constexpr, MEET: gl.constexpr,
    LOAD_MORE: gl.constexpr, EPILOGUE: gl.constexpr, STORE: gl.constexpr, PUBLISH: gl.constexpr, MOVE: gl.constexpr,
):  # fmt: skip
    """`run_matmul` with one more role, the mover."""
    if work.matmul.HALVES == 1:
        gl.warp_specialize(
            [
                (multiply_role, (work, 0, LOCATE, EPILOGUE)),
                (load_role, (work, LOCATE, BEFORE_LOAD, LOAD, MEET, LOAD_MORE)),
                (store_role, (work, 0, LOCATE, MEET, STORE, PUBLISH)),
                (MOVE, (work, epoch)),
            ],
            [1, 1, 1],
            [64, 64, 64],
        )
    else:
        gl.warp_specialize(
            [
                (multiply_role, (work, 0, LOCATE, EPILOGUE)),
                (multiply_role, (work, 1, LOCATE, EPILOGUE)),
                (load_role, (work, LOCATE, BEFORE_LOAD, LOAD, MEET, LOAD_MORE)),
                (store_role, (work, 0, LOCATE, MEET, STORE, PUBLISH)),
                (store_role, (work, 1, LOCATE, MEET, STORE, PUBLISH)),
                (MOVE, (work, epoch)),
            ],
            [4, 1, 1, 1, 1],
            [224, 56, 56, 56, 56],
        )


@gl.jit
def fetch(work, rank, source, row, cols, keep, epoch):
    """Elements of a row of a source's place in the slot of a rank."""
    place = (epoch & 1) * work.flags.world + source
    lines = rank.to(gl.int64) * work.rank_lines + place.to(gl.int64) * work.place_lines
    return gl.load(work.places + (lines * LINE + row.to(gl.int64) * work.n) + cols, mask=keep, other=0.0).to(gl.float32)


@gl.jit
def sum_up(work, row, cols, keep, met, epoch, L: gl.constexpr):
    """Elements of a row of the sum over ranks; NaN unless the wait was met."""
    flags, extras = work.flags, work.extras
    AT_ONCE: gl.constexpr = min(flags.world, 8)
    total = gl.full([1, extras.COLS], gl.where(met, 0.0, INFINITY) * 0.0, gl.float32, L)
    if work.SHOTS == 2:
        owner = row // work.rows
        total += fetch(work, owner, owner, row % work.rows, cols, keep & met, epoch)
    else:
        for first in range(0, flags.world, AT_ONCE):
            for j in gl.static_range(AT_ONCE):  # unrolled, so that the loads of these sources are in flight together
                there = keep & met & (first + j < flags.world)
                total += fetch(work, flags.rank, first + j, row, cols, there, epoch)
    return total


@gl.jit
def hand_out(work, epoch):
    """All CTAs, behind their tiles: sum rows, or fetch them from their owners."""
    count = work.chunks * work.flags.world
    met = gl.wait_all(work.flags, (work.SHOTS - 1) * count, count, epoch)
    finish_rows(work, met, epoch, sum_up)


# ---------------------------------------------------------------- the kernel


@gl.jit(
    do_not_specialize=[
        "rank", "rank_lines", "place_lines", "eps", "flags_stride", "timeout_us", "m", "rows", "k", "chunk_tiles",
        "chunks", "whole", "split",
    ]
)  # fmt: skip
def matmul_all_reduce_kernel(
    rank, a_desc, b_desc, out_desc, residual_desc, slots_desc, places, rank_lines, place_lines, total, normed, bias,
    residual, weight, eps, scratch, flags_ptr, flags_stride, state, timeout_us, m, rows, n, k, chunk_tiles, chunks, whole, split,
    WORLD: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    C_BUFS: gl.constexpr, SHARED: gl.constexpr, GROUP: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr,
    SHOTS: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, NORM: gl.constexpr, COLS: gl.constexpr,
):  # fmt: skip
    """[m, n]: the sum over ranks of a [m, k] @ b [k, n], and what Extras says. Grid: co-resident CTAs, one per SM."""
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    n = n // LINE * LINE  # as it is: the compiler learns that rows are aligned
    OWNERS: gl.constexpr = WORLD if SHOTS == 2 else 1
    MOVERS: gl.constexpr = SHOTS == 2 and not NORM
    tiles = gl.cdiv(rows, BM) * gl.cdiv(n, BN) * OWNERS
    mm = make_matmul(
        a_desc, b_desc, slots_desc, flags, state, scratch, k, tiles, whole, split, BM, BN, BK, STAGES, C_BUFS, SHARED,
        A_T, B_T, 0,
    )  # fmt: skip
    if MOVERS:
        moves = make_channel(MOVES, 1)
        move_bufs = gl.allocate_shared_memory(slots_desc.dtype, [MOVES] + slots_desc.block_shape, slots_desc.layout)
    else:  # nobody looks at them
        moves, move_bufs = mm.ring, mm.c_bufs
    extras = Extras(total, normed, bias, residual, weight, eps, m, n, HAS_BIAS, HAS_RESIDUAL, NORM, COLS)
    work = Work(
        mm, flags, extras, out_desc, residual_desc, slots_desc, places, rank_lines, place_lines, moves, move_bufs,
        rows, n, chunk_tiles, chunks, SHOTS, GROUP,
    )  # fmt: skip
    gl.grid_dependency_wait()
    epoch = this_epoch(mm)
    if MOVERS:
        run_with_movers(
            work, epoch, locate, nothing_before_load, load_operands, meet, load_more, epilogue, store, publish, move_role
        )  # fmt: skip
    else:
        EPILOGUE: gl.constexpr = epilogue if SHOTS == 2 else no_more
        run_matmul(
            work, locate, nothing_before_load, load_operands, meet, load_more, EPILOGUE, store, publish, no_communicator, 56
        )  # fmt: skip
        if SHOTS > 0:
            hand_out(work, epoch)
