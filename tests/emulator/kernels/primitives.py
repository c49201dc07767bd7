"""One kernel per primitive, some with a switch that makes them wrong."""

from tileweave import lang as gl

# ---------------------------------------------------------------- flags


@gl.jit
def ping(
    rank, W: gl.constexpr, data, out, flags_ptr, stride, first, BARRIER: gl.constexpr, EARLY: gl.constexpr,
    MISSING: gl.constexpr,
):  # fmt: skip
    """Every rank writes its slice for the next one, signals it, waits, and reads what it got; flags start at `first`."""
    flags = gl.Flags(flags_ptr, stride, rank, W, 1000)
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o = gl.arange(0, 256, L)
    peer = (rank + 1) % W
    if EARLY:
        gl.signal(flags, peer, 3, first + 1)
    gl.store(data + peer * 256 + o, o + rank)
    if BARRIER:
        gl.barrier()
    if not EARLY:
        gl.signal(flags, peer, 3, first + 1)
    reached = gl.wait(flags, 3, first + 1 - MISSING)
    if reached:
        gl.store(out + rank * 256 + o, gl.load(data + rank * 256 + o))


@gl.jit
def signals(flags_ptr, stride, INDEX: gl.constexpr, value):
    gl.signal(gl.Flags(flags_ptr, stride, 0, 1, 1000), 0, INDEX, value)


@gl.jit
def signals_all(rank, W: gl.constexpr, flags_ptr, stride, INDEX: gl.constexpr):
    flags = gl.Flags(flags_ptr, stride, rank, W, 1000)
    gl.signal_all(flags, INDEX + rank, 1)
    for peer in range(W):
        gl.wait(flags, INDEX + peer, 1)


@gl.jit
def waits_for_all(rank, W: gl.constexpr, data, out, flags_ptr, stride, EXPECTED: gl.constexpr):
    """Every rank writes its word and signals all; out: whether all have come, and the sum of all words."""
    flags = gl.Flags(flags_ptr, stride, rank, W, 1000)
    gl.store(data + rank, rank + 1)
    gl.barrier()
    gl.signal_all(flags, 2 + rank, 1)
    met = gl.wait_all(flags, 2, W, EXPECTED)
    total = 0
    if met:
        for peer in range(W):
            total += gl.load(data + peer)
    gl.store(out + rank, total)


@gl.jit
def waits_for_others(rank, W: gl.constexpr, data, out, flags_ptr, stride, SKIP: gl.constexpr):
    """As `waits_for_all`, but no rank signals itself: of its flags it skips that of the rank SKIP further on."""
    flags = gl.Flags(flags_ptr, stride, rank, W, 1000)
    gl.store(data + rank, rank + 1)
    gl.barrier()
    for i in range(1, W):
        gl.signal(flags, (rank + i) % W, 2 + rank, 1)
    met = gl.wait_all(flags, 2, W, 1, skip=2 + (rank + SKIP) % W)
    total = 0
    if met:
        for i in range(1, W):
            total += gl.load(data + (rank + i) % W)
    gl.store(out + rank, total)


@gl.jit
def waits(rank, W: gl.constexpr, flags_ptr, stride, INDEX: gl.constexpr, expected, out):
    flags = gl.Flags(flags_ptr, stride, rank, W, 1000)
    gl.store(out + rank, gl.wait(flags, INDEX, expected).to(gl.int32))


@gl.jit
def waits_or_aborts(rank, W: gl.constexpr, flags_ptr, stride, out):
    """Rank 0 waits for what never comes; rank 1 raises the abort word of rank 0's block."""
    flags = gl.Flags(flags_ptr, stride, rank, W, 1000)
    if rank == 0:
        gl.store(out, gl.wait(flags, 0, 1).to(gl.int32))
    else:
        gl.atomic_xchg(flags_ptr + gl.ABORT, 1, sem="release", scope="sys")


@gl.jit
def meetings(rank, W: gl.constexpr, data, flags_ptr, stride, N: gl.constexpr):
    """N meetings back to back; before each, every rank writes its word, after it all read all words."""
    flags = gl.Flags(flags_ptr, stride, rank, W, 1000)
    ok = True
    for n in range(N):
        gl.store(data + rank, n + 1)
        gl.barrier_all(flags, 0, 2 * n + 1)
        for peer in range(W):
            ok = ok & (gl.load(data + peer) == n + 1)
        gl.barrier_all(flags, 0, 2 * n + 2)
    gl.static_assert(ok)


# ---------------------------------------------------------------- mbarriers, TMA, wgmma


@gl.jit
def arrives(bar, n: gl.constexpr):
    for _ in range(n):
        gl.mbarrier_arrive(bar, count=1)


@gl.jit
def waits_once(bar):
    gl.mbarrier_wait(bar, 0)


@gl.jit
def phases(n: gl.constexpr, COUNT: gl.constexpr):
    """A waiter for phase 0 while n arrivals come, COUNT of which complete a phase."""
    bar = gl.allocate_shared_memory(gl.int64, [1], gl.MBarrierLayout())
    gl.mbarrier_init(bar, count=COUNT)
    gl.warp_specialize([(waits_once, (bar,)), (arrives, (bar, n))], [1], [24])


@gl.jit
def barrier_misuse(WHAT: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [2, 1], gl.MBarrierLayout())
    if WHAT == "before init":
        gl.mbarrier_arrive(bar.index(0), count=1)
    gl.mbarrier_init(bar.index(0), count=1)
    if WHAT == "too many":
        gl.mbarrier_arrive(bar.index(0), count=2)
    if WHAT == "after invalidate":
        gl.mbarrier_invalidate(bar.index(0))
        gl.mbarrier_wait(bar.index(0), 0)
    if WHAT == "bytes":
        gl.mbarrier_expect(bar.index(0), 1 << 20)
    if WHAT == "index":
        gl.mbarrier_arrive(bar.index(2), count=1)


@gl.jit
def initializes(bar, done):
    gl.mbarrier_init(bar, count=1)
    gl.mbarrier_arrive(bar, count=1)


@gl.jit
def waits_late(bar, done, x):
    for i in range(20):
        gl.store(x, i)
    gl.mbarrier_wait(bar, 0)
    gl.mbarrier_arrive(done, count=1)


@gl.jit
def invalidates(bar, done, ORDERED: gl.constexpr):
    gl.mbarrier_arrive(bar, count=1)
    if ORDERED:
        gl.mbarrier_wait(done, 0)
    gl.mbarrier_invalidate(bar)


@gl.jit
def barrier_lives(x, WHAT: gl.constexpr):
    """A barrier that another partition initializes or invalidates, "late" without order; the waiter takes its time."""
    bar = gl.allocate_shared_memory(gl.int64, [1], gl.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], gl.MBarrierLayout())
    gl.mbarrier_init(done, count=1)
    if WHAT == "late init":
        gl.warp_specialize([(waits_late, (bar, done, x)), (initializes, (bar, done))], [1], [24])
    else:
        gl.mbarrier_init(bar, count=1)
        gl.warp_specialize([(waits_late, (bar, done, x)), (invalidates, (bar, done, WHAT == "ordered"))], [1], [24])


@gl.jit
def stores_at(dst, row, SHAPE: gl.constexpr):
    """One block of zeros to row `row` of dst."""
    buf = gl.allocate_shared_memory(gl.bfloat16, SHAPE, dst.layout)
    buf.store(gl.zeros(SHAPE, gl.bfloat16, gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])))
    gl.fence_async_shared()
    gl.barrier()
    gl.tma_store(dst, [row, 0], buf)
    gl.store_wait(0)


@gl.jit
def copies(src, dst, row, col, SHAPE: gl.constexpr, WAIT: gl.constexpr):
    """One block from src to dst at (0, 0)."""
    buf = gl.allocate_shared_memory(gl.bfloat16, SHAPE, src.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], gl.MBarrierLayout())
    gl.mbarrier_init(bar, count=1)
    gl.mbarrier_expect(bar, SHAPE[0] * SHAPE[1] * 2)
    gl.tma_load(src, [row, col], bar, buf)
    if WAIT:
        gl.mbarrier_wait(bar, 0)
    gl.tma_store(dst, [0, 0], buf)
    gl.store_read_wait(0)


@gl.jit
def publishes(rank, src, pt, flags_ptr, stride, out, HOW: gl.constexpr):
    """Rank 0 sends a tile to rank 1 by TMA and tells it; HOW says what stands before the signal."""
    flags = gl.Flags(flags_ptr, stride, rank, 2, 1000)
    buf = gl.allocate_shared_memory(gl.bfloat16, [1, 32, 64], pt.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], gl.MBarrierLayout())
    gl.mbarrier_init(bar, count=1)
    gl.mbarrier_expect(bar, 32 * 64 * 2)
    if rank == 0:
        gl.tma_load(src, [0, 0], bar, buf.reshape([32, 64]))
        gl.mbarrier_wait(bar, 0)
        gl.store_async(pt, 1, [0, 0], buf)
        if HOW == "read wait":
            gl.store_read_wait(0)
        if HOW == "no barrier":
            gl.store_wait(0)
        if HOW == "right" or HOW == "no proxy fence":
            gl.store_wait(0)
            gl.barrier()
        gl.signal(flags, 1, 0, 1)
        gl.store_wait(0)
    else:
        gl.wait(flags, 0, 1)
        if HOW != "no proxy fence":
            gl.fence_proxy_async()
        gl.load_async(pt, 1, [0, 0], buf, bar)
        gl.mbarrier_wait(bar, 0)
        gl.tma_store(out, [0, 0], buf.reshape([32, 64]))
        gl.store_read_wait(0)


@gl.jit
def broadcasts(rank, W: gl.constexpr, src, pt, ADD: gl.constexpr, PENDING: gl.constexpr):
    """Rank 0's tile to all; with ADD every rank's tile is added everywhere."""
    buf = gl.allocate_shared_memory(gl.bfloat16, [1, 32, 64], pt.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], gl.MBarrierLayout())
    gl.mbarrier_init(bar, count=1)
    gl.mbarrier_expect(bar, 32 * 64 * 2)
    gl.tma_load(src, [0, 0], bar, buf.reshape([32, 64]))
    gl.mbarrier_wait(bar, 0)
    if ADD:
        for peer in range(W):
            gl.store_add_async(pt, peer, [0, 0], buf)
    else:
        gl.broadcast_async(pt, W, [0, 0], buf)
    gl.store_read_wait(PENDING)


@gl.jit
def fills(dst, FENCE: gl.constexpr, FILL: gl.constexpr, WAIT: gl.constexpr):
    """Registers to shared memory to global memory."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    buf = gl.allocate_shared_memory(gl.bfloat16, [32, 64], dst.layout)
    if FILL:
        buf.store(gl.full([32, 64], 2.0, gl.bfloat16, L))
    if FENCE:
        gl.fence_async_shared()
    gl.tma_store(dst, [0, 0], buf)
    if WAIT:
        gl.store_read_wait(0)


@gl.jit
def reuses(dst, PENDING: gl.constexpr):
    """Two tiles in turn through two buffers: before a buffer's second use all but one store have read theirs."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    buf = gl.allocate_shared_memory(gl.bfloat16, [2, 32, 64], dst.layout)
    for i in range(4):
        gl.store_read_wait(PENDING)
        buf.index(i % 2).store(gl.full([32, 64], 1.0 * i, gl.bfloat16, L))
        gl.fence_async_shared()
        gl.tma_store(dst, [i * 32, 0], buf.index(i % 2))
    gl.store_read_wait(0)


@gl.jit
def multiplies(a, b, c, WAIT: gl.constexpr, FENCE: gl.constexpr):
    """c [64, 64] = a [64, 64] @ b [64, 64], operands from pointers through shared memory."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    M: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    S: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    o = gl.arange(0, 64, gl.SliceLayout(1, L))[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    x = gl.allocate_shared_memory(gl.bfloat16, [64, 64], S, gl.load(a + o))
    y = gl.allocate_shared_memory(gl.bfloat16, [64, 64], S, gl.load(b + o))
    if FENCE:
        gl.fence_async_shared()
    acc = gl.warpgroup_mma(x, y, gl.zeros([64, 64], gl.float32, M), is_async=True)
    if WAIT:
        acc = gl.warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    gl.store(c + o, gl.convert_layout(acc, L))


# ---------------------------------------------------------------- generic memory


@gl.jit
def adds(x, y, n, B: gl.constexpr):
    """y = x + 1, where the last block is ragged."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.program_id(0) * B + gl.arange(0, B, L)
    gl.store(y + i, gl.load(x + i, mask=i < n, other=0.0) + 1.0, mask=i < n)


@gl.jit
def writes(x, value, B: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.store(x + gl.arange(0, B, L), value)


@gl.jit
def counts(counters, keys, out, B: gl.constexpr):
    """A histogram by tile-wide atomics, and scalar atomics of every kind."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o = gl.arange(0, B, L)
    key = gl.load(keys + o)
    before = gl.atomic_add(counters + key, 1, mask=key < 4, sem="relaxed", scope="gpu")
    gl.store(out + o, before)
    gl.atomic_max(counters + 8, 7, sem="relaxed", scope="gpu")
    gl.atomic_max(counters + 8, 5, sem="relaxed", scope="gpu")
    if gl.atomic_cas(counters + 9, 0, 3, sem="relaxed", scope="gpu") == 0:
        gl.atomic_cas(counters + 9, 0, 4, sem="relaxed", scope="gpu")
    gl.atomic_xchg(counters + 10, gl.atomic_xchg(counters + 11, 6) + 1)


@gl.jit
def polls_three_times(counter):
    n = 0
    while n < 3:
        gl.atomic_add(counter, 0, sem="acquire", scope="sys")
        n += 1


@gl.jit
def sums_ranks(rank, W: gl.constexpr, data, stride, out, ALL: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o = gl.arange(0, 128, L)
    if rank == 0:
        if ALL:
            total = gl.all_reduce(data + o, stride, W)
        else:
            total = gl.reduce(data + o, stride, W)
        gl.store(out + o, total)


@gl.jit
def multicasts(rank, W: gl.constexpr, mc, uc, stride, flags_ptr, fstride, out, FENCE: gl.constexpr, HOW: gl.constexpr):
    """Every rank writes its own slice; rank 0 adds them up in the fabric and stores twice the sum everywhere."""
    flags = gl.Flags(flags_ptr, fstride, rank, W, 1000)
    L: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    o = gl.arange(0, 1024, L)
    mc = gl.multicast_pointer(mc, gl.bfloat16)
    gl.store(uc + rank * stride + o, (o + rank).to(gl.bfloat16))
    if FENCE:
        gl.fence_proxy_alias()
    gl.barrier_all(flags, 0, 1)
    if rank == 0:
        total = gl.multimem_load_reduce(mc + o)
        if HOW == "add":
            gl.multimem_add(mc + o, total)
        else:
            gl.multimem_store(mc + o, total + total)
    if FENCE:
        gl.fence_proxy_alias()
    gl.barrier_all(flags, 0, 2)
    gl.store(out + rank * stride + o, gl.load(uc + rank * stride + o))


@gl.jit
def stored_by_tma(tiles, mc, out, ROWS: gl.constexpr, FENCE: gl.constexpr):
    """A tile goes to memory by TMA, and is read through a multicast address."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    buf = gl.allocate_shared_memory(tiles.dtype, tiles.block_shape, tiles.layout)
    buf.store(gl.full([ROWS, 64], 1.0, gl.bfloat16, L))
    gl.fence_async_shared()
    gl.barrier()
    gl.tma_store(tiles, [0, 0], buf)
    gl.store_wait(0)
    gl.barrier()
    if FENCE:
        gl.fence_proxy_alias()
    rows, cols = gl.arange(0, ROWS, gl.SliceLayout(1, L)), gl.arange(0, 64, gl.SliceLayout(0, L))
    o = rows[:, None] * 64 + cols[None, :]
    gl.store(out + o, gl.multimem_load_reduce(gl.multicast_pointer(mc, gl.bfloat16) + o))


@gl.jit
def misuses_addresses(mc, uc, WHAT: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    o = gl.arange(0, 1024, L)
    if WHAT == "load":
        gl.load(mc + o)
    if WHAT == "store":
        gl.store(mc + o, 0.0)
    if WHAT == "atomic":
        gl.atomic_add(mc, 1)
    if WHAT == "multimem_load_reduce":
        gl.multimem_load_reduce(uc + o)
    if WHAT == "multimem_store":
        gl.multimem_store(uc + o, o)
    if WHAT == "multimem_add":
        gl.multimem_add(uc + o, o)
    if WHAT == "beyond":
        gl.multimem_load_reduce(mc + 8 + o)


@gl.jit
def hands_over(x, counter, BARRIER: gl.constexpr):
    """CTA 0 reads a word and tells CTA 1, which then writes it. Every thread of CTA 0 reads, its first one tells."""
    if gl.program_id(0) == 0:
        gl.load(x)
        if BARRIER:
            gl.barrier()
        gl.atomic_add(counter, 1, sem="release", scope="gpu")
    else:
        while gl.atomic_add(counter, 0, sem="acquire", scope="gpu") < 1:
            pass
        gl.store(x, 1)


@gl.jit
def shares(x, y, WHAT: gl.constexpr, BARRIER: gl.constexpr):
    """Two accesses of one partition to x, of different threads unless WHAT says so; BARRIER: with one between them."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 256, L)
    if WHAT == "an atomic, then a tile load":
        gl.atomic_add(x, 1, sem="relaxed", scope="gpu")
    elif WHAT == "one element, then a tile" or WHAT == "one element, then an atomic":
        gl.store(x, 7)
    elif WHAT == "a load by every thread, then a store by one":
        gl.load(x)
    elif WHAT == "two loads, then a tile like the second":
        gl.load(x + 255 - i)
        gl.load(x + i)
    elif WHAT == "one element by all threads, twice" or WHAT == "one element by all threads, once":
        gl.store(x + i * 0, i)
    elif WHAT == "a masked tile, then the whole":
        gl.store(x + i, i, mask=i < 100)
    elif WHAT == "loads":
        gl.load(x + i)
    else:
        gl.store(x + i, i)
    if BARRIER:
        gl.barrier()
    if WHAT == "a tile store, then a load of reversed addresses" or WHAT == "loads":
        gl.store(y + i, gl.load(x + 255 - i))
    elif WHAT == "two tile stores to swapped addresses":
        gl.store(x + 255 - i, i)
    elif WHAT == "a tile, then a shifted one":
        gl.store(x + 1 + i, i, mask=i < 255)
    elif WHAT == "a tile, then an element of every thread":
        gl.store(y + i, gl.load(x) + i)
    elif WHAT == "an atomic, then a tile load":
        gl.store(y + i, gl.load(x + i * 0))
    elif WHAT == "a load by every thread, then a store by one":
        gl.store(x, 7)
    elif WHAT == "one element, then an atomic":
        gl.atomic_add(x, 1, sem="relaxed", scope="gpu")
    elif WHAT == "one element by all threads, twice":
        gl.load(x + i * 0)
    elif WHAT == "a tile, then the same by atomics":
        gl.atomic_add(x + i, 1, sem="relaxed", scope="gpu")
    elif WHAT != "one element by all threads, once":
        gl.store(x + i, gl.load(x + i) + 1)


@gl.jit
def takes_over(x, counter, USED: gl.constexpr):
    """CTA 0 writes a tile and tells CTA 1, which writes it as well. The acquire reaches all threads if USED."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 256, L)
    if gl.program_id(0) == 0:
        gl.store(x + i, i)
        gl.barrier()
        gl.atomic_add(counter, 1, sem="release", scope="gpu")
    else:
        while gl.atomic_add(counter, 0, sem="relaxed", scope="gpu") < 1:
            pass
        if USED:
            seen = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
            gl.store(x + i, seen)
        else:
            gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
            gl.store(x + i, 1)
