"""The route of a dispatch, made on the device: `routing.find_route` in a few launches, without a sort.

Choices are counted in chunks, whole tokens each: a choice's number among all is how many are ahead of it in its chunk, of
the same expert, and how many ahead of that chunk's are known by a running sum over (expert, chunk), which PyTorch makes
of the table that the first kernel has filled in. The second one, a CTA, tells all ranks how many choices of each
expert there are here, and finds from what it is told where each expert's rows begin. The third one sends to each expert's
rank what its row is made of, 16 bytes to the row's place there; when all ranks' have come, it hands out what came here.
The fourth one finds where rows lie if experts begin at multiples of a tile.

| word | written by | waited for by | order, scope | why its reuse is safe |
|---|---|---|---|---|
| table | `count_choices_kernel` | `exchange_counts_kernel`, `send_rows_kernel` | kernel boundaries | the call's own |
| flags[d][r] = epoch, counts | rank r, its counts lie in rank d's slot | rank d | release / acquire, sys | monotonic |
| slot epoch % 2 of the counts, half of the memory whatever a call needs | `exchange_counts_kernel` of all ranks | that of the slot's rank | flags | written again in call e + 2, by a rank that all have told of call e + 1, hence ended call e |
| flags[d][r] = epoch, rows | the last CTA of rank r, its rows for d lie in d's slot | CTAs of rank d | release / acquire, sys | monotonic |
| slot of the rows | `send_rows_kernel` of all ranks, places of their own | that of the slot's rank | flags | written again by a rank that has met all others in an exchange of counts, which follows their last reading |
| state[DONE] | every CTA of `send_rows_kernel`, its rows sent and the epoch read | nobody; the last one tells all ranks | acq_rel, gpu | the last one puts it back to 0 |
| state[EPOCH] | `exchange_counts_kernel`; the last CTA of `send_rows_kernel` | next launch (kernel boundary) | stream order | read by all CTAs before they arrive at DONE |

After a wait that timed out no row is there: what a peer has left of an earlier call is looked at by nobody.
"""

from tileweave import lang as gl
from tileweave.tiles.matmul import DONE, EPOCH

CHUNK = gl.constexpr(128)  # choices
COUNTS = gl.constexpr(1024)  # that are sent at once
WORDS = gl.constexpr(4)  # of a row: the first row of its token, the token's slot, home, weight


@gl.aggregate
class Choices:
    """A chunk of choices, a tile [CHUNK] each: expert and rank are world * most and world where there is none."""

    i: gl.tensor  # which ones, of the rank
    token: gl.tensor
    inside: gl.tensor
    expert: gl.tensor  # numbered as if each rank had `most` of them
    rank: gl.tensor
    leads: gl.tensor  # whether it is the first one, in the order of rows, of its token and rank
    number: gl.tensor  # how many of its expert are ahead in the chunk
    leader: gl.tensor  # how many that lead
    last: gl.tensor  # whether it is its expert's last one in the chunk

    @gl.constexpr_function
    def __init__(self, i, token, inside, expert, rank, leads, number, leader, last):
        self.i, self.token, self.inside, self.expert, self.rank = i, token, inside, expert, rank
        self.leads, self.number, self.leader, self.last = leads, number, leader, last


@gl.constexpr_function
def pair_layout(warps):
    """Of a tile [CHUNK, CHUNK]: a choice by the others."""
    return gl.BlockedLayout([4, 8], [2, 16], [warps, 1], [1, 0])


@gl.jit
def chosen(
    topk_index, chunk, tokens, k, experts, more, each, most, WORLD: gl.constexpr, K: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """(number, whether there is such a choice, expert, rank) of a chunk's choices. Of `experts` the first `more` ranks have
    `most`, the others `each`."""
    lane = gl.arange(0, CHUNK, LAYOUT)
    token, j = chunk * (CHUNK // K) + lane // K, lane % K
    inside = (token < tokens) & (j < k)
    i = token * k + j
    found = gl.load(topk_index + i, mask=inside, other=-1).to(gl.int64)
    known = (found >= 0) & (found < experts)
    e = gl.where(known, found, 0).to(gl.int32)
    whole = more * most
    rank = gl.where(e < whole, e // most, more + (e - whole) // each)
    expert = rank * most + gl.where(e < whole, e % most, (e - whole) % each)
    return i, inside, gl.where(known, expert, WORLD * most), gl.where(known, rank, WORLD)


@gl.jit
def across(tile, LAYOUT: gl.constexpr):
    """A tile of choices as a row to hold the others against."""
    return gl.convert_layout(tile, gl.SliceLayout(0, LAYOUT))[None, :]


@gl.jit
def choices_of(topk_index, chunk, tokens, k, experts, more, each, most, WORLD: gl.constexpr, K: gl.constexpr):
    """The choices of a chunk."""
    L: gl.constexpr = pair_layout(gl.num_warps())
    OWN: gl.constexpr = gl.SliceLayout(1, L)
    i, inside, expert, rank = chosen(topk_index, chunk, tokens, k, experts, more, each, most, WORLD, K, OWN)
    lane = gl.arange(0, CHUNK, OWN)
    me, other = lane[:, None], gl.arange(0, CHUNK, gl.SliceLayout(0, L))[None, :]
    its_expert, same_token = across(expert, L), me // K == other // K
    same = expert[:, None] == its_expert
    sooner = (its_expert < expert[:, None]) | (same & (other < me))
    ahead = same_token & (across(rank, L) == rank[:, None]) & sooner
    leads = (gl.sum(gl.where(ahead, 1, 0), 1) == 0) & (rank < WORLD)
    number = gl.sum(gl.where(same & (other < me), 1, 0), 1)
    leader = gl.sum(gl.where(same & (other < me), across(leads.to(gl.int32), L), 0), 1)
    last = gl.sum(gl.where(same & (other > me), 1, 0), 1) == 0
    return Choices(i, chunk * (CHUNK // K) + lane // K, inside, expert, rank, leads, number, leader, last)


@gl.jit
def of_leader(choices, value, K: gl.constexpr):
    """For each choice the value of the one that leads its token's choices of its rank."""
    L: gl.constexpr = pair_layout(gl.num_warps())
    me = gl.arange(0, CHUNK, gl.SliceLayout(1, L))[:, None]
    same = me // K == gl.arange(0, CHUNK, gl.SliceLayout(0, L))[None, :] // K
    same = same & (across(choices.rank, L) == choices.rank[:, None])
    return gl.sum(gl.where(same, across(gl.where(choices.leads, value, 0), L), 0), 1)


@gl.jit(do_not_specialize=["tokens", "k", "experts", "more", "each", "most", "chunks"])
def count_choices_kernel(
    topk_index, table, tokens, k, experts, more, each, most, chunks, WORLD: gl.constexpr, K: gl.constexpr
):  # fmt: skip
    """table [2, WORLD * most, chunks] int32, zeros before: how many choices a chunk has of an expert, and how many that
    lead. K: k or the next power of two. Grid: any number of CTAs."""
    gl.grid_dependency_wait()
    numbered = WORLD * most
    for chunk in range(gl.program_id(0), chunks, gl.num_programs(0)):
        c = choices_of(topk_index, chunk, tokens, k, experts, more, each, most, WORLD, K)
        at, tells = table + c.expert * chunks + chunk, c.last & (c.rank < WORLD)
        gl.store(at, c.number + 1, mask=tells)
        gl.store(at + numbered * chunks, c.leader + c.leads.to(gl.int32), mask=tells)


@gl.jit
def ahead_of(sums, i, inside):
    """The running sum in front of element `i`, if that is `inside`; tiles."""
    return gl.load(sums + i - 1, mask=inside & (i > 0), other=0)


@gl.jit(do_not_specialize=[
    "rank", "slots_stride", "slot_words", "flags_stride", "timeout_us", "most", "chunks", "capacity", "own",
])  # fmt: skip
def exchange_counts_kernel(
    rank, sums, slots, slots_stride, slot_words, flags_ptr, flags_stride, state, timeout_us, most, chunks, capacity, own, firsts, bounds, offsets,
    told, WORLD: gl.constexpr, SOURCES: gl.constexpr, EXPERTS: gl.constexpr,
):  # fmt: skip
    """Of the running sums of `count_choices_kernel`'s table, of `most` experts a rank, what all ranks make of them together.

    firsts   int32 [3, WORLD * most]: what a choice's number among this rank's is to be added to for its row; for its home; for its slot, to
             the number of those that lead
    bounds   int32 [WORLD, most + 1]: of a TokenRoute
    offsets  int32 [own]: likewise
    told     int32 [3 + WORLD]: choices dropped, the most choices of a rank, the most tokens from a rank to another; rows of each rank

    SOURCES, EXPERTS: WORLD and most or the next powers of two. Grid: one CTA.
    """
    gl.grid_dependency_wait()
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    epoch = gl.load(state + EPOCH) + 1
    numbered = WORLD * most
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    e, column = gl.arange(0, EXPERTS, LINE), gl.arange(0, EXPERTS, gl.SliceLayout(0, L))
    source = gl.arange(0, SOURCES, gl.SliceLayout(1, L))
    slot = slots + (epoch & 1) * slot_words
    for begin in range(0, 2 * numbered, COUNTS):
        n = begin + gl.arange(0, COUNTS, LINE)
        inside = n < 2 * numbered
        count = ahead_of(sums, (n + 1) * chunks, inside) - ahead_of(sums, n * chunks, inside)
        for peer in range(WORLD):
            gl.store(slot + (rank * 0 + peer).to(gl.int64) * slots_stride + rank * 2 * numbered + n, count, mask=inside)
    gl.barrier()
    gl.signal_all(flags, rank, epoch)
    met = gl.wait_all(flags, 0, WORLD, epoch)
    slot += rank.to(gl.int64) * slots_stride
    there = (source < WORLD)[:, None] & (column < most)[None, :] & met
    choices, sent = source * 0, source * 0
    kept_before, own_before = gl.to_tensor(0), gl.to_tensor(0)
    leaders_before = gl.load(sums + numbered * chunks - 1)
    for to in range(WORLD):
        at = slot + source[:, None] * 2 * numbered + (to * most + column)[None, :]
        counts = gl.load(at, mask=there, other=0)
        leading = gl.load(at + numbered, mask=there, other=0)
        total = gl.convert_layout(gl.sum(counts, 0), LINE)
        mine = gl.convert_layout(gl.sum(gl.where(source[:, None] == rank, counts, 0), 0), LINE)
        before = gl.convert_layout(gl.sum(gl.where(source[:, None] < rank, counts, 0), 0), LINE)
        end = gl.cumsum(total, 0)
        row = end - total + before
        kept = gl.minimum(gl.maximum(capacity - row, 0), mine)
        number = own_before + gl.cumsum(mine, 0) - mine
        home = kept_before + gl.cumsum(kept, 0) - kept
        gl.store(firsts + to * most + e, row - number, mask=e < most)
        gl.store(firsts + numbered + to * most + e, home - number, mask=e < most)
        gl.store(firsts + 2 * numbered + to * most + e, e * 0 - leaders_before, mask=e < most)
        gl.store(bounds + to * (most + 1) + e, end - total, mask=e < most)
        rows = gl.sum(total, 0)
        gl.store(bounds + to * (most + 1) + most, rows)
        gl.store(told + 3 + to, rows)
        if to == rank:
            gl.store(offsets + e, gl.minimum(end, capacity), mask=e < own)
        choices += gl.sum(counts, 1)
        sent = gl.maximum(sent, gl.sum(leading, 1))
        kept_before += gl.sum(kept, 0)
        own_before += gl.sum(mine, 0)
        leaders_before += gl.sum(gl.where(source == rank, gl.sum(leading, 1), 0), 0)
    gl.store(told, own_before - kept_before)
    gl.store(told + 1, gl.max(choices, 0))
    gl.store(told + 2, gl.max(sent, 0))
    gl.store(state + EPOCH, epoch)


@gl.jit
def send_chunk(
    c, rank, sums, firsts, weight, slots, slots_stride, rank_out, place_out, home_out, token_slot, sends, sent, tokens, each_slots, chunk,
    chunks, numbered, limit, WORLD: gl.constexpr, K: gl.constexpr, WEIGHTED: gl.constexpr,
):  # fmt: skip
    """What a chunk's choices are made of to where it is wanted."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
    known = c.rank < WORLD
    e = gl.where(known, c.expert, 0)
    number = c.number + ahead_of(sums, e * chunks + chunk, known)
    leader = c.leader + ahead_of(sums, (numbered + e) * chunks + chunk, known)
    place = number + gl.load(firsts + e)
    home = number + gl.load(firsts + numbered + e)
    slot = leader + gl.load(firsts + 2 * numbered + e)
    kept = known & (place < limit)
    leads = kept & c.leads
    first, its_slot = of_leader(c, place, K), of_leader(c, slot, K)
    gl.store(rank_out + c.i, c.rank.to(gl.int64), mask=c.inside)
    gl.store(place_out + c.i, gl.where(kept, place, -1), mask=c.inside)
    gl.store(home_out + c.i, gl.where(kept, home, -1), mask=c.inside)
    gl.store(token_slot + c.rank * tokens + c.token, slot, mask=leads)
    where = sends + c.rank.to(gl.int64) * tokens + slot
    gl.store(where, c.token, mask=leads)
    gl.store(where + WORLD * tokens.to(gl.int64), place, mask=leads)
    for to in range(WORLD):
        gl.atomic_max(sent + to, gl.max(gl.where(leads & (c.rank == to), slot + 1, 0), 0), sem="relaxed", scope="gpu")
    bits = c.i * 0
    if WEIGHTED:
        bits = gl.load(weight + c.i, mask=kept, other=0)
    word = gl.arange(0, WORDS, gl.SliceLayout(0, L))[None, :]
    ROW: gl.constexpr = gl.SliceLayout(1, L)
    first, its_slot = gl.convert_layout(first, ROW), gl.convert_layout(rank * each_slots + its_slot, ROW)
    home, bits = gl.convert_layout(home, ROW), gl.convert_layout(bits, ROW)
    values = gl.where(
        word < 2,
        gl.where(word == 0, first[:, None], its_slot[:, None]),
        gl.where(word == 2, home[:, None], bits[:, None]),
    )
    at = c.rank.to(gl.int64) * slots_stride + place * WORDS
    at, kept = gl.convert_layout(at, ROW), gl.convert_layout(kept.to(gl.int32), ROW)
    gl.store(slots + at[:, None] + word, values, mask=(kept > 0)[:, None] & (word < WORDS))


@gl.jit
def hand_out(row, count, slot, row_lists, rows, width, WEIGHTED: gl.constexpr):
    """Rows `row`, a tile, of which those from `count` on are nobody's."""
    there, inside = row < count, row < rows
    for word in gl.static_range(WORDS):
        if word < 3 or WEIGHTED:
            nothing = -1 if word == 1 else 0
            value = gl.load(slot + row * WORDS + word, mask=there, other=nothing)
            gl.store(row_lists + word * width.to(gl.int64) + row, value, mask=inside)


@gl.jit(do_not_specialize=[
    "rank", "slots_stride", "flags_stride", "timeout_us", "tokens", "k", "experts", "more", "each", "most", "chunks", "each_slots", "limit", "rows", "width",
])  # fmt: skip
def send_rows_kernel(
    rank, topk_index, weight, sums, firsts, bounds, slots, slots_stride, flags_ptr, flags_stride, state, timeout_us, rank_out, place_out,
    home_out, token_slot, sends, sent, row_lists, tokens, k, experts, more, each, most, chunks, each_slots, limit, rows, width, WORLD: gl.constexpr,
    K: gl.constexpr, WEIGHTED: gl.constexpr,
):  # fmt: skip
    """rank_out, place_out, home_out [tokens, k], token_slot [WORLD, tokens] (-1 before), sends [2, WORLD, tokens],
    sent [WORLD] (0 before) and row_lists [3 or 4, width] of a route of at most `limit` rows a rank. Grid: co-resident CTAs."""
    gl.grid_dependency_wait()
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    epoch = gl.load(state + EPOCH) + 1
    for chunk in range(gl.program_id(0), chunks, gl.num_programs(0)):
        c = choices_of(topk_index, chunk, tokens, k, experts, more, each, most, WORLD, K)
        send_chunk(
            c, rank, sums, firsts, weight, slots, slots_stride, rank_out, place_out, home_out, token_slot, sends, sent, tokens, each_slots,
            chunk, chunks, WORLD * most, limit, WORLD, K, WEIGHTED,
        )  # fmt: skip
    gl.barrier()
    if gl.atomic_add(state + DONE, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:
        gl.atomic_xchg(state + DONE, 0, sem="relaxed", scope="gpu")
        gl.atomic_xchg(state + EPOCH, epoch, sem="relaxed", scope="gpu")
        gl.signal_all(flags, rank, epoch)
    met = gl.wait_all(flags, 0, WORLD, epoch)
    count = gl.where(met, gl.minimum(gl.load(bounds + rank * (most + 1) + most), rows), 0)
    LANES: gl.constexpr = 32 * gl.num_warps()
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = slots + rank.to(gl.int64) * slots_stride
    for begin in range(gl.program_id(0) * LANES, rows, gl.num_programs(0) * LANES):
        hand_out(begin + gl.arange(0, LANES, L), count, slot, row_lists, rows, width, WEIGHTED)


# ---------------------------------------------------------------- where rows lie


@gl.jit(do_not_specialize=["most"])
def lacking_kernel(bounds, apart, most, WORLD: gl.constexpr, EXPERTS: gl.constexpr, ALIGN: gl.constexpr):
    """apart [WORLD, most] = by how much rows of an expert are further apart from their rank's first one if every expert's
    begin at a multiple of ALIGN. Grid: one CTA."""
    gl.grid_dependency_wait()
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    e = gl.arange(0, EXPERTS, L)
    for to in range(WORLD):
        bound = bounds + to * (most + 1) + e
        rows = gl.load(bound + 1, mask=e < most, other=0) - gl.load(bound, mask=e < most, other=0)
        lacking = (ALIGN - rows % ALIGN) % ALIGN
        gl.store(apart + to * most + e, gl.cumsum(lacking, 0) - lacking, mask=e < most)


@gl.jit
def aligned(row, inside, bounds, apart, most, EXPERTS: gl.constexpr):
    """Where rows lie, a tile of numbers from their rank's first one; bounds and apart are the rank's."""
    expert, step = row * 0, EXPERTS // 2
    while step > 0:
        more = expert + step
        there = inside & (more < most)
        expert = gl.where(there & (gl.load(bounds + more, mask=there, other=0) <= row), more, expert)
        step = step // 2
    return row + gl.load(apart + expert, mask=inside, other=0)


@gl.jit(do_not_specialize=["rank", "tokens", "rows", "most"])
def align_rows_kernel(
    rank, sends, sent, row_first, bounds, apart, places, from_row, tokens, rows, most, WORLD: gl.constexpr, EXPERTS: gl.constexpr
):  # fmt: skip
    """places [WORLD, tokens] and from_row [rows] = sends[1] and row_first, aligned. Grid: any number of CTAs."""
    gl.grid_dependency_wait()
    LANES: gl.constexpr = 32 * gl.num_warps()
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, LANES, L)
    for to in range(WORLD):
        count, begin = gl.load(sent + to), (rank * 0 + to).to(gl.int64) * tokens
        for first in range(gl.program_id(0) * LANES, count, gl.num_programs(0) * LANES):
            i = first + lane
            row = gl.load(sends + (WORLD * tokens.to(gl.int64) + begin) + i, mask=i < count, other=0)
            row = aligned(row, i < count, bounds + to * (most + 1), apart + to * most, most, EXPERTS)
            gl.store(places + begin + i, row, mask=i < count)
    for first in range(gl.program_id(0) * LANES, rows, gl.num_programs(0) * LANES):
        i = first + lane
        row = gl.load(row_first + i, mask=i < rows, other=0)
        row = aligned(row, i < rows, bounds + rank * (most + 1), apart + rank * most, most, EXPERTS)
        gl.store(from_row + i, row, mask=i < rows)
