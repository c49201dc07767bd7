"""Variants in compiling_collectives.py, which only a process with a Triton of its own may import."""

VARIANTS = {  # world, dtype, shape, collective, options of its operator
    "all_gather": (8, "bfloat16", (64, 1024), "all_gather", (0,)),
    "all_gather, 72 ranks": (72, "bfloat16", (64, 1024), "all_gather", (1,)),
    "all_gather, 8-byte": (2, "float32", (3, 6), "all_gather", (1,)),
    "all_gather, 2-byte": (3, "bfloat16", (7, 5), "all_gather", (1,)),
    "all_gather, 1-byte": (3, "int8", (7, 5), "all_gather", (1,)),
    "all_to_all": (4, "float16", (4, 64, 64), "all_to_all", (2, 1)),
    "reduce_scatter": (8, "bfloat16", (64, 1024), "reduce_scatter", (1, "sum", False)),
    "reduce_scatter, float32, mean": (3, "float32", (6, 64), "reduce_scatter", (0, "avg", False)),
    "reduce_scatter, 2-byte": (2, "float16", (6, 7), "reduce_scatter", (0, "sum", True)),
    "reduce_scatter, 72 ranks": (72, "bfloat16", (72, 64), "reduce_scatter", (0, "sum", True)),
    "all_reduce, one shot": (8, "bfloat16", (64, 64), "all_reduce", ("sum", False)),
    "all_reduce, two shots": (8, "bfloat16", (4096, 1024), "all_reduce", ("avg", False)),
    "beyond 2**31 elements": (2, "bfloat16", (1 << 16, 1 << 16), "all_gather", (0,)),
}
