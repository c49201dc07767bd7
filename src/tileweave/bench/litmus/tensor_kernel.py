"""Litmus kernels of tensor memory and tcgen05. As kernel.py; for the emulator only, as no such GPU is at hand."""

from tileweave import lang as gl
from tileweave.bench.litmus.kernel import begin


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
    M: gl.constexpr = gl.tensor_memory_registers(64, 64, gl.num_warps())
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
