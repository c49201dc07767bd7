"""Litmus kernels of tensor memory and tcgen05. As kernel.py; for the emulator only, as no such GPU is at hand."""

from tileweave import lang as gl
from tileweave.bench.litmus.kernel import COLS, ROWS, TILE_BYTES, begin

ONE_FP8 = gl.constexpr(float.fromhex("0x1.7p-15"))  # as bfloat16: 1 twice, as float8_e4m3fn
ONE_E8M0 = gl.constexpr(float.fromhex("0x1.fep127"))  # likewise, as float8_e8m0fnu


@gl.jit
def operands(desc):
    """ones [64, 64] twice, in shared memory, and two mbarriers for one arrival."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    ones = gl.full([64, 64], 1.0, gl.bfloat16, L)
    a = gl.allocate_shared_memory(gl.bfloat16, [64, 64], desc.layout)
    b = gl.allocate_shared_memory(gl.bfloat16, [64, 64], desc.layout, ones)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], gl.MBarrierLayout())
    gl.mbarrier_init(bars.index(0), count=1)
    gl.mbarrier_init(bars.index(1), count=1)
    gl.fence_async_shared()
    gl.barrier()
    a.store(ones)
    return a, b, bars.index(0), bars.index(1), ones


@gl.jit
def least_sum(acc, r):
    """Leave the least element of an accumulator."""
    M: gl.constexpr = gl.tensor_memory_registers(acc.shape[0], acc.shape[1], gl.num_warps())
    gl.store(r, gl.min(gl.min(gl.tcgen05_load(acc, M), 1), 0).to(gl.int32))


@gl.jit(do_not_specialize=["first"])
def tensor_products(first, cells, out, tiles, desc, TURNS: gl.constexpr, HOW: gl.constexpr):
    """ones [64, 64] @ ones, twice into one accumulator, of which an operand is then overwritten: the least sum, 128.

    HOW: "right"; "no wait" for the commit before the operand is overwritten ("operand") or the sums are read ("sums"),
    or an arrival in place of the commit; no "commit" at all; "no fence" behind an operand's store from registers; the
    second product into "other columns", some of them the first's, or of "another kind", 8-bit operands; the first one
    takes in what "nobody wrote"; more memory than there is ("too much").
    """
    _, _, _, r = begin(first, cells, out, 1, TURNS)
    a, b, done, _, ones = operands(desc)
    COLUMNS: gl.constexpr = 544 if HOW == "too much" else 96
    T: gl.constexpr = gl.TensorMemoryLayout([64, 64], 1)
    whole = gl.allocate_tensor_memory(gl.float32, [64, COLUMNS], T)
    acc = whole.slice(0, 64)
    if HOW != "no fence":
        gl.fence_async_shared()
    gl.barrier()
    gl.tcgen05_mma(a, b, acc, use_acc=HOW == "nobody wrote")
    if HOW == "another kind":
        of_8_bits = gl.reinterpret(a, gl.float8e4nv, [64, 128], desc.layout)
        gl.tcgen05_mma(of_8_bits, gl.reinterpret(b, gl.float8e4nv, [128, 64], desc.layout), acc, use_acc=True)
    else:
        gl.tcgen05_mma(a, b, whole.slice(32, 64) if HOW == "other columns" else acc, use_acc=HOW != "other columns")
    if HOW == "arrival":
        gl.mbarrier_arrive(done, count=1)
    elif HOW != "commit":
        gl.tcgen05_commit(done)
    if HOW == "operand":
        a.store(ones + ones)
    if HOW != "sums":
        gl.mbarrier_wait(done, 0)
    least_sum(acc, r)
    a.store(ones + ones)


@gl.jit
def multiply_twice(a, b, acc, done, read, HOW: gl.constexpr):
    """Issue a product, and another one into the same accumulator when the first has been read."""
    gl.tcgen05_mma(a, b, acc, use_acc=False, mbarriers=[done])
    if HOW != "no release":
        gl.mbarrier_wait(read, 0)
    gl.tcgen05_mma(a, b, acc, use_acc=True, mbarriers=[done])


@gl.jit
def read_once(acc, done, read, r):
    """Read the first product, and give the accumulator back."""
    gl.mbarrier_wait(done, 0)
    least_sum(acc, r)
    gl.mbarrier_arrive(read, count=1)
    gl.mbarrier_wait(done, 1)


@gl.jit(do_not_specialize=["first"])
def tensor_reused(first, cells, out, tiles, desc, TURNS: gl.constexpr, HOW: gl.constexpr):
    """A partition multiplies into an accumulator that another one reads: the least sum it reads first.

    HOW: "right", or the next product does not wait for the reader's "no release".
    """
    _, _, _, r = begin(first, cells, out, 1, TURNS)
    a, b, done, read, _ = operands(desc)
    acc = gl.allocate_tensor_memory(gl.float32, [64, 64], gl.TensorMemoryLayout([64, 64], 1))
    gl.fence_async_shared()
    gl.barrier()
    gl.warp_specialize([(read_once, (acc, done, read, r)), (multiply_twice, (a, b, acc, done, read, HOW))], [1], [64])


@gl.jit
def hand_in(a, cells, told):
    """Overwrite an operand, then a cell, and tell of both."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    a.store(gl.full([64, 64], 2.0, gl.bfloat16, L))
    gl.fence_async_shared()
    gl.store(cells, 1)
    gl.mbarrier_arrive(told, count=1)


@gl.jit
def multiply_once(a, b, acc, told, done):
    """Issue a product of what has been told of."""
    gl.mbarrier_wait(told, 0)
    gl.tcgen05_mma(a, b, acc, use_acc=False, mbarriers=[done])


@gl.jit
def take_over(a, acc, cells, done, r, HOW: gl.constexpr):
    """Behind the product, overwrite its operand, or read the cell."""
    gl.mbarrier_wait(done, 0)
    if HOW == "operand":
        least_sum(acc, r)
        L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        a.store(gl.full([64, 64], 3.0, gl.bfloat16, L))
    else:
        gl.store(r, gl.load(cells))


@gl.jit(do_not_specialize=["first"])
def tensor_passes_on(first, cells, out, tiles, desc, TURNS: gl.constexpr, HOW: gl.constexpr):
    """One partition writes an operand and then a cell, one multiplies, one is told by the commit alone.

    HOW: what the last one then does: read the sums, 128 at least, and overwrite the "operand"; or read the "cell", 1.
    """
    _, _, x, r = begin(first, cells, out, 1, TURNS)
    a, b, told, done, _ = operands(desc)
    acc = gl.allocate_tensor_memory(gl.float32, [64, 64], gl.TensorMemoryLayout([64, 64], 1))
    gl.fence_async_shared()
    gl.barrier()
    gl.warp_specialize(
        [
            (take_over, (a, acc, x, done, r, HOW)),
            (hand_in, (a, x, told)),
            (multiply_once, (a, b, acc, told, done)),
        ],
        [1, 1],
        [64, 64],
    )


@gl.jit
def copy_both(of_a, of_b, a_scales, b_scales):
    """The scales of both operands to tensor memory."""
    gl.tcgen05_copy_scales(of_a, a_scales)
    gl.tcgen05_copy_scales(of_b, b_scales)


@gl.jit
def multiply_told(a, b, acc, a_scales, b_scales, told, done):
    """Issue a product with scales when it is told to."""
    gl.mbarrier_wait(told, 0)
    gl.tcgen05_mma_scaled(a, b, acc, a_scales, b_scales, use_acc=False, mbarriers=[done])


@gl.jit
def copy_and_tell(of_a, of_b, acc, a_scales, b_scales, told, done, r, HOW: gl.constexpr):
    """Copy the scales, tell of it, and leave the least sum of the product that another partition makes."""
    copy_both(of_a, of_b, a_scales, b_scales)
    if HOW == "told by an arrival":
        gl.mbarrier_arrive(told, count=1)
    else:
        gl.tcgen05_commit(told)
    gl.mbarrier_wait(done, 0)
    least_sum(acc, r)


@gl.jit(do_not_specialize=["first"])
def tensor_scales(first, cells, out, tiles, desc, TURNS: gl.constexpr, HOW: gl.constexpr):
    """ones [128, 128] @ ones in 8 bits with scales of 1, but that TMA loads others for a over these, 2**-127: the least
    sum, 0.

    HOW: "right"; TMA is not waited for ("early"); a's scales are overwritten with no wait for the commit ("buffer");
    or another partition multiplies, "told by a commit" or "told by an arrival" that they have been copied.
    """
    _, instance, _, r = begin(first, cells, out, 1, TURNS)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=4)
    ones = gl.full([128, 64], ONE_FP8, gl.bfloat16, L)
    scales = gl.full([ROWS, COLS], ONE_E8M0, gl.bfloat16, L)
    operand = gl.allocate_shared_memory(gl.bfloat16, [128, 64], desc.layout, ones)
    buf = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLS], desc.layout, scales)
    others = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLS], desc.layout, scales)
    bars = gl.allocate_shared_memory(gl.int64, [3, 1], gl.MBarrierLayout())
    loaded, told, done = bars.index(0), bars.index(1), bars.index(2)
    for i in gl.static_range(3):
        gl.mbarrier_init(bars.index(i), count=1)
    S: gl.constexpr = gl.TensorMemoryScalesLayout()
    a_scales = gl.allocate_tensor_memory(gl.uint8, [128, 4], S)
    b_scales = gl.allocate_tensor_memory(gl.uint8, [128, 4], S)
    acc = gl.allocate_tensor_memory(gl.float32, [128, 128], gl.TensorMemoryLayout([128, 128], 1))
    OF_8_BITS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    a = gl.reinterpret(operand, gl.float8e4nv, [128, 128], OF_8_BITS)
    of_a = gl.reinterpret(buf, gl.uint8, [8, 1, 1, 2, 256], PLAIN).index(0)
    of_b = gl.reinterpret(others, gl.uint8, [8, 1, 1, 2, 256], PLAIN).index(0)
    gl.fence_async_shared()
    gl.barrier()
    gl.mbarrier_expect(loaded, TILE_BYTES)
    gl.tma_load(desc, [instance * ROWS, 0], loaded, buf)
    if HOW != "early":
        gl.mbarrier_wait(loaded, 0)
    if HOW == "told by a commit" or HOW == "told by an arrival":
        gl.warp_specialize(
            [
                (copy_and_tell, (of_a, of_b, acc, a_scales, b_scales, told, done, r, HOW)),
                (multiply_told, (a, a.permute((1, 0)), acc, a_scales, b_scales, told, done)),
            ],
            [1],
            [64],
        )
    else:
        copy_both(of_a, of_b, a_scales, b_scales)
        gl.tcgen05_mma_scaled(a, a.permute((1, 0)), acc, a_scales, b_scales, use_acc=False, mbarriers=[done])
        if HOW == "buffer":
            buf.store(scales)
        gl.mbarrier_wait(done, 0)
        least_sum(acc, r)
