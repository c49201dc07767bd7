"""Tensor memory and its products (tcgen05, Blackwell), where Triton is installed.

Triton writes no tcgen05 fence. PTX wants one on either side of what orders two threads' tcgen05 operations, unless a
commit is that side: so these words have theirs with them.
"""

from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as _gl
from triton.experimental.gluon.language import _semantic as _gluon_semantic
from triton.experimental.gluon.language._core import builtin as _builtin
from triton.experimental.gluon.language.nvidia import blackwell as _bw
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tensor_memory_descriptor,
)

from tileweave.lang._asm import asm

__all__ = [
    "TensorMemoryLayout", "TensorMemoryScalesLayout", "allocate_tensor_memory", "tcgen05_commit", "tcgen05_copy_scales",
    "tcgen05_load", "tcgen05_mma", "tcgen05_mma_scaled", "tcgen05_store", "tensor_memory_descriptor",
    "tensor_memory_registers",
]  # fmt: skip


@constexpr_function
def tensor_memory_registers(rows, columns, warps):
    """The register layout in which `warps` warps load or store a float32 matrix of tensor memory."""
    shape, layout = [rows, columns], TensorMemoryLayout([rows, columns], 1)
    between = [] if hasattr(_bw, "get_tmem_reg_layout") else [shape]  # 3.9 also asks what was allocated, 3.6 for a CGA
    beyond = [[]] if not between else []
    # By its module: a name of ours for a function of the binding would outlive it, which it reports when Python ends.
    compute = _gluon_semantic._compute_tmem_reg_layout
    return compute(_gl.float32, shape, *between, layout, warps, "32x32b", *beyond)


@_builtin
def tcgen05_load(buf, layout, _semantic=None):
    """A matrix of tensor memory, in registers of `layout`, when it is there. By all warps of the partition, four.

    What products have written must have been waited for: by the mbarrier of a commit.
    """
    asm("tcgen05.fence::after_thread_sync;", _semantic=_semantic)
    value = buf.load(layout, _semantic=_semantic)
    asm("tcgen05.fence::before_thread_sync;", _semantic=_semantic)
    return value


@_builtin
def tcgen05_store(buf, value, _semantic=None):
    """Write a matrix of tensor memory from registers; it is there when this returns. By four warps."""
    asm("tcgen05.fence::after_thread_sync;", _semantic=_semantic)
    buf.store(value, _semantic=_semantic)
    asm("tcgen05.fence::before_thread_sync;", _semantic=_semantic)


@_builtin
def tcgen05_mma(a, b, acc, *, use_acc=True, mbarriers=(), _semantic=None):
    """Start acc = a @ b, plus acc with `use_acc`, from one thread; then a commit to each of `mbarriers`.

    a, b: shared memory, [M, K] and [K, N] (a also in tensor memory); acc: float32 in tensor memory, [M, N], M 64 or
    128. Operands are read and acc is written at any moment until an mbarrier that a commit (`tcgen05_commit`, or one
    of `mbarriers`) arrives at has been waited for. Products into one accumulator take place in order. Operands
    written by generic stores need `fence_async_shared`.
    """
    asm("tcgen05.fence::after_thread_sync;", _semantic=_semantic)
    _bw.tcgen05_mma(a, b, acc, use_acc=use_acc, mbarriers=list(mbarriers), _semantic=_semantic)


@_builtin
def tcgen05_copy_scales(src, dst, _semantic=None):
    """Start a copy of scales from shared memory to tensor memory, from one thread, for products to come.

    src: [N / 128, S / 4, 2, 256] bytes, not swizzled, blocks of 128 rows and 4 columns as torch's block-scaled products
    take them: row 32 j + i of a block is bytes 4 j to 4 j + 3 of its i-th 16. dst: [N, S] in TensorMemoryScalesLayout.
    Copies and products of a partition take place in order; a commit tells of copies too. `src` is read as operands are.
    """
    rows, columns = (_gl._unwrap_if_constexpr(n) for n in dst.shape)
    asm("tcgen05.fence::after_thread_sync;", _semantic=_semantic)
    blocks = src.reshape((rows // 128, columns // 4, 32, 4, 4), _semantic=_semantic)
    by_rows = blocks.permute((0, 3, 2, 1, 4), _semantic=_semantic)
    _bw.tcgen05_copy(by_rows.reshape((rows, columns), _semantic=_semantic), dst, _semantic=_semantic)


@_builtin
def tcgen05_mma_scaled(a, b, acc, a_scales, b_scales, *, use_acc=True, mbarriers=(), _semantic=None):
    """`tcgen05_mma` of operands each of whose elements is multiplied with the scale of its row of a, or column of b,
    and of its block along K: M is 128.

    a, b: float8e4nv, or uint8 with two of float4 (e2m1) along K, the first in the low bits; both with K innermost.
    a_scales, b_scales: [M, S] and [N, S] in tensor memory; blocks have K / S elements: 32 of float8 with scales of 8
    bits of exponent (uint8), 16 of float4 with scales of float8e4nv.
    """
    kind = _gl.constexpr("e2m1" if a.dtype == _gl.uint8 else "e4m3")
    asm("tcgen05.fence::after_thread_sync;", _semantic=_semantic)
    _bw.tcgen05_mma_scaled(
        a, b, acc, a_scales, b_scales, kind, kind, use_acc=use_acc, mbarriers=list(mbarriers), _semantic=_semantic
    )
