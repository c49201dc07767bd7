"""The attention template: a persistent, warp-specialized flash attention forward whose ends are left open.

    loader       one warp: TMA loads of query tiles, and of K and V blocks into one ring
    consumer     a warp group for each 64 rows of a tile, one or two: S = Q K^T, the running softmax, O += P V, both wgmma; then the
                 op's EPILOGUE. Where a query's boxes have 128 rows, those of attention_tcgen05.py instead
    storer       a warp for each consumer: the op's STORE of its finished rows
    communicator whole CTAs below COMM_SMS that only run the op's COMMUNICATE role

A tile is CONSUMERS * ROWS query rows of one head. What its rows attend to is a list of segments, runs of rows of K and V
that lie together, each with the columns that a row sees of it: row i the first min(cols, i + offset + 1). So a causal
mask, a full one and whatever is behind a ragged end are one comparison, made only in the blocks that the limit of some
row falls into. O, the maximum and the sum stay in registers, in float32, over all segments of a tile.

In the ring lie K 0, K 1, V 0, K 2, V 1, ...: the order of use, as S of a block is computed while O takes in the block
before. Blocks of a segment are taken from its end, so that those with a mask come first. The next tile's query comes into
another buffer meanwhile; a finished tile's O leaves from the buffer that its query came in.

PACKED rows are those of several sequences one behind the other. `bounds` [rows, 2] says of each, counted as `row` is and to
whole tiles, where what it sees begins and ends in the whole; a segment's offset then says where its first column lies there.
A block in which some row of a consumer is not to look back so far has a mask as well.

Which tile is next says a counter that all CTAs draw from, so they end together although tiles differ in length; a grid of
G computing CTAs begins with tiles 0 to G - 1.

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| queries.ready | loader: which tile it is (shared memory), then TMA of its query | consumers, storers | mbarrier, CTA | Channel's phases |
| queries.empty | every storer, its bulk store has read the buffer (and whoever else reads which tile it is) | loader | mbarrier, CTA | Channel's phases |
| ring.ready / empty | loader's TMA / every consumer, its wgmma has read the slot | consumers / loader | mbarrier, CTA | Channel's phases |
| finished[c] of a query buffer | consumer c: O is in its part of it | storer c | mbarrier, CTA | the buffer is refilled only after the storer has released it |
| turns[c] | the consumer before c: its products of a block have been issued | consumer c, before it issues its own (TAKE_TURNS) | mbarrier, CTA | each arrival is waited for before the next one of its kind |
| next | every loader draws from it | nobody; who draws last puts it back to 0 | relaxed, gpu | each CTA draws until it gets a number beyond the last, then no more |

**A kernel of one's own** states what differs, with a `work` aggregate that holds an `Attention` as `work.attention`:

| hook | says | default |
|---|---|---|
| `LOCATE(work, n)` | the n-th tile: batch, head, first row | `locate_tile` orders them |
| `SEGMENTS(work, row)` | how many segments a tile attends to, at least 1 | `one_segment` |
| `SEGMENT(work, row, i)` | the i-th: source, its first row in the source's K and V, cols, offset (NO_MASK: no causal mask). The first may be empty for all rows, the others too | |
| `BEFORE_Q(work, batch, head, row, known)`, `BEFORE_KV(work, batch, head, source, known)` | wait until a tile's query, a segment, has arrived; return (whether it has, `known`): a number of the loader's, 0 at first, to remember what need not be waited for again | `nothing_before_q`, `nothing_before_kv` |
| `LOAD_Q(work, buf, bar, batch, head, row, there)` | start the load of ROWS rows | `load_q` |
| `LOAD_KV(work, buf, bar, IS_V, batch, head, source, row, there)` | start the load of a block of K or V; head is that of the query. Rows of K may be anything where no column is seen, those of V must be numbers: a descriptor of V pads with zeros. Where `there` is False load K from beyond the end of a descriptor that pads with NaN: the result is NaN, and every role keeps its counts | `load_kv` |
| `EPILOGUE(work, o, peak, total, MINE, batch, head, row, LAYOUT)` | O as it is stored, of the unscaled maximum and the sum of its rows | `normalize` |
| `STORE(work, batch, head, row, buf)` | start the store of ROWS rows by TMA; a read wait follows | `store_out` |
| `END(work)` | a storer's end: no more of this CTA's rows will be stored | `nothing_at_the_end` |
| `COMMUNICATE(work)` | what communicator CTAs do | `no_communicator` |

Whatever is read once (an epoch) is read before `run_attention` and handed over in `work`.
"""

from tileweave import lang as gl
from tileweave.tiles.channel import Channel, make_channel

NO_MASK = gl.constexpr(1 << 30)  # an offset by which every row sees all columns
TENSOR_ROWS = gl.constexpr(128)  # of a consumer by tcgen05, and of a query's boxes, by which a launch says so


@gl.aggregate
class Attention:
    """What the roles of an attention CTA share. `next` is the counter of tiles, `tiles` how many the whole grid computes,
    `scale` what logits are multiplied with, times log2(e), `group` how many query heads share a head of K and V."""

    q_desc: gl.tensor_descriptor
    k_desc: gl.tensor_descriptor
    v_desc: gl.tensor_descriptor
    q_bufs: gl.shared_memory_descriptor
    kv_bufs: gl.shared_memory_descriptor
    numbers: gl.shared_memory_descriptor  # of the tiles whose queries are in q_bufs
    queries: Channel
    ring: Channel
    finished: gl.shared_memory_descriptor
    turns: gl.shared_memory_descriptor
    next: gl.tensor
    tiles: gl.tensor
    scale: gl.tensor
    group: gl.tensor
    bounds: gl.tensor  # if PACKED
    CONSUMERS: gl.constexpr
    ROWS: gl.constexpr  # of each
    BN: gl.constexpr  # rows of a block of K and V
    D: gl.constexpr
    TAKE_TURNS: gl.constexpr
    COMM_SMS: gl.constexpr
    PACKED: gl.constexpr

    @gl.constexpr_function
    def __init__(
        self, q_desc, k_desc, v_desc, q_bufs, kv_bufs, numbers, queries, ring, finished, turns, next, tiles, scale,
        group, bounds, CONSUMERS, ROWS, BN, D, TAKE_TURNS, COMM_SMS, PACKED,
    ):  # fmt: skip
        self.q_desc, self.k_desc, self.v_desc = q_desc, k_desc, v_desc
        self.q_bufs, self.kv_bufs, self.numbers = q_bufs, kv_bufs, numbers
        self.queries, self.ring, self.finished, self.turns = queries, ring, finished, turns
        self.next, self.tiles, self.scale, self.group, self.bounds = next, tiles, scale, group, bounds
        self.CONSUMERS, self.ROWS = gl.constexpr(CONSUMERS), gl.constexpr(ROWS)
        self.BN, self.D = gl.constexpr(BN), gl.constexpr(D)
        self.TAKE_TURNS, self.COMM_SMS = gl.constexpr(TAKE_TURNS), gl.constexpr(COMM_SMS)
        self.PACKED = gl.constexpr(PACKED)


@gl.jit
def make_attention(
    q_desc, k_desc, v_desc, next, tiles, scale, group, bounds, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    Q_BUFS: gl.constexpr, TAKE_TURNS: gl.constexpr, COMM_SMS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Allocate buffers and barriers, for `run_attention` of attention_roles.py. The last two dimensions of the descriptors' boxes are ROWS x D and BN x D, all others
    1; STAGES counts blocks of K and of V, at least 3. `bounds` is any pointer unless PACKED."""
    DIMS: gl.constexpr = len(q_desc.block_shape)
    KV_DIMS: gl.constexpr = len(k_desc.block_shape)
    READERS: gl.constexpr = 2 if q_desc.block_shape[DIMS - 2] == TENSOR_ROWS else 1
    q_bufs = gl.allocate_shared_memory(q_desc.dtype, [Q_BUFS * CONSUMERS] + q_desc.block_shape, q_desc.layout)
    kv_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_shape, k_desc.layout)
    numbers = gl.allocate_shared_memory(gl.int32, [Q_BUFS, 1], gl.MBarrierLayout())
    finished = gl.allocate_shared_memory(gl.int64, [Q_BUFS * CONSUMERS, 1], gl.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], gl.MBarrierLayout())
    for i in gl.static_range(Q_BUFS * CONSUMERS):
        gl.mbarrier_init(finished.index(i), count=1)
    for i in gl.static_range(CONSUMERS):
        gl.mbarrier_init(turns.index(i), count=1)
    return Attention(
        q_desc, k_desc, v_desc, q_bufs, kv_bufs, numbers, make_channel(Q_BUFS, CONSUMERS * READERS),
        make_channel(STAGES, CONSUMERS), finished, turns, next, tiles, scale, group, bounds, CONSUMERS,
        q_desc.block_shape[DIMS - 2], k_desc.block_shape[KV_DIMS - 2], q_desc.block_shape[DIMS - 1], TAKE_TURNS, COMM_SMS,
        PACKED,
    )  # fmt: skip


# ---------------------------------------------------------------- tiles, and what they attend to


@gl.jit
def locate_tile(n, heads, rows, TILE: gl.constexpr, together):
    """(head, first row) of the n-th tile, heads counted over all batches: `together` heads at a time, so that their K and
    V stay in L2, the tiles of these from the last rows on, which under a causal mask are the longest."""
    across = gl.cdiv(rows, TILE)
    first = n // (together * across) * together
    n = n % (together * across)
    width = gl.minimum(heads - first, together)
    return first + n % width, (across - 1 - n // width) * TILE


@gl.jit
def limit(att, rows, cols, offset):
    """How many columns of a segment, from its first on, a row sees, or each of several; of PACKED rows those before its
    end. What is not positive means none."""
    end = rows + offset + 1
    if att.PACKED:
        end = gl.load(att.bounds + 2 * rows + 1) - offset
    return gl.minimum(end, cols)


@gl.jit
def beginning(att, rows, offset):
    """The first column of a segment that a PACKED row sees, or each of several; negative where it lies before."""
    return gl.load(att.bounds + 2 * rows) - offset


@gl.jit
def packed_segment(att, row, position, size):
    """First row, cols and offset of the segment that a PACKED tile sees of `size` keys, which lie from `position` on in
    the sequence: from where its first row begins to where its last one ends."""
    start = gl.maximum(beginning(att, row, position), 0)
    return start, limit(att, row + att.CONSUMERS * att.ROWS - 1, size, position) - start, position + start


@gl.jit
def seen(att, row, i, cols, offset):
    """How many blocks of the i-th segment a tile takes in: those of which some row sees a column, and one at least of the
    first segment, so that every tile has a first block."""
    last = row + att.CONSUMERS * att.ROWS - 1
    visible = gl.maximum(limit(att, last, cols, offset), gl.where(i == 0, 1, 0))
    return gl.cdiv(visible, att.BN)


@gl.jit
def whole(att, first_row, cols, offset):
    """How many blocks of a segment a consumer's rows, from `first_row` on, all see whole."""
    blocks = gl.maximum(limit(att, first_row, cols, offset), 0) // att.BN
    if att.PACKED:
        blocks = gl.where(beginning(att, first_row + att.ROWS - 1, offset) > 0, 0, blocks)
    return blocks


# ---------------------------------------------------------------- the loader


@gl.jit
def draw(att):
    """The number of the next tile of this CTA, beyond the last if there is none: then the CTA draws no more."""
    computing = gl.num_programs(0) - att.COMM_SMS
    drawn = gl.atomic_add(att.next, 1, sem="relaxed", scope="gpu")
    if drawn == att.tiles - 1:  # as many draws as tiles: all but the first ones of all CTAs, and one in vain for each
        gl.atomic_xchg(att.next, 0, sem="relaxed", scope="gpu")
    return computing + drawn


@gl.jit
def announce(att, at, n):
    """Say which tile's query comes into a buffer."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    att.numbers.index(at.slot).store(gl.full([1], 0, gl.int32, L) + n)
    gl.barrier()


@gl.jit
def announced(att, at):
    """What `announce` has said, once the query is ready."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(att.numbers.index(at.slot).load(L))


@gl.jit
def query_buf(att, at, MINE: gl.constexpr):
    """A consumer's part of a query buffer."""
    return att.q_bufs.index(at.slot * att.CONSUMERS + MINE)


@gl.jit
def bring(work, LOAD_KV: gl.constexpr, IS_V: gl.constexpr, at, batch, head, source, row, there):
    """Start the load of a block of K or V into the ring; returns the next place."""
    att = work.attention
    att.ring.producer_wait(at)
    bar = att.ring.ready_at(at)
    gl.mbarrier_expect(bar, att.BN * att.D * (att.k_desc.dtype.primitive_bitwidth // 8))
    LOAD_KV(work, att.kv_bufs.index(at.slot), bar, IS_V, batch, head, source, row, there)
    return att.ring.next(at)


@gl.jit
def load_role(
    work, LOCATE: gl.constexpr, SEGMENTS: gl.constexpr, SEGMENT: gl.constexpr, BEFORE_Q: gl.constexpr,
    LOAD_Q: gl.constexpr, BEFORE_KV: gl.constexpr, LOAD_KV: gl.constexpr,
):  # fmt: skip
    """Loader: draw tiles; bring their queries, and the blocks of all segments in the consumers' order."""
    att = work.attention
    Q_BYTES: gl.constexpr = att.CONSUMERS * att.ROWS * att.D * (att.q_desc.dtype.primitive_bitwidth // 8)
    to, at = att.queries.start(), att.ring.start()
    n, known = gl.program_id(0) - att.COMM_SMS, 0
    while n < att.tiles:
        batch, head, row = LOCATE(work, n)
        there, known = BEFORE_Q(work, batch, head, row, known)
        att.queries.producer_wait(to)
        announce(att, to, n)
        bar = att.queries.ready_at(to)
        gl.mbarrier_expect(bar, Q_BYTES)
        for i in gl.static_range(att.CONSUMERS):
            LOAD_Q(work, query_buf(att, to, i), bar, batch, head, row + i * att.ROWS, there)
        to = att.queries.next(to)
        v_source, v_row = row * 0, row * 0
        for i in range(SEGMENTS(work, row)):
            source, start, cols, offset = SEGMENT(work, row, i)
            blocks = seen(att, row, i, cols, offset)
            if blocks > 0:
                there, known = BEFORE_KV(work, batch, head, source, known)
            for j in range(blocks):
                k_row = start + (blocks - 1 - j) * att.BN
                at = bring(work, LOAD_KV, False, at, batch, head, source, k_row, there)
                if (i > 0) | (j > 0):
                    at = bring(work, LOAD_KV, True, at, batch, head, v_source, v_row, there)
                v_source, v_row = source, k_row
        at = bring(work, LOAD_KV, True, at, batch, head, v_source, v_row, there)
        n = draw(att)
    att.queries.producer_wait(to)
    announce(att, to, n)
    att.queries.publish(to)


# ---------------------------------------------------------------- the consumers


@gl.jit
def await_turn(att, parity, MINE: gl.constexpr):
    """Wait until the consumer before has issued its products; the first one begins."""
    if att.TAKE_TURNS:
        gl.mbarrier_wait(att.turns.index(MINE), parity ^ (1 if MINE == 0 else 0))


@gl.jit
def pass_turn(att, parity, MINE: gl.constexpr):
    """Let the next consumer issue its products."""
    if att.TAKE_TURNS:
        gl.mbarrier_arrive(att.turns.index((MINE + 1) % att.CONSUMERS), count=1)
    return parity ^ 1


@gl.jit
def block_of(att, at):
    """A block of K or V in the ring."""
    return att.kv_bufs.index(at.slot).reshape([att.BN, att.D])


@gl.jit
def logits(att, q, at, LS: gl.constexpr):
    """Begin S = Q K^T."""
    nothing = gl.zeros([att.ROWS, att.BN], gl.float32, LS)
    return gl.warpgroup_mma(q, block_of(att, at).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gl.jit
def masked(att, s, first_row, first_col, cols, offset, LS: gl.constexpr):
    """S with -inf in the columns, from `first_col` of a segment on, that a row does not see."""
    rows = first_row + gl.arange(0, att.ROWS, gl.SliceLayout(1, LS))
    end = limit(att, rows, cols, offset) - first_col
    columns = gl.arange(0, att.BN, gl.SliceLayout(0, LS))
    visible = columns[None, :] < end[:, None]
    if att.PACKED:
        visible = visible & (columns[None, :] >= (beginning(att, rows, offset) - first_col)[:, None])
    return gl.where(visible, s, float("-inf"))


@gl.jit
def softmax_step(att, s, peak, GUARD: gl.constexpr):
    """Of logits and their rows' maxima so far: the exponentials and the maxima now, and what the sums so far shrink by.
    GUARD: there may be rows that have seen nothing yet."""
    larger = gl.maximum(peak, gl.max(s, 1))
    top = larger * att.scale
    if GUARD:
        top = gl.where(larger == float("-inf"), 0.0, top)
    return gl.exp2(s * att.scale - top[:, None]), larger, gl.exp2(peak * att.scale - top)


@gl.jit
def take_in(
    att, q, o, peak, total, p, at, parity, first_row, first_col, cols, offset, MASKED: gl.constexpr, MINE: gl.constexpr,
    LS: gl.constexpr, LO: gl.constexpr,
):  # fmt: skip
    """One block: its S is computed while O takes in P V of the block before; then its softmax.

    The place `at` is that of its K, which has been waited for; behind it lies V of the block before. Returns o, peak, total, p,
    at, parity, having waited for that place too.
    """
    v_at = att.ring.next(at)
    await_turn(att, parity, MINE)
    s = logits(att, q, at, LS)
    left = operand(att, p, LO)
    att.ring.consumer_wait(v_at)
    o = gl.warpgroup_mma(left, block_of(att, v_at), o, is_async=True)
    parity = pass_turn(att, parity, MINE)
    s = gl.warpgroup_mma_wait(1, deps=[s])
    att.ring.release(at)
    if MASKED:
        s = masked(att, s, first_row, first_col, cols, offset, LS)
    p, peak, shrink = softmax_step(att, s, peak, MASKED)
    total = total * shrink + gl.sum(p, 1)
    after = att.ring.next(v_at)
    att.ring.consumer_wait(after)  # here, where the assembler cannot move P's exponentials behind the wait for O
    o = gl.warpgroup_mma_wait(0, deps=[o])
    att.ring.release(v_at)
    o = o * gl.convert_layout(shrink, gl.SliceLayout(1, LO))[:, None]
    return o, peak, total, gl.pack_pairs(p, att.kv_bufs.dtype), after, parity


@gl.jit
def operand(att, p, LO: gl.constexpr):
    """Packed P as the left operand of O += P V."""
    return gl.unpack_pairs(p, att.kv_bufs.dtype, gl.DotOperandLayout(0, LO, 2))


@gl.jit
def attend(
    work, q, at, parity, row, MINE: gl.constexpr, LO: gl.constexpr, SEGMENTS: gl.constexpr, SEGMENT: gl.constexpr
):
    """A consumer's rows of a tile through all segments: O not yet normalized, maxima and sums of rows, place, parity."""
    att = work.attention
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, att.BN, 16])
    first_row = row + MINE * att.ROWS
    source, start, cols, offset = SEGMENT(work, row, 0)
    first_col = (seen(att, row, 0, cols, offset) - 1) * att.BN
    att.ring.consumer_wait(at)
    await_turn(att, parity, MINE)
    s = logits(att, q, at, LS)
    parity = pass_turn(att, parity, MINE)
    s = gl.warpgroup_mma_wait(0, deps=[s])
    att.ring.release(at)
    at = att.ring.next(at)
    s = masked(att, s, first_row, first_col, cols, offset, LS)
    peak = gl.full([att.ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LS))
    p, peak, shrink = softmax_step(att, s, peak, True)
    total = gl.sum(p, 1)
    p = gl.pack_pairs(p, att.kv_bufs.dtype)
    o = gl.zeros([att.ROWS, att.D], gl.float32, LO)
    att.ring.consumer_wait(at)
    for i in range(SEGMENTS(work, row)):
        source, start, cols, offset = SEGMENT(work, row, i)
        blocks = seen(att, row, i, cols, offset)
        begun = gl.where(i == 0, 1, 0)
        bare = gl.maximum(blocks - whole(att, first_row, cols, offset), begun)
        for j in range(begun, bare):
            col = (blocks - 1 - j) * att.BN
            o, peak, total, p, at, parity = take_in(
                att, q, o, peak, total, p, at, parity, first_row, col, cols, offset, True, MINE, LS, LO
            )
        for j in range(bare, blocks):
            o, peak, total, p, at, parity = take_in(
                att, q, o, peak, total, p, at, parity, first_row, 0, cols, offset, False, MINE, LS, LO
            )
    o = gl.warpgroup_mma(operand(att, p, LO), block_of(att, at), o, is_async=True)
    o = gl.warpgroup_mma_wait(0, deps=[o])
    att.ring.release(at)
    total, peak = gl.convert_layout(total, gl.SliceLayout(1, LO)), gl.convert_layout(peak, gl.SliceLayout(1, LO))
    return o, peak, total, att.ring.next(at), parity


@gl.jit
def consume_role(
    work,
    MINE: gl.constexpr,
    LOCATE: gl.constexpr,
    SEGMENTS: gl.constexpr,
    SEGMENT: gl.constexpr,
    EPILOGUE: gl.constexpr,
):
    """Consumer: attend, pass O through the op's epilogue to the storer, in the buffer that the query came in."""
    att = work.attention
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, att.D, 16])
    to, at, parity = att.queries.start(), att.ring.start(), 0
    att.queries.consumer_wait(to)
    n = announced(att, to)
    while n < att.tiles:
        batch, head, row = LOCATE(work, n)
        q = query_buf(att, to, MINE).reshape([att.ROWS, att.D])
        o, peak, total, at, parity = attend(work, q, at, parity, row, MINE, LO, SEGMENTS, SEGMENT)
        o = EPILOGUE(work, o, peak, total, MINE, batch, head, row + MINE * att.ROWS, LO)
        q.store(o.to(att.q_bufs.dtype))
        gl.fence_async_shared()
        gl.mbarrier_arrive(finished_at(att, to, MINE), count=1)
        to = att.queries.next(to)
        att.queries.consumer_wait(to)
        n = announced(att, to)


# ---------------------------------------------------------------- the storers


@gl.jit
def finished_at(att, to, MINE: gl.constexpr):
    """The barrier that says a consumer's rows are in a query buffer."""
    return att.finished.index(to.slot * att.CONSUMERS + MINE)


@gl.jit
def store_role(work, MINE: gl.constexpr, LOCATE: gl.constexpr, STORE: gl.constexpr, END: gl.constexpr):
    """Storer: carry a consumer's rows away, and give the query buffer back."""
    att = work.attention
    to = att.queries.start()
    att.queries.consumer_wait(to)
    n = announced(att, to)
    while n < att.tiles:
        batch, head, row = LOCATE(work, n)
        gl.mbarrier_wait(finished_at(att, to, MINE), to.parity)
        STORE(work, batch, head, row + MINE * att.ROWS, query_buf(att, to, MINE))
        gl.store_read_wait(0)
        att.queries.release(to)
        to = att.queries.next(to)
        att.queries.consumer_wait(to)
        n = announced(att, to)
    END(work)
