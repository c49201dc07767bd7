"""The words of `tileweave.lang` as the emulator understands them: one attribute for each, no others in `__all__`."""

from tileweave import lang
from tileweave.emulator.async_words import (
    allocate_shared_memory,
    barrier,
    broadcast_async,
    column_block,
    fence_async_shared,
    fence_proxy_async,
    load_async,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_invalidate,
    mbarrier_wait,
    reinterpret,
    store_add_async,
    store_async,
    store_read_wait,
    store_wait,
    tma_load,
    tma_store,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from tileweave.emulator.flag_words import (
    ABORT,
    HEADER_WORDS,
    RECORD,
    Flags,
    barrier_all,
    signal,
    signal_all,
    wait,
    wait_all,
)
from tileweave.emulator.memory_words import (
    all_reduce,
    atomic_add,
    atomic_cas,
    atomic_max,
    atomic_xchg,
    fence_proxy_alias,
    load,
    multicast_pointer,
    multimem_add,
    multimem_load_reduce,
    multimem_store,
    reduce,
    store,
)
from tileweave.emulator.tensor_words import TensorView as tensor_memory_descriptor
from tileweave.emulator.tensor_words import (
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_copy_scales,
    tcgen05_load,
    tcgen05_mma,
    tcgen05_mma_scaled,
    tcgen05_store,
    tensor_memory_registers,
)
from tileweave.emulator.tile_words import (
    arange,
    cdiv,
    columns,
    convert_layout,
    cumsum,
    exp2,
    full,
    grid_dependency_wait,
    log2,
    max,
    maximum,
    min,
    minimum,
    num_programs,
    num_warps,
    pack_pairs,
    program_id,
    static_assert,
    static_range,
    sum,
    to_tensor,
    unpack_pairs,
    where,
    zeros,
)
from tileweave.emulator.tiles import Tile as tensor
from tileweave.emulator.views import Descriptor as tensor_descriptor
from tileweave.emulator.views import View as shared_memory_descriptor


def constexpr(value):
    """Everything is known at compile time here."""
    return value


# Types and layouts are values that kernels hand around: the library's own serve.
int1, uint8, int32, int64 = lang.int1, lang.uint8, lang.int32, lang.int64
float16, bfloat16, float32, float8e4nv = lang.float16, lang.bfloat16, lang.float32, lang.float8e4nv
BlockedLayout, SliceLayout, NVMMADistributedLayout = lang.BlockedLayout, lang.SliceLayout, lang.NVMMADistributedLayout
NVMMASharedLayout, MBarrierLayout = lang.NVMMASharedLayout, lang.MBarrierLayout
DotOperandLayout = lang.DotOperandLayout
TensorMemoryLayout, TensorMemoryScalesLayout = lang.TensorMemoryLayout, lang.TensorMemoryScalesLayout

__all__ = [
    "ABORT", "HEADER_WORDS", "RECORD", "BlockedLayout", "DotOperandLayout", "Flags", "MBarrierLayout",
    "NVMMADistributedLayout", "NVMMASharedLayout", "SliceLayout", "TensorMemoryLayout",
    "TensorMemoryScalesLayout", "all_reduce",
    "allocate_shared_memory", "allocate_tensor_memory",
    "arange", "atomic_add", "atomic_cas", "atomic_max", "atomic_xchg", "barrier", "barrier_all", "bfloat16",
    "broadcast_async", "cdiv", "column_block", "columns", "constexpr", "convert_layout", "cumsum", "exp2",
    "fence_async_shared",
    "fence_proxy_alias", "fence_proxy_async", "float16", "float32", "float8e4nv", "full",
    "grid_dependency_wait", "int1", "int32", "int64", "load", "load_async", "log2", "max", "maximum",
    "mbarrier_arrive", "mbarrier_expect", "mbarrier_init", "mbarrier_invalidate", "mbarrier_wait", "min",
    "minimum", "multicast_pointer", "multimem_add", "multimem_load_reduce", "multimem_store", "num_programs",
    "num_warps", "pack_pairs", "program_id", "reduce", "reinterpret", "shared_memory_descriptor", "signal",
    "signal_all", "static_assert", "static_range", "store", "store_add_async", "store_async",
    "store_read_wait", "store_wait", "sum", "tcgen05_commit", "tcgen05_copy_scales", "tcgen05_load", "tcgen05_mma",
    "tcgen05_mma_scaled", "tcgen05_store", "tensor",
    "tensor_descriptor", "tensor_memory_descriptor", "tensor_memory_registers", "tma_load", "tma_store",
    "to_tensor", "uint8", "unpack_pairs", "wait", "wait_all", "warp_specialize", "warpgroup_mma", "warpgroup_mma_init",
    "warpgroup_mma_wait", "where", "zeros",
]  # fmt: skip
