"""The matmul template: a persistent, warp-specialized tile loop whose ends are left open.

    loader       one warp: TMA loads of A and B tiles into a ring
    multiplier   the default partition: wgmma over the ring, then the op's EPILOGUE on the accumulator
    storer       one warp: the op's STORE role, which carries finished tiles away
    communicator whole CTAs below COMM_SMS that only run the op's COMMUNICATE role

A fused kernel states what differs: LOCATE (which tile comes t-th, and where its rows lie), BEFORE_LOAD (what a load
must wait for), EPILOGUE, STORE and COMMUNICATE. Its `work` aggregate holds a `Matmul` as `work.matmul` and whatever
its own roles need.
"""

from tileweave import lang as gl
from tileweave.tiles.channel import Channel, make_channel


@gl.aggregate
class Matmul:
    """What the roles of a matmul CTA share. Tiles are BM x BN, K steps of BK; A_T, B_T: the operand is stored K x M, N x K."""

    a_desc: gl.tensor_descriptor
    b_desc: gl.tensor_descriptor
    a_bufs: gl.shared_memory_descriptor
    b_bufs: gl.shared_memory_descriptor
    ring: Channel
    k_steps: gl.tensor
    tiles: gl.tensor
    BM: gl.constexpr
    BN: gl.constexpr
    BK: gl.constexpr
    A_T: gl.constexpr
    B_T: gl.constexpr
    COMM_SMS: gl.constexpr

    @gl.constexpr_function
    def __init__(self, a_desc, b_desc, a_bufs, b_bufs, ring, k_steps, tiles, BM, BN, BK, A_T, B_T, COMM_SMS):
        self.a_desc = a_desc
        self.b_desc = b_desc
        self.a_bufs = a_bufs
        self.b_bufs = b_bufs
        self.ring = ring
        self.k_steps = k_steps
        self.tiles = tiles
        self.BM = gl.constexpr(BM)
        self.BN = gl.constexpr(BN)
        self.BK = gl.constexpr(BK)
        self.A_T = gl.constexpr(A_T)
        self.B_T = gl.constexpr(B_T)
        self.COMM_SMS = gl.constexpr(COMM_SMS)


@gl.jit
def make_matmul(
    a_desc,
    b_desc,
    k,
    tiles,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    A_T: gl.constexpr,
    B_T: gl.constexpr,
    COMM_SMS: gl.constexpr,
):
    """Allocate the ring of operand tiles; `tiles` is how many output tiles the whole grid computes."""
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_shape, a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_shape, b_desc.layout)
    ring = make_channel(STAGES)
    k_steps = gl.cdiv(k, BK)
    return Matmul(a_desc, b_desc, a_bufs, b_bufs, ring, k_steps, tiles, BM, BN, BK, A_T, B_T, COMM_SMS)


@gl.jit
def first_tile(mm):
    """Number of the first tile of this CTA; the next ones follow at `tile_step`."""
    return gl.program_id(0) - mm.COMM_SMS


@gl.jit
def tile_step(mm):
    """Number of computing CTAs."""
    return gl.num_programs(0) - mm.COMM_SMS


@gl.jit
def grouped_order(t, rows, cols, GROUP: gl.constexpr):
    """(row, column) of the t-th of rows x cols tiles, GROUP rows at a time, so that a wave's operands stay in L2."""
    width = GROUP * cols
    first = (t // width) * GROUP
    height = gl.minimum(rows - first, GROUP)
    return first + (t % width) % height, (t % width) // height


@gl.jit
def nothing_before_load(work, owner, row):
    """BEFORE_LOAD of a kernel whose operands are all local."""
    pass


@gl.jit
def no_communicator(work):
    """COMMUNICATE of an intra-SM kernel."""
    pass


@gl.jit
def load_role(work, LOCATE: gl.constexpr, BEFORE_LOAD: gl.constexpr):
    """Loader: for each tile, all K steps of A and B through the ring."""
    mm = work.matmul
    n = 0
    for t in range(first_tile(mm), mm.tiles, tile_step(mm)):
        owner, a_row, row, col = LOCATE(work, t)
        BEFORE_LOAD(work, owner, row)
        for step in range(0, mm.k_steps):
            k = step * mm.BK
            mm.ring.producer_wait(n)
            bar = mm.ring.ready_at(n)
            gl.mbarrier_expect(bar, (mm.BM + mm.BN) * mm.BK * 2)
            a_buf = mm.a_bufs.index(mm.ring.slot(n))
            b_buf = mm.b_bufs.index(mm.ring.slot(n))
            if mm.A_T:
                gl.tma_load(mm.a_desc, [k, a_row], bar, a_buf)
            else:
                gl.tma_load(mm.a_desc, [a_row, k], bar, a_buf)
            if mm.B_T:
                gl.tma_load(mm.b_desc, [col, k], bar, b_buf)
            else:
                gl.tma_load(mm.b_desc, [k, col], bar, b_buf)
            n += 1


@gl.jit
def multiply_tile(mm, n, LAYOUT: gl.constexpr):
    """The accumulator of one tile, from ring use n on. One wgmma stays in flight while the next step's operands arrive."""
    acc = gl.zeros([mm.BM, mm.BN], gl.float32, LAYOUT)
    for step in range(0, mm.k_steps):
        mm.ring.consumer_wait(n)
        a = mm.a_bufs.index(mm.ring.slot(n))
        b = mm.b_bufs.index(mm.ring.slot(n))
        if mm.A_T:
            a = a.permute((1, 0))
        if mm.B_T:
            b = b.permute((1, 0))
        pending = gl.warpgroup_mma(a, b, acc, use_acc=step > 0, is_async=True)
        acc = gl.warpgroup_mma_wait(num_outstanding=1, deps=[pending])
        mm.ring.release(n - 1, pred=step > 0)
        n += 1
    acc = gl.warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    mm.ring.release(n - 1)
    return acc


@gl.jit
def multiply_role(work, LOCATE: gl.constexpr, EPILOGUE: gl.constexpr):
    """Multiplier: accumulate a tile, hand it to the op."""
    mm = work.matmul
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, mm.BN, 16]
    )
    done = 0
    for t in range(first_tile(mm), mm.tiles, tile_step(mm)):
        owner, a_row, row, col = LOCATE(work, t)
        acc = multiply_tile(mm, done * mm.k_steps, LAYOUT)
        EPILOGUE(work, acc, done, owner, row, col, LAYOUT)
        done += 1


@gl.jit
def run_matmul(
    work,
    LOCATE: gl.constexpr,
    BEFORE_LOAD: gl.constexpr,
    EPILOGUE: gl.constexpr,
    STORE: gl.constexpr,
    COMMUNICATE: gl.constexpr,
):
    """Run the roles. A worker warp's registers: 24 suffice to issue loads, a storer computes addresses as well."""
    if gl.program_id(0) < work.matmul.COMM_SMS:
        COMMUNICATE(work)
    else:
        gl.warp_specialize(
            [
                (multiply_role, (work, LOCATE, EPILOGUE)),
                (load_role, (work, LOCATE, BEFORE_LOAD)),
                (STORE, (work, LOCATE)),
            ],
            [1, 1],
            [24, 40],
        )
