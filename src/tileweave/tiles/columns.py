"""Matrices B side by side: a matmul of one A and up to three B, each of which has whole columns of tiles and a result of its
own. `work` has, besides `matmul`, the matrices as `c0`, `c1`, `c2`, of which COLUMNS are there."""

from tileweave import lang as gl


@gl.aggregate
class Column:
    """One matrix B: [k, n] or its transpose, the result [world, rows, n] that it leads to, and of its columns biases [n]
    and a scale, or scales [n]. It has the columns from `first` to `end` of all, which are padded to whole tiles."""

    b: gl.tensor_descriptor
    out: gl.tensor_descriptor
    bias: gl.tensor
    scale: gl.tensor
    first: gl.tensor
    end: gl.tensor
    n: gl.tensor

    @gl.constexpr_function
    def __init__(self, b, out, bias, scale, first, end, n):
        self.b, self.out, self.bias, self.scale, self.first, self.end, self.n = b, out, bias, scale, first, end, n


@gl.jit
def column(b, out, bias, scale, first, n, BN: gl.constexpr):
    """The matrix whose columns begin at `first`."""
    return Column(b, out, bias, scale, first, first + gl.cdiv(n, BN) * BN, n)


@gl.jit
def col_tiles(work):
    """Tiles side by side, of all matrices."""
    return work.c2.end // work.matmul.BN


@gl.jit
def load_column(work, c, at, bar, col, k):
    """Loader: a tile of B, if it is this matrix's."""
    if (col >= c.first) & (col < c.end):
        where = [col - c.first, k] if work.matmul.B_T else [k, col - c.first]
        gl.tma_load(c.b, where, bar, work.matmul.b_bufs.index(at.slot))


@gl.jit
def load_b(work, at, bar, col, k):
    """Loader: a tile of B."""
    load_column(work, work.c0, at, bar, col, k)
    if work.COLUMNS > 1:
        load_column(work, work.c1, at, bar, col, k)
    if work.COLUMNS > 2:
        load_column(work, work.c2, at, bar, col, k)


@gl.jit
def store_column(c, owner, row, col, buf):
    """Storer: one part, if it is this matrix's."""
    if (col >= c.first) & (col < c.end):
        gl.tma_store(c.out, [owner, row, col - c.first], buf)


@gl.jit
def store(work, owner, row, col, buf, epoch, met):
    """Storer: one part to its result."""
    store_column(work.c0, owner, row, col, buf)
    if work.COLUMNS > 1:
        store_column(work.c1, owner, row, col, buf)
    if work.COLUMNS > 2:
        store_column(work.c2, owner, row, col, buf)
