"""Attention of one GPU: the template with all ends local. K and V are one segment; its barriers are the template's.

| word | written by | waited for by | order | why its reuse is safe |
|---|---|---|---|---|
| next | the template | nobody | relaxed, gpu | 0 between launches, which follow each other |
"""

from tileweave import lang as gl
from tileweave.tiles.attention import Attention, locate_tile, make_attention
from tileweave.tiles.attention_hooks import (
    load_kv,
    load_q,
    log_sum_exp,
    no_communicator,
    normalize,
    nothing_at_the_end,
    nothing_before_kv,
    nothing_before_q,
    one_segment,
)
from tileweave.tiles.attention_roles import run_attention


@gl.aggregate
class Work:
    """What the roles share besides the template's."""

    attention: Attention
    out: gl.tensor_descriptor  # [batch, heads, rows, D]
    lse: gl.tensor  # [batch, heads, rows], if HAS_LSE
    heads: gl.tensor
    batch_heads: gl.tensor
    rows: gl.tensor
    cols: gl.tensor
    offset: gl.tensor
    together: gl.tensor
    HAS_LSE: gl.constexpr

    @gl.constexpr_function
    def __init__(self, attention, out, lse, heads, batch_heads, rows, cols, offset, together, HAS_LSE):
        self.attention, self.out, self.lse = attention, out, lse
        self.heads, self.batch_heads, self.rows, self.cols = heads, batch_heads, rows, cols
        self.offset, self.together, self.HAS_LSE = offset, together, gl.constexpr(HAS_LSE)


@gl.jit
def locate(work, n):
    """The n-th tile: its batch, head and first row."""
    TILE: gl.constexpr = work.attention.CONSUMERS * work.attention.ROWS
    head, row = locate_tile(n, work.batch_heads, work.rows, TILE, work.together)
    return head // work.heads, head % work.heads, row


@gl.jit
def segment(work, row, i):
    """All of K and V: source, first row, columns, offset."""
    return 0, 0, work.cols, work.offset


@gl.jit
def epilogue(work, o, peak, total, MINE: gl.constexpr, batch, head, row, LAYOUT: gl.constexpr):
    """Consumer: normalize, and store the log-sum-exp of the rows."""
    if work.HAS_LSE:
        rows = row + gl.arange(0, work.attention.ROWS, gl.SliceLayout(1, LAYOUT))
        lse = work.lse + (batch * work.heads + head).to(gl.int64) * work.rows
        gl.store(lse + rows, log_sum_exp(work, peak, total), mask=rows < work.rows)
    return normalize(work, o, peak, total, MINE, batch, head, row, LAYOUT)


@gl.jit
def store(work, batch, head, row, buf):
    """Storer: ROWS rows of the result."""
    gl.tma_store(work.out, [batch, head, row, 0], buf)


@gl.jit(do_not_specialize=["tiles", "scale", "heads", "group", "batch_heads", "rows", "cols", "offset", "together"])
def attention_kernel(
    q_desc, k_desc, v_desc, out_desc, lse, next, tiles, scale, heads, group, batch_heads, rows, cols, offset, together,
    HAS_LSE: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, Q_BUFS: gl.constexpr,
    TAKE_TURNS: gl.constexpr,
):  # fmt: skip
    """softmax(scale * Q K^T, masked) V, of q [batch, heads, rows, D] and k, v [batch, heads / group, cols, D].

    scale has log2(e) in it; row i sees the first min(cols, i + offset + 1) columns. Grid: co-resident CTAs, one per SM.
    """
    gl.grid_dependency_wait()
    att = make_attention(
        q_desc, k_desc, v_desc, next, tiles, scale, group, next, CONSUMERS, STAGES, Q_BUFS, TAKE_TURNS, 0, False
    )  # fmt: skip
    work = Work(att, out_desc, lse, heads, batch_heads, rows, cols, offset, together, HAS_LSE)
    run_attention(
        work, locate, one_segment, segment, nothing_before_q, load_q, nothing_before_kv, load_kv, epilogue, store,
        nothing_at_the_end, no_communicator,
    )  # fmt: skip
