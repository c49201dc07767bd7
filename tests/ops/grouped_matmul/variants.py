"""What compiling.py compiles, which only a process with a Triton of its own may import."""

VARIANTS = {  # dtype, rows, experts, k, n, whether w is stored [E, I, H], tile, stages
    "planned": ("bfloat16", 32768, 32, 7168, 2048, False, None, 0),
    "planned, w transposed": ("float16", 32768, 128, 7168, 2048, True, None, 0),
    "two multipliers": ("bfloat16", 512, 8, 256, 256, False, (128, 256, 64), 4),
    "tall": ("bfloat16", 512, 8, 256, 256, True, (256, 128, 64), 4),
    "one multiplier": ("bfloat16", 100, 512, 256, 256, False, (64, 256, 64), 5),
    "small": ("bfloat16", 100, 512, 256, 256, True, (64, 64, 64), 10),
}
