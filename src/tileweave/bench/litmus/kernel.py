"""Litmus kernels: a few accesses each, by parties that are CTAs of one launch or of a launch per rank.

Every instance of a test has its own cells, int32 words, and its own tile, all zero at first. Party p of an instance
leaves what it has read in its two words of `out`, which hold -1 before. `first` is the number of the launch's first CTA
among all parties.
"""

from tileweave import lang as gl

CELLS = gl.constexpr(256)  # words of an instance: x, y and z a cache line each, where parties meet, data
LINE, MEET, DATA = gl.constexpr(32), gl.constexpr(96), gl.constexpr(128)
ROWS, COLS = gl.constexpr(32), gl.constexpr(64)  # of an instance's tile of bf16
TILE_BYTES = gl.constexpr(32 * 64 * 2)


@gl.jit
def begin(first, cells, out, PARTIES: gl.constexpr, TURNS: gl.constexpr):
    """Which party of which instance this CTA is, that instance's cells, and where to leave results.

    With TURNS parties wait for each other, up to that many turns, so that what they do happens at about one time.
    """
    party = first + gl.program_id(0)
    instance = party // PARTIES
    x = cells + instance * CELLS
    if TURNS > 0:
        here = gl.atomic_add(x + MEET, 1, sem="relaxed", scope="gpu") + 1
        turn = 0
        while (here < PARTIES) & (turn < TURNS):
            here = gl.atomic_add(x + MEET, 0, sem="relaxed", scope="gpu")
            turn += 1
    return party % PARTIES, instance, x, out + party * 2


# ---------------------------------------------------------------- generic accesses, flags


@gl.jit(do_not_specialize=["first"])
def message_passing(
    first, cells, out, TURNS: gl.constexpr, RELEASE: gl.constexpr, ACQUIRE: gl.constexpr, SCOPE: gl.constexpr
):
    """0: data = 1; flag = 1. 1: reads flag, and data if it is 1."""
    party, _, x, r = begin(first, cells, out, 2, TURNS)
    if party == 0:
        gl.store(x + DATA, 1)
        gl.atomic_xchg(x, 1, sem=RELEASE, scope=SCOPE)
    else:
        flag = gl.atomic_add(x, 0, sem=ACQUIRE, scope=SCOPE)
        gl.store(r, flag)
        if flag == 1:
            gl.store(r + 1, gl.load(x + DATA))


@gl.jit(do_not_specialize=["first"])
def message_passing_strong(first, cells, out, TURNS: gl.constexpr, VOLATILE: gl.constexpr):
    """As message_passing, data by relaxed operations as well, and read in any case."""
    party, _, x, r = begin(first, cells, out, 2, TURNS)
    if party == 0:
        gl.atomic_xchg(x + LINE, 1, sem="relaxed", scope="gpu")
        gl.atomic_xchg(x, 1, sem="relaxed", scope="gpu")
    elif VOLATILE:
        flag = gl.load(x, volatile=True)
        data = gl.load(x + LINE, volatile=True)
        gl.store(r, flag)
        gl.store(r + 1, data)
    else:
        flag = gl.atomic_add(x, 0, sem="relaxed", scope="gpu")
        data = gl.atomic_add(x + LINE, 0, sem="relaxed", scope="gpu")
        gl.store(r, flag)
        gl.store(r + 1, data)


@gl.jit(do_not_specialize=["first"])
def message_passing_flag(first, cells, out, TURNS: gl.constexpr, BARRIER: gl.constexpr):
    """0: a tile of data by all threads, barrier, signal. 1: wait, then the tile: its least element."""
    party, _, x, r = begin(first, cells, out, 2, TURNS)
    flags = gl.Flags(x, gl.to_tensor(LINE), party, 2, gl.to_tensor(1000000))
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    data = x + DATA + gl.arange(0, 128, L)
    if party == 0:
        gl.store(data, 1)
        if BARRIER:
            gl.barrier()
        gl.signal(flags, 1 - party, 0, 1)
    else:
        gl.store(r, gl.wait(flags, 0, 1).to(gl.int32))
        gl.store(r + 1, gl.min(gl.load(data), 0))


@gl.jit(do_not_specialize=["first"])
def store_buffering(first, cells, out, TURNS: gl.constexpr, RELEASE: gl.constexpr, ACQUIRE: gl.constexpr):
    """Each party writes its word, then reads the other's."""
    party, _, x, r = begin(first, cells, out, 2, TURNS)
    gl.atomic_xchg(x + party * LINE, 1, sem=RELEASE, scope="gpu")
    gl.store(r, gl.atomic_add(x + (1 - party) * LINE, 0, sem=ACQUIRE, scope="gpu"))


@gl.jit(do_not_specialize=["first"])
def load_buffering(first, cells, out, TURNS: gl.constexpr, DEPENDS: gl.constexpr):
    """Each party reads the other's word, then writes its own: 1, or with DEPENDS what it has read."""
    party, _, x, r = begin(first, cells, out, 2, TURNS)
    read = gl.load(x + (1 - party) * LINE, volatile=True)
    if DEPENDS:
        gl.atomic_xchg(x + party * LINE, read, sem="relaxed", scope="gpu")
    else:
        gl.atomic_xchg(x + party * LINE, 1, sem="relaxed", scope="gpu")
    gl.store(r, read)


@gl.jit(do_not_specialize=["first"])
def two_writers(first, cells, out, TURNS: gl.constexpr):
    """2+2W. 0: x = 1; y = 2. 1: y = 1; x = 2."""
    party, _, x, _ = begin(first, cells, out, 2, TURNS)
    gl.atomic_xchg(x + party * LINE, 1, sem="relaxed", scope="gpu")
    gl.atomic_xchg(x + (1 - party) * LINE, 2, sem="relaxed", scope="gpu")


@gl.jit(do_not_specialize=["first"])
def independent_reads(first, cells, out, TURNS: gl.constexpr, ACQUIRE: gl.constexpr):
    """IRIW. 0: x = 1. 1: y = 1. 2: reads x, then y. 3: reads y, then x."""
    party, _, x, r = begin(first, cells, out, 4, TURNS)
    if party < 2:
        gl.atomic_xchg(x + party * LINE, 1, sem="relaxed", scope="gpu")
    else:
        earlier = gl.atomic_add(x + (party - 2) * LINE, 0, sem=ACQUIRE, scope="gpu")
        later = gl.atomic_add(x + (3 - party) * LINE, 0, sem=ACQUIRE, scope="gpu")
        gl.store(r, earlier)
        gl.store(r + 1, later)


@gl.jit(do_not_specialize=["first"])
def read_read(first, cells, out, TURNS: gl.constexpr, VOLATILE: gl.constexpr):
    """CoRR. 0: x = 1; x = 2. 1: reads x twice."""
    party, _, x, r = begin(first, cells, out, 2, TURNS)
    if party == 0:
        gl.atomic_xchg(x, 1, sem="relaxed", scope="gpu")
        gl.atomic_xchg(x, 2, sem="relaxed", scope="gpu")
    elif VOLATILE:
        earlier = gl.load(x, volatile=True)
        later = gl.load(x, volatile=True)
        gl.store(r, earlier)
        gl.store(r + 1, later)
    else:
        earlier = gl.atomic_add(x, 0, sem="relaxed", scope="gpu")
        later = gl.atomic_add(x, 0, sem="relaxed", scope="gpu")
        gl.store(r, earlier)
        gl.store(r + 1, later)


@gl.jit(do_not_specialize=["first"])
def write_read(first, cells, out, TURNS: gl.constexpr):
    """CoWR. Each party writes 1 or 2 into x and reads x."""
    party, _, x, r = begin(first, cells, out, 2, TURNS)
    gl.atomic_xchg(x, party + 1, sem="relaxed", scope="gpu")
    gl.store(r, gl.atomic_add(x, 0, sem="relaxed", scope="gpu"))


@gl.jit(do_not_specialize=["first"])
def write_to_read_causality(first, cells, out, TURNS: gl.constexpr, RELEASE: gl.constexpr):
    """WRC. 0: x = 1. 1: reads x, y = 1. 2: reads y by an acquire, then x."""
    party, _, x, r = begin(first, cells, out, 3, TURNS)
    y = x + LINE
    if party == 0:
        gl.atomic_xchg(x, 1, sem="relaxed", scope="gpu")
    elif party == 1:
        gl.store(r, gl.atomic_add(x, 0, sem="relaxed", scope="gpu"))
        gl.atomic_xchg(y, 1, sem=RELEASE, scope="gpu")
    else:
        told = gl.atomic_add(y, 0, sem="acquire", scope="gpu")
        gl.store(r + 1, gl.atomic_add(x, 0, sem="relaxed", scope="gpu"))
        gl.store(r, told)


@gl.jit(do_not_specialize=["first"])
def passed_on(first, cells, out, TURNS: gl.constexpr, RELEASE: gl.constexpr):
    """ISA2. 0: data = 1, release x. 1: acquire x, y = 1. 2: acquire y, then data. Each goes on only if it was told."""
    party, _, x, r = begin(first, cells, out, 3, TURNS)
    if party == 0:
        gl.store(x + DATA, 1)
        gl.atomic_xchg(x, 1, sem="release", scope="gpu")
    elif party == 1:
        told = gl.atomic_add(x, 0, sem="acquire", scope="gpu")
        gl.store(r, told)
        if told == 1:
            gl.atomic_xchg(x + LINE, 1, sem=RELEASE, scope="gpu")
    else:
        told = gl.atomic_add(x + LINE, 0, sem="acquire", scope="gpu")
        gl.store(r, told)
        if told == 1:
            gl.store(r + 1, gl.load(x + DATA))


@gl.jit(do_not_specialize=["first"])
def release_sequence(first, cells, out, TURNS: gl.constexpr):
    """0: data = 1, release 1 into x by an addition. 1: adds 2 to x, relaxed. 2: acquires x, then data if 1 is in x."""
    party, _, x, r = begin(first, cells, out, 3, TURNS)
    if party == 0:
        gl.store(x + DATA, 1)
        gl.atomic_add(x, 1, sem="release", scope="gpu")
    elif party == 1:
        gl.atomic_add(x, 2, sem="relaxed", scope="gpu")
    else:
        told = gl.atomic_add(x, 0, sem="acquire", scope="gpu")
        gl.store(r, told)
        if told % 2 == 1:
            gl.store(r + 1, gl.load(x + DATA))


@gl.jit(do_not_specialize=["first"])
def additions(first, cells, out, TURNS: gl.constexpr, SCOPE_0: gl.constexpr, SCOPE_1: gl.constexpr):
    """Each party adds 1 to x."""
    party, _, x, _ = begin(first, cells, out, 2, TURNS)
    if party == 0:
        gl.atomic_add(x, 1, sem="relaxed", scope=SCOPE_0)
    else:
        gl.atomic_add(x, 1, sem="relaxed", scope=SCOPE_1)


@gl.jit(do_not_specialize=["first"])
def tile_passing(first, cells, out, TURNS: gl.constexpr, BARRIER: gl.constexpr):
    """0: all threads write data, barrier, the first one releases x. 1: acquires x, then all threads read."""
    party, _, x, r = begin(first, cells, out, 2, TURNS)
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    data = x + DATA + gl.arange(0, 128, L)
    if party == 0:
        gl.store(data, 1)
        if BARRIER:
            gl.barrier()
        gl.atomic_xchg(x, 1, sem="release", scope="gpu")
    else:
        flag = gl.atomic_add(x, 0, sem="acquire", scope="gpu")
        gl.store(r, flag)
        if flag == 1:
            gl.store(r + 1, gl.min(gl.load(data), 0))
