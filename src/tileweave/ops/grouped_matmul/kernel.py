"""Grouped matmul: rows that are sorted by expert, each times its expert's matrix, on one GPU.

`grouped_tiles_kernel` makes the table of row tiles (tiles/grouped.py) of the experts' ends, `grouped_matmul_kernel` goes
by it.

| word | written by | read by | order |
|---|---|---|---|
| table | `grouped_tiles_kernel`, a CTA for each expert | `grouped_matmul_kernel` | kernel boundary |

There is nobody to wait for, so there are no flags; barriers are the template's.
"""

from tileweave import lang as gl
from tileweave.tiles.grouped import as_product, end_of, entry_of, load_rows, locate_rows, store_part, within_expert
from tileweave.tiles.matmul import (
    Matmul,
    make_matmul,
    no_communicator,
    nobody_to_meet,
    nobody_to_tell,
    nothing_before_load,
    nothing_more,
    run_matmul,
)


@gl.aggregate
class Work:
    """What the roles share besides the matmul."""

    matmul: Matmul
    w: gl.tensor_descriptor  # [experts, k, n] or, B_T, [experts, n, k]
    out: gl.tensor_descriptor  # [rows, n]
    out_ptr: gl.tensor
    offsets: gl.tensor
    table: gl.tensor
    rows: gl.tensor
    n: gl.tensor
    GROUP: gl.constexpr

    @gl.constexpr_function
    def __init__(self, matmul, w, out, out_ptr, offsets, table, rows, n, GROUP):
        self.matmul, self.w, self.out, self.out_ptr = matmul, w, out, out_ptr
        self.offsets, self.table, self.rows, self.n = offsets, table, rows, n
        self.GROUP = gl.constexpr(GROUP)


# ---------------------------------------------------------------- the table of row tiles


@gl.jit
def tiles_before(offsets, expert, rows, BM: gl.constexpr):
    """Row tiles of all experts ahead of one."""
    LANES: gl.constexpr = 32 * gl.num_warps()
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    count = gl.zeros([LANES], gl.int32, L)
    for first in range(0, expert, LANES):
        e = first + gl.arange(0, LANES, L)
        end = gl.maximum(gl.minimum(gl.load(offsets + e, mask=e < expert, other=0), rows), 0)
        start = gl.maximum(gl.minimum(gl.load(offsets + e - 1, mask=(e > 0) & (e < expert), other=0), rows), 0)
        count += gl.cdiv(gl.maximum(end - start, 0), BM)
    return gl.sum(count, 0)


@gl.jit
def zero_rows(out, first, rows, n):
    """Zeros in the rows from `first` on, which are no expert's."""
    LANES: gl.constexpr = 32 * gl.num_warps()
    L: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    n = n // 8 * 8  # which it is, as the compiler must know to store 16 bytes at once
    for row in range(first + gl.program_id(0), rows, gl.num_programs(0)):
        for col in range(0, n, 8 * LANES):
            cols = col + gl.arange(0, 8 * LANES, L)
            zeros = gl.zeros([8 * LANES], out.dtype.element_ty, L)
            gl.store(out + row.to(gl.int64) * n + cols, zeros, mask=cols < n)


@gl.jit(do_not_specialize=["rows", "n", "limit"])
def grouped_tiles_kernel(
    offsets, table, out, rows, n, limit, EXPERTS: gl.constexpr, BM: gl.constexpr
):  # fmt: skip
    """table [1 + limit][ENTRY] int32 = how many row tiles there are, then these in the order of experts. Of `offsets`
    [EXPERTS] int32, ends of experts, what is beyond `rows` counts as `rows`, what is negative as 0. Zeroes rows of `out` [rows, n] that are no
    expert's. Grid: any number of CTAs."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    LANES: gl.constexpr = 32 * gl.num_warps()
    gl.grid_dependency_wait()
    for expert in range(gl.program_id(0), EXPERTS, gl.num_programs(0)):
        start = gl.to_tensor(0)
        if expert > 0:
            start = end_of(offsets, expert - 1, rows)
        end = end_of(offsets, expert, rows)
        before = tiles_before(offsets, expert, rows, BM)
        tiles = gl.cdiv(gl.maximum(end - start, 0), BM)
        for first in range(0, tiles, LANES):
            i = first + gl.arange(0, LANES, L)
            there = (i < tiles) & (before + i < limit)
            entry = entry_of(table, before + i)
            gl.store(entry, i * 0 + expert, mask=there)
            gl.store(entry + 1, start + i * BM, mask=there)
            gl.store(entry + 2, i * 0 + end, mask=there)
        if expert == EXPERTS - 1:
            gl.store(table, gl.minimum(before + tiles, limit))
    zero_rows(out, end_of(offsets, EXPERTS - 1, rows), rows, n)


# ---------------------------------------------------------------- the matmul


@gl.jit
def store(work, expert, row, col, buf, epoch, met):
    """Storer: what of a part is the expert's."""
    end = end_of(work.offsets, expert, work.rows)
    store_part(work.matmul, work.out, work.out_ptr, end, work.n, row, col, buf)


@gl.jit(do_not_specialize=["rows", "n", "k"])
def grouped_matmul_kernel(
    x_desc, w_desc, like_w_desc, out_desc, out, offsets, table, rows, n, k, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, C_BUFS: gl.constexpr, GROUP: gl.constexpr, B_T: gl.constexpr,
):  # fmt: skip
    """out [rows, n] = each row of x [rows, k] times the matrix of its expert, by the table. Grid: a CTA per SM.

    like_w_desc: a matrix of one expert, of which only the box counts.
    """
    gl.grid_dependency_wait()
    flags = gl.Flags(table, rows, rows, 1, rows)  # a world of one: nobody looks at them, nor at a state
    tiles = gl.load(table) * gl.cdiv(n, BN)
    mm = make_matmul(
        x_desc, like_w_desc, out_desc, flags, table, out, k, tiles, tiles, gl.to_tensor(1), BM, BN, BK, STAGES, C_BUFS,
        False, False, B_T, 0,
    )  # fmt: skip
    work = Work(mm, w_desc, out_desc, out, offsets, table, rows, n, GROUP)
    run_matmul(
        work, locate_rows, nothing_before_load, load_rows, nobody_to_meet, nothing_more, as_product, store,
        nobody_to_tell, no_communicator, 64, within_expert,
    )  # fmt: skip
