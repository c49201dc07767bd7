"""Tiles whose columns belong to ranks, in chunks: of every chunk the owners' r+1, r+2, ..., r in turn, on rank r.

While one chunk is multiplied, the one before travels. A phase is (chunk, owner), of number chunk * WORLD + owner. `work`
has, besides `matmul` and `flags`: `rows`, `cols` of an owner (whole tiles), `chunks`, `chunk_tiles` of one owner in a chunk,
and GROUP as in `grouped_order`.
"""

from tileweave import lang as gl
from tileweave.tiles.matmul import grouped_order


@gl.jit
def tile_at(work, t):
    """Row and column of the t-th tile of an owner, in his columns."""
    mm = work.matmul
    i, j = grouped_order(t, gl.cdiv(work.rows, mm.BM), gl.cdiv(work.cols, mm.BN), work.GROUP)
    return i * mm.BM, j * mm.BN


@gl.jit
def tiles_of(work, chunk):
    """Tiles of each owner in a chunk: its first, and how many; one at least, also beyond the last chunk."""
    per = gl.cdiv(work.rows, work.matmul.BM) * gl.cdiv(work.cols, work.matmul.BN)
    first = chunk * work.chunk_tiles
    return first, gl.maximum(gl.minimum(work.chunk_tiles, per - first), 1)


@gl.jit
def locate_in_chunks(work, t):
    """LOCATE: the phase of the t-th tile, its row twice, its column in the product."""
    flags = work.flags
    chunk = t // (work.chunk_tiles * flags.world)
    first, count = tiles_of(work, chunk)
    t -= first * flags.world
    owner = (flags.rank + 1 + t // count) % flags.world
    row, col = tile_at(work, first + t % count)
    return chunk * flags.world + owner, row, row, owner * work.cols + col


@gl.jit
def part_at(mm, i):
    """Row and column in a tile of its i-th part; a tile has HALVES * BN / WIDTH."""
    return i % mm.HALVES * mm.ROWS, i // mm.HALVES * mm.WIDTH


@gl.jit
def count_up(mm, word, count, every):
    """Count in a word of `state`; whether that makes `every`, in which case the word is 0 again. Performed before: what is
    counted. Whoever comes last knows that all of it is."""
    last = (count > 0) & (gl.atomic_add(mm.state + word, count, sem="acq_rel", scope="gpu") == every - count)
    if last:
        gl.atomic_xchg(mm.state + word, 0, sem="relaxed", scope="gpu")
    return last
