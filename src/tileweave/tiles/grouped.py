"""What grouped matmuls share: rows sorted by expert, where experts begin and end known on the device only.

A table of row tiles says for each its expert, its first row and the end of the expert. No tile spans two experts, so an
expert's last tile may be ragged: its operand has rows of the next expert, which are multiplied in vain, and its result
must not touch them. A part that is all the expert's goes by TMA, one that ends within it by masked stores from registers,
one beyond it nowhere; a multiplier all of whose rows are beyond it leaves its K steps out (`within`).

A kernel whose rows lie in its operand `matmul.a_desc` takes LOCATE, LOAD and WITHIN from here: its `work` has, besides, `w`
(descriptor of the matrices), `offsets`, `table`, `rows`, `n` and GROUP.
"""

from tileweave import lang as gl
from tileweave.tiles.matmul import grouped_order

ENTRY = gl.constexpr(4)  # words of a row tile in the table: expert, first row, end of the expert, nothing


@gl.jit
def entry_of(table, i):
    """The words of the i-th row tile; the first entry of the table has their number."""
    return table + (1 + i) * ENTRY


@gl.jit
def row_tile(t, tiles, cols, GROUP: gl.constexpr):
    """(row tile, column) of the t-th of `tiles` tiles, `cols` side by side: GROUP row tiles over all columns, whatever their
    experts, so that a wave's operands stay in L2 and a matrix is read once where an expert has few rows."""
    return grouped_order(gl.minimum(t, gl.maximum(tiles - 1, 0)), tiles // cols, cols, GROUP)


@gl.jit
def end_of(offsets, expert, rows):
    """The row behind an expert's last one, from 0 to `rows`, whatever the offsets say."""
    return gl.maximum(gl.minimum(gl.load(offsets + expert), rows), 0)


@gl.jit
def load_matrix(mm, w, at, bar, expert, col, k, SIDE: gl.constexpr = 0):
    """Loader: a tile of an expert's matrix [experts, k, n], B_T [experts, n, k], to a place in the ring, where the tiles of
    several matrices lie side by side."""
    buf = mm.b_bufs.index(at.slot)
    if mm.B_T:
        tiles = gl.reinterpret(buf, w.dtype, [mm.ACC // mm.BN] + w.block_shape, w.layout)
        gl.tma_load(w, [expert, col, k], bar, tiles.index(SIDE))
    else:
        tile = gl.column_block(buf, SIDE, mm.BN)
        gl.tma_load(w, [expert, k, col], bar, gl.reinterpret(tile, w.dtype, w.block_shape, w.layout))


@gl.jit
def locate_rows(work, t):
    """LOCATE: the t-th tile's expert, its row in the operand and in the result, its column."""
    i, j = row_tile(t, work.matmul.tiles, gl.cdiv(work.n, work.matmul.BN), work.GROUP)
    entry = entry_of(work.table, i)
    row = gl.load(entry + 1)
    return gl.load(entry), row, row, j * work.matmul.BN


@gl.jit
def load_rows(work, at, bar, expert, row, col, step, epoch, there):
    """LOAD: a K step."""
    mm = work.matmul
    gl.tma_load(mm.a_desc, [row, step * mm.BK], bar, mm.a_bufs.index(at.slot))
    load_matrix(mm, work.w, at, bar, expert, col, step * mm.BK)


@gl.jit
def within_expert(work, expert, row, steps):
    """WITHIN: how many K steps a multiplier's rows take, none if all of them are beyond the expert's."""
    return gl.where(row < end_of(work.offsets, expert, work.rows), steps, 0)


@gl.jit
def as_product(work, part, at, HALF: gl.constexpr, expert, row, col, LAYOUT: gl.constexpr):
    """EPILOGUE: the product as it is."""
    return part, at


@gl.jit
def store_part(mm, out_desc, out, end, n, row, col, buf):
    """Storer: what of a part lies ahead of `end`, to `out` [rows, n]."""
    if row + mm.ROWS <= end:
        gl.tma_store(out_desc, [row, col], buf)
    elif row < end:
        store_rows(mm, out_desc, out, end, n, row, col, buf)


@gl.jit
def store_rows(mm, like, out, end, n, row, col, buf):
    """Storer: rows of a part ahead of `end`, by stores of 16 bytes. `like`: a descriptor of parts."""
    STEP: gl.constexpr = 8  # rows of 128 bytes that are swizzled together
    LANES: gl.constexpr = mm.WIDTH // 8
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    steps = gl.reinterpret(buf, like.dtype, [mm.ROWS // STEP, STEP, mm.WIDTH], like.layout)
    cols = col + gl.arange(0, mm.WIDTH, gl.SliceLayout(0, L))
    n = n // 8 * 8  # which it is, as the compiler must know to store 16 bytes at once
    for i in range(0, gl.cdiv(gl.minimum(end - row, mm.ROWS), STEP)):
        rows = row + i * STEP + gl.arange(0, STEP, gl.SliceLayout(1, L))
        where = rows.to(gl.int64)[:, None] * n + cols[None, :]
        gl.store(out + where, steps.index(i).load(L), mask=(rows < end)[:, None] & (cols < n)[None, :])
