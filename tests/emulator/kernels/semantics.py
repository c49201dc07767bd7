"""Device semantics that differ from Python's, and the ways in which device functions refer to each other."""

from tileweave import lang as gl
from tileweave.lang import arange, int64
from tileweave.lang import store as put

SEVEN = gl.constexpr(7)


@gl.aggregate
class Pair:
    """Two values handed around together."""

    left: gl.tensor
    right: gl.tensor
    SCALE: gl.constexpr

    @gl.constexpr_function
    def __init__(self, left, right, SCALE):
        self.left = left
        self.right = right
        self.SCALE = gl.constexpr(SCALE)

    @gl.jit
    def swapped(self):
        """The other way round; refers to its own class."""
        return Pair(self.right, self.left, self.SCALE)

    @gl.jit
    def total(self):
        return (self.left + self.right) * self.SCALE


@gl.constexpr_function
def halves(n):
    return n // 2, -n // 2


@gl.jit
def divide(a, b):
    return a // b, a % b


@gl.jit
def remainder(a, b):
    return divide(a, b)[1]


@gl.jit
def apply(FUNCTION: gl.constexpr, a, b):
    return FUNCTION(a, b)


@gl.jit
def scalars(rank, ints, floats, a, b, flag, HALVES: gl.constexpr):
    """Results of scalar arithmetic, one a word of `ints`."""
    quotient, rest = divide(a, b)
    gl.store(ints, quotient)
    gl.store(ints + 1, rest)
    gl.store(ints + 2, apply(remainder, a, b))
    c = a
    c //= b
    gl.store(ints + 3, c)
    gl.store(ints + 4, (~(a < b)).to(gl.int32))
    gl.store(ints + 5, (not (a < b)).to(gl.int32))
    gl.store(ints + 6, (gl.load(ints + 16) + 1 < 0).to(gl.int32))
    gl.store(ints + 7, (gl.load(ints + 16).to(int64) + 1 < 0).to(gl.int32))
    pair = Pair(rank.to(gl.int64), 5, 2).swapped()
    gl.store(ints + 8, pair.left)
    gl.store(ints + 9, pair.total())
    gl.store(ints + 10, SEVEN + gl.constexpr(1))
    low, high = HALVES
    gl.store(ints + 11, low - high)
    gl.store(ints + 12, gl.where((a < b) & (flag > 0), 1, 2))
    gl.store(ints + 13, gl.cdiv(gl.maximum(a, 9), gl.minimum(b, 4)))
    gl.store(ints + 14, gl.num_warps() * 100 + gl.num_programs(0) * 10 + gl.program_id(0))
    gl.store(floats, (1.0 / 3).to(floats.dtype.element_ty))
    gl.store(floats + 1, gl.exp2(3.0))


@gl.jit
def tiles(x, out, N: gl.constexpr):
    """Reductions and broadcasts of a tile, row by row of `out`."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    rows = arange(0, N, gl.SliceLayout(1, L))
    cols = arange(0, N, gl.SliceLayout(0, L))
    t = gl.load(x + rows[:, None] * N + cols[None, :])
    put(out + rows, gl.sum(t, 1))
    put(out + N + rows, gl.max(t, 1))
    put(out + 2 * N + cols, gl.min(t, 0))
    put(out + 3 * N + rows, gl.log2(gl.exp2(gl.sum(gl.maximum(t, 0.0), 1) / N)))
    put(out + 4 * N + rows, gl.sum(gl.where(t > 0, 1.0, 0.0), 1))
    put(out + 5 * N + rows, ((rows - 3) // 2 * 10 + (rows - 3) % 2).to(gl.float32))
    put(out + 6 * N + rows, (~(rows < 2)).to(t.dtype))
    gl.static_assert(t.shape[0] == N)


@gl.jit
def pairs(x, packed, out, N: gl.constexpr, DTYPE: gl.constexpr):
    """packed [64, N / 2] int32 = the pairs of columns of `x` [64, N] float32, out [64, N] what they hold."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16])
    rows = gl.arange(0, 64, gl.SliceLayout(1, L))
    cols = gl.arange(0, N, gl.SliceLayout(0, L))
    where = rows[:, None] * N + cols[None, :]
    p = gl.pack_pairs(gl.load(x + where), DTYPE)
    gl.store(out + where, gl.convert_layout(gl.unpack_pairs(p, DTYPE, gl.DotOperandLayout(0, L, 2)), L))
    HALF: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, 64, gl.SliceLayout(1, HALF))
    cols = gl.arange(0, N // 2, gl.SliceLayout(0, HALF))
    gl.store(packed + rows[:, None] * (N // 2) + cols[None, :], gl.convert_layout(p, HALF))


@gl.jit
def columns(x, out, n, N: gl.constexpr, WIDTH: gl.constexpr):
    """out[j] = the j-th WIDTH columns of `x` [64, N], plus a number that the loop counts."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16])
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, WIDTH, 16])
    rows = gl.arange(0, 64, gl.SliceLayout(1, L))
    cols = gl.arange(0, N, gl.SliceLayout(0, L))
    parts = gl.columns(gl.load(x + rows[:, None] * N + cols[None, :]), WIDTH)
    part_rows = gl.arange(0, 64, gl.SliceLayout(1, PART))
    part_cols = gl.arange(0, WIDTH, gl.SliceLayout(0, PART))
    count = gl.to_tensor(0)
    for i in range(n):
        count = count + 1
    for j in gl.static_range(N // WIDTH):
        where = out + j * 64 * WIDTH + part_rows[:, None] * WIDTH + part_cols[None, :]
        gl.store(where, parts[j] + count.to(gl.float32))


@gl.jit
def write_pairs(x, buf, bar):
    """Fill `buf` [64, 64] of 16-bit numbers with `x`, and say so."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 64, gl.SliceLayout(1, L))
    cols = gl.arange(0, 64, gl.SliceLayout(0, L))
    buf.store(gl.load(x + rows[:, None] * 64 + cols[None, :]))
    gl.mbarrier_arrive(bar, count=1)


@gl.jit
def read_words(out, buf, bar, WAITS: gl.constexpr):
    """The same bytes as [4, 16, 32] numbers of 32 bits, the second of the four, to `out`."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0])
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3)
    rows = gl.arange(0, 16, gl.SliceLayout(1, L))
    cols = gl.arange(0, 32, gl.SliceLayout(0, L))
    if WAITS:
        gl.mbarrier_wait(bar, 0)
    words = gl.reinterpret(buf, gl.float32, [4, 16, 32], LAYOUT).index(1)
    gl.store(out + rows[:, None] * 32 + cols[None, :], words.load(L))


@gl.jit
def reinterpreted(x, out, WAITS: gl.constexpr):
    """One role writes a buffer as pairs of 16 bits, another one reads it as words of 32."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    buf = gl.allocate_shared_memory(gl.bfloat16, [64, 64], LAYOUT)
    bar = gl.allocate_shared_memory(gl.int64, [1], gl.MBarrierLayout())
    gl.mbarrier_init(bar, count=1)
    gl.warp_specialize([(write_pairs, (x, buf, bar)), (read_words, (out, buf, bar, WAITS))], [1], [40])


@gl.jit
def halves_of_sums(out, HALF: gl.constexpr):
    """Float32 sums in tensor memory, over whose first half of columns 16-bit values are written, one for each sum; then
    sums are read from column HALF * 32 on."""
    WHOLE: gl.constexpr = gl.TensorMemoryLayout([128, 64], 1)
    TWICE: gl.constexpr = gl.TensorMemoryLayout([128, 128], 1)
    L: gl.constexpr = gl.tensor_memory_registers(128, 64, gl.num_warps())
    PART: gl.constexpr = gl.tensor_memory_registers(128, 32, gl.num_warps())
    sums = gl.allocate_tensor_memory(gl.float32, [128, 64], WHOLE)
    small = gl.reinterpret(sums, gl.bfloat16, [128, 128], TWICE)
    if HALF == 1:
        gl.tcgen05_store(sums, gl.full([128, 64], 3.0, gl.float32, L))
    gl.tcgen05_store(small.slice(0, 64), gl.full([128, 64], 1.0, gl.float32, L).to(gl.bfloat16))
    part = gl.tcgen05_load(sums.slice(HALF * 32, 32), PART)
    rows = gl.arange(0, 128, gl.SliceLayout(1, PART))[:, None] * 32
    gl.store(out + rows + gl.arange(0, 32, gl.SliceLayout(0, PART))[None, :], part)
    gl.tcgen05_load(small.slice(32 if HALF == 1 else 64, 64), L)


@gl.jit
def scaled_products(A: gl.constexpr, B: gl.constexpr):
    """A product with scales of operands of two dtypes."""
    L: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    a = gl.allocate_shared_memory(A, [128, 128], L)
    b = gl.allocate_shared_memory(B, [128, 128], L).permute((1, 0))
    acc = gl.allocate_tensor_memory(gl.float32, [128, 128], gl.TensorMemoryLayout([128, 128], 1))
    scales = gl.allocate_tensor_memory(gl.uint8, [128, 4], gl.TensorMemoryScalesLayout())
    gl.tcgen05_mma_scaled(a, b, acc, scales, scales, use_acc=False)
