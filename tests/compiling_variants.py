"""Names of the variants in compiling.py, which only a process with a Triton of its own may import."""

NAMES = (
    "add",
    "deterministic",
    "fp16 average, a transposed, b not",
    "float32 result",
    "one rank",
    "eight ranks",
    "slots beyond 2**31 elements",
    "tile (128, 256, 64), 3 stages",
    "tile (256, 128, 64), 3 stages",
    "tile (128, 128, 64), 5 stages",
    "tile (128, 128, 64), 4 stages",
    "tile (128, 64, 64), 6 stages",
    "inter-SM all-gather",
    "words",
)
