"""The collectives: a rank lays its parts out in its own slot, tells its peers, and takes what it needs from theirs.

A part is what one rank gets of another: `part` units of VEC elements, in one piece in the slot. `x` and `out` are plain
tensors in which a part is strided: every `run` units there follow WORLD - 1 runs that belong to others. So a unit has
one address in the slot and another in the tensor, and shards of any dimension are moved without reshaping copies.

| collective | what is laid out | what is taken |
|---|---|---|
| all_gather | x, as it is | every source's x, to its runs in out |
| all_to_all | SPLIT: a part per destination, from its runs in x | every source's part for this rank, to its runs in out |
| reduce_scatter | SPLIT | REDUCE: the sum of every source's part for this rank, in rank order in float32 |
| all_reduce, small | x, as it is | REDUCE: the sum of every source's x, likewise; hence the same bits on all ranks |

Data are pulled, not pushed: a slot holds a part once, however many ranks want it, and what arrives goes straight to the
result. Registers carry it, since they can pick single elements and add: a full grid of 16-byte loads fills the link.

A part is shared out to the CTAs in blocks, in the same way on all ranks: CTA c needs CTA c of every peer and nobody
else, nor any CTA of its own grid. It works in up to STEPS steps, a block each, each laid out and published before the one before it is
taken, so that waiting and laying out are hidden behind the link.

| word | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| slot e % 2 of rank s | s in call e, CTA c the tiles of CTA c | CTA c of every rank, after flags[.][c, s] | flags | s writes it again in call e + 2, after it has seen all peers in call e + 1, which they entered when they had ended call e |
| flags[d][c, s] = e * STEPS + step | CTA c of rank s, when step is laid out | CTA c of rank d, before it takes the step | release / acquire, sys | one writer, monotonic; a call without CTA c leaves it behind, the next one with it is ahead of both |
| state[DONE] | every CTA at its end | nobody; the last one advances the epoch | acq_rel, gpu | the last one puts it back to 0 |
| state[EPOCH] | the last CTA | next launch (kernel boundary) | stream order | read by all CTAs before they arrive at DONE |

Two slots need every rank to wait for every peer in each call: CTA 0, which every call has, does. After a wait that timed
out nothing is read from peers, and what is missing becomes NaN (all bits set).
"""

from tileweave import lang as gl

# Words of `state`, this rank's own memory.
EPOCH = gl.constexpr(0)
DONE = gl.constexpr(1)
INFINITY = gl.constexpr(float("inf"))


@gl.aggregate
class Work:
    """What the functions share. Sizes are in units of VEC elements, distances of slots in lines of LINE elements."""

    flags: gl.Flags
    x: gl.tensor  # x_units
    out: gl.tensor  # out_units
    slots: gl.tensor  # of all ranks,
    rank_lines: gl.tensor  # the distance of two ranks,
    part_lines: gl.tensor  # the distance of two parts of a slot,
    slot: gl.tensor  # and where the slot of this call begins
    part: gl.tensor
    split_run: gl.tensor
    concat_run: gl.tensor
    x_units: gl.tensor
    out_units: gl.tensor
    block: gl.tensor  # units of a part that a CTA moves in a step
    SPLIT: gl.constexpr
    AVERAGE: gl.constexpr
    VEC: gl.constexpr
    LINE: gl.constexpr
    TILE: gl.constexpr  # units that are moved at once

    @gl.constexpr_function
    def __init__(
        self, flags, x, out, slots, rank_lines, part_lines, slot, part, split_run, concat_run, x_units, out_units, block,
        SPLIT, AVERAGE, VEC, LINE, TILE,
    ):  # fmt: skip
        self.flags = flags
        self.x = x
        self.out = out
        self.slots = slots
        self.rank_lines = rank_lines
        self.part_lines = part_lines
        self.slot = slot
        self.part = part
        self.split_run = split_run
        self.concat_run = concat_run
        self.x_units = x_units
        self.out_units = out_units
        self.block = block
        self.SPLIT = gl.constexpr(SPLIT)
        self.AVERAGE = gl.constexpr(AVERAGE)
        self.VEC = gl.constexpr(VEC)
        self.LINE = gl.constexpr(LINE)
        self.TILE = gl.constexpr(TILE)


@gl.constexpr_function
def at_once(parts):
    """How many parts a tile takes in: all, or 16 of them; a power of two."""
    return min(1 << (parts - 1).bit_length(), 16)


@gl.constexpr_function
def unit_layout(vec, warps):
    """Of a tile [units, VEC]: a thread has a unit, a warp 32 in a row."""
    return gl.BlockedLayout([1, vec], [32, 1], [warps, 1], [1, 0])


@gl.jit
def span(work, step):
    """The units of every part that this CTA moves in a step: the first, and the one past the end."""
    first = (step * gl.num_programs(0) + gl.program_id(0)) * work.block
    return first, gl.minimum(first + work.block, work.part)


@gl.jit
def pointers(work, base, unit, L: gl.constexpr):
    """Pointers to the VEC elements of each unit."""
    return base + unit[:, None] * work.VEC + gl.arange(0, work.VEC, gl.SliceLayout(0, L))[None, :]


@gl.jit
def mask_of(work, keep, L: gl.constexpr):
    """A mask of units as one of their elements."""
    return keep[:, None] & (gl.arange(0, work.VEC, gl.SliceLayout(0, L)) < work.VEC)[None, :]


@gl.jit
def strided(work, i, place, run):
    """Where unit `i` of the part at `place` lies in a tensor in which the parts' runs take turns."""
    return ((i // run).to(gl.int64) * (work.flags.world - 1) + place) * run + i


@gl.jit
def in_slot(work, rank, part, i, L: gl.constexpr):
    """Pointers to unit `i` of a part in the slot of a rank; both may differ from unit to unit."""
    lines = rank.to(gl.int64) * work.rank_lines + part.to(gl.int64) * work.part_lines + work.slot
    places = (lines * work.LINE + i.to(gl.int64) * work.VEC)[:, None]
    return work.slots + places + gl.arange(0, work.VEC, gl.SliceLayout(0, L))[None, :]


@gl.jit
def lay_out(work, step):
    """Copy this CTA's share of all parts from x to the own slot."""
    PARTS: gl.constexpr = work.flags.world if work.SPLIT else 1
    PEERS: gl.constexpr = at_once(PARTS)
    ROWS: gl.constexpr = work.TILE // PEERS
    L: gl.constexpr = unit_layout(work.VEC, gl.num_warps())
    flags = work.flags
    start, end = span(work, step)
    row = gl.arange(0, work.TILE, gl.SliceLayout(1, L))
    for base in range(start, end, ROWS):
        i = base + row % ROWS
        for first in range(0, PARTS, PEERS):
            n = first + row // ROWS
            part = (flags.rank + 1 + n) % PARTS
            source = strided(work, i, part, work.split_run)
            keep = (i < end) & (n < PARTS)
            inside = mask_of(work, keep & (source < work.x_units), L)
            values = gl.load(pointers(work, work.x, source, L), mask=inside)
            gl.store(in_slot(work, flags.rank, part, i, L), values, mask=mask_of(work, keep, L))


@gl.jit
def exchange(work, step, met):
    """Copy this CTA's share of the sources' parts from their slots to the result."""
    PEERS: gl.constexpr = at_once(work.flags.world)
    ROWS: gl.constexpr = work.TILE // PEERS
    L: gl.constexpr = unit_layout(work.VEC, gl.num_warps())
    flags = work.flags
    mine = flags.rank if work.SPLIT else 0 * flags.rank
    start, end = span(work, step)
    row = gl.arange(0, work.TILE, gl.SliceLayout(1, L))
    for base in range(start, end, ROWS):
        i = base + row % ROWS
        for first in range(0, flags.world, PEERS):
            n = first + row // ROWS
            source = (flags.rank + 1 + n) % flags.world
            target = strided(work, i, source, work.concat_run)
            keep = mask_of(work, (i < end) & (n < flags.world) & (target < work.out_units), L)
            values = gl.load(in_slot(work, source, mine, i, L), mask=keep & met, other=-1)
            gl.store(pointers(work, work.out, target, L), values, mask=keep)


@gl.jit
def add_source(work, total, source, mine, i, keep, L: gl.constexpr):
    """`total` plus the part of one source."""
    value = gl.load(in_slot(work, source, mine, i, L), mask=keep, other=0.0).to(gl.float32)
    if work.AVERAGE:  # before the sum: a mean that the type can hold does not overflow on the way
        value = value * (1.0 / work.flags.world)
    return total + value


@gl.jit
def reduce(work, step, met):
    """Sum this CTA's share of the sources' parts, in rank order in float32, into the result."""
    AT_ONCE: gl.constexpr = min(work.flags.world, 8)
    ROWS: gl.constexpr = work.TILE // min(at_once(work.flags.world), 4)
    L: gl.constexpr = unit_layout(work.VEC, gl.num_warps())
    flags = work.flags
    mine = flags.rank if work.SPLIT else 0 * flags.rank
    start, end = span(work, step)
    for base in range(start, end, ROWS):
        i = base + gl.arange(0, ROWS, gl.SliceLayout(1, L))
        keep = mask_of(work, i < end, L)
        total = gl.full([ROWS, work.VEC], gl.where(met, 0.0, INFINITY) * 0.0, gl.float32, L)  # NaN if not met
        for first in range(0, flags.world, AT_ONCE):
            for j in gl.static_range(AT_ONCE):  # unrolled, so that the loads of these sources are in flight together
                source = first + j
                total = add_source(work, total, source, mine, i, keep & met & (source < flags.world), L)
        values = total.to(work.out.dtype.element_ty)
        gl.store(pointers(work, work.out, i.to(gl.int64), L), values, mask=keep)


@gl.jit
def publish(flags, value):
    """Tell CTA `c` of every rank that what this CTA `c` has laid out so far is there."""
    gl.barrier()
    gl.signal_all(flags, gl.program_id(0) * flags.world + flags.rank, value)


@gl.jit
def arrived(flags, value):
    """Wait for what CTA `c` of every rank has laid out; False after a timeout."""
    return gl.wait_all(flags, gl.program_id(0) * flags.world, flags.world, value)


@gl.jit(
    do_not_specialize=[
        "rank", "flags_stride", "timeout_us", "rank_lines", "slot_lines", "part_lines", "part", "split_run",
        "concat_run", "x_units", "out_units", "block", "steps",
    ]
)  # fmt: skip
def collective_kernel(
    rank,
    x,
    out,
    slots,
    rank_lines,
    slot_lines,
    part_lines,
    flags_ptr,
    flags_stride,
    state,
    timeout_us,
    part,
    split_run,
    concat_run,
    x_units,
    out_units,
    block,
    steps,
    WORLD: gl.constexpr,
    SPLIT: gl.constexpr,
    REDUCE: gl.constexpr,
    AVERAGE: gl.constexpr,
    VEC: gl.constexpr,
    LINE: gl.constexpr,
    TILE: gl.constexpr,
    STEPS: gl.constexpr,
):
    """One collective on x and out, flat. Grid: co-resident CTAs, as many on every rank, with WORLD flags for each."""
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    epoch = gl.load(state + EPOCH) + 1
    slot = (epoch & 1).to(gl.int64) * slot_lines
    work = Work(
        flags, x, out, slots, rank_lines, part_lines, slot, part, split_run, concat_run, x_units, out_units, block,
        SPLIT, AVERAGE, VEC, LINE, TILE,
    )  # fmt: skip
    for step in range(steps + 1):
        if step < steps:
            lay_out(work, step)
            publish(flags, epoch * STEPS + step)
        if step > 0:
            met = arrived(flags, epoch * STEPS + step - 1)
            if REDUCE:
                reduce(work, step - 1, met)
            else:
                exchange(work, step - 1, met)
    if gl.atomic_add(state + DONE, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:
        gl.atomic_xchg(state + DONE, 0, sem="relaxed", scope="gpu")
        gl.atomic_xchg(state + EPOCH, epoch, sem="relaxed", scope="gpu")
