"""The matmul template: a persistent, warp-specialized tile loop whose ends are left open.

    loader       one warp: TMA loads of A and B tiles into a ring
    multiplier   a warp group for each half of a tile's rows (one for tiles of 64 rows): wgmma over the ring, then the
                 op's EPILOGUE on the accumulator, in parts
    storer       a warp for each multiplier: the op's STORE of each finished part
    extra        a warp that some ops have besides: their EXTRA role, with the epoch
    communicator whole CTAs below COMM_SMS that only run the op's COMMUNICATE role

TENSOR: the products are tcgen05 in place of wgmma, of roles that matmul_tcgen05.py has. A launch says so by the box of its
parts: there is one multiplier of all 128 rows.

A part, or message, is a multiplier's ROWS by WIDTH columns, 128 bytes wide: what TMA moves in one piece. A multiplier
hands parts to its storer through a ring of C_BUFS buffers, so a tile's first part travels while its last is still in
registers; and as the multipliers wait for each other nowhere, one computes while the other is in its epilogue.

SHARED: the last tiles of the loop, those from `whole` on, are shared by `split` CTAs each, of which each multiplies its
share of the K steps: they fill a last wave that whole tiles would leave half empty. The CTAs exchange their accumulators
through `scratch`, in float32, and each finishes every split-th part. All of this is the last work of its CTA.

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| ring.ready / empty | loader's TMA / multiplier | multiplier / loader | mbarrier, CTA | Channel's phases |
| results[h].ready / empty | multiplier h, a part is in its buffer / storer h, its bulk store has read it | storer / multiplier | mbarrier, CTA | Channel's phases |
| state[DONE] | every storer, the roles before it have read the epoch | nobody; the last one advances the epoch | acq_rel, gpu | the last one puts it back to 0 |
| state[EPOCH] | the last CTA | next launch (kernel boundary) | stream order | read by all roles of a CTA before its storers arrive at DONE |
| flags[rank][FIRST_SHARE + h * grid + cta] = epoch | multiplier h of a CTA that shares a tile, its accumulator is in scratch | multipliers h of those that share it | release / acquire, sys | monotonic; scratch belongs to one launch |

A fused kernel states what differs: LOCATE (which tile comes t-th, and where its rows lie), BEFORE_LOAD (what the loads
of a tile must wait for), LOAD (where the operands of a K step come from), LOAD_SCALES (and scales of blocks along K, if
they have any), WITHIN (how many of its K steps a multiplier's rows take, where some tiles are not full; TENSOR does not
ask), AHEAD and SCALE (factors of an accumulator, loaded before its K steps, or, TENSOR, of a part, which is a pair where
a tile is made of two products), MEET, LOAD_MORE and EPILOGUE (what an accumulator waits for and takes in), STORE and
PUBLISH (where a part goes, and who is told) and COMMUNICATE. Its `work` aggregate holds a `Matmul` as `work.matmul`.
"""

from tileweave import lang as gl
from tileweave.tiles.block_scales import load_scales
from tileweave.tiles.channel import Channel, make_channel
from tileweave.tiles.matmul_tcgen05 import MORE, fetch_role, issue_role, make_accumulators, part_of
from tileweave.tiles.matmul_wgmma import multiply_tile, pass_over
from tileweave.tiles.units import first_unit, unit, unit_step, units

FIRST_SHARE = gl.constexpr(128)  # flags below are the op's
# Words of `state`, this rank's own memory; those from OWN_WORDS on are the op's.
EPOCH, DONE, OWN_WORDS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gl.aggregate
class Matmul:
    """What the roles of a matmul CTA share. Tiles are BM x BN, K steps of BK; A_T, B_T: the operand is stored K x M, N x K.

    Accumulators are ACC wide: BN, or a multiple of it where SCALE makes one tile of several products side by side."""

    a_desc: gl.tensor_descriptor
    b_desc: gl.tensor_descriptor
    a_bufs: gl.shared_memory_descriptor
    b_bufs: gl.shared_memory_descriptor
    ring: Channel
    c_bufs: gl.shared_memory_descriptor
    result_0: Channel
    result_1: Channel
    flags: gl.Flags
    state: gl.tensor
    scratch: gl.tensor
    k_steps: gl.tensor
    tiles: gl.tensor
    whole: gl.tensor
    split: gl.tensor
    BM: gl.constexpr
    BN: gl.constexpr
    ACC: gl.constexpr
    BK: gl.constexpr
    HALVES: gl.constexpr  # multipliers
    ROWS: gl.constexpr  # of each
    A_ROWS: gl.constexpr  # of A that a K step loads
    WIDTH: gl.constexpr
    SHARED: gl.constexpr
    A_T: gl.constexpr
    B_T: gl.constexpr
    COMM_SMS: gl.constexpr
    TENSOR: gl.constexpr

    @gl.constexpr_function
    def __init__(
        self, a_desc, b_desc, a_bufs, b_bufs, ring, c_bufs, result_0, result_1, flags, state, scratch,
        k_steps, tiles, whole, split, BM, BN, ACC, BK, HALVES, ROWS, A_ROWS, WIDTH, SHARED, A_T, B_T, COMM_SMS, TENSOR,
    ):  # fmt: skip
        self.a_desc, self.b_desc = a_desc, b_desc
        self.a_bufs, self.b_bufs, self.ring = a_bufs, b_bufs, ring
        self.c_bufs, self.result_0, self.result_1 = c_bufs, result_0, result_1
        self.flags, self.state, self.scratch = flags, state, scratch
        self.k_steps, self.tiles, self.whole, self.split = k_steps, tiles, whole, split
        self.BM, self.BN, self.BK = gl.constexpr(BM), gl.constexpr(BN), gl.constexpr(BK)
        self.ACC = gl.constexpr(ACC)
        self.HALVES, self.ROWS = gl.constexpr(HALVES), gl.constexpr(ROWS)
        self.A_ROWS, self.WIDTH, self.SHARED = gl.constexpr(A_ROWS), gl.constexpr(WIDTH), gl.constexpr(SHARED)
        self.A_T, self.B_T, self.COMM_SMS = gl.constexpr(A_T), gl.constexpr(B_T), gl.constexpr(COMM_SMS)
        self.TENSOR = gl.constexpr(TENSOR)


@gl.jit
def make_matmul(
    a_desc, b_desc, c_desc, flags, state, scratch, k, tiles, whole, split,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, C_BUFS: gl.constexpr,
    SHARED: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr, COMM_SMS: gl.constexpr,
):  # fmt: skip
    """Allocate the rings of operands and of results, whose parts have the box of `c_desc`, the last two dimensions of
    which are ROWS x WIDTH; that of `b_desc` is as wide as an accumulator. `tiles` is how many output tiles the whole grid
    computes, the first `whole` of them alone.

    A whose boxes have fewer rows than a tile has no more: the rows below are nobody's, and zero at first. TMA would fill
    them at each step, which takes it longer than to load as many."""
    DIMS: gl.constexpr = len(c_desc.block_shape)
    ROWS: gl.constexpr = c_desc.block_shape[DIMS - 2]
    HALVES: gl.constexpr = BM // ROWS
    ACC: gl.constexpr = b_desc.block_shape[0 if B_T else 1]
    A_ROWS: gl.constexpr = BM if A_T else a_desc.block_shape[0]
    TENSOR: gl.constexpr = HALVES == 1 and ROWS == 128
    BEHIND: gl.constexpr = MORE if TENSOR else 0
    PLACES: gl.constexpr = STAGES + BEHIND
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [PLACES, BK, BM] if A_T else [PLACES, BM, BK], a_desc.layout)
    if A_ROWS < BM:
        L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        for i in range(STAGES):
            a_bufs.index(i).store(gl.zeros([BM, BK], gl.float32, L).to(a_desc.dtype))
        gl.fence_async_shared()
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_shape, b_desc.layout)
    c_bufs = gl.allocate_shared_memory(c_desc.dtype, [HALVES * C_BUFS] + c_desc.block_shape, c_desc.layout)
    result_0 = make_channel(C_BUFS, 1)
    result_1 = make_channel(C_BUFS, 1) if HALVES > 1 else result_0
    return Matmul(
        a_desc, b_desc, a_bufs, b_bufs, make_channel(STAGES, HALVES, BEHIND), c_bufs, result_0, result_1, flags, state, scratch,
        gl.cdiv(k, BK), tiles, whole, split, BM, BN, ACC, BK, HALVES, ROWS, A_ROWS, c_desc.block_shape[DIMS - 1], SHARED,
        A_T, B_T, COMM_SMS, TENSOR,
    )  # fmt: skip


@gl.jit
def more(mm):
    """The ring of what LOAD_MORE loads: that of the operands or, TENSOR, one of its own."""
    if mm.TENSOR:
        return mm.ring.behind(MORE)
    else:
        return mm.ring


@gl.jit
def results(mm, HALF: gl.constexpr):
    """The ring between a multiplier and its storer; its buffers are those of `result_buf`."""
    if HALF == 0:
        return mm.result_0
    else:
        return mm.result_1


@gl.jit
def result_buf(mm, HALF: gl.constexpr, at):
    """The buffer of a place in `results`."""
    return mm.c_bufs.index(HALF * mm.result_0.STAGES + at.slot)


@gl.jit
def this_epoch(mm):
    """The number of this call, from 1. Each role reads it before anything else."""
    return gl.load(mm.state + EPOCH) + 1


@gl.jit
def finish(mm, epoch):
    """A storer's end as far as the epoch is concerned; the last one advances it. A world of one has no use for epochs
    unless its CTAs share tiles."""
    if (mm.flags.world > 1) | mm.SHARED:
        gl.barrier()
        if gl.atomic_add(mm.state + DONE, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) * mm.HALVES - 1:
            gl.atomic_xchg(mm.state + DONE, 0, sem="relaxed", scope="gpu")
            gl.atomic_xchg(mm.state + EPOCH, epoch, sem="relaxed", scope="gpu")


@gl.jit
def grouped_order(t, rows, cols, GROUP: gl.constexpr):
    """(row, column) of the t-th of rows x cols tiles, GROUP rows at a time, so that a wave's operands stay in L2; of any
    tile beyond the last one, as a storer asks which comes next before it knows that there is none."""
    width = GROUP * cols
    first = (t // width) * GROUP
    height = gl.maximum(gl.minimum(rows - first, GROUP), 1)
    return first + (t % width) % height, (t % width) // height


@gl.jit
def nothing_before_load(work, owner, row, epoch):
    """BEFORE_LOAD of a kernel whose operands are all local; returns whether what it waits for has come."""
    return epoch == epoch


@gl.jit
def load_operands(work, at, bar, owner, a_row, col, step, epoch, there):
    """LOAD of a kernel whose operands are `a_desc` and `b_desc`: start the loads of a K step to a place in the ring."""
    mm = work.matmul
    k = step * mm.BK
    a_buf = mm.a_bufs.index(at.slot)
    b_buf = mm.b_bufs.index(at.slot)
    if mm.A_T:
        gl.tma_load(mm.a_desc, [k, a_row], bar, a_buf)
    else:
        boxes = gl.reinterpret(a_buf, mm.a_desc.dtype, [mm.BM // mm.A_ROWS, mm.A_ROWS, mm.BK], mm.a_desc.layout)
        gl.tma_load(mm.a_desc, [a_row, k], bar, boxes.index(0))
    if mm.B_T:
        gl.tma_load(mm.b_desc, [col, k], bar, b_buf)
    else:
        gl.tma_load(mm.b_desc, [k, col], bar, b_buf)


@gl.jit
def all_steps(work, owner, row, steps):
    """WITHIN of a kernel whose tiles are whole."""
    return steps


@gl.jit
def nobody_to_meet(work, owner, epoch):
    """MEET of an epilogue that waits for nobody."""
    return epoch == epoch


@gl.jit
def nothing_more(work, at, owner, row, col, epoch, met):
    """LOAD_MORE of an epilogue that takes nothing in; returns the next place in the ring."""
    return at


@gl.jit
def nobody_to_tell(work, owner, count, epoch):
    """PUBLISH of a kernel whose results stay where they are."""
    pass


@gl.jit
def no_communicator(work):
    """COMMUNICATE of an intra-SM kernel."""
    pass


@gl.jit
def load_role(
    work, LOCATE: gl.constexpr, BEFORE_LOAD: gl.constexpr, LOAD: gl.constexpr, MEET: gl.constexpr,
    LOAD_MORE: gl.constexpr, now=None, scales=None, LOAD_SCALES: gl.constexpr = load_scales,
):  # fmt: skip
    """Loader: for each tile, all K steps of A and B through the ring, then what its epilogue takes in. TENSOR: `now` is
    this call's epoch, as a commit does not tell the storers, by way of the multiplier, that this role has read it; with
    `scales`, those of blocks along K come with each step."""
    mm = work.matmul
    STEP_BYTES: gl.constexpr = mm.BK * (mm.a_desc.dtype.primitive_bitwidth // 8)
    BESIDE: gl.constexpr = 0 if scales is None else scales.BYTES
    epoch = this_epoch(mm) if now is None else now
    met = epoch == epoch
    at, previous = mm.ring.start(), -1
    for u in range(first_unit(mm), units(mm), unit_step(mm)):
        t, share, shares, first, last = unit(mm, u)
        owner, a_row, row, col = LOCATE(work, t)
        there = BEFORE_LOAD(work, owner, row, epoch)
        for step in range(first, last):
            mm.ring.producer_wait(at)
            bar = mm.ring.ready_at(at)
            gl.mbarrier_expect(bar, (mm.A_ROWS + mm.ACC) * STEP_BYTES + BESIDE)
            if scales is not None:
                LOAD_SCALES(work, scales, at, bar, owner, a_row, col, step, epoch, there)
            LOAD(work, at, bar, owner, a_row, col, step, epoch, there)
            at = mm.ring.next(at)
        if owner != previous:
            met = MEET(work, owner, epoch)
            previous = owner
        for j in range(share, mm.BN // mm.WIDTH, shares):
            at = LOAD_MORE(work, at, owner, row, col + j * mm.WIDTH, epoch, met)


@gl.jit
def part_buf(mm, at, HALF: gl.constexpr, like):
    """A multiplier's half of the operand buffer at a place in the ring, as a part: what LOAD_MORE fills. `like` is the
    descriptor that loads it."""
    halves = gl.reinterpret(mm.a_bufs.index(at.slot), like.dtype, [mm.HALVES] + like.block_shape, like.layout)
    return halves.index(HALF)


@gl.jit
def take_part(mm, part, at, HALF: gl.constexpr, like, LAYOUT: gl.constexpr):
    """EPILOGUE's end of LOAD_MORE: `part` plus the part at a place in the ring, in float32."""
    mm.ring.consumer_wait(at)
    part += part_buf(mm, at, HALF, like).reshape([mm.ROWS, mm.WIDTH]).load(LAYOUT).to(gl.float32)
    gl.fence_async_shared()
    mm.ring.release(at)
    return part


@gl.jit
def scratch_at(mm, cta, HALF: gl.constexpr, j, LAYOUT: gl.constexpr):
    """Pointers to part j of an accumulator in scratch."""
    rows = gl.arange(0, mm.ROWS, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, mm.WIDTH, gl.SliceLayout(0, LAYOUT))
    part = (cta * mm.HALVES + HALF) * (mm.BN // mm.WIDTH) + j
    return mm.scratch + part.to(gl.int64) * (mm.ROWS * mm.WIDTH) + rows[:, None] * mm.WIDTH + cols[None, :]


@gl.jit
def give_shares(mm, parts, share, epoch, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """Leave the parts that others finish in scratch, say so, and wait for theirs; False after a timeout."""
    for j in gl.static_range(mm.BN // mm.WIDTH):
        if j % mm.split != share:
            gl.store(scratch_at(mm, first_unit(mm), HALF, j, LAYOUT), part_of(mm, parts, j, LAYOUT))
    gl.barrier()
    own = FIRST_SHARE + HALF * unit_step(mm) + first_unit(mm)
    gl.signal(mm.flags, mm.flags.rank, own, epoch)
    return gl.wait_all(mm.flags, own - share, mm.split, epoch, skip=own)


@gl.jit
def take_shares(mm, part, j, share, met, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """`part` plus the others' shares of it, in an order that depends on no timing; NaN unless all have come."""
    for i in range(1, mm.split):
        others = first_unit(mm) - share + (share + i) % mm.split
        cta = gl.where(met, others, first_unit(mm))  # not met: what nobody writes, as others may still be storing
        part += gl.load(scratch_at(mm, cta, HALF, j, LAYOUT))
    return part + gl.where(met, 0.0, float("nan"))


@gl.jit
def nothing_ahead(work, owner, row, col, LAYOUT: gl.constexpr):
    """AHEAD of a product without factors: what SCALE needs, loaded before the K steps, whose time hides that of the load."""
    return row


@gl.jit
def unscaled(work, acc, ahead):
    """SCALE of a product without factors."""
    return acc


@gl.jit
def multiply_role(
    work, HALF: gl.constexpr, LOCATE: gl.constexpr, EPILOGUE: gl.constexpr, WITHIN: gl.constexpr,
    AHEAD: gl.constexpr, SCALE: gl.constexpr, accumulators=None,
):  # fmt: skip
    """Multiplier: accumulate half a tile or, TENSOR, take one that has been, pass its parts through the op's epilogue to
    the storer."""
    mm = work.matmul
    epoch = this_epoch(mm)
    DEPTH: gl.constexpr = 256 // mm.a_desc.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, mm.ACC, DEPTH])
    PART: gl.constexpr = (
        gl.tensor_memory_registers(mm.ROWS, mm.WIDTH, gl.num_warps())
        if mm.TENSOR
        else gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, mm.WIDTH, DEPTH])
    )
    result = results(mm, HALF)
    at, done = more(mm).start(), result.start()
    if mm.TENSOR:
        taken = accumulators.ring.start()
    for u in range(first_unit(mm), units(mm), unit_step(mm)):
        t, share, shares, first, last = unit(mm, u)
        owner, a_row, row, col = LOCATE(work, t)
        if mm.TENSOR:
            accumulators.ring.consumer_wait(taken)
            parts = accumulators.bufs.index(taken.slot)
        else:
            steps = WITHIN(work, owner, row + HALF * mm.ROWS, last - first)
            ahead = AHEAD(work, owner, row + HALF * mm.ROWS, col, LAYOUT)
            acc, at = multiply_tile(mm, at, steps, HALF, LAYOUT)
            at = pass_over(mm, at, last - first - steps)
            acc = SCALE(work, acc, ahead)
            parts = gl.columns(acc, mm.WIDTH)
        met = epoch == epoch
        if mm.SHARED:
            if shares > 1:
                met = give_shares(mm, parts, share, epoch, HALF, PART)
        for j in gl.static_range(mm.BN // mm.WIDTH):
            if j % shares == share:
                part = part_of(mm, parts, j, PART)
                if mm.SHARED:
                    if shares > 1:
                        part = take_shares(mm, part, j, share, met, HALF, PART)
                if mm.TENSOR:
                    part = SCALE(work, part, AHEAD(work, owner, row, col + j * mm.WIDTH, PART))
                part, at = EPILOGUE(work, part, at, HALF, owner, row + HALF * mm.ROWS, col + j * mm.WIDTH, PART)
                result.producer_wait(done)
                result_buf(mm, HALF, done).reshape([mm.ROWS, mm.WIDTH]).store(part.to(mm.c_bufs.dtype))
                gl.fence_async_shared()
                result.publish(done)
                done = result.next(done)
        if mm.TENSOR:
            accumulators.ring.release(taken)
            taken = accumulators.ring.next(taken)


@gl.jit
def store_role(
    work, HALF: gl.constexpr, LOCATE: gl.constexpr, MEET: gl.constexpr, STORE: gl.constexpr, PUBLISH: gl.constexpr
):
    """Storer: carry the parts of a multiplier away; tell an owner once this CTA has no more tiles for it."""
    mm = work.matmul
    epoch = this_epoch(mm)
    met = epoch == epoch
    result = results(mm, HALF)
    done, count, previous = result.start(), 0, -1
    finished = epoch != epoch
    for u in range(first_unit(mm), units(mm), unit_step(mm)):
        t, share, shares, first, last = unit(mm, u)
        owner, a_row, row, col = LOCATE(work, t)
        if owner != previous:
            met = MEET(work, owner, epoch)
            previous = owner
        for j in range(share, mm.BN // mm.WIDTH, shares):
            result.consumer_wait(done)
            if not finished:  # early, as its round trip is long: the other roles have read the epoch by now
                finish(mm, epoch)
                finished = epoch == epoch
            STORE(work, owner, row + HALF * mm.ROWS, col + j * mm.WIDTH, result_buf(mm, HALF, done), epoch, met)
            gl.store_read_wait(0)
            result.release(done)
            done = result.next(done)
            count += 1
        after, next_share, next_shares, next_first, next_last = unit(mm, u + unit_step(mm))
        next_owner, next_a_row, next_row, next_col = LOCATE(work, after)
        if (next_owner != owner) | (after >= mm.tiles):
            PUBLISH(work, owner, count, epoch)
            count = 0
    if not finished:
        finish(mm, epoch)


@gl.jit
def run_matmul(
    work, LOCATE: gl.constexpr, BEFORE_LOAD: gl.constexpr, LOAD: gl.constexpr, MEET: gl.constexpr,
    LOAD_MORE: gl.constexpr, EPILOGUE: gl.constexpr, STORE: gl.constexpr, PUBLISH: gl.constexpr,
    COMMUNICATE: gl.constexpr, REGISTERS: gl.constexpr = 48, WITHIN: gl.constexpr = all_steps,
    AHEAD: gl.constexpr = nothing_ahead, SCALE: gl.constexpr = unscaled,
    EXTRA: gl.constexpr = None, epoch=0, scales=None, LOAD_SCALES: gl.constexpr = load_scales,
):  # fmt: skip
    """Run the roles. A worker warp's 48 REGISTERS do for addresses and waits unless an op has many of them, a multiplier's
    224 for its accumulator; TENSOR leaves as many as anyone wants. With an EXTRA role `epoch` is this call's, read before any role may advance it.
    TENSOR: `scales` are those of blocks along K, which LOAD_SCALES loads ahead of the operands of a K step: a LOAD may wait
    for all of it."""
    HALVES: gl.constexpr = work.matmul.HALVES
    if gl.program_id(0) < work.matmul.COMM_SMS:
        COMMUNICATE(work)
    elif work.matmul.TENSOR:
        accumulators = make_accumulators(work.matmul)
        now = this_epoch(work.matmul)
        NOBODY: gl.constexpr = nobody_to_meet
        NOTHING: gl.constexpr = nothing_more
        gl.warp_specialize(
            [
                (multiply_role, (work, 0, LOCATE, EPILOGUE, WITHIN, AHEAD, SCALE, accumulators)),
                (load_role, (work, LOCATE, BEFORE_LOAD, LOAD, NOBODY, NOTHING, now, scales, LOAD_SCALES)),
                (issue_role, (work, accumulators, scales)),
                (fetch_role, (work, LOCATE, MEET, LOAD_MORE, now)),
                (store_role, (work, 0, LOCATE, MEET, STORE, PUBLISH)),
            ]
            + ([] if EXTRA is None else [(EXTRA, (work, epoch))]),
            [1, 1, 1, 1] + ([] if EXTRA is None else [1]),
            [128, 128, 128, 128] + ([] if EXTRA is None else [128]),
        )
    elif HALVES == 1:
        gl.warp_specialize(
            [
                (multiply_role, (work, 0, LOCATE, EPILOGUE, WITHIN, AHEAD, SCALE)),
                (load_role, (work, LOCATE, BEFORE_LOAD, LOAD, MEET, LOAD_MORE)),
                (store_role, (work, 0, LOCATE, MEET, STORE, PUBLISH)),
            ]
            + ([] if EXTRA is None else [(EXTRA, (work, epoch))]),
            [1, 1] + ([] if EXTRA is None else [1]),
            [64, 64] + ([] if EXTRA is None else [64]),
        )
    else:
        gl.warp_specialize(
            [
                (multiply_role, (work, 0, LOCATE, EPILOGUE, WITHIN, AHEAD, SCALE)),
                (multiply_role, (work, 1, LOCATE, EPILOGUE, WITHIN, AHEAD, SCALE)),
                (load_role, (work, LOCATE, BEFORE_LOAD, LOAD, MEET, LOAD_MORE)),
                (store_role, (work, 0, LOCATE, MEET, STORE, PUBLISH)),
                (store_role, (work, 1, LOCATE, MEET, STORE, PUBLISH)),
            ]
            + ([] if EXTRA is None else [(EXTRA, (work, epoch))]),
            [4, 1, 1, 1] + ([] if EXTRA is None else [1]),
            [224, REGISTERS, REGISTERS, REGISTERS] + ([] if EXTRA is None else [REGISTERS]),
        )
