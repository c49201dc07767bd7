"""Kernels that are launched ahead, some with the wait in the wrong place or in only some of their partitions."""

from tileweave import lang as gl


@gl.jit
def passes_on(source, out, WAIT: gl.constexpr):
    """out = source + 1, each CTA its 64 elements; the stream's earlier kernels are waited for "first", between the load
    and the store ("late"), or never."""
    o = gl.program_id(0) * 64 + gl.arange(0, 64, gl.BlockedLayout([1], [32], [4], [0]))
    if WAIT == "first":
        gl.grid_dependency_wait()
    x = gl.load(source + o)
    if WAIT == "late":
        gl.grid_dependency_wait()
    gl.store(out + o, x + 1)


@gl.jit
def waiting(source, out, WAIT: gl.constexpr, TILE_BYTES: gl.constexpr):
    if WAIT:
        gl.grid_dependency_wait()
    tile = gl.allocate_shared_memory(source.dtype, source.block_shape, source.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], gl.MBarrierLayout())
    gl.mbarrier_init(ready, count=1)
    gl.mbarrier_expect(ready, TILE_BYTES)
    gl.tma_load(source, [0, 0], ready, tile)
    gl.mbarrier_wait(ready, 0)
    gl.tma_store(out, [0, 0], tile)
    gl.store_read_wait(0)


@gl.jit
def nothing():
    pass


@gl.jit
def copies_in_a_partition(source, out, OWN_WAIT: gl.constexpr, FIRST_WAIT: gl.constexpr, TILE_BYTES: gl.constexpr):
    """out = source by TMA, in a partition of its own, which waits by itself or was made behind a wait."""
    if FIRST_WAIT:
        gl.grid_dependency_wait()
    gl.warp_specialize([(nothing, ()), (waiting, (source, out, OWN_WAIT, TILE_BYTES))], [4], [64])


@gl.jit
def counts(counter, WAIT: gl.constexpr):
    """Every CTA adds one, without an order; who is launched ahead may do so before the word is what others made it."""
    if WAIT:
        gl.grid_dependency_wait()
    gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")


@gl.jit
def sets(counter, value):
    gl.store(counter, value)


# ---------------------------------------------------------------- CTAs that wait for each other


@gl.jit
def meets_a_cta(flags_ptr, stride, AHEAD: gl.constexpr, FIRST: gl.constexpr, END: gl.constexpr, TELL: gl.constexpr):
    """Each CTA raises its flag, with TELL, and those from FIRST to END wait for that of the CTA which is AHEAD."""
    flags = gl.Flags(flags_ptr, stride, 0, 1, 1000)
    me, n = gl.program_id(0), gl.num_programs(0)
    if TELL:
        gl.signal(flags, 0, me, 1)
    if (me >= FIRST) & (me < END):
        gl.wait(flags, (me + AHEAD) % n, 1)


# ---------------------------------------------------------------- slots that peers write


@gl.jit
def pushes(
    rank, W: gl.constexpr, slots, out, flags_ptr, stride, state, value, SLOTS: gl.constexpr, LEFT_OUT: gl.constexpr,
    MASK: gl.constexpr,
):  # fmt: skip
    """A call: writes `value` into the slot of this epoch of each peer, signals all peers but for the next LEFT_OUT,
    waits for as many, and stores the sum of what they wrote. Without MASK the slot is a remainder, which is wrong once
    epochs are negative."""
    flags = gl.Flags(flags_ptr, stride, rank, W, 1000)
    epoch = gl.load(state + rank) + 1
    slot = epoch & (SLOTS - 1) if MASK else epoch % SLOTS
    for i in range(1, W):
        gl.store(slots + ((rank + i) % W * SLOTS + slot) * W + rank, value)
    gl.barrier()
    for i in range(1 + LEFT_OUT, W):
        gl.signal(flags, (rank + i) % W, rank, epoch)
    total = value
    for i in range(1 + LEFT_OUT, W):
        source = (rank + W - i) % W
        gl.wait(flags, source, epoch)
        total += gl.load(slots + (rank * SLOTS + slot) * W + source)
    gl.store(out + rank, total)
    gl.store(state + rank, epoch)


@gl.jit
def pushes_values(rank, W: gl.constexpr, slots, out, flags_ptr, stride, state, values, number, NUMBERED: gl.constexpr):
    """The same of a value in memory, with two slots. NUMBERED: the host says which call it is."""
    value = gl.load(values)
    flags = gl.Flags(flags_ptr, stride, rank, W, 1000)
    epoch = number if NUMBERED else gl.load(state + rank) + 1
    slot = epoch & 1
    for i in range(1, W):
        gl.store(slots + ((rank + i) % W * 2 + slot) * W + rank, value)
    gl.barrier()
    gl.signal_all(flags, rank, epoch)
    gl.wait_all(flags, 0, W, epoch)
    total = value
    for i in range(1, W):
        source = (rank + W - i) % W
        total += gl.load(slots + (rank * 2 + slot) * W + source)
    gl.store(out + rank, total)
    gl.store(state + rank, epoch)
