"""Ulysses attention, inter-SM: communicator CTAs push q, k, v of a head to the rank that computes it, which starts on the
head as it lands and stores finished tiles straight into the rank that owns the rows.

Rank r computes `heads` query heads and the `kv_heads` that they share, of all tokens. Its own tokens are read as they lie;
what other ranks have comes into its slot, a place per source, so that no tile spans two sources: the row of a tile counts
the sources' rows as padded to whole tiles. Heads go a block at a time to everybody, the next rank first, in the order in
which tiles take them up. A finished tile of foreign rows goes into a slot of their rank; that rank's communicators, once
they have sent everything, bring what has come there to the result. With CAUSAL a tile sees its own source's keys up to its
diagonal and those of the sources before. Two slots alternate by the epoch. Besides the tables of the template, of the
communicator and of the exchange:

| word or barrier | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| flags[d][b * WORLD + r] = epoch | rank r, the last communicator that sent d of its b-th block of heads | rank d's loaders, before queries and keys of r of these heads | release / acquire, sys; then a proxy fence | the exchange's |
| flags[d][(FLAGS + b) * WORLD + r] = epoch | rank r, the last storer of d's rows of the b-th block | rank d's communicators | release / acquire, sys; then a proxy fence | likewise |
| slot e % 2 of rank d | peers in call e (TMA stores) | d's loaders and communicators after flags | flags | written again in call e + 2, by a rank that has ended call e + 1, in which it waited for every peer, each of which had ended call e before |
| state[stored + b * WORLD + d] | each storer, a tile of d's rows of the b-th block performed | nobody; the last one tells | acq_rel, gpu | the last one puts it back to 0 |

A wait that times out makes loads come from beyond the end, which TMA fills with NaN: every role keeps its counts.
"""

from tileweave import lang as gl
from tileweave.tiles.attention import (
    NO_MASK,
    Attention,
    locate_tile,
    make_attention,
    packed_segment,
)
from tileweave.tiles.attention_hooks import (
    log_sum_exp,
    no_communicator,
    normalize,
)
from tileweave.tiles.attention_roles import run_attention
from tileweave.tiles.communicator import send_blocks
from tileweave.tiles.exchange import (
    NEXT,
    Sender,
    await_block,
    collect,
    fetch_kv,
    fetch_q,
    finish,
    load_from,
    moved,
    raise_flag,
    send_kv,
    send_q,
)
from tileweave.tiles.matmul import EPOCH, OWN_WORDS


@gl.aggregate
class Work:
    """What the roles share besides the template's. Heads are those of one rank unless said otherwise."""

    attention: Attention
    matmul: Sender  # by the name that tiles/communicator.py knows
    flags: gl.Flags
    out: gl.tensor_descriptor  # [batch, all heads, rows, D], as q
    q_slots: gl.tensor_descriptor  # [world, slot x source, batch x heads, rows, D], any rank's
    k_slots: gl.tensor_descriptor  # [world, slot x source, batch x kv_heads, cols, D]
    v_slots: gl.tensor_descriptor
    out_slots: gl.tensor_descriptor  # as q_slots; the source is whose heads they are
    lse: gl.tensor  # [batch, heads, WORLD * rows]
    heads: gl.tensor
    kv_heads: gl.tensor
    all_kv_heads: gl.tensor
    batches: gl.tensor
    rows: gl.tensor  # of a source
    padded: gl.tensor  # the same in whole tiles
    cols: gl.tensor
    together: gl.tensor
    blocks: gl.tensor  # of heads of K and V, all batches counted
    height: gl.tensor  # heads in one
    share: gl.tensor  # of a block for one receiver: tiles for each communicator
    ends: gl.tensor  # storers and communicators of the grid
    epoch: gl.tensor
    CAUSAL: gl.constexpr
    FLAGS: gl.constexpr  # blocks that there are flags for

    @gl.constexpr_function
    def __init__(
        self, attention, matmul, flags, out, q_slots, k_slots, v_slots, out_slots, lse, heads, kv_heads, all_kv_heads,
        batches, rows, padded, cols, together, blocks, height, share, ends, epoch, CAUSAL, FLAGS,
    ):  # fmt: skip
        self.attention, self.matmul, self.flags, self.out = attention, matmul, flags, out
        self.q_slots, self.k_slots, self.v_slots, self.out_slots = q_slots, k_slots, v_slots, out_slots
        self.lse, self.heads, self.kv_heads, self.all_kv_heads = lse, heads, kv_heads, all_kv_heads
        self.batches, self.rows, self.padded, self.cols, self.together = batches, rows, padded, cols, together
        self.blocks, self.height, self.share, self.ends, self.epoch = blocks, height, share, ends, epoch
        self.CAUSAL, self.FLAGS = gl.constexpr(CAUSAL), gl.constexpr(FLAGS)


# ---------------------------------------------------------------- the attention of one GPU, of rows that lie in pieces


@gl.jit
def locate(work, n):
    """The n-th tile: its batch, head and first row, in padded sources."""
    TILE: gl.constexpr = work.attention.CONSUMERS * work.attention.ROWS
    rows = work.flags.world * work.padded
    head, row = locate_tile(n, work.batches * work.heads, rows, TILE, work.together)
    return head // work.heads, head % work.heads, row


@gl.jit
def segments(work, row):
    """Sources of whose keys a tile sees some."""
    return row // work.padded + 1 if work.CAUSAL else row * 0 + work.flags.world


@gl.jit
def segment(work, row, i):
    """The i-th source that a tile attends to, and what it sees of its keys: those of the same tokens or own keys first."""
    att, flags = work.attention, work.flags
    first = row // work.padded if work.CAUSAL or att.PACKED else flags.rank
    source = (first + flags.world - i) % flags.world
    start, cols, offset = row * 0, work.cols, row * 0 + NO_MASK
    if att.PACKED:
        start, cols, offset = packed_segment(att, row, source * work.cols, work.cols)
    elif work.CAUSAL:
        offset = gl.where(row * 0 + i == 0, -first * work.padded, offset)
    return source, start, cols, offset


@gl.jit
def epilogue(work, o, peak, total, MINE: gl.constexpr, batch, head, row, LAYOUT: gl.constexpr):
    """Consumer: normalize, and store the log-sum-exp of the rows."""
    source = row // work.padded
    rows = row - source * work.padded + gl.arange(0, work.attention.ROWS, gl.SliceLayout(1, LAYOUT))
    first = ((batch * work.heads + head).to(gl.int64) * work.flags.world + source) * work.rows
    gl.store(work.lse + first + rows, log_sum_exp(work, peak, total), mask=rows < work.rows)
    return normalize(work, o, peak, total, MINE, batch, head, row, LAYOUT)


# ---------------------------------------------------------------- what the heads' journey adds


@gl.jit
def place(work, source):
    """Where what comes from a source lies in a slot."""
    return (work.epoch & 1) * work.flags.world + source


@gl.jit
def before_kv(work, batch, head, source, known):
    """Loader: wait for a source's share of the head's block."""
    there = known == known
    if source != work.flags.rank:
        block = (batch * work.kv_heads + head // work.attention.group) // work.height
        there = await_block(work, block, source)
    return there, known


@gl.jit
def before_q(work, batch, head, row, known):
    """Loader: the same for a tile's queries."""
    return before_kv(work, batch, head, row // work.padded, known)


@gl.jit
def load_q(work, buf, bar, batch, head, row, there):
    """Loader: ROWS rows of q, own or from a slot."""
    source, rank = row // work.padded, work.flags.rank
    row = row % work.padded
    if source == rank:
        gl.tma_load(work.attention.q_desc, [batch, rank * work.heads + head, row, 0], bar, buf)
    else:
        at = [place(work, source), batch * work.heads + head, gl.where(there, row, work.rows), 0]
        gl.load_async(work.q_slots, rank, at, moved(buf, work.q_slots), bar)


@gl.jit
def load_kv(work, buf, bar, IS_V: gl.constexpr, batch, head, source, row, there):
    """Loader: a block of K or V, own or from a slot."""
    head = head // work.attention.group
    own = [batch, work.flags.rank * work.all_kv_heads // work.flags.world + head, row, 0]
    arrived = [place(work, source), batch * work.kv_heads + head, gl.where(there, row, work.cols), 0]
    load_from(work, buf, bar, IS_V, source, own, arrived)


@gl.jit
def store(work, batch, head, row, buf):
    """Storer: ROWS rows of the result to the rank that owns them; who stores the last of a block tells it."""
    att, flags = work.attention, work.flags
    source, row = row // work.padded, row % work.padded
    if source == flags.rank:
        gl.tma_store(work.out, [batch, flags.rank * work.heads + head, row, 0], buf)
    else:
        at = [place(work, flags.rank), batch * work.heads + head, row, 0]
        gl.store_async(work.out_slots, source, at, moved(buf, work.out_slots))
        gl.store_wait(0)
        gl.barrier()
        block = (batch * work.kv_heads + head // att.group) // work.height
        high = gl.minimum(work.height, work.batches * work.kv_heads - block * work.height)
        stored = work.matmul.state + OWN_WORDS + (flags.world - 1) * work.FLAGS + block * flags.world + source
        if gl.atomic_add(stored, 1, sem="acq_rel", scope="gpu") == high * att.group * (work.padded // att.ROWS) - 1:
            gl.atomic_xchg(stored, 0, sem="relaxed", scope="gpu")
            raise_flag(work, source, work.FLAGS, block)


@gl.jit
def peer(work, n, TO: gl.constexpr):
    """Whom the n-th block goes to, or comes from: the next rank first, or the one before."""
    distance = 1 + n % (work.flags.world - 1)
    return (work.flags.rank + (distance if TO else work.flags.world - distance)) % work.flags.world


@gl.jit
def item(work, n, i):
    """This CTA's i-th tile of the n-th block: of q (0), K (1) or V (2); head of K and V, head of q, row; beyond the end
    where there is nothing to send."""
    att = work.attention
    across = work.padded // att.ROWS
    of_q, t = att.group * across, i * work.matmul.COMM_SMS + gl.program_id(0)
    per = of_q + 2 * gl.cdiv(work.cols, att.BN)
    number, u = t // per, t % per
    is_q, w = u < of_q, u - of_q
    kind = gl.where(is_q, 0, 1 + w % 2)
    row = gl.where(is_q, u % across * att.ROWS, w // 2 * att.BN)
    nothing = number >= work.height
    return (
        kind,
        n // (work.flags.world - 1) * work.height + number,
        u // across,
        gl.where(nothing, work.rows + work.cols, row),
    )


@gl.jit
def fetch(work, n, i, at):
    """Communicator: a tile of own q, K or V, of the receiver's heads."""
    to = peer(work, n, True)
    kind, head, q_head, row = item(work, n, i)
    batch, head = head // work.kv_heads, head % work.kv_heads
    kv_head = to * work.all_kv_heads // work.flags.world + head
    if kind == 0:
        fetch_q(work, [batch, to * work.heads + head * work.attention.group + q_head, row, 0], at)
    else:
        fetch_kv(work, kind == 2, [batch, kv_head, row, 0], at)


@gl.jit
def send(work, n, i, at, epoch):
    """Communicator: push it into this rank's place in a slot of the receiver."""
    to, mine = peer(work, n, True), place(work, work.flags.rank)
    kind, head, q_head, row = item(work, n, i)
    if kind == 0:
        send_q(work, to, [mine, head * work.attention.group + q_head, row, 0], at)
    else:
        send_kv(work, kind == 2, to, [mine, head, row, 0], at)


@gl.jit
def tell(work, n, epoch):
    """Communicator: raise the flag of a block."""
    raise_flag(work, peer(work, n, True), 0, n // (work.flags.world - 1))


@gl.jit
def returned(work, i):
    """Communicator: this CTA's i-th tile of what comes back, own rows of the others' heads: block, rank, head, row, whether
    there is such a tile."""
    att = work.attention
    TILE: gl.constexpr = att.CONSUMERS * att.ROWS
    across = work.padded // TILE
    per = work.height * att.group * across  # of a block, from one rank
    t = i * work.matmul.COMM_SMS + gl.program_id(0)
    n, u = t // per, t % per
    block, head = n // (work.flags.world - 1), u // across
    head += block * work.height * att.group
    there = (block < work.blocks) & (head < work.batches * work.heads)
    return block, peer(work, n, False), head, gl.where(there, u % across * TILE, work.rows), there


@gl.jit
def communicate(work):
    """Communicator: send everything, then collect."""
    flags, att = work.flags, work.attention
    send_blocks(work, (flags.world - 1) * work.blocks, work.share, work.epoch, fetch, send, tell)
    tiles = (flags.world - 1) * work.blocks * work.height * att.group * (work.padded // (att.CONSUMERS * att.ROWS))
    collect(work, gl.cdiv(tiles, work.matmul.COMM_SMS), returned)
    finish(work)


# ---------------------------------------------------------------- the kernel


@gl.jit(do_not_specialize=[
    "rank", "flags_stride", "timeout_us", "tiles", "scale", "heads", "kv_heads", "all_kv_heads", "batches", "group", "rows",
    "padded", "cols", "together", "blocks", "height", "share", "ends",
])  # fmt: skip
def ulysses_attention_kernel(
    rank, q_desc, k_desc, v_desc, out_desc, lse, bounds, q_slots_desc, k_slots_desc, v_slots_desc, out_slots_desc, flags_ptr,
    flags_stride, state, timeout_us, tiles, scale, heads, kv_heads, all_kv_heads, batches, group, rows, padded, cols,
    together, blocks, height, share, ends,
    WORLD: gl.constexpr, CAUSAL: gl.constexpr, PACKED: gl.constexpr, FLAGS: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, Q_BUFS: gl.constexpr, TAKE_TURNS: gl.constexpr, COMM_SMS: gl.constexpr,
):  # fmt: skip
    """softmax(scale * q K^T, masked) V of this rank's rows of q [batches, WORLD * heads, rows, D] and the k, v of all ranks.
    scale has log2(e) in it; bounds: those of PACKED rows, as the template has them. Grid: co-resident CTAs, one per SM."""
    gl.grid_dependency_wait()
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    att = make_attention(
        q_desc, k_desc, v_desc, state + NEXT, tiles, scale, group, bounds, CONSUMERS, STAGES, Q_BUFS, TAKE_TURNS, COMM_SMS,
        PACKED,
    )  # fmt: skip
    work = Work(
        att, Sender(att.ring, state, COMM_SMS), flags, out_desc, q_slots_desc, k_slots_desc, v_slots_desc, out_slots_desc,
        lse, heads, kv_heads, all_kv_heads, batches, rows, padded, cols, together, blocks, height, share, ends,
        gl.load(state + EPOCH) + 1, CAUSAL, FLAGS,
    )  # fmt: skip
    COMMUNICATE: gl.constexpr = communicate if COMM_SMS > 0 else no_communicator
    run_attention(
        work, locate, segments, segment, before_q, load_q, before_kv, load_kv, epilogue, store, finish, COMMUNICATE
    )  # fmt: skip
