"""The attention template's consumers, one or two, on tensor cores that work in tensor memory (tcgen05). For each there are

    consumer   four warps: the running softmax of its 128 rows, S out of tensor memory and P into it, and O there made
               smaller where a maximum has grown; then the op's EPILOGUE
    issuer     one warp: S = Q K^T and O += P V, in the order in which K and V come

beside the template's loader and storers. O stays in tensor memory, in float32, over all segments of a tile; maxima and sums
are in registers, a row in each thread. P has the place of S. So one consumer's softmax and products take turns, and two
consumers fill each other's gaps; they have an issuer each, as one may wait while the other multiplies.

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| scored[c] | the commit of a block's S | consumer c | mbarrier, CTA | one phase a block, as of the next two, which each wait for the one before |
| weighed[c] | consumer c: P is in the place of S, O is of P's measure, or of an earlier tile and taken | issuer c, before O += P V | mbarrier, CTA | likewise |
| added[c] | the commit of a block's O += P V | issuer c, before the next S in P's place; consumer c, before it takes O | mbarrier, CTA | the consumer waits for a tile's last one, and nothing comes behind that before it has |
| ring.ready / empty | loader's TMA / the commit of each issuer's product that reads the slot | issuers / loader | mbarrier, CTA | Channel's phases |
| queries.empty | every storer, as the template has it; every issuer, it has read which tile it is | loader | mbarrier, CTA | Channel's phases |
"""

from tileweave import lang as gl
from tileweave.tiles.attention import (
    announced,
    block_of,
    finished_at,
    masked,
    query_buf,
    seen,
    softmax_step,
    whole,
)

WIDTH = gl.constexpr(32)  # columns of O that are in registers at once while it is made smaller


@gl.aggregate
class Products:
    """Matrices in tensor memory, one of each for every consumer, and their barriers."""

    s_bufs: gl.tensor_memory_descriptor  # [CONSUMERS, ROWS, BN]
    o_bufs: gl.tensor_memory_descriptor  # [CONSUMERS, ROWS, D]
    scored: gl.shared_memory_descriptor
    weighed: gl.shared_memory_descriptor
    added: gl.shared_memory_descriptor

    @gl.constexpr_function
    def __init__(self, s_bufs, o_bufs, scored, weighed, added):
        self.s_bufs, self.o_bufs = s_bufs, o_bufs
        self.scored, self.weighed, self.added = scored, weighed, added


@gl.jit
def make_products(att):
    """Allocate them."""
    OF_S: gl.constexpr = gl.TensorMemoryLayout([att.ROWS, att.BN], 1)
    OF_O: gl.constexpr = gl.TensorMemoryLayout([att.ROWS, att.D], 1)
    scored = gl.allocate_shared_memory(gl.int64, [att.CONSUMERS, 1], gl.MBarrierLayout())
    weighed = gl.allocate_shared_memory(gl.int64, [att.CONSUMERS, 1], gl.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [att.CONSUMERS, 1], gl.MBarrierLayout())
    for i in gl.static_range(att.CONSUMERS):
        gl.mbarrier_init(scored.index(i), count=1)
        gl.mbarrier_init(weighed.index(i), count=1)
        gl.mbarrier_init(added.index(i), count=1)
    return Products(
        gl.allocate_tensor_memory(gl.float32, [att.CONSUMERS, att.ROWS, att.BN], OF_S),
        gl.allocate_tensor_memory(gl.float32, [att.CONSUMERS, att.ROWS, att.D], OF_O),
        scored, weighed, added,
    )  # fmt: skip


@gl.jit
def weights(att, products, MINE: gl.constexpr):
    """P, in the first half of the columns of S."""
    TWICE: gl.constexpr = gl.TensorMemoryLayout([att.ROWS, 2 * att.BN], 1)
    both = gl.reinterpret(products.s_bufs.index(MINE), att.kv_bufs.dtype, [att.ROWS, 2 * att.BN], TWICE)
    return both.slice(0, att.BN)


# ---------------------------------------------------------------- the issuers


@gl.jit
def issue_scores(att, products, q, at, parity, MINE: gl.constexpr):
    """Start a block's S, where P of the block before has been read."""
    att.ring.consumer_wait(at)
    gl.mbarrier_wait(products.added.index(MINE), parity ^ 1)
    k = block_of(att, at).permute((1, 0))
    told = [att.ring.empty_at(at), products.scored.index(MINE)]
    gl.tcgen05_mma(q, k, products.s_bufs.index(MINE), use_acc=False, mbarriers=told)


@gl.jit
def issue_sums(att, products, at, more, parity, MINE: gl.constexpr):
    """Start O += P V of a block, or O = P V of a tile's first. Returns the parity of the next block."""
    att.ring.consumer_wait(at)
    gl.mbarrier_wait(products.weighed.index(MINE), parity)
    told = [att.ring.empty_at(at), products.added.index(MINE)]
    p, o = weights(att, products, MINE), products.o_bufs.index(MINE)
    gl.tcgen05_mma(p, block_of(att, at), o, use_acc=more, mbarriers=told)
    return parity ^ 1


@gl.jit
def issue_role(work, products, MINE: gl.constexpr, LOCATE: gl.constexpr, SEGMENTS: gl.constexpr, SEGMENT: gl.constexpr):
    """Issuer: the products of a consumer's rows."""
    att = work.attention
    to, at, parity = att.queries.start(), att.ring.start(), 0
    att.queries.consumer_wait(to)
    n = announced(att, to)
    while n < att.tiles:
        batch, head, row = LOCATE(work, n)
        att.queries.release(to)
        q = query_buf(att, to, MINE).reshape([att.ROWS, att.D])
        blocks = row * 0
        for i in range(SEGMENTS(work, row)):
            source, start, cols, offset = SEGMENT(work, row, i)
            blocks += seen(att, row, i, cols, offset)
        issue_scores(att, products, q, at, parity, MINE)
        at = att.ring.next(at)
        for j in range(1, blocks):
            v_at = att.ring.next(at)
            parity = issue_sums(att, products, v_at, j > 1, parity, MINE)
            issue_scores(att, products, q, at, parity, MINE)
            at = att.ring.next(v_at)
        parity = issue_sums(att, products, at, blocks > 1, parity, MINE)
        at = att.ring.next(at)
        to = att.queries.next(to)
        att.queries.consumer_wait(to)
        n = announced(att, to)


# ---------------------------------------------------------------- the consumers


@gl.jit
def shrink_sums(att, o, shrink):
    """Multiply the rows of O, part by part."""
    PART: gl.constexpr = gl.tensor_memory_registers(att.ROWS, WIDTH, gl.num_warps())
    factor = gl.convert_layout(shrink, gl.SliceLayout(1, PART))[:, None]
    for j in gl.static_range(att.D // WIDTH):
        part = o.slice(j * WIDTH, WIDTH)
        gl.tcgen05_store(part, gl.tcgen05_load(part, PART) * factor)


@gl.jit
def weigh(
    att, products, peak, total, more, parity, first_row, first_col, cols, offset, MASKED: gl.constexpr,
    MINE: gl.constexpr, LS: gl.constexpr,
):  # fmt: skip
    """One block: from S to P, with O made smaller unless it is a tile's first. Returns peak, total, parity."""
    gl.mbarrier_wait(products.scored.index(MINE), parity)
    s = gl.tcgen05_load(products.s_bufs.index(MINE), LS)
    if MASKED:
        s = masked(att, s, first_row, first_col, cols, offset, LS)
    p, peak, shrink = softmax_step(att, s, peak, MASKED)
    total = total * shrink + gl.sum(p, 1)
    gl.tcgen05_store(weights(att, products, MINE), p.to(att.kv_bufs.dtype))
    if more:
        shrink_sums(att, products.o_bufs.index(MINE), shrink)
    gl.mbarrier_arrive(products.weighed.index(MINE), count=1)
    return peak, total, parity ^ 1


@gl.jit
def attend(
    work, products, parity, row, MINE: gl.constexpr, LO: gl.constexpr, SEGMENTS: gl.constexpr, SEGMENT: gl.constexpr
):
    """A consumer's rows of a tile through all segments: O not yet normalized, maxima and sums of rows, parity."""
    att = work.attention
    LS: gl.constexpr = gl.tensor_memory_registers(att.ROWS, att.BN, gl.num_warps())
    first_row = row + MINE * att.ROWS
    peak = gl.full([att.ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LS))
    total = gl.zeros([att.ROWS], gl.float32, gl.SliceLayout(1, LS))
    for i in range(SEGMENTS(work, row)):
        source, start, cols, offset = SEGMENT(work, row, i)
        blocks = seen(att, row, i, cols, offset)
        bare = gl.maximum(blocks - whole(att, first_row, cols, offset), 0)
        for j in range(0, bare):
            col = (blocks - 1 - j) * att.BN
            peak, total, parity = weigh(
                att, products, peak, total, (i > 0) | (j > 0), parity, first_row, col, cols, offset, True, MINE, LS
            )
        for j in range(bare, blocks):
            peak, total, parity = weigh(
                att, products, peak, total, (i > 0) | (j > 0), parity, first_row, 0, cols, offset, False, MINE, LS
            )
    gl.mbarrier_wait(products.added.index(MINE), parity ^ 1)
    o = gl.tcgen05_load(products.o_bufs.index(MINE), LO)
    total, peak = gl.convert_layout(total, gl.SliceLayout(1, LO)), gl.convert_layout(peak, gl.SliceLayout(1, LO))
    return o, peak, total, parity


@gl.jit
def weigh_role(
    work, products, MINE: gl.constexpr, LOCATE: gl.constexpr, SEGMENTS: gl.constexpr, SEGMENT: gl.constexpr,
    EPILOGUE: gl.constexpr,
):  # fmt: skip
    """Consumer: attend, pass O through the op's epilogue to the storer, in the buffer that the query came in."""
    att = work.attention
    LO: gl.constexpr = gl.tensor_memory_registers(att.ROWS, att.D, gl.num_warps())
    to, parity = att.queries.start(), 0
    att.queries.consumer_wait(to)
    n = announced(att, to)
    while n < att.tiles:
        batch, head, row = LOCATE(work, n)
        o, peak, total, parity = attend(work, products, parity, row, MINE, LO, SEGMENTS, SEGMENT)
        o = EPILOGUE(work, o, peak, total, MINE, batch, head, row + MINE * att.ROWS, LO)
        query_buf(att, to, MINE).reshape([att.ROWS, att.D]).store(o.to(att.q_bufs.dtype))
        gl.fence_async_shared()
        gl.mbarrier_arrive(finished_at(att, to, MINE), count=1)
        to = att.queries.next(to)
        att.queries.consumer_wait(to)
        n = announced(att, to)
