"""Litmus kernels of multicast addresses and of copies beside a kernel. As kernel.py; for the emulator only."""

from tileweave import lang as gl
from tileweave.bench.litmus.async_kernel import filled, in_memory, least
from tileweave.bench.litmus.kernel import COLS, LINE, ROWS, begin


@gl.jit
def vectors():
    """Offsets of a tile's elements, eight consecutive ones a thread."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    cols = gl.arange(0, COLS, gl.SliceLayout(0, L))
    return rows[:, None] * COLS + cols[None, :]


@gl.jit(do_not_specialize=["first"])
def multimem_passing(first, cells, out, tiles, slices, TURNS: gl.constexpr, FENCE: gl.constexpr):
    """0: ones to every rank by multimem, with FENCE an alias fence, release. 1: acquire, its slice by plain loads."""
    party, _, x, r = begin(first, cells, out, 2, TURNS)
    if party == 0:
        gl.multimem_store(gl.multicast_pointer(slices, gl.bfloat16) + vectors(), filled(1))
        if FENCE:
            gl.fence_proxy_alias()
        gl.barrier()
        gl.atomic_xchg(x, 1, sem="release", scope="sys")
    else:
        flag = gl.atomic_add(x, 0, sem="acquire", scope="sys")
        gl.store(r, flag)
        if flag == 1:
            gl.store(r + 1, in_memory(tiles, 1))


@gl.jit(do_not_specialize=["first"])
def multimem_sums(first, cells, out, tiles, slices, TURNS: gl.constexpr, FENCE: gl.constexpr):
    """0: ones to its slice by plain stores, alias fence, release. 1: acquire, the sum of both slices by multimem."""
    party, _, x, r = begin(first, cells, out, 2, TURNS)
    if party == 0:
        gl.store(tiles + vectors(), filled(1))
        if FENCE:
            gl.fence_proxy_alias()
        gl.barrier()
        gl.atomic_xchg(x, 1, sem="release", scope="sys")
    else:
        flag = gl.atomic_add(x, 0, sem="acquire", scope="sys")
        gl.store(r, flag)
        if flag == 1:
            total = gl.multimem_load_reduce(gl.multicast_pointer(slices, gl.bfloat16) + vectors())
            gl.store(r + 1, least(total))


@gl.jit(do_not_specialize=["first"])
def multimem_additions(first, cells, out, tiles, slices, TURNS: gl.constexpr):
    """Each party adds ones to all slices."""
    _, _, _, _ = begin(first, cells, out, 2, TURNS)
    gl.multimem_add(gl.multicast_pointer(slices, gl.bfloat16) + vectors(), filled(1))


@gl.jit(do_not_specialize=["first"])
def copy_passing(first, cells, out, tiles, TURNS: gl.constexpr):
    """Waits for a flag that a copy writes, then reads the tile that another copy has written."""
    party, instance, x, r = begin(first, cells, out, 1, TURNS)
    flags = gl.Flags(x, LINE, party, 1, 1000000)
    if gl.wait(flags, 0, 1):
        gl.store(r, in_memory(tiles, instance))
