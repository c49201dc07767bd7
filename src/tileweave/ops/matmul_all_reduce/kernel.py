"""matmul + all-reduce, intra-SM: finished parts go where they are summed; when all have come, every CTA hands out rows.

SHOTS says how often an element travels:

    0   never: a plain matmul into the result, for a world of one and for a reduction behind it
    1   every rank multiplies the whole product and sends its parts to a place per source of all ranks' slots, its own
        included; then it sums the places in rank order
    2   every rank owns `rows` rows. Parts go to a place per source of their owner, own tiles come last and take in what
        the peers have sent (through the operand ring, behind the last K step) in float32. A finished part takes the
        place of its own source in the owner's slot, from where all ranks fetch it

So what a rank reads behind its tile loop is rounded to the dtype, and is the same on all ranks. There, in registers, rows
are shared out to the CTAs: bias and residual are added, and a CTA that has a whole row can normalize it (NORM).

Two slots alternate by the epoch, which lives in `state` and is advanced by the last CTA. Besides the template's:

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| state[SENT + d] | every storer of this rank, its parts for rank d performed (one shot: d is this rank, for all) | nobody; the last one tells | acq_rel, gpu | the last one puts it back to 0 |
| flags[d][r] = epoch | rank r, the last storer that sent a part to d | one shot: all CTAs of rank d behind their tile loop; two shots: its loaders and storers before own tiles | release / acquire, sys; before TMA a proxy fence | monotonic |
| flags[d][WORLD + r] = epoch | two shots: rank r, the last storer of its own tiles | all CTAs of rank d behind their tile loop | release / acquire, sys | monotonic |
| ring, uses behind an own tile's K steps | loader's TMA load of a peer's part / multiplier | multiplier / loader | mbarrier, CTA | Channel's phases |
| slot e % 2 of rank d | all ranks in call e (TMA stores) | d after flags; its own place, two shots, by all ranks after flags[.][WORLD + d] | flags | written again in call e + 2, by a rank that has ended call e + 1, in which it waited for every peer, each of which had ended call e before |

After a wait that timed out loaders load from beyond the slot, which TMA fills with NaN, and results are NaN: every role
keeps its counts.
"""

from tileweave import lang as gl
from tileweave.tiles.matmul import (
    OWN_WORDS,
    Matmul,
    grouped_order,
    load_operands,
    make_matmul,
    no_communicator,
    nothing_before_load,
    part_buf,
    run_matmul,
    take_part,
    this_epoch,
)

SENT = OWN_WORDS  # of `state`: one word per rank
INFINITY = gl.constexpr(float("inf"))


@gl.aggregate
class Rows:
    """What is made of the sum: `total` = sum + bias + residual, [m, n], and `normed` = RMSNorm(total) * weight."""

    total: gl.tensor
    normed: gl.tensor
    bias: gl.tensor
    residual: gl.tensor
    weight: gl.tensor
    eps: gl.tensor
    m: gl.tensor
    places: gl.tensor  # the slots as a pointer,
    rank_stride: gl.tensor  # the distance of two ranks in elements,
    place_stride: gl.tensor  # and that of two places
    HAS_BIAS: gl.constexpr
    HAS_RESIDUAL: gl.constexpr
    NORM: gl.constexpr
    COLS: gl.constexpr  # that a CTA takes at once

    @gl.constexpr_function
    def __init__(
        self, total, normed, bias, residual, weight, eps, m, places, rank_stride, place_stride,
        HAS_BIAS, HAS_RESIDUAL, NORM, COLS,
    ):  # fmt: skip
        self.total, self.normed, self.bias, self.residual, self.weight = total, normed, bias, residual, weight
        self.eps, self.m = eps, m
        self.places, self.rank_stride, self.place_stride = places, rank_stride, place_stride
        self.HAS_BIAS, self.HAS_RESIDUAL = gl.constexpr(HAS_BIAS), gl.constexpr(HAS_RESIDUAL)
        self.NORM, self.COLS = gl.constexpr(NORM), gl.constexpr(COLS)


@gl.aggregate
class Work:
    """What the roles share besides the matmul."""

    matmul: Matmul
    flags: gl.Flags
    slots: gl.tensor_descriptor  # [world, slot x source, rows, n], any rank's; no shots: the result as [1, 1, m, n]
    rows: gl.tensor  # of an owner; one shot: all
    n: gl.tensor
    SHOTS: gl.constexpr
    GROUP: gl.constexpr

    @gl.constexpr_function
    def __init__(self, matmul, flags, slots, rows, n, SHOTS, GROUP):
        self.matmul, self.flags, self.slots, self.rows, self.n = matmul, flags, slots, rows, n
        self.SHOTS, self.GROUP = gl.constexpr(SHOTS), gl.constexpr(GROUP)


# ---------------------------------------------------------------- the matmul of one GPU


@gl.jit
def tiles_per_owner(work):
    """Tiles of one owner's rows."""
    return gl.cdiv(work.rows, work.matmul.BM) * gl.cdiv(work.n, work.matmul.BN)


@gl.jit
def no_more(work, part, at, HALF: gl.constexpr, owner, row, col, LAYOUT: gl.constexpr):
    """EPILOGUE that takes nothing in."""
    return part, at


@gl.jit
def add_rows(work, out, total, row, cols, keep):
    """`total`, elements of a row, plus bias and residual."""
    if out.HAS_BIAS:
        total += gl.load(out.bias + cols, mask=keep, other=0.0).to(gl.float32)
    if out.HAS_RESIDUAL:
        where = out.residual + row.to(gl.int64) * work.n + cols
        total += gl.load(where, mask=keep, other=0.0).to(gl.float32)
    return total


@gl.jit
def normalize(work, out, row, squares, L: gl.constexpr):
    """RMSNorm of a row of `total`, whose squares add up to `squares`, into `normed`."""
    scale = gl.exp2(-0.5 * gl.log2(squares / (work.n * 1.0) + out.eps))
    start = row.to(gl.int64) * work.n
    for col in range(0, work.n, out.COLS):
        cols = col + gl.arange(0, out.COLS, L)
        keep = cols < work.n
        x = gl.load(out.total + start + cols, mask=keep, other=0.0).to(gl.float32)  # what this very thread has stored
        x = x * scale * gl.load(out.weight + cols, mask=keep, other=0.0).to(gl.float32)
        gl.store(out.normed + start + cols, x.to(out.normed.dtype.element_ty), mask=keep)


# ---------------------------------------------------------------- what the all-reduce adds


@gl.jit
def locate(work, t):
    """The t-th tile: its owner, its row in A, its row and column in the owner's rows."""
    mm, flags = work.matmul, work.flags
    per = tiles_per_owner(work)
    owner = (flags.rank + 1 + t // per) % flags.world if work.SHOTS == 2 else flags.rank
    i, j = grouped_order(t % per, gl.cdiv(work.rows, mm.BM), gl.cdiv(work.n, mm.BN), work.GROUP)
    row = i * mm.BM
    return owner, owner * work.rows + row if work.SHOTS == 2 else row, row, j * mm.BN


@gl.jit
def meet(work, owner, epoch):
    """Before own tiles are finished: every peer has sent all its parts of them; False after a timeout."""
    met = work.flags.rank >= 0
    if work.SHOTS == 2:
        if owner == work.flags.rank:
            met = gl.wait_all(work.flags, 0, work.flags.world, epoch, skip=owner)
            gl.fence_proxy_async()
    return met


@gl.jit
def load_more(work, at, owner, row, col, epoch, met):
    """Loader: behind the K steps of an own tile, what the peers have sent for a part of it."""
    mm, flags = work.matmul, work.flags
    if work.SHOTS == 2:
        if owner == flags.rank:
            for i in range(flags.world - 1):
                place = (epoch & 1) * flags.world + i + (i >= flags.rank).to(gl.int32)
                mm.ring.producer_wait(at)
                bar = mm.ring.ready_at(at)
                gl.mbarrier_expect(bar, mm.BM * mm.WIDTH * 2)
                for half in gl.static_range(mm.HALVES):
                    where = [place, gl.where(met, row, work.rows) + half * mm.ROWS, col]
                    gl.load_async(work.slots, flags.rank, where, part_buf(mm, at, half, work.slots), bar)
                at = mm.ring.next(at)
    return at


@gl.jit
def epilogue(work, part, at, HALF: gl.constexpr, owner, row, col, LAYOUT: gl.constexpr):
    """Multiplier: a part of an own tile takes in what the peers have sent."""
    if owner == work.flags.rank:
        for i in range(work.flags.world - 1):
            part = take_part(work.matmul, part, at, HALF, work.slots, LAYOUT)
            at = work.matmul.ring.next(at)
    return part, at


@gl.jit
def store(work, owner, row, col, buf, epoch, met):
    """Storer: one part to its owner, which may be this rank; one shot: to all ranks."""
    flags = work.flags
    place = (epoch & 1) * flags.world + flags.rank
    if work.SHOTS == 0:
        gl.tma_store(work.slots, [0, 0, row, col], buf)
    elif work.SHOTS == 1:
        for i in range(flags.world):
            gl.store_async(work.slots, (flags.rank + 1 + i) % flags.world, [place, row, col], buf)
    else:
        gl.store_async(work.slots, owner, [place, row, col], buf)


@gl.jit
def publish(work, owner, count, epoch):
    """Count parts as performed; the last CTA tells their owner, or, where all ranks want them, all."""
    if work.SHOTS > 0:
        gl.store_wait(0)
        gl.barrier()
        sent = work.matmul.state + SENT + owner
        all_parts = tiles_per_owner(work) * (work.matmul.BN // work.matmul.WIDTH) * work.matmul.HALVES
        if (count > 0) & (gl.atomic_add(sent, count, sem="acq_rel", scope="gpu") == all_parts - count):
            gl.atomic_xchg(sent, 0, sem="relaxed", scope="gpu")
            if owner == work.flags.rank:
                gl.signal_all(work.flags, (work.SHOTS - 1) * work.flags.world + work.flags.rank, epoch)
            else:
                gl.signal(work.flags, owner, work.flags.rank, epoch)


@gl.jit
def fetch(work, out, source, row, cols, keep, epoch):
    """Elements of a row from the place of a source; two shots: of the row's owner, from its slot."""
    rank = source if work.SHOTS == 2 else work.flags.rank
    place = (epoch & 1) * work.flags.world + source
    start = rank.to(gl.int64) * out.rank_stride + place.to(gl.int64) * out.place_stride + row.to(gl.int64) * work.n
    return gl.load(out.places + start + cols, mask=keep, other=0.0).to(gl.float32)


@gl.jit
def sum_up(work, out, row, cols, keep, met, epoch, L: gl.constexpr):
    """The sum over ranks of elements of a row; NaN unless the wait was met."""
    AT_ONCE: gl.constexpr = min(work.flags.world, 8)
    total = gl.full([out.COLS], gl.where(met, 0.0, INFINITY) * 0.0, gl.float32, L)
    if work.SHOTS == 2:
        total += fetch(work, out, row // work.rows, row % work.rows, cols, keep & met, epoch)
    else:
        for first in range(0, work.flags.world, AT_ONCE):
            for j in gl.static_range(AT_ONCE):  # unrolled, so that the loads of these sources are in flight together
                source = work.flags.rank * 0 + first + j
                there = keep & met & (source < work.flags.world)
                total += fetch(work, out, source, row, cols, there, epoch)
    return total


@gl.jit
def hand_out(work, out, epoch):
    """All CTAs, behind their tiles: sum rows or fetch them from their owners, those of the next rank first."""
    L: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    flags = work.flags
    met = gl.wait_all(flags, (work.SHOTS - 1) * flags.world, flags.world, epoch)
    pieces = 1 if out.NORM else gl.cdiv(work.n, out.COLS)
    for item in range(gl.program_id(0), out.m * pieces, gl.num_programs(0)):
        row = (item // pieces + (flags.rank + 1) * work.rows) % out.m
        start = item % pieces * out.COLS
        squares = gl.zeros([out.COLS], gl.float32, L)
        for col in range(start, work.n if out.NORM else start + out.COLS, out.COLS):
            cols = col + gl.arange(0, out.COLS, L)
            keep = cols < work.n
            total = add_rows(work, out, sum_up(work, out, row, cols, keep, met, epoch, L), row, cols, keep)
            total = total.to(out.total.dtype.element_ty)
            gl.store(out.total + row.to(gl.int64) * work.n + cols, total, mask=keep)
            x = total.to(gl.float32)
            squares += gl.where(keep, x * x, 0.0)
        if out.NORM:
            normalize(work, out, row, gl.sum(squares, 0), L)


# ---------------------------------------------------------------- the kernel


@gl.jit(
    do_not_specialize=[
        "rank", "rank_stride", "place_stride", "eps", "flags_stride", "timeout_us", "m", "rows", "k", "whole", "split",
    ]
)  # fmt: skip
def matmul_all_reduce_kernel(
    rank, a_desc, b_desc, slots_desc, places, rank_stride, place_stride, total, normed, bias, residual, weight, eps,
    scratch, flags_ptr, flags_stride, state, timeout_us, m, rows, n, k, whole, split, WORLD: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, C_BUFS: gl.constexpr,
    SHARED: gl.constexpr, GROUP: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr, SHOTS: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, NORM: gl.constexpr, COLS: gl.constexpr,
):  # fmt: skip
    """[m, n]: the sum over ranks of a [m, k] @ b [k, n], and what Rows says. Grid: co-resident CTAs, one per SM."""
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    OWNERS: gl.constexpr = WORLD if SHOTS == 2 else 1
    tiles = gl.cdiv(rows, BM) * gl.cdiv(n, BN) * OWNERS
    mm = make_matmul(
        a_desc, b_desc, slots_desc, flags, state, scratch, k, tiles, whole, split, BM, BN, BK, STAGES, C_BUFS, SHARED,
        A_T, B_T, 0,
    )  # fmt: skip
    work = Work(mm, flags, slots_desc, rows, n, SHOTS, GROUP)
    out = Rows(
        total, normed, bias, residual, weight, eps, m, places, rank_stride, place_stride,
        HAS_BIAS, HAS_RESIDUAL, NORM, COLS,
    )  # fmt: skip
    gl.grid_dependency_wait()
    epoch = this_epoch(mm)
    EPILOGUE: gl.constexpr = epilogue if SHOTS == 2 else no_more
    run_matmul(
        work, locate, nothing_before_load, load_operands, meet, load_more, EPILOGUE, store, publish, no_communicator
    )  # fmt: skip
    if SHOTS > 0:
        hand_out(work, out, epoch)
