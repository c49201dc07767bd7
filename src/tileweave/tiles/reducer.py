"""The communicator role of an inter-SM reduction: CTAs that sum finished tiles over ranks, and hand the sums to all ranks.

Every rank has put its part of a tile into its own slot, in the place of the tile's owner. The owner's communicators sum a
chunk's tiles (`phases`) once all ranks have multiplied them, and put the sums where the parts were, on every rank: in the
fabric (`sum_in_fabric`, multimem instructions), or by themselves (`sum_here`, TMA both ways, in rank order in float32). The
tiles are dealt to them part by part. `work` has, besides what `phases` says, `slots` [world, slot x owner, rows in whole
tiles, cols] and `places`, the same as a multicast pointer, whose places are `place_lines` lines of VECTOR elements apart (FABRIC).

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| flags[d][chunk * WORLD + r] = epoch | rank r, its tiles of d in the chunk in its slot: see the op | communicators of d | acquire, sys; then a proxy fence | monotonic |
| state[OWN_WORDS + chunks * WORLD + chunk] | every communicator CTA, its share of the chunk performed | nobody; the last one tells | acq_rel, gpu | the last one puts it back to 0 |
| flags[d][(chunks + chunk) * WORLD + r] = epoch | rank r, the last communicator of the chunk | whoever takes the sums, on all ranks d | release, sys | monotonic |
| ring.ready | `sum_here`'s TMA loads | this CTA, before it adds | mbarrier, CTA | a barrier, and store_read_wait: the buffer's last use has been read |

A communicator whose wait has timed out neither sums nor tells: all ranks are aborted, so nobody waits for it.
"""

from tileweave import lang as gl
from tileweave.tiles.communicator import finish_all
from tileweave.tiles.matmul import OWN_WORDS, part_buf, this_epoch
from tileweave.tiles.phases import count_up, part_at, tile_at, tiles_of

VECTOR = gl.constexpr(8)  # elements of a 16-byte access


@gl.jit
def my_part(work, first, i):
    """Communicator: row and column of its i-th part of own tiles from `first` on, in its own columns."""
    mm = work.matmul
    PARTS: gl.constexpr = mm.HALVES * (mm.BN // mm.WIDTH)
    part = gl.program_id(0) + i * mm.COMM_SMS
    row, col = tile_at(work, first + part // PARTS)
    down, right = part_at(mm, part % PARTS)
    return row + down, col + right


@gl.jit
def sum_in_fabric(work, first, parts, epoch, at, to):
    """Communicator: its parts of own tiles are added up, and the sums stored to all ranks, in the fabric."""
    mm, flags = work.matmul, work.flags
    L: gl.constexpr = gl.BlockedLayout([1, VECTOR], [4, 8], [gl.num_warps(), 1], [1, 0])
    place = ((epoch & 1) * flags.world + flags.rank).to(gl.int64) * work.place_lines * VECTOR
    gl.fence_proxy_alias()
    for i in range(parts):
        row, col = my_part(work, first, i)
        rows = (row + gl.arange(0, mm.ROWS, gl.SliceLayout(1, L)))[:, None]
        cols = (col + gl.arange(0, mm.WIDTH, gl.SliceLayout(0, L)))[None, :]
        here = work.places + (place + rows.to(gl.int64) * (gl.cdiv(work.cols, mm.WIDTH) * mm.WIDTH) + cols)
        gl.multimem_store(here, gl.multimem_load_reduce(here))
    return at, to


@gl.jit
def sum_here(work, first, parts, epoch, at, to):
    """Communicator: fetch its parts of own tiles from all ranks, add them up in rank order, store the sums to all."""
    mm, flags = work.matmul, work.flags
    L: gl.constexpr = gl.BlockedLayout([1, VECTOR], [4, 8], [gl.num_warps(), 1], [1, 0])
    AHEAD: gl.constexpr = mm.ring.STAGES - 1
    place = (epoch & 1) * flags.world + flags.rank
    total = gl.zeros([mm.ROWS, mm.WIDTH], gl.float32, L)
    gl.fence_proxy_async()
    for i in range(parts * flags.world + AHEAD):
        if i < parts * flags.world:
            row, col = my_part(work, first, i // flags.world)
            gl.store_read_wait(0)
            gl.mbarrier_expect(mm.ring.ready_at(to), mm.ROWS * mm.WIDTH * 2)
            buf = part_buf(mm, to, 0, work.slots)
            gl.load_async(work.slots, i % flags.world, [place, row, col], buf, mm.ring.ready_at(to))
            to = mm.ring.next(to)
        if i >= AHEAD:
            mm.ring.consumer_wait(at)
            source = (i - AHEAD) % flags.world
            buf = part_buf(mm, at, 0, work.slots)
            part = buf.reshape([mm.ROWS, mm.WIDTH]).load(L).to(gl.float32)
            total = part + gl.where(source == 0, 0.0, total)
            if source == flags.world - 1:
                row, col = my_part(work, first, (i - AHEAD) // flags.world)
                buf.reshape([mm.ROWS, mm.WIDTH]).store(total.to(work.slots.dtype))
                gl.fence_async_shared()
                gl.barrier()
                for peer in range(flags.world):
                    gl.store_async(work.slots, (flags.rank + peer) % flags.world, [place, row, col], buf)
            gl.fence_async_shared()
            gl.barrier()
            at = mm.ring.next(at)
    gl.store_wait(0)
    return at, to


@gl.jit
def reduce_role(work):
    """Communicator: own tiles of every chunk, once all ranks have multiplied them."""
    mm, flags = work.matmul, work.flags
    SUM: gl.constexpr = sum_in_fabric if work.FABRIC else sum_here
    epoch = this_epoch(mm)
    at, to = mm.ring.start(), mm.ring.start()
    for chunk in range(work.chunks):
        first, tiles = tiles_of(work, chunk)
        if gl.wait_all(flags, chunk * flags.world, flags.world, epoch):
            parts = gl.cdiv(tiles * mm.HALVES * (mm.BN // mm.WIDTH) - gl.program_id(0), mm.COMM_SMS)
            at, to = SUM(work, first, gl.maximum(parts, 0), epoch, at, to)
            gl.barrier()
            if count_up(mm, OWN_WORDS + work.chunks * flags.world + chunk, 1, mm.COMM_SMS):
                gl.signal_all(flags, (work.chunks + chunk) * flags.world + flags.rank, epoch)
    finish_all(mm, epoch)
