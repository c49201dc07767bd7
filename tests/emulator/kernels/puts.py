"""Small kernels: a copy through a ring, and all ranks putting a tile into everybody's box."""

from tileweave import lang as gl


@gl.jit
def ring_copy(src, dst_desc, dst, src_rank, ROWS, BR: gl.constexpr, BC: gl.constexpr, S: gl.constexpr):
    """Rows of `src_rank`'s slice to `dst`'s, through S buffers."""
    buf = gl.allocate_shared_memory(gl.bfloat16, [S, 1, BR, BC], src.layout)
    bar = gl.allocate_shared_memory(gl.int64, [S, 1], gl.MBarrierLayout())
    for i in gl.static_range(S):
        gl.mbarrier_init(bar.index(i), count=1)
    first = gl.program_id(0)
    step = gl.num_programs(0)
    count = gl.cdiv(ROWS // BR - first, step)
    for i in range(0, gl.minimum(count, S - 1)):
        gl.mbarrier_expect(bar.index(i), BR * BC * 2)
        gl.load_async(src, src_rank, [(first + i * step) * BR, 0], buf.index(i), bar.index(i))
    for i in range(0, count):
        s = i % S
        gl.mbarrier_wait(bar.index(s), (i // S) & 1)
        gl.store_async(dst_desc, dst, [(first + i * step) * BR, 0], buf.index(s))
        j = i + S - 1
        if j < count:
            gl.store_read_wait(1)
            gl.mbarrier_expect(bar.index(j % S), BR * BC * 2)
            gl.load_async(src, src_rank, [(first + j * step) * BR, 0], buf.index(j % S), bar.index(j % S))
    gl.store_read_wait(0)
    gl.store_wait(0)


@gl.jit
def put_tma(rank, W: gl.constexpr, shard, box, out, flags_ptr, stride, FENCE: gl.constexpr, BARRIER: gl.constexpr):
    """Put by TMA, signal, wait, read the own box by TMA. FENCE 2 and BARRIER 1 are right."""
    flags = gl.Flags(flags_ptr, stride, rank, W, 1000)
    buf = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], box.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], gl.MBarrierLayout())
    gl.mbarrier_init(bar, count=1)
    gl.mbarrier_expect(bar, 64 * 64 * 2)
    gl.tma_load(shard, [0, 0, 0], bar, buf)
    gl.mbarrier_wait(bar, 0)
    for peer in range(W):
        gl.store_async(box, peer * W + rank, [0, 0], buf)
    gl.store_wait(0)
    if BARRIER:
        gl.barrier()
    for peer in range(W):
        gl.signal(flags, peer, rank, 1)
    for peer in range(W):
        gl.wait(flags, peer, 1)
    if FENCE == 1:
        gl.fence_async_shared()
    if FENCE == 2:
        gl.fence_proxy_async()
    for j in range(W):
        gl.mbarrier_expect(bar, 64 * 64 * 2)
        gl.load_async(box, rank * W + j, [0, 0], buf, bar)
        gl.mbarrier_wait(bar, (j + 1) & 1)
        gl.tma_store(out, [j, 0, 0], buf)
        gl.store_read_wait(0)


@gl.jit
def put_registers(rank, W: gl.constexpr, shard, box, out, counters, BARRIER: gl.constexpr, USED: gl.constexpr):
    """The same with generic loads and stores; without BARRIER nothing orders the other threads' stores."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o = gl.arange(0, 4096, L)
    x = gl.load(shard + o)
    for d in range(W):
        gl.store(box + (d * W + rank) * 4096 + o, x)
    if BARRIER:
        gl.barrier()
    for d in range(W):
        gl.atomic_add(counters + d * 64, 1, sem="release", scope="sys")
    if USED:
        while gl.atomic_add(counters + rank * 64, 0, sem="acquire", scope="sys") < W:
            pass
    else:
        while gl.atomic_add(counters + rank * 64, 0, sem="relaxed", scope="sys") < W:
            pass
        gl.atomic_add(counters + rank * 64, 0, sem="acquire", scope="sys")
    for j in range(W):
        gl.store(out + j * 4096 + o, gl.load(box + (rank * W + j) * 4096 + o))
