"""The list of words, in one place: what a kernel may say (WORDS) and what the host needs to describe it (HOST)."""

WORDS = (
    # types and compile-time values
    "constexpr", "tensor", "shared_memory_descriptor", "tensor_descriptor", "int1", "uint8", "int32", "int64",
    "float16", "float8e4nv", "bfloat16", "float32", "BlockedLayout", "SliceLayout", "NVMMADistributedLayout",
    "NVMMASharedLayout", "MBarrierLayout", "DotOperandLayout", "TensorMemoryLayout", "TensorMemoryScalesLayout",
    "tensor_memory_descriptor",
    # structure
    "grid_dependency_wait", "program_id", "num_programs", "num_warps", "static_range", "static_assert", "cdiv",
    "warp_specialize", "barrier",
    # tiles in registers
    "arange", "zeros", "full", "where", "maximum", "minimum", "max", "min", "sum", "cumsum", "exp2", "log2",
    "convert_layout", "to_tensor", "columns", "pack_pairs", "unpack_pairs",
    # memory
    "load", "store", "atomic_add", "atomic_cas", "atomic_max", "atomic_xchg", "allocate_shared_memory",
    "reinterpret", "column_block",
    # asynchronous machinery of one SM
    "mbarrier_init", "mbarrier_expect", "mbarrier_arrive", "mbarrier_wait", "mbarrier_invalidate",
    "fence_async_shared", "warpgroup_mma", "warpgroup_mma_init", "warpgroup_mma_wait", "tma_load", "tma_store",
    # tensor memory (Blackwell)
    "allocate_tensor_memory", "tensor_memory_registers", "tcgen05_load", "tcgen05_store", "tcgen05_mma",
    "tcgen05_mma_scaled", "tcgen05_copy_scales", "tcgen05_commit",
    # communication primitives
    "load_async", "store_async", "store_add_async", "broadcast_async", "store_read_wait", "store_wait",
    "fence_proxy_async", "Flags", "ABORT", "RECORD", "HEADER_WORDS", "signal", "signal_all", "wait", "wait_all",
    "barrier_all", "reduce", "all_reduce", "multicast_pointer", "multimem_load_reduce", "multimem_store",
    "multimem_add", "fence_proxy_alias",
)  # fmt: skip

HOST = ("jit", "aggregate", "constexpr_function", "TensorDescriptor", "REPORT")
