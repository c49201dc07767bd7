"""Attention whose K and V come from several sources, as those of a ring do: what a kernel adds to the template for that."""

from tileweave import lang as gl
from tileweave.tiles.attention import NO_MASK, Attention, locate_tile, make_attention
from tileweave.tiles.attention_hooks import (
    load_q,
    no_communicator,
    normalize,
    nothing_at_the_end,
    nothing_before_q,
)
from tileweave.tiles.attention_roles import run_attention


@gl.aggregate
class Work:
    """What the roles share besides the template's. Sources are the shards, of `cols` rows, of a sequence."""

    attention: Attention
    out: gl.tensor_descriptor
    rows: gl.tensor
    cols: gl.tensor
    rank: gl.tensor
    absent: gl.tensor
    WORLD: gl.constexpr

    @gl.constexpr_function
    def __init__(self, attention, out, rows, cols, rank, absent, WORLD):
        self.attention, self.out, self.rows, self.cols = attention, out, rows, cols
        self.rank, self.absent, self.WORLD = rank, absent, gl.constexpr(WORLD)


@gl.jit
def locate(work, n):
    """The n-th tile of the only batch."""
    TILE: gl.constexpr = work.attention.CONSUMERS * work.attention.ROWS
    head, row = locate_tile(n, gl.cdiv(work.attention.tiles, gl.cdiv(work.rows, TILE)), work.rows, TILE, 1)
    return 0, head, row


@gl.jit
def segments(work, row):
    """One for each source."""
    return work.WORLD


@gl.jit
def segment(work, row, i):
    """Own rows first, under a causal mask, then those of the ranks before, whole, and none of the ranks behind."""
    source = (work.rank - i + work.WORLD) % work.WORLD
    return source, 0, gl.where(source <= work.rank, work.cols, 0), gl.where(i == 0, 0, NO_MASK)


@gl.jit
def before_kv(work, batch, head, source, known):
    """Whether a source is there; `known` counts the questions."""
    return source != work.absent, known + 1


@gl.jit
def load_kv(work, buf, bar, IS_V: gl.constexpr, batch, head, source, row, there):
    """A block of [sources, heads, cols, D]; K from beyond the end, where NaN is, if the source is absent."""
    att = work.attention
    if IS_V:
        gl.tma_load(att.v_desc, [source, head // att.group, row, 0], bar, buf)
    else:
        gl.tma_load(att.k_desc, [source, head // att.group, gl.where(there, row, work.cols), 0], bar, buf)


@gl.jit
def store(work, batch, head, row, buf):
    """ROWS rows of the result."""
    gl.tma_store(work.out, [batch, head, row, 0], buf)


@gl.jit(do_not_specialize=["tiles", "scale", "group", "rows", "cols", "rank", "absent"])
def segments_kernel(
    q_desc, k_desc, v_desc, out_desc, next, tiles, scale, group, rows, cols, rank, absent, WORLD: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Rank's rows [1, heads, rows, D] of causal attention over a sequence of WORLD shards."""
    att = make_attention(q_desc, k_desc, v_desc, next, tiles, scale, group, next, CONSUMERS, STAGES, 2, False, 0, False)
    work = Work(att, out_desc, rows, cols, rank, absent, WORLD)
    run_attention(
        work, locate, segments, segment, nothing_before_q, load_q, before_kv, load_kv, normalize, store,
        nothing_at_the_end, no_communicator,
    )  # fmt: skip
