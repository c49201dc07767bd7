"""What compiling.py compiles, which only a process with a Triton of its own may import."""

VARIANTS = {  # dtype, world, with a gate, silu, whether w is stored [E, I, H], tile and stages or None
    "planned": ("bfloat16", 8, False, False, False, None),
    "gated": ("bfloat16", 8, True, False, False, None),
    "gated, w transposed": ("float16", 4, True, False, True, ((128, 256, 64), 4)),
    "gated, tall": ("bfloat16", 2, True, False, False, ((256, 128, 64), 4)),
    "two multipliers": ("bfloat16", 2, False, False, False, ((128, 256, 64), 4)),
    "tall": ("bfloat16", 8, False, True, True, ((256, 128, 64), 4)),
    "one multiplier": ("bfloat16", 3, False, False, False, ((64, 256, 64), 5)),
}

# dtype, world, whether rows have weights, whether w is stored [E, H, I], tile and stages or None
COMBINE_VARIANTS = {
    "combine, planned": ("bfloat16", 8, True, False, None),
    "combine, w transposed": ("float16", 4, False, True, ((128, 256, 64), 4)),
    "combine, tall": ("bfloat16", 2, True, True, ((256, 128, 64), 4)),
    "combine, one multiplier": ("bfloat16", 3, True, False, ((64, 256, 64), 5)),
}

# dtype of choices, world, experts, choices of a token, dtype of weights or None, which of the kernels in order
ROUTE_VARIANTS = {
    f"route, {kind}, {name}": (*made, which)
    for kind, made in (
        ("eight ranks", ("int64", 8, 256, 8, "float32")),
        ("two ranks", ("int32", 2, 9, 1, None)),
        ("many experts", ("int64", 8, 8192, 16, "bfloat16")),
    )
    for which, name in enumerate(("count", "exchange", "send", "lacking", "align"))
}
