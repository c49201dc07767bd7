"""The mover role: a warp of every computing CTA that brings finished tiles from slots to the result, by TMA.

Tiles come in phases (`phases`). Those of an owner are finished where he has put them: in the place of their owner, either of
his slot, or, LOCAL, of every rank's. `work` has, besides what `phases` says, `slots` [world, slot x owner, rows, cols], `out`
[m, n] and a `Mover` as `mover`.

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| flags[d][chunks * WORLD + phase] = epoch | the phase's owner, when its tiles are finished: see the op | movers of rank d | acquire, sys; then proxy fences | monotonic |
| ring.ready | mover's TMA load | mover, before it stores | mbarrier, CTA | store_read_wait: the stores of the buffer's last use have read it |

After a wait that timed out it loads from beyond the place, which TMA fills with NaN.
"""

from tileweave import lang as gl
from tileweave.tiles.channel import Channel, make_channel
from tileweave.tiles.matmul import first_unit, unit_step
from tileweave.tiles.phases import part_at, tile_at, tiles_of

BUFFERS = gl.constexpr(2)


@gl.aggregate
class Mover:
    """What a mover has of its CTA. LOCAL: all owners' tiles are moved, else all but the own ones. MULTICAST: they have come
    through multicast addresses."""

    ring: Channel
    bufs: gl.shared_memory_descriptor
    LOCAL: gl.constexpr
    MULTICAST: gl.constexpr

    @gl.constexpr_function
    def __init__(self, ring, bufs, LOCAL, MULTICAST):
        self.ring, self.bufs = ring, bufs
        self.LOCAL, self.MULTICAST = gl.constexpr(LOCAL), gl.constexpr(MULTICAST)


@gl.jit
def make_mover(slots, LOCAL: gl.constexpr, MULTICAST: gl.constexpr):
    """Allocate the buffers, of a box of descriptor `slots` each."""
    bufs = gl.allocate_shared_memory(slots.dtype, [BUFFERS] + slots.block_shape, slots.layout)
    return Mover(make_channel(BUFFERS, 1), bufs, LOCAL, MULTICAST)


@gl.jit
def arrive(work, phase, epoch):
    """Wait until the tiles of a phase are finished; False after a timeout."""
    there = gl.wait(work.flags, work.chunks * work.flags.world + phase, epoch)
    if work.mover.MULTICAST:
        gl.fence_proxy_alias()
    gl.fence_proxy_async()
    return there


@gl.jit
def move_tile(work, owner, row, col, epoch, there, at, to):
    """A finished tile to the result, part by part; returns the next places in the ring."""
    mm, mover, flags = work.matmul, work.mover, work.flags
    source = flags.rank if mover.LOCAL else owner
    PARTS: gl.constexpr = mm.HALVES * (mm.BN // mm.WIDTH)
    for i in range(PARTS + 1):
        if i < PARTS:
            gl.store_read_wait(0)
            down, right = part_at(mm, i)
            bar = mover.ring.ready_at(to)
            gl.mbarrier_expect(bar, mm.ROWS * mm.WIDTH * 2)
            where = [(epoch & 1) * flags.world + owner, gl.where(there, row, work.rows) + down, col + right]
            gl.load_async(work.slots, source, where, mover.bufs.index(to.slot), bar)
            to = mover.ring.next(to)
        if i > 0:
            mover.ring.consumer_wait(at)
            down, right = part_at(mm, i - 1)
            buf = mover.bufs.index(at.slot).reshape([mm.ROWS, mm.WIDTH])
            gl.tma_store(work.out, [row + down, owner * work.cols + col + right], buf)
            at = mover.ring.next(at)
    return at, to


@gl.jit
def move_role(work, epoch):
    """Mover: this CTA's share of every chunk's finished tiles, those of the next rank first."""
    flags, mm = work.flags, work.matmul
    owners = flags.world if work.mover.LOCAL else flags.world - 1
    at, to, previous = work.mover.ring.start(), work.mover.ring.start(), -1
    there = epoch == epoch
    for chunk in range(work.chunks):
        first, count = tiles_of(work, chunk)
        for u in range(first_unit(mm), count * owners, unit_step(mm)):
            owner = (flags.rank + 1 + u // count) % flags.world
            phase = chunk * flags.world + owner
            if phase != previous:
                there = arrive(work, phase, epoch)
                previous = phase
            row, col = tile_at(work, first + u % count)
            at, to = move_tile(work, owner, row, col, epoch, there, at, to)
    gl.store_read_wait(0)
