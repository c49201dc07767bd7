"""Litmus kernels of the asynchronous machinery: TMA, mbarriers, wgmma. As kernel.py; tiles are of one value each."""

from tileweave import lang as gl
from tileweave.bench.litmus.kernel import COLS, ROWS, TILE_BYTES, begin


@gl.jit
def elements():
    """Offsets of a tile's elements."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    cols = gl.arange(0, COLS, gl.SliceLayout(0, L))
    return rows[:, None] * COLS + cols[None, :]


@gl.jit
def filled(value):
    """A tile of one value."""
    return (elements() * 0 + value).to(gl.bfloat16)


@gl.jit
def least(tile):
    """The least element of a tile as an integer."""
    return gl.min(gl.min(tile.to(gl.float32), 1), 0).to(gl.int32)


@gl.jit
def in_buffer(buf):
    """The least element of a buffer."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    return least(buf.load(L))


@gl.jit
def in_memory(tiles, instance):
    """The least element of an instance's tile."""
    return least(gl.load(tiles + instance * (ROWS * COLS) + elements()))


@gl.jit
def new_barrier():
    """An mbarrier of one arrival."""
    bar = gl.allocate_shared_memory(gl.int64, [1], gl.MBarrierLayout())
    gl.mbarrier_init(bar, count=1)
    return bar


# ---------------------------------------------------------------- TMA


@gl.jit(do_not_specialize=["first"])
def tma_publishes(first, cells, out, tiles, desc, TURNS: gl.constexpr, HOW: gl.constexpr):
    """0: TMA store of ones, its completion as HOW says, release. 1: acquire, then the tile by plain loads."""
    party, instance, x, r = begin(first, cells, out, 2, TURNS)
    if party == 0:
        buf = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLS], desc.layout, filled(1))
        gl.fence_async_shared()
        gl.barrier()
        gl.tma_store(desc, [instance * ROWS, 0], buf)
        if HOW == "read wait":
            gl.store_read_wait(0)
        else:
            gl.store_wait(0)
        if HOW != "no barrier":
            gl.barrier()
        gl.atomic_xchg(x, 1, sem="release", scope="gpu")
        gl.store_wait(0)
        gl.barrier()
    else:
        flag = gl.atomic_add(x, 0, sem="acquire", scope="gpu")
        gl.store(r, flag)
        if flag == 1:
            gl.store(r + 1, in_memory(tiles, instance))


@gl.jit(do_not_specialize=["first"])
def tma_takes(first, cells, out, tiles, desc, TURNS: gl.constexpr, FENCE: gl.constexpr):
    """0: plain stores of ones, barrier, release. 1: acquire, with FENCE a proxy fence, then the tile by TMA."""
    party, instance, x, r = begin(first, cells, out, 2, TURNS)
    if party == 0:
        gl.store(tiles + instance * (ROWS * COLS) + elements(), filled(1))
        gl.barrier()
        gl.atomic_xchg(x, 1, sem="release", scope="gpu")
    else:
        buf = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLS], desc.layout)
        bar = new_barrier()
        flag = gl.atomic_add(x, 0, sem="acquire", scope="gpu")
        gl.store(r, flag)
        if flag == 1:
            if FENCE:
                gl.fence_proxy_async()
            gl.mbarrier_expect(bar, TILE_BYTES)
            gl.tma_load(desc, [instance * ROWS, 0], bar, buf)
            gl.mbarrier_wait(bar, 0)
            gl.store(r + 1, in_buffer(buf))


@gl.jit(do_not_specialize=["first"])
def tma_overwrites(first, cells, out, tiles, desc, TURNS: gl.constexpr, FENCE: gl.constexpr):
    """Plain loads of the tile, which holds zeros, then, with FENCE behind a proxy fence, a TMA store of ones to it."""
    _, instance, _, r = begin(first, cells, out, 1, TURNS)
    buf = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLS], desc.layout, filled(1))
    gl.fence_async_shared()
    gl.barrier()
    gl.store(r, in_memory(tiles, instance))
    if FENCE:
        gl.fence_proxy_async()
    gl.barrier()
    gl.tma_store(desc, [instance * ROWS, 0], buf)
    gl.store_wait(0)
    gl.barrier()
    gl.store(r + 1, in_memory(tiles, instance))


@gl.jit(do_not_specialize=["first"])
def tma_reads_registers(first, cells, out, tiles, desc, TURNS: gl.constexpr, FENCE: gl.constexpr):
    """Zeros in a buffer, then ones from registers, with FENCE a proxy fence, then a TMA store of it: what arrives."""
    _, instance, _, r = begin(first, cells, out, 1, TURNS)
    buf = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLS], desc.layout, filled(0))
    gl.fence_async_shared()
    gl.barrier()
    buf.store(filled(1))
    if FENCE:
        gl.fence_async_shared()
    gl.barrier()
    gl.tma_store(desc, [instance * ROWS, 0], buf)
    gl.store_wait(0)
    gl.barrier()
    gl.store(r, in_memory(tiles, instance))


@gl.jit(do_not_specialize=["first"])
def tma_buffer_again(first, cells, out, tiles, desc, TURNS: gl.constexpr, WAIT: gl.constexpr):
    """A TMA store of ones, then, with WAIT when it has read its buffer, twos into the buffer: what arrives."""
    _, instance, _, r = begin(first, cells, out, 1, TURNS)
    buf = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLS], desc.layout, filled(1))
    gl.fence_async_shared()
    gl.barrier()
    gl.tma_store(desc, [instance * ROWS, 0], buf)
    if WAIT:
        gl.store_read_wait(0)
    buf.store(filled(2))
    gl.store_wait(0)
    gl.barrier()
    gl.store(r, in_memory(tiles, instance))


@gl.jit(do_not_specialize=["first"])
def tma_arrives(first, cells, out, tiles, desc, TURNS: gl.constexpr, WAIT: gl.constexpr):
    """A TMA load of the tile, which holds zeros, over a buffer of ones; with WAIT its mbarrier is waited for."""
    _, instance, _, r = begin(first, cells, out, 1, TURNS)
    buf = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLS], desc.layout, filled(1))
    bar = new_barrier()
    gl.fence_async_shared()
    gl.barrier()
    gl.mbarrier_expect(bar, TILE_BYTES)
    gl.tma_load(desc, [instance * ROWS, 0], bar, buf)
    if WAIT:
        gl.mbarrier_wait(bar, 0)
    gl.store(r, in_buffer(buf))
    if not WAIT:
        gl.mbarrier_wait(bar, 0)


@gl.jit(do_not_specialize=["first"])
def tma_additions(first, cells, out, tiles, desc, TURNS: gl.constexpr):
    """Each party adds ones to the tile."""
    _, instance, _, _ = begin(first, cells, out, 2, TURNS)
    buf = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, COLS], desc.layout, filled(1).reshape([1, ROWS, COLS]))
    gl.fence_async_shared()
    gl.barrier()
    gl.store_add_async(desc, instance, [0, 0], buf)
    gl.store_read_wait(0)


# ---------------------------------------------------------------- mbarriers


@gl.jit
def fills(buf, bar):
    """Ones into the buffer, then an arrival."""
    buf.store(filled(1))
    gl.mbarrier_arrive(bar, count=1)


@gl.jit
def reads_told(buf, bar, r, WAIT: gl.constexpr):
    """With WAIT when the arrival has come, the buffer."""
    if WAIT:
        gl.mbarrier_wait(bar, 0)
    gl.store(r, in_buffer(buf))
    if not WAIT:
        gl.mbarrier_wait(bar, 0)


@gl.jit(do_not_specialize=["first"])
def arrival(first, cells, out, tiles, desc, TURNS: gl.constexpr, WAIT: gl.constexpr):
    """One partition fills a buffer of zeros with ones and arrives; the other one waits, with WAIT, and reads it."""
    _, _, _, r = begin(first, cells, out, 1, TURNS)
    buf = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLS], desc.layout, filled(0))
    bar = new_barrier()
    gl.warp_specialize([(reads_told, (buf, bar, r, WAIT)), (fills, (buf, bar))], [4], [64])


@gl.jit
def loads_beside(x, buf, bar, desc, row, ORDERED: gl.constexpr):
    """x = 1 before, or not ORDERED behind, the arrival that precedes a TMA load."""
    if ORDERED:
        gl.store(x, 1)
    gl.mbarrier_expect(bar, TILE_BYTES)
    if not ORDERED:
        gl.store(x, 1)
    gl.tma_load(desc, [row, 0], bar, buf)


@gl.jit
def reads_beside(x, bar, r):
    """x when the load has completed the phase."""
    gl.mbarrier_wait(bar, 0)
    gl.store(r, gl.load(x))


@gl.jit(do_not_specialize=["first"])
def completion(first, cells, out, tiles, desc, TURNS: gl.constexpr, ORDERED: gl.constexpr):
    """Whether the bytes of a TMA load tell what its issuer did: only its arrival does."""
    _, instance, x, r = begin(first, cells, out, 1, TURNS)
    buf = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLS], desc.layout)
    bar = new_barrier()
    loaded = (x, buf, bar, desc, instance * ROWS, ORDERED)
    gl.warp_specialize([(reads_beside, (x, bar, r)), (loads_beside, loaded)], [4], [64])


@gl.jit
def arrives_twice(bar):
    """Two phases at once."""
    gl.mbarrier_arrive(bar, count=1)
    gl.mbarrier_arrive(bar, count=1)


@gl.jit
def waits_for(bar, r, WAITS: gl.constexpr):
    """One phase, or the two in turn."""
    gl.mbarrier_wait(bar, 0)
    if WAITS == 2:
        gl.mbarrier_wait(bar, 1)
    gl.store(r, WAITS)


@gl.jit(do_not_specialize=["first"])
def phases(first, cells, out, tiles, desc, TURNS: gl.constexpr, ARRIVALS: gl.constexpr, WAITS: gl.constexpr):
    """Two arrivals, of which a phase takes ARRIVALS, and a partition that waits for WAITS phases."""
    _, _, _, r = begin(first, cells, out, 1, TURNS)
    bar = gl.allocate_shared_memory(gl.int64, [1], gl.MBarrierLayout())
    gl.mbarrier_init(bar, count=ARRIVALS)
    gl.warp_specialize([(waits_for, (bar, r, WAITS)), (arrives_twice, (bar,))], [4], [64])


@gl.jit(do_not_specialize=["first"])
def bytes_expected(first, cells, out, tiles, desc, TURNS: gl.constexpr, BYTES: gl.constexpr):
    """An mbarrier that expects BYTES of a tile's load."""
    _, instance, _, r = begin(first, cells, out, 1, TURNS)
    buf = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLS], desc.layout)
    bar = new_barrier()
    gl.mbarrier_expect(bar, BYTES)
    gl.tma_load(desc, [instance * ROWS, 0], bar, buf)
    gl.mbarrier_wait(bar, 0)
    gl.store(r, in_buffer(buf))


@gl.jit
def initializes(bar):
    """An mbarrier comes to life, and its one phase passes."""
    gl.mbarrier_init(bar, count=1)
    gl.mbarrier_arrive(bar, count=1)


@gl.jit(do_not_specialize=["first"])
def barrier_begins(first, cells, out, tiles, desc, TURNS: gl.constexpr):
    """One partition initializes an mbarrier while the other one waits at it."""
    _, _, _, r = begin(first, cells, out, 1, TURNS)
    bar = gl.allocate_shared_memory(gl.int64, [1], gl.MBarrierLayout())
    gl.warp_specialize([(waits_for, (bar, r, 1)), (initializes, (bar,))], [4], [64])


# ---------------------------------------------------------------- wgmma


@gl.jit(do_not_specialize=["first"])
def wgmma_reads(first, cells, out, tiles, desc, TURNS: gl.constexpr, HOW: gl.constexpr):
    """ones [64, 64] @ ones, of which an operand is then overwritten by twos: the least sum, 64 if all is in order.

    HOW: "right", "no wait" before the operand is overwritten, "no wait" before the sums are used ("early use"), or "no
    fence" between the operand's last store from registers and the product.
    """
    _, _, _, r = begin(first, cells, out, 1, TURNS)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    M: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    ones = gl.full([64, 64], 1.0, gl.bfloat16, L)
    a = gl.allocate_shared_memory(gl.bfloat16, [64, 64], desc.layout, ones + ones)
    b = gl.allocate_shared_memory(gl.bfloat16, [64, 64], desc.layout, ones)
    gl.fence_async_shared()
    gl.barrier()
    a.store(ones)
    if HOW != "no fence":
        gl.fence_async_shared()
    gl.barrier()
    sums = gl.warpgroup_mma(a, b, gl.zeros([64, 64], gl.float32, M), is_async=True)
    if HOW == "right" or HOW == "no fence":
        sums = gl.warpgroup_mma_wait(num_outstanding=0, deps=[sums])
    if HOW != "early use":
        a.store(ones + ones)
    if HOW == "no wait":
        sums = gl.warpgroup_mma_wait(num_outstanding=0, deps=[sums])
    gl.store(r, gl.min(gl.min(sums, 1), 0).to(gl.int32))
