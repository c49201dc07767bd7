"""The vocabulary where Triton is installed: Gluon's words and the communication primitives.

Words carry the names of the newest Gluon; what an older one (3.6 is the oldest supported) names or does
otherwise is bridged here. Inline PTX is in lang, nowhere else in the library.
"""

import triton
from triton._C.libtriton import ir
from triton.experimental.gluon import constexpr_function, jit
from triton.experimental.gluon import language as _gl
from triton.experimental.gluon.language import (
    BlockedLayout,
    DotOperandLayout,
    NVMMADistributedLayout,
    NVMMASharedLayout,
    SliceLayout,
    allocate_shared_memory,
    arange,
    atomic_add,
    atomic_cas,
    atomic_max,
    atomic_xchg,
    bfloat16,
    cdiv,
    constexpr,
    convert_layout,
    exp2,
    float8e4nv,
    float16,
    float32,
    full,
    int1,
    int32,
    int64,
    load,
    log2,
    max,
    maximum,
    min,
    minimum,
    num_programs,
    num_warps,
    program_id,
    shared_memory_descriptor,
    static_assert,
    static_range,
    store,
    sum,
    tensor,
    to_tensor,
    uint8,
    where,
    zeros,
)
from triton.experimental.gluon.language._core import builtin as _builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as _mbarrier
from triton.experimental.gluon.language.nvidia.hopper import tma as _tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate

from tileweave.lang._asm import asm as _asm
from tileweave.lang._sums import (
    all_reduce,
    multicast_pointer,
    multimem_add,
    multimem_load_reduce,
    multimem_store,
    reduce,
)
from tileweave.lang._tensor import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_copy_scales,
    tcgen05_load,
    tcgen05_mma,
    tcgen05_mma_scaled,
    tcgen05_store,
    tensor_memory_descriptor,
    tensor_memory_registers,
)

TRITON_VERSION = tuple(int(x) for x in triton.__version__.split(".")[:2])
_RENAMED = TRITON_VERSION >= (3, 7) and hasattr(_tma, "async_load")  # tma.async_load, gl.barrier, ...

tensor_descriptor = _tma.tensor_descriptor
MBarrierLayout = _mbarrier.MBarrierLayout
mbarrier_init = _mbarrier.init
mbarrier_expect = _mbarrier.expect
mbarrier_arrive = _mbarrier.arrive
mbarrier_wait = _mbarrier.wait
mbarrier_invalidate = _mbarrier.invalidate

# Words of a flag block that precede the flags themselves (see Flags).
ABORT = constexpr(0)
RECORD = constexpr(1)  # 1: somebody timed out and filled the next four: index, expected, seen, rank
REPORT = constexpr(8)  # and 9: address of the owner's copy of the record in pinned host memory, or 0
HEADER_WORDS = constexpr(16)


def aggregate(cls):
    """Mark a class of values that device functions hand around together; `declaration` is the class as written."""
    made = _aggregate(cls)
    made.declaration = cls
    return made


@jit
def _plus(x, y):
    return x + y


if hasattr(_gl, "cumsum"):
    cumsum = _gl.cumsum
else:

    @jit
    def cumsum(input, axis: constexpr = 0):
        """Sums along an axis of all elements up to each."""
        return _gl.associative_scan(input, axis, _plus)


@_builtin
def barrier(_semantic=None):
    """Barrier among the threads of the calling warp partition."""
    return (_gl.barrier if hasattr(_gl, "barrier") else _gl.thread_barrier)(_semantic=_semantic)


@_builtin
def columns(x, width, _semantic=None):
    """A matrix in registers cut into matrices of `width` columns, left to right, as a tuple.

    For a wgmma's result (NVMMADistributedLayout): no data moves, each part has the layout of a result of that width.
    """
    width = _gl._unwrap_if_constexpr(width)
    whole = x.type.layout
    rows, _, depth = whole.instr_shape
    layout = NVMMADistributedLayout(whole.version, whole.warps_per_cta, [rows, width, depth])

    def cut(part):
        height, count = (_gl._unwrap_if_constexpr(n) for n in part.shape)
        if count == width:
            return [_semantic.convert_layout(part, layout, True)]
        halves = _semantic.permute(_semantic.reshape(part, [height, 2, count // 2], False), (0, 2, 1))
        left, right = _semantic.split(halves)
        return cut(left) + cut(right)

    return _gl.tuple(cut(x))


@_builtin
def pack_pairs(x, dtype, _semantic=None):
    """A float32 matrix [M, N] rounded to a 16-bit type, as int32 [M, N / 2]: columns 2 i and 2 i + 1 in one value.

    Two neighbours must lie in one thread, as they do in a wgmma's result. 16-bit values of their own that live from one
    turn of a loop to the next would be taken apart and packed anew in each.
    """
    name = "f16x2" if _gl._unwrap_if_constexpr(dtype) == float16 else "bf16x2"
    rows, cols = (_gl._unwrap_if_constexpr(n) for n in x.shape)
    even, odd = _semantic.split(_semantic.reshape(x, [rows, cols // 2, 2], False))
    return _gl.inline_asm_elementwise(
        f"cvt.rn.{name}.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=int32, is_pure=True, pack=1, _semantic=_semantic
    )


@_builtin
def unpack_pairs(x, dtype, layout, _semantic=None):
    """What `pack_pairs` has packed, as a matrix [M, N] of `dtype` in `layout`, which must leave all where it is."""
    kind = _gl._unwrap_if_constexpr(dtype)
    rows, cols = (_gl._unwrap_if_constexpr(n) for n in x.shape)
    even, odd = _gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(kind, kind), is_pure=True, pack=1, _semantic=_semantic
    )
    whole = _semantic.reshape(_semantic.join(even, odd), [rows, 2 * cols], False)
    return _semantic.convert_layout(whole, _gl._unwrap_if_constexpr(layout), True)


@_builtin
def reinterpret(buf, dtype, shape, layout, _semantic=None):
    """The same bytes of shared memory as a tile of another type, shape and layout."""
    f = getattr(buf, "reinterpret", None) or buf._reinterpret
    return f(dtype, [_gl._unwrap_if_constexpr(n) for n in shape], layout, _semantic=_semantic)


@_builtin
def column_block(buf, index, width, _semantic=None):
    """Columns index * width to (index + 1) * width of a matrix in shared memory, as a buffer of their own.

    For 128-byte swizzling and a `width` of whole lines of 128 bytes: the matrix lies there line of columns by line of
    columns, so what TMA loads to such a block is what wgmma finds in the matrix.
    """
    rows, cols = (_gl._unwrap_if_constexpr(n) for n in buf.shape)
    width = _gl._unwrap_if_constexpr(width)
    line = 128 * 8 // buf.dtype.primitive_bitwidth
    assert buf.layout.swizzle_byte_width == 128 and width % line == 0, f"width={width}: lines are {line} columns"
    blocks = reinterpret(buf, buf.dtype, [cols // width, rows, width], buf.layout, _semantic=_semantic)
    return blocks.index(index, _semantic=_semantic)


@_builtin
def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs, _semantic=None, _generator=None):
    """Run one function per warp partition; the first in the default one. Functions may be constexpr parameters."""
    unwrap = _gl._unwrap_if_constexpr
    functions_and_args = [(unwrap(function), args) for function, args in functions_and_args]
    return _gl.warp_specialize(
        functions_and_args, worker_num_warps, worker_num_regs, _semantic=_semantic, _generator=_generator
    )


@_builtin
def tma_load(desc, coord, bar, buf, pred=True, _semantic=None):
    """Bulk tensor copy, global memory of this rank to shared memory; completes `bar`'s transaction count."""
    f = _tma.async_load if _RENAMED else _tma.async_copy_global_to_shared
    return f(desc, coord, bar, buf, pred, _semantic=_semantic)


@_builtin
def tma_store(desc, coord, buf, _semantic=None):
    """Bulk tensor copy, shared memory to global memory of this rank; completion as `store_async`."""
    f = _tma.async_store if _RENAMED else _tma.async_copy_shared_to_global
    return f(desc, coord, buf, _semantic=_semantic)


@_builtin
def _tma_add(desc, coord, buf, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, buf.handle)


# ---------------------------------------------------------------- tiles to and from any rank


@_builtin
def load_async(pt, rank, coord, buf, bar, pred=True, _semantic=None):
    """Start a TMA load of one tile from `rank`'s slice of a parallel tensor into shared memory.

    `pt` is a descriptor whose outermost coordinate is the rank; `coord` are the others. The tile is in `buf`
    when `bar`, which must expect its bytes, completes its phase. Reads through the async proxy: memory that
    generic accesses (or another rank's, seen through `wait`) touched needs `fence_proxy_async` first.
    """
    tma_load(pt, [rank, *coord], bar, buf, pred, _semantic=_semantic)


@_builtin
def store_async(pt, rank, coord, buf, _semantic=None):
    """Start a TMA store of one tile from shared memory into `rank`'s slice of a parallel tensor.

    `store_read_wait` tells when `buf` may be reused, `store_wait` when the writes are performed. `buf` written by
    generic stores needs `fence_async_shared` and a barrier first.
    """
    tma_store(pt, [rank, *coord], buf, _semantic=_semantic)


@_builtin
def store_add_async(pt, rank, coord, buf, _semantic=None):
    """Start a TMA reduce-add (bf16, fp16, fp32) of one tile into `rank`'s slice of a parallel tensor.

    Completion as `store_async`. Each element's add is relaxed at gpu scope in PTX; that adds of different GPUs are
    atomic to one another is relied upon, not promised, and the emulator exempts it by name.
    """
    _tma_add(pt, [rank, *coord], buf, _semantic=_semantic)


@_builtin
def broadcast_async(pt, world, coord, buf, _semantic=None):
    """Start a TMA store of one tile into every rank's slice (a store per peer). Completion as `store_async`."""
    for rank in range(_gl._unwrap_if_constexpr(world)):
        tma_store(pt, [rank, *coord], buf, _semantic=_semantic)


@_builtin
def store_read_wait(pending, _semantic=None):
    """Wait until all but the newest `pending` bulk stores have *read* their buffers, which may then be reused.

    The data may still be in flight: a flag published after this alone is a race. Includes a partition barrier.
    """
    _tma.store_wait(pending, _semantic=_semantic)


@_builtin
def store_wait(pending, _semantic=None):
    """Wait until all but the newest `pending` bulk stores are *performed* in the destination's memory.

    Only the issuing thread knows; a partition `barrier` must stand between this and the `signal` that publishes.
    """
    _asm(f"cp.async.bulk.wait_group {_gl._unwrap_if_constexpr(pending)};", _semantic=_semantic)


@_builtin
def grid_dependency_wait(_semantic=None):
    """Wait for the stream's earlier kernels, before any access to global memory: what they wrote is seen after it.

    A kernel that says this is launched while the last CTAs of its predecessor end, which saves part of the latency.
    """
    _asm("griddepcontrol.wait;", _semantic=_semantic)


@_builtin
def fence_proxy_async(_semantic=None):
    """Order generic accesses before this point with async-proxy (TMA) accesses to global memory after it."""
    _asm("fence.proxy.async.global;", _semantic=_semantic)


@_builtin
def fence_proxy_alias(_semantic=None):
    """Order accesses through multicast and through unicast addresses of the same memory."""
    _asm("fence.proxy.alias;", _semantic=_semantic)


# ---------------------------------------------------------------- flags


@aggregate
class Flags:
    """The flag blocks of all ranks: `[world, stride]` int32, the first HEADER_WORDS of a block reserved.

    A flag is a monotonic 32-bit counter, never reset. It has reached a value that it equals or is ahead of by less than
    2^16: one that some calls leave out may be far behind, and must not look ahead when the counter has gone half round.
    `timeout_us`, microseconds, bounds every `wait`.
    """

    ptr: tensor
    stride: tensor
    rank: tensor
    world: constexpr
    timeout_us: tensor

    @constexpr_function
    def __init__(self, ptr, stride, rank, world, timeout_us):
        self.ptr = ptr
        self.stride = stride
        self.rank = rank
        self.world = constexpr(world)
        self.timeout_us = timeout_us


@jit
def _word(flags, rank, word):
    return flags.ptr + rank.to(int64) * flags.stride + word


@jit
def signal(flags, rank, index, value):
    """Store `value` into flag `index` of `rank`: a release at system scope.

    Publishes what the issuing partition has performed; after bulk stores that is `store_wait(0)`, then `barrier()`.
    """
    atomic_xchg(_word(flags, rank, HEADER_WORDS + index), value, sem="release", scope="sys")


@jit
def signal_all(flags, index, value):
    """`signal` to every rank, this one included. A thread has a rank, so this takes as long as one `signal`."""
    LANES: constexpr = 32 * num_warps()
    lane = arange(0, LANES, BlockedLayout([1], [32], [num_warps()], [0]))
    for base in range(0, flags.world, LANES):
        i = base + lane
        words = _word(flags, (flags.rank + 1 + i) % flags.world, HEADER_WORDS + index)
        atomic_xchg(words, lane * 0 + value, mask=i < flags.world, sem="release", scope="sys")


@_builtin
def _spin(flag, needed, abort, expected, timeout_ns, _semantic=None):
    """Every thread polls its flag, if it is needed, with acquire loads until it is reached, the group aborted or time
    is up. 1 where the flag was reached in time, or not needed, and the group has not aborted: who raises flags although
    what they stand for is missing has aborted before, so the abort word is read behind the flag."""
    text = """{
        .reg .pred p; .reg .b32 v, a; .reg .b64 t0, t1;
        mov.u32 $0, 1;
        setp.eq.s32 p, $2, 0;
        @p bra DONE;
        mov.u64 t0, %globaltimer;
        AGAIN:
        ld.acquire.sys.global.b32 v, [$1];
        ld.relaxed.sys.global.b32 a, [$3];
        setp.eq.s32 p, a, 0;
        selp.u32 $0, 1, 0, p;
        @!p bra DONE;
        sub.u32 v, v, $4;
        setp.lt.u32 p, v, 0x10000;
        @p bra DONE;
        mov.u32 $0, 0;
        mov.u64 t1, %globaltimer;
        sub.u64 t1, t1, t0;
        setp.lt.u64 p, t1, $5;
        @p bra AGAIN;
        DONE:
        }"""
    args = [flag, needed, abort, expected, timeout_ns]
    return _gl.inline_asm_elementwise(
        text, "=&r,l,r,l,r,l", args, dtype=int32, is_pure=False, pack=1, _semantic=_semantic
    )


@_builtin
def _store_release(address, value, _semantic=None):
    """Store a word at a 64-bit address, released at system scope."""
    handles = [_semantic.to_tensor(x).handle for x in (address, value)]
    text = "st.release.sys.b32 [$1], $2; mov.u32 $0, 0;"
    _semantic.builder.create_inline_asm(text, "=r,l,r", handles, [int32.to_ir(_semantic.builder)], False, 1)


@jit
def _tell_host(block):
    """Copy this rank's record to where its host looks: the claimed word last."""
    address = load((block + REPORT).to(_gl.pointer_type(int64)))
    if address != 0:
        atomic_add(block + ABORT, 0, sem="acquire", scope="sys")
        for word in static_range(4, -1, -1):
            _store_release(address + 4 * word, atomic_add(block + RECORD + word, 0, sem="relaxed", scope="sys"))


@jit
def _give_up(flags, first, count, expected, skip, step):
    """Record in every rank's block which flag does not come, unless another one has been recorded; abort all ranks."""
    first = flags.rank * 0 + first  # a tensor, also where the caller's is a number
    missing, value = first + (first == skip).to(int32) * step, expected
    for i in range(count):
        seen = atomic_add(_word(flags, flags.rank, HEADER_WORDS + first + i * step), 0, sem="relaxed", scope="sys")
        if (first + i * step != skip) & ((seen - expected < 0) | (seen - expected >= 0x10000)):
            missing, value = first + i * step, seen
    for peer in range(flags.world):
        block = _word(flags, flags.rank * 0 + peer, 0)
        if atomic_cas(block + RECORD, 0, 1, sem="relaxed", scope="sys") == 0:
            atomic_xchg(block + RECORD + 1, missing, sem="relaxed", scope="sys")
            atomic_xchg(block + RECORD + 2, expected, sem="relaxed", scope="sys")
            atomic_xchg(block + RECORD + 3, value, sem="relaxed", scope="sys")
            atomic_xchg(block + RECORD + 4, flags.rank, sem="relaxed", scope="sys")
        atomic_xchg(block + ABORT, 1, sem="release", scope="sys")
    _tell_host(_word(flags, flags.rank, 0))


@jit
def wait_all(flags, first, count, expected, skip=-1, step: constexpr = 1):
    """Wait until `count` flags of this rank, `step` apart from index `first` on, have reached `expected`: an acquire at
    system scope by the whole partition. Flag `skip` is not waited for. Threads poll a flag each: as fast as `wait`.

    Returns whether they have. When `flags.timeout_us` pass first, the first waiter records (index, expected, seen,
    rank) in every rank's block and raises every rank's abort word; from then on every wait fails at once, also one
    whose flag is there, and tells its host. A TMA access to memory that a flag covers needs `fence_proxy_async` after
    this.
    """
    LANES: constexpr = 32 * num_warps()
    lane = arange(0, LANES, BlockedLayout([1], [32], [num_warps()], [0]))
    reached = flags.rank >= 0
    for base in range(0, count, LANES):
        i = base + lane
        needed = (i < count) & (first + i * step != skip)
        flag = _word(flags, flags.rank, HEADER_WORDS + first) + where(needed, i * step, 0)
        abort = _word(flags, flags.rank, ABORT)
        ok = _spin(flag, needed.to(int32), abort, expected, flags.timeout_us.to(int64) * 1000)
        # One answer for all threads: control flow of a partition must not diverge.
        reached = reached & (min(ok, 0) != 0)
    barrier()
    if not reached:
        _give_up(flags, first, count, expected, skip, step)
    return reached


@jit
def wait(flags, index, expected):
    """`wait_all` for one flag."""
    return wait_all(flags, index, 1, expected)


@jit
def barrier_all(flags, index, epoch):
    """All ranks meet: flags `index` to `index + world - 1` of each take `epoch`, one per source rank.

    Safe back to back with growing epochs. Publishes and acquires like `signal` and `wait`; returns whether all came.
    """
    barrier()
    for i in range(1, flags.world + 1):
        signal(flags, (flags.rank + i) % flags.world, index + flags.rank, epoch)
    return wait_all(flags, index, flags.world, epoch)
