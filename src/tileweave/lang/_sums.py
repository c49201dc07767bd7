"""Sums over ranks, where Triton is installed: by loads from the peers, or in the fabric at multicast addresses."""

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as _gl
from triton.experimental.gluon.language import constexpr, float32, int64, load, store
from triton.experimental.gluon.language._core import builtin as _builtin


@jit
def reduce(ptrs, stride, world: constexpr):
    """Sum over all ranks of the elements at `ptrs` (a tile of pointers into rank 0's slice), in float32.

    Plain loads from the peers in rank order: the result does not depend on timing. `stride` is the distance of
    two ranks' slices in elements.
    """
    total = load(ptrs).to(float32)
    for peer in range(1, world):
        total += load(ptrs + stride.to(int64) * peer).to(float32)
    return total


@jit
def all_reduce(ptrs, stride, world: constexpr):
    """`reduce`, the rounded sum then stored back to every rank's slice; returns it in float32.

    The caller owns these elements: no other rank may touch them in the meantime.
    """
    total = reduce(ptrs, stride, world)
    for peer in range(world):
        store(ptrs + stride.to(int64) * peer, total.to(ptrs.dtype.element_ty))
    return total


@_builtin
def multicast_pointer(address, dtype, _semantic=None):
    """Pointer to elements of `dtype` at a multicast address, which the host hands over as a number."""
    return _semantic.cast(_semantic.to_tensor(address), _gl.pointer_type(_gl._unwrap_if_constexpr(dtype)))


@_builtin
def multimem_load_reduce(ptrs, _semantic=None):
    """Sum over all ranks in the fabric (multimem.ld_reduce, float32 accumulation) of 16-bit floats.

    `ptrs` is a tile of multicast addresses whose layout gives a thread eight consecutive elements. Only for
    multicast addresses; `fence_proxy_alias` stands between these and unicast accesses to the same memory.
    """
    ty = ptrs.dtype.element_ty
    kind = {"bf16": "bf16x2", "fp16": "f16x2"}[ty.name]
    text = f"multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.{kind} {{$0, $1, $2, $3}}, [$4];"
    return _gl.inline_asm_elementwise(
        text, "=r,=r,=r,=r" + ",l" * 8, [ptrs], dtype=ty, is_pure=False, pack=8, _semantic=_semantic
    )


@_builtin
def multimem_store(ptrs, value, _semantic=None):
    """Store 16-bit floats to every rank at once (multimem.st); addresses and layout as `multimem_load_reduce`."""
    _multimem_write("st.relaxed.sys.global", ptrs, value, _semantic)


@_builtin
def multimem_add(ptrs, value, _semantic=None):
    """Add 16-bit floats to every rank's memory at once (multimem.red); addresses and layout as above."""
    _multimem_write("red.relaxed.sys.global.add", ptrs, value, _semantic)


def _multimem_write(instruction, ptrs, value, semantic):
    kind = {"bf16": "bf16x2", "fp16": "f16x2"}[ptrs.dtype.element_ty.name]
    # Eight one-byte results, in two registers, are thrown away; eight addresses, of which the first is used; values.
    text = f"multimem.{instruction}.v4.{kind} [$2], {{$10, $11, $12, $13}}; mov.u32 $0, 0; mov.u32 $1, 0;"
    registers = "=r,=r" + ",l" * 8 + ",r" * 4
    nothing = ptrs.type.with_element_ty(_gl.int8).to_ir(semantic.builder)
    semantic.builder.create_inline_asm(text, registers, [ptrs.handle, value.handle], [nothing], False, 8)
