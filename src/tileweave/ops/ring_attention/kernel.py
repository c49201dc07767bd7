"""ring attention, inter-SM: communicator CTAs push this rank's K and V to the peers; queries attend to own ones first.

Queries of rank r attend to what ranks r, r-1, r-2, ... hold, in turn: own K and V as they lie, then those in a slot that
their owners fill, all in one launch with O, maximum and sum in registers. So communicators push to rank r+1, which needs
it first, then to r+2, ...; a block of heads at a time to everybody, in the order in which tiles take heads up.

A rank's rows are PIECES runs of `rows` that are apart in the sequence: 1, or 2 in zigzag order, rank r having the r-th and
the r-th last. No tile spans two: q and out have the piece as a dimension, and the row of a tile counts pieces as padded to
whole tiles. With CAUSAL a piece sees

| keys of | piece 0 | piece 1 (zigzag) |
|---|---|---|
| rank r itself | its diagonal | its diagonal |
| earlier ranks | all of contiguous keys, the first half of zigzag ones | the first half |
| later ranks | nothing | all |

and what no row of the receiver sees is not sent. A rank's slots have a place for each peer. There are two, of `held` heads:
all of them, and the slots alternate by the epoch; or, TWO_BLOCKS, one block, so that all places together hold about as many
keys as two ranks have. Then the slots alternate by the block as well, and whoever sends needs a credit for each. Besides the
tables of the template, of the communicator and of the exchange:

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| flags[d][b * WORLD + r] = epoch | rank r, the last communicator that sent d of its b-th block of heads; at once where d sees nothing | rank d's loaders, before a segment of these heads; d's first communicator, b = 0, before it ends | release / acquire, sys; then a proxy fence | the exchange's |
| slot e % 2 of rank d | peers in call e (TMA stores) | d's loaders after flags | flags | written again in call e + 2, by a rank that has ended call e + 1, in which it waited for every peer, each of which had ended call e before |
| slot (e + b) % 2 of rank d, TWO_BLOCKS | peers, block b of call e | likewise | likewise | credits |
| flags[r][(FLAGS + b) * WORLD + d] = epoch, a credit | rank d: for its first two blocks at the start, for block b where the last tile of block b - 2 is finished | r's communicators, before they store their first tile of block b in d's slot | release / acquire, sys; then a proxy fence | the exchange's |
| state[finished + b] | each storer, rows of block b finished | nobody; the last one gives the credit | acq_rel, gpu | the last one puts it back to 0 |

No two ranks wait for each other's credits: blocks below the lowest that anybody is kept from sending have all been sent and,
as a block is at least LAG tiles of each communicator, told, so every rank can finish them.

A wait that times out makes the loader load K from beyond the slot, which TMA fills with NaN: every role keeps its counts.
"""

from tileweave import lang as gl
from tileweave.tiles.attention import NO_MASK, Attention, locate_tile, make_attention, packed_segment
from tileweave.tiles.attention_hooks import (
    log_sum_exp,
    no_communicator,
    normalize,
    nothing_before_q,
)
from tileweave.tiles.attention_roles import run_attention
from tileweave.tiles.communicator import send_blocks
from tileweave.tiles.exchange import NEXT, Sender, await_block, fetch_kv, finish, load_from, raise_flag, send_kv
from tileweave.tiles.matmul import EPOCH, OWN_WORDS


@gl.aggregate
class Work:
    """What the roles share besides the template's."""

    attention: Attention
    matmul: Sender  # by the name that tiles/communicator.py knows
    flags: gl.Flags
    out: gl.tensor_descriptor  # [batch, heads, PIECES, rows, D], as q
    k_slots: gl.tensor_descriptor  # [world, slot x peer, held, cols, D], any rank's
    v_slots: gl.tensor_descriptor
    lse: gl.tensor  # [batch, heads, PIECES * rows]
    heads: gl.tensor
    kv_heads: gl.tensor
    batch_heads: gl.tensor
    rows: gl.tensor  # of a piece
    padded: gl.tensor  # the same in whole tiles
    cols: gl.tensor
    together: gl.tensor
    blocks: gl.tensor  # of heads of K and V, all batches counted
    height: gl.tensor  # heads in one
    held: gl.tensor  # heads of K and V in a slot
    share: gl.tensor  # of a block for one receiver: tiles for each communicator
    ends: gl.tensor  # storers and communicators of the grid
    epoch: gl.tensor
    CAUSAL: gl.constexpr
    PIECES: gl.constexpr
    FLAGS: gl.constexpr  # blocks that there are flags for
    TWO_BLOCKS: gl.constexpr

    @gl.constexpr_function
    def __init__(
        self, attention, matmul, flags, out, k_slots, v_slots, lse, heads, kv_heads, batch_heads, rows, padded, cols,
        together, blocks, height, held, share, ends, epoch, CAUSAL, PIECES, FLAGS, TWO_BLOCKS,
    ):  # fmt: skip
        self.attention, self.matmul, self.flags, self.out = attention, matmul, flags, out
        self.k_slots, self.v_slots, self.lse = k_slots, v_slots, lse
        self.heads, self.kv_heads, self.batch_heads = heads, kv_heads, batch_heads
        self.rows, self.padded, self.cols, self.together = rows, padded, cols, together
        self.blocks, self.height, self.held, self.share = blocks, height, held, share
        self.ends, self.epoch = ends, epoch
        self.CAUSAL, self.PIECES, self.FLAGS = gl.constexpr(CAUSAL), gl.constexpr(PIECES), gl.constexpr(FLAGS)
        self.TWO_BLOCKS = gl.constexpr(TWO_BLOCKS)


# ---------------------------------------------------------------- the attention of one GPU


@gl.jit
def locate(work, n):
    """The n-th tile: its batch, head and first row, in padded pieces."""
    TILE: gl.constexpr = work.attention.CONSUMERS * work.attention.ROWS
    head, row = locate_tile(n, work.batch_heads, work.PIECES * work.padded, TILE, work.together)
    return head // work.heads, head % work.heads, row


@gl.jit
def in_piece(work, row):
    """The piece of a row of padded pieces, and the row in it."""
    piece = row * 0
    if work.PIECES == 2:
        piece += (row >= work.padded).to(gl.int32)
    return piece, row - piece * work.padded


@gl.jit
def load_q(work, buf, bar, batch, head, row, there):
    """Loader: ROWS rows of q."""
    piece, row = in_piece(work, row)
    gl.tma_load(work.attention.q_desc, [batch, head, piece, row, 0], bar, buf)


@gl.jit
def epilogue(work, o, peak, total, MINE: gl.constexpr, batch, head, row, LAYOUT: gl.constexpr):
    """Consumer: normalize, and store the log-sum-exp of the rows."""
    piece, first_row = in_piece(work, row)
    rows = first_row + gl.arange(0, work.attention.ROWS, gl.SliceLayout(1, LAYOUT))
    first = ((batch * work.heads + head).to(gl.int64) * work.PIECES + piece) * work.rows
    gl.store(work.lse + first + rows, log_sum_exp(work, peak, total), mask=rows < work.rows)
    return normalize(work, o, peak, total, MINE, batch, head, row, LAYOUT)


@gl.jit
def store(work, batch, head, row, buf):
    """Storer: ROWS rows of the result, which have no more use for their keys."""
    piece, row = in_piece(work, row)
    gl.tma_store(work.out, [batch, head, piece, row, 0], buf)
    if work.TWO_BLOCKS:
        give_back(work, block_of(work, batch, head))


# ---------------------------------------------------------------- what the ring adds


@gl.jit
def segments(work, row):
    """Ranks of whose keys a tile sees some: of a causal first piece the earlier ones. PACKED: pieces of all ranks."""
    count = work.flags.rank * 0 + work.flags.world
    if work.attention.PACKED:
        count *= work.PIECES
    elif work.CAUSAL:
        count = gl.where(row < work.padded, work.flags.rank + 1, count)
    return count


@gl.jit
def segment(work, row, i):
    """The i-th rank that a tile attends to, and what it sees of its keys; PACKED: of its own piece of them, or the other."""
    flags, att = work.flags, work.attention
    source = (flags.rank + flags.world - i) % flags.world
    start, cols, offset = row * 0, work.cols, work.cols * 0 + NO_MASK
    piece, _ = in_piece(work, row)
    if att.PACKED:
        source = (flags.rank + flags.world - i // work.PIECES) % flags.world
        piece = (piece + i) % work.PIECES
        position = gl.where(piece == 0, source, 2 * flags.world - 1 - source) * work.rows
        start, cols, offset = packed_segment(att, row, position, work.rows)
        start += piece * work.rows
    elif work.CAUSAL:
        own = piece * (work.rows - work.padded)  # rows of the second piece without the padding of the first
        offset = gl.where(source == flags.rank, own, offset)
        cols = gl.where(source < flags.rank, cols // work.PIECES, cols)
    return source, start, cols, offset


@gl.jit
def block_of(work, batch, head):
    """The block of a query head's K and V."""
    return (batch * work.kv_heads + head // work.attention.group) // work.height


@gl.jit
def before_kv(work, batch, head, source, known):
    """Loader: wait for a source's keys of the head's block. `known`: blocks of which those of all sources have come;
    PACKED tiles skip some."""
    flags = work.flags
    block = block_of(work, batch, head)
    there = known == known
    if (source != flags.rank) & (known <= block):
        there = await_block(work, block, source)
        if not work.attention.PACKED:
            if there & (source == (0 if work.CAUSAL and work.PIECES == 1 else (flags.rank + 1) % flags.world)):
                known = block + 1
    return there, known


@gl.jit
def place(work, source, receiver, head):
    """Where a head of K and V of a source lies in a receiver's slots: which place of the two slots, which head in it."""
    slot = (work.epoch + head // work.held) & 1
    peers = work.flags.world - 1
    return slot * peers + (receiver + peers - source) % work.flags.world, head % work.held


@gl.jit
def load_any(work, buf, bar, IS_V: gl.constexpr, batch, head, source, row, there):
    """Loader: a block of K or V, own or from a slot."""
    head = head // work.attention.group
    slot, held = place(work, source, work.flags.rank, batch * work.kv_heads + head)
    arrived = [slot, held, gl.where(there, row, work.cols), 0]
    load_from(work, buf, bar, IS_V, source, [batch, head, row, 0], arrived)


@gl.jit
def reach(work):
    """How many ranks this one sends to: of contiguous causal rows the later ones."""
    flags = work.flags
    return flags.world - 1 - flags.rank * (1 if work.CAUSAL and work.PIECES == 1 else 0)


@gl.jit
def receiver(work, block):
    """Whom a block goes to: the next rank first, then on to the next block of heads."""
    return (work.flags.rank + 1 + block % reach(work)) % work.flags.world


@gl.jit
def item(work, block, i):
    """This CTA's i-th tile of a block: of V or of K, the head, the row; beyond the end where there is nothing to send."""
    att = work.attention
    high = gl.cdiv(work.cols, att.BN)
    t = i * work.matmul.COMM_SMS + gl.program_id(0)
    number, row = t // 2 // high, t // 2 % high * att.BN
    head = block // reach(work) * work.height + number
    nothing = (number >= work.height) | (head >= work.batch_heads // att.group)
    if work.CAUSAL and work.PIECES == 2:
        end = work.cols // 2 + (att.BN if att.PACKED else 0)  # PACKED: blocks begin at any row
        nothing = nothing | ((receiver(work, block) > work.flags.rank) & (row >= end))
    return t % 2 == 1, head, gl.where(nothing, work.cols, row)


@gl.jit
def fetch(work, block, i, at):
    """Communicator: a tile of own K or V."""
    is_v, head, row = item(work, block, i)
    fetch_kv(work, is_v, [head // work.kv_heads, head % work.kv_heads, row, 0], at)


@gl.jit
def send(work, block, i, at, epoch):
    """Communicator: push it into this rank's place in a slot, once there is room."""
    flags, to = work.flags, receiver(work, block)
    if work.TWO_BLOCKS:
        if i == 0:
            gl.wait(flags, (work.FLAGS + block // reach(work)) * flags.world + to, epoch)
            gl.fence_proxy_async()
    is_v, head, row = item(work, block, i)
    slot, head = place(work, flags.rank, to, head)
    send_kv(work, is_v, to, [slot, head, row, 0], at)


@gl.jit
def tell(work, block, epoch):
    """Communicator: raise the flag of a block."""
    raise_flag(work, receiver(work, block), 0, block // reach(work))


@gl.jit
def give_credits(work, block):
    """Let all peers send a block, if there is such a one."""
    if block < work.blocks:
        for i in range(1, work.flags.world):
            raise_flag(work, (work.flags.rank + i) % work.flags.world, work.FLAGS, block)


@gl.jit
def give_back(work, block):
    """Storer: ROWS rows of a block are finished; behind the last ones the block after the next may come in its place."""
    att = work.attention
    heads = gl.minimum(work.height, work.batch_heads // att.group - block * work.height) * att.group
    finished = work.matmul.state + OWN_WORDS + (work.flags.world - 1) * work.FLAGS + block
    rows = heads * work.PIECES * work.padded
    if gl.atomic_add(finished, att.ROWS, sem="acq_rel", scope="gpu") == rows - att.ROWS:
        gl.atomic_xchg(finished, 0, sem="relaxed", scope="gpu")
        give_credits(work, block + 2)


@gl.jit
def communicate(work):
    """Communicator: give the first credits, tell those that see nothing of this rank's keys, then send to the others."""
    if work.TWO_BLOCKS:
        if gl.program_id(0) == 0:
            give_credits(work, 0)
            give_credits(work, 1)
    if work.CAUSAL and work.PIECES == 1:
        if gl.program_id(0) == 0:
            for peer in range(0, work.flags.rank):
                for b in range(0, work.blocks):
                    raise_flag(work, peer, 0, b)
    send_blocks(work, reach(work) * work.blocks, work.share, work.epoch, fetch, send, tell)
    if gl.program_id(0) == 0:
        gl.wait_all(work.flags, 0, work.flags.world, work.epoch, skip=work.flags.rank)
    finish(work)


# ---------------------------------------------------------------- the kernel


@gl.jit(do_not_specialize=[
    "rank", "flags_stride", "timeout_us", "tiles", "scale", "heads", "kv_heads", "batch_heads", "group", "rows", "padded", "cols",
    "together", "blocks", "height", "held", "share", "ends",
])  # fmt: skip
def ring_attention_kernel(
    rank, q_desc, k_desc, v_desc, out_desc, lse, bounds, k_slots_desc, v_slots_desc, flags_ptr, flags_stride, state,
    timeout_us, tiles, scale, heads, kv_heads, batch_heads, group, rows, padded, cols, together, blocks, height, held, share, ends,
    WORLD: gl.constexpr, CAUSAL: gl.constexpr, PACKED: gl.constexpr, PIECES: gl.constexpr, FLAGS: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, Q_BUFS: gl.constexpr, TAKE_TURNS: gl.constexpr, COMM_SMS: gl.constexpr,
    TWO_BLOCKS: gl.constexpr,
):  # fmt: skip
    """softmax(scale * q K^T, masked) V, of q [batch, heads, PIECES, rows, D] and the k, v [batch, kv_heads, cols, D] of all
    ranks. scale has log2(e) in it; bounds: those of PACKED rows, as the template has them. Grid: co-resident CTAs, one per SM."""
    gl.grid_dependency_wait()
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    att = make_attention(
        q_desc, k_desc, v_desc, state + NEXT, tiles, scale, group, bounds, CONSUMERS, STAGES, Q_BUFS, TAKE_TURNS, COMM_SMS,
        PACKED,
    )  # fmt: skip
    work = Work(
        att, Sender(att.ring, state, COMM_SMS), flags, out_desc, k_slots_desc, v_slots_desc, lse, heads, kv_heads,
        batch_heads, rows, padded, cols, together, blocks, height, held, share, ends, gl.load(state + EPOCH) + 1, CAUSAL,
        PIECES, FLAGS, TWO_BLOCKS,
    )  # fmt: skip
    COMMUNICATE: gl.constexpr = communicate if COMM_SMS > 0 else no_communicator
    run_attention(
        work, locate, segments, segment, nothing_before_q, load_q, before_kv, load_any, epilogue, store, finish,
        COMMUNICATE,
    )  # fmt: skip
