"""matmul + all-reduce, intra-SM or inter-SM: finished parts go where they are summed, and from there to every rank.

SHOTS says how often an element travels:

    0   never: a plain matmul into the result, for a world of one and for a reduction behind it
    1   every rank multiplies the whole product and sends its parts to a place per source of all ranks' slots, its own
        included. Behind the tile loop every rank sums the places in rank order in float32 (`hand_out`)
    2   rank r owns `cols` columns from r * cols on, which suits any number of rows. Tiles go in chunks, of every chunk the
        owners' r+1, r+2, ..., r in turn: while one is multiplied the one before travels, and a mover, a warp of every CTA,
        brings what is finished from the slots to the result

With two shots, intra-SM, parts go to a place per source of their owner; own tiles take in what the peers have sent (through
the operand ring, behind the last K step), in float32. A finished part takes the place of its own source in the owner's
slot, from which movers pull it. Inter-SM (COMM_SMS > 0) parts stay in their own rank's slot, in a place per owner, until
communicators (`reducer`) have put the sums there, on all ranks: in the FABRIC, or by TMA.

Bias and residual are added in float32, one shot: to the sum, else by the owner to his own part. NORM wants whole rows, which
one shot has; two shots leave it to a launch behind this one.

Two slots alternate by the epoch, which lives in `state` and is advanced by the last CTA. A phase is (chunk, owner), of
number chunk * WORLD + owner; one shot has but one, of this rank's number. Besides those of the template, of movers and of
communicators:

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| state[SENT + phase] | every storer of this rank, its parts of the phase performed | nobody; the last one tells | acq_rel, gpu | the last one puts it back to 0 |
| flags[d][chunk * WORLD + r] = epoch | rank r, the last storer of the chunk's parts for d; one shot: to all | one shot: all CTAs of rank d behind their tile loop; intra-SM: its loaders and storers, before own tiles of the chunk; inter-SM: its communicators | release / acquire, sys; before TMA a proxy fence | one writer, monotonic: whatever a flag means in a call |
| flags[d][(chunks + chunk) * WORLD + r] = epoch | intra-SM: rank r, the last storer of its own tiles of the chunk | movers of rank d | release / acquire, sys; before TMA a proxy fence | as above |
| ring, uses behind an own tile's K steps | loader's TMA load of a peer's part or of the residual / multiplier | multiplier / loader | mbarrier, CTA | Channel's phases |
| slot e % 2 of rank d | all ranks in call e (TMA stores, multimem) | d after flags; intra-SM, its own place, inter-SM, its places: all ranks after flags | flags | written again in call e + 2, by a rank that has ended call e + 1, in which it waited for every peer, each of which had ended call e before |

After a wait that timed out loaders and movers load from beyond the slot, which TMA fills with NaN, and `hand_out` sums
NaN: every role keeps its counts, but for communicators, whose chunk then is never told.
"""

from tileweave import lang as gl
from tileweave.tiles.block_scales import make_block_scales
from tileweave.tiles.matmul import (
    OWN_WORDS,
    Matmul,
    load_operands,
    make_matmul,
    more,
    no_communicator,
    nobody_to_meet,
    nothing_before_load,
    part_buf,
    run_matmul,
    take_part,
    this_epoch,
)
from tileweave.tiles.mover import Mover, make_mover, move_role
from tileweave.tiles.phases import count_up, locate_in_chunks, tile_at, tiles_of
from tileweave.tiles.reducer import reduce_role
from tileweave.tiles.sums import Extras, Sums, add_bias, hand_out

SENT = OWN_WORDS  # of `state`: one word per phase
LINE = gl.constexpr(8)  # elements of a 16-byte access


@gl.aggregate
class Work:
    """What the roles share besides the matmul."""

    matmul: Matmul
    flags: gl.Flags
    extras: Extras
    out: gl.tensor_descriptor  # [m, n], the result,
    residual: gl.tensor_descriptor  # and the residual
    slots: gl.tensor_descriptor  # [world, slot x source or owner, rows, cols], any rank's,
    places: gl.tensor  # this rank's, as a pointer; in the fabric: all ranks' at once
    place_lines: gl.tensor  # the distance of two places in lines of LINE elements
    mover: Mover
    rows: gl.tensor  # of a place: the product's, inter-SM in whole tiles
    cols: gl.tensor  # of an owner, in whole tiles; one shot: all
    n: gl.tensor
    chunk_tiles: gl.tensor  # of one owner
    chunks: gl.tensor
    SHOTS: gl.constexpr
    PEERS: gl.constexpr  # whose parts an own tile takes in
    FABRIC: gl.constexpr
    GROUP: gl.constexpr

    @gl.constexpr_function
    def __init__(
        self, matmul, flags, extras, out, residual, slots, places, place_lines, mover, rows, cols, n, chunk_tiles, chunks,
        SHOTS, PEERS, FABRIC, GROUP,
    ):  # fmt: skip
        self.matmul, self.flags, self.extras = matmul, flags, extras
        self.out, self.residual = out, residual
        self.slots, self.places, self.place_lines, self.mover = slots, places, place_lines, mover
        self.rows, self.cols, self.n, self.chunk_tiles, self.chunks = rows, cols, n, chunk_tiles, chunks
        self.SHOTS, self.PEERS = gl.constexpr(SHOTS), gl.constexpr(PEERS)
        self.FABRIC, self.GROUP = gl.constexpr(FABRIC), gl.constexpr(GROUP)


# ---------------------------------------------------------------- the matmul of one GPU


@gl.jit
def no_more(work, part, at, HALF: gl.constexpr, owner, row, col, LAYOUT: gl.constexpr):
    """EPILOGUE that takes nothing in."""
    return part, at


# ---------------------------------------------------------------- what the all-reduce adds


@gl.jit
def is_own(work, phase):
    """Whether this rank owns the tiles of a phase."""
    return (work.SHOTS == 2) & (phase % work.flags.world == work.flags.rank)


@gl.jit
def locate(work, t):
    """The t-th tile: its phase, its row twice, its column."""
    if work.SHOTS == 2:
        return locate_in_chunks(work, t)
    else:
        row, col = tile_at(work, t)
        return work.flags.rank, row, row, col


@gl.jit
def meet(work, phase, epoch):
    """Before own tiles are finished: every peer has sent all its parts of this chunk; False after a timeout."""
    met = epoch == epoch
    if is_own(work, phase):
        met = gl.wait_all(work.flags, phase - work.flags.rank, work.flags.world, epoch, skip=phase)
        gl.fence_proxy_async()
    return met


@gl.jit
def load_more(work, at, phase, row, col, epoch, met):
    """Loader: behind the K steps of an own tile, what the peers have sent for a part of it, in rank order; the residual."""
    mm, flags = work.matmul, work.flags
    if is_own(work, phase):
        for i in range(work.PEERS + (1 if work.extras.HAS_RESIDUAL else 0)):
            mm.ring.producer_wait(at)
            bar = mm.ring.ready_at(at)
            gl.mbarrier_expect(bar, mm.BM * mm.WIDTH * 2)
            for half in gl.static_range(mm.HALVES):
                buf = part_buf(mm, at, half, work.slots)
                place = (epoch & 1) * flags.world + i + (i >= flags.rank).to(gl.int32)
                where = [place, gl.where(met, row, work.rows) + half * mm.ROWS, col - flags.rank * work.cols]
                if i < work.PEERS:
                    gl.load_async(work.slots, flags.rank, where, buf, bar)
                else:
                    here = [row + half * mm.ROWS, col]
                    gl.tma_load(work.residual, here, bar, buf.reshape([mm.ROWS, mm.WIDTH]))
            at = more(mm).next(at)
    return at


@gl.jit
def epilogue(work, part, at, HALF: gl.constexpr, phase, row, col, LAYOUT: gl.constexpr):
    """Multiplier: a part of an own tile takes in what the peers have sent, residual and bias."""
    if is_own(work, phase):
        part = add_bias(work.extras, part, col, LAYOUT)
        for i in range(work.PEERS + (1 if work.extras.HAS_RESIDUAL else 0)):
            part = take_part(work.matmul, part, at, HALF, work.slots, LAYOUT)
            at = more(work.matmul).next(at)
    return part, at


@gl.jit
def store(work, phase, row, col, buf, epoch, met):
    """Storer: one part to its owner, an own one to the result as well; one shot: to all ranks."""
    mm, flags = work.matmul, work.flags
    slot = (epoch & 1) * flags.world
    if work.SHOTS == 0:
        gl.tma_store(work.out, [row, col], buf.reshape([mm.ROWS, mm.WIDTH]))
    elif work.SHOTS == 1:
        for i in range(flags.world):
            gl.store_async(work.slots, (flags.rank + 1 + i) % flags.world, [slot + flags.rank, row, col], buf)
    else:
        owner = phase % flags.world
        at = col - owner * work.cols
        if mm.COMM_SMS > 0:
            gl.store_async(work.slots, flags.rank, [slot + owner, row, at], buf)
        else:
            gl.store_async(work.slots, owner, [slot + flags.rank, row, at], buf)
            if is_own(work, phase):
                gl.tma_store(work.out, [row, col], buf.reshape([mm.ROWS, mm.WIDTH]))


@gl.jit
def publish(work, phase, count, epoch):
    """Count parts as performed; the last CTA tells their owner, or, where all ranks want them, all."""
    mm, flags = work.matmul, work.flags
    if work.SHOTS > 0:
        gl.store_wait(0)
        gl.barrier()
        chunk, owner = phase // flags.world, phase % flags.world
        first, tiles = tiles_of(work, chunk)
        if count_up(mm, SENT + phase, count, tiles * (mm.BN // mm.WIDTH) * mm.HALVES):
            if mm.COMM_SMS > 0:
                gl.signal(flags, owner, chunk * flags.world + flags.rank, epoch)
            elif owner == flags.rank:
                gl.signal_all(flags, (work.SHOTS - 1) * work.chunks * flags.world + phase, epoch)
            else:
                gl.signal(flags, owner, chunk * flags.world + flags.rank, epoch)


# ---------------------------------------------------------------- the kernel


@gl.jit(
    do_not_specialize=[
        "rank", "multicast", "place_lines", "eps", "flags_stride", "timeout_us", "m", "rows", "cols", "k", "chunk_tiles",
        "chunks", "whole", "split",
    ]
)  # fmt: skip
def matmul_all_reduce_kernel(
    rank, a_desc, b_desc, out_desc, residual_desc, slots_desc, places, multicast, place_lines, total, normed, bias,
    residual, weight, eps, scale_a, scale_b, scratch, flags_ptr, flags_stride, state, timeout_us, m, rows, n, cols, k,
    chunk_tiles, chunks, whole, split,
    WORLD: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    C_BUFS: gl.constexpr, SHARED: gl.constexpr, GROUP: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr,
    SHOTS: gl.constexpr, COMM_SMS: gl.constexpr, FABRIC: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, NORM: gl.constexpr, COLS: gl.constexpr,
):  # fmt: skip
    """[m, n]: the sum over ranks of a [m, k] @ b [k, n], and what Extras says. Grid: co-resident CTAs, one per SM.

    scale_a and scale_b are descriptors of scales of blocks along K; None where operands have none.
    """
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    n = n // LINE * LINE  # as it is: the compiler learns that rows are aligned
    INTER: gl.constexpr = COMM_SMS > 0
    OWNERS: gl.constexpr = WORLD if SHOTS == 2 else 1
    tiles = gl.cdiv(rows, BM) * gl.cdiv(cols, BN) * OWNERS
    mm = make_matmul(
        a_desc, b_desc, slots_desc, flags, state, scratch, k, tiles, whole, split, BM, BN, BK, STAGES, C_BUFS, SHARED,
        A_T, B_T, COMM_SMS,
    )  # fmt: skip
    scales = None
    if scale_a is not None:
        scales = make_block_scales(mm, scale_a, scale_b)
    if SHOTS == 2:
        mover = make_mover(slots_desc, INTER, FABRIC)
    else:  # nobody looks at it
        mover = Mover(mm.ring, mm.c_bufs, False, False)
    if FABRIC:
        places = gl.multicast_pointer(multicast, slots_desc.dtype)
    extras = Extras(total, normed, bias, residual, weight, eps, m, n, HAS_BIAS, HAS_RESIDUAL, NORM, COLS)
    work = Work(
        mm, flags, extras, out_desc, residual_desc, slots_desc, places, place_lines, mover, rows, cols, n, chunk_tiles,
        chunks, SHOTS, 0 if INTER else WORLD - 1, FABRIC, GROUP,
    )  # fmt: skip
    gl.grid_dependency_wait()
    epoch = this_epoch(mm)
    MEET: gl.constexpr = nobody_to_meet if INTER else meet
    EPILOGUE: gl.constexpr = epilogue if SHOTS == 2 else no_more
    COMMUNICATE: gl.constexpr = reduce_role if INTER else no_communicator
    MOVE: gl.constexpr = move_role if SHOTS == 2 else None
    run_matmul(
        work, locate, nothing_before_load, load_operands, MEET, load_more, EPILOGUE, store, publish, COMMUNICATE, 56,
        EXTRA=MOVE, epoch=epoch, scales=scales,
    )  # fmt: skip
    if SHOTS == 1:
        hand_out(Sums(flags, extras, places, place_lines), epoch)
