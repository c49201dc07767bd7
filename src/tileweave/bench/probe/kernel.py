"""Device code of `tileweave probe`: copies by TMA and by registers, flags and barriers handed back and forth.

A rank's memory has two parts of one size: what is copied lies in the first, copies go to the second one, of the same
rank or another's. A copy is done `repeats` times; a CTA begins its share of the next one when that of the last is
performed, so that one of them is one message. A rank that only looks on has nothing to copy, or no turns.

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| ring.ready | the CTA's TMA load | the CTA, before it stores | mbarrier, CTA | store_read_wait: the stores of the buffer's last use have read it |
| state[c % 128] (registers) | CTA c, its share performed | nobody | release, sys | nobody reads it |
| flags[r][p] (hand-over) = first + turn | party p's partner | party p | release / acquire, sys | monotonic: a launch's `first` is beyond the last one's |
"""

from tileweave import lang as gl
from tileweave.tiles.channel import make_channel


@gl.jit(do_not_specialize=["source", "target", "tiles", "across", "down", "repeats"])
def tma_copy_kernel(memory, source, target, tiles, across, down, repeats, STAGES: gl.constexpr):
    """Copy `tiles` boxes of `memory` [world, rows, columns], `across` of them side by side, from the rows of rank
    `source` to those of rank `target`, `down` rows below. Half a ring of loads is ahead of the stores. One warp."""
    ROWS: gl.constexpr = memory.block_shape[1]
    COLS: gl.constexpr = memory.block_shape[2]
    AHEAD: gl.constexpr = STAGES // 2
    bufs = gl.allocate_shared_memory(memory.dtype, [STAGES] + memory.block_shape, memory.layout)
    ring = make_channel(STAGES, 1)
    at, to = ring.start(), ring.start()
    count = gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))
    for _ in range(repeats):
        for i in range(count + AHEAD):
            if i < count:
                gl.store_read_wait(STAGES - 1 - AHEAD)
                tile = gl.program_id(0) + i * gl.num_programs(0)
                gl.mbarrier_expect(ring.ready_at(to), ROWS * COLS * 2)
                where = [tile // across * ROWS, tile % across * COLS]
                gl.load_async(memory, source, where, bufs.index(to.slot), ring.ready_at(to))
                to = ring.next(to)
            if i >= AHEAD:
                tile = gl.program_id(0) + (i - AHEAD) * gl.num_programs(0)
                ring.consumer_wait(at)
                where = [tile // across * ROWS + down, tile % across * COLS]
                gl.store_async(memory, target, where, bufs.index(at.slot))
                at = ring.next(at)
        gl.store_wait(0)


@gl.jit(do_not_specialize=["source", "target", "units", "repeats"])
def register_copy_kernel(
    sources, copies, stride, offsets, state, source, target, units, repeats,
    VEC: gl.constexpr, UNITS: gl.constexpr, SPREAD: gl.constexpr, VOLATILE: gl.constexpr, LOOKUP: gl.constexpr,
    RELEASE_EACH: gl.constexpr,
):  # fmt: skip
    """Copy `units` of VEC int32 from `sources` of rank `source` to `copies` of rank `target`, UNITS of them at a time;
    both are rank 0's, `stride` elements from the next one's.

    Neighbouring threads have neighbouring units, or, with SPREAD above 1, such as lie a SPREADth of all apart (`units`
    is then a multiple). The naive way: VOLATILE stores through all caches; LOOKUP, each access reads from `offsets`
    [world] where the peer's memory begins; RELEASE_EACH waits behind all UNITS, not only at the end, until they are
    performed, which is what a release in `state` [128] is for.
    """
    L: gl.constexpr = gl.BlockedLayout([1, VEC], [32, 1], [gl.num_warps(), 1], [1, 0])
    element = gl.arange(0, VEC, gl.SliceLayout(0, L))
    here = sources + source.to(gl.int64) * stride
    done = state + gl.program_id(0) % 128
    for turn in range(repeats):
        for first in range(gl.program_id(0) * UNITS, units, gl.num_programs(0) * UNITS):
            unit = first + gl.arange(0, UNITS, gl.SliceLayout(1, L))
            place = unit
            if SPREAD > 1:
                place = unit % SPREAD * (units // SPREAD) + unit // SPREAD
            where = place.to(gl.int64)[:, None] * VEC + element[None, :]
            keep = (unit < units)[:, None] & (element < VEC)[None, :]
            # Not from L1, where the last copy of so few bytes may have left them: nothing in a launch empties it.
            values = gl.load(here + where, mask=keep, cache_modifier=".cg")
            if LOOKUP:
                begin = gl.load(offsets + (target + 0 * unit), mask=unit < units, other=0, volatile=True)
                where += begin[:, None]
            else:
                where += target.to(gl.int64) * stride
            if VOLATILE:
                gl.store(copies + where, values, mask=keep, cache_modifier=".wt")
            else:
                gl.store(copies + where, values, mask=keep)
            if RELEASE_EACH:
                gl.barrier()
                gl.atomic_xchg(done, turn, sem="release", scope="sys")
        gl.barrier()
        gl.atomic_xchg(done, turn, sem="release", scope="sys")


@gl.jit(do_not_specialize=["rank", "party", "mine", "theirs", "first", "turns", "flags_stride", "timeout_us"])
def flag_kernel(rank, party, mine, theirs, first, turns, out, flags_ptr, flags_stride, timeout_us, WORLD: gl.constexpr):
    """Two parties hand a flag to each other, `turns` times each. Between ranks `party` of rank `mine` is 0, that of
    `theirs` 1, a CTA each; within one, where mine is theirs, CTA c is party c. out [party] takes how often it came."""
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    me = party + gl.program_id(0)
    partner = gl.where(me == 0, theirs, mine)
    came = 0
    for turn in range(turns):
        if me == 0:
            gl.signal(flags, partner, 1, first + turn)
            came += gl.wait(flags, 0, first + turn).to(gl.int32)
        else:
            came += gl.wait(flags, 1, first + turn).to(gl.int32)
            gl.signal(flags, partner, 0, first + turn)
    gl.store(out + me, came)


@gl.jit
def serve(bars, turns):
    """Arrive at the first barrier, wait for the second."""
    for turn in range(turns):
        gl.mbarrier_arrive(bars.index(0), count=1)
        gl.mbarrier_wait(bars.index(1), turn & 1)


@gl.jit
def answer(bars, turns):
    """Wait for the first barrier, arrive at the second."""
    for turn in range(turns):
        gl.mbarrier_wait(bars.index(0), turn & 1)
        gl.mbarrier_arrive(bars.index(1), count=1)


@gl.jit(do_not_specialize=["turns"])
def mbarrier_kernel(out, turns):
    """Two partitions of a CTA hand a pair of mbarriers to each other, `turns` times each; out [1] takes `turns`."""
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], gl.MBarrierLayout())
    for i in gl.static_range(2):
        gl.mbarrier_init(bars.index(i), count=1)
    gl.warp_specialize([(serve, (bars, turns)), (answer, (bars, turns))], [4], [24])
    gl.store(out, turns)
