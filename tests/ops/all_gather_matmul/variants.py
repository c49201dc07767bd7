"""The variants of the kernel that compiling.py compiles, which only a process with a Triton of its own may import."""

FULL = dict(ns=(1024, 136, 64), gathered=True)
VARIANTS = {
    "inter-SM": dict(),
    "inter-SM, three b, gathered": FULL,
    "inter-SM, three b, gathered, b not transposed": dict(FULL, b_t=False),
    # With b not transposed as well the oldest Triton keeps a few values of a role's beginning in memory.
    "intra-SM, everything, tiles shared": dict(FULL, schedule="intra_sm", split=2, rows=100),
    "none, three b, gathered, tiles shared": dict(
        FULL, b_t=False, schedule="none", split=2, rows=100, tile=(128, 128, 64)
    ),
    "one rank": dict(world=1, bias=False),
    "eight ranks, fp16": dict(world=8, dtype="float16"),
    "slots beyond 2**31 elements": dict(rows=(1 << 21) + 1000),
    "copy engine": dict(FULL, mechanism="copy_engine", comm_sms=1),
    "by registers": dict(FULL, mechanism="register"),
    "by registers, fp16": dict(mechanism="register", dtype="float16", tile=(256, 128, 64)),
    "multimem": dict(FULL, mechanism="multimem"),
    "float8, multimem": dict(dtype="float8_e4m3fn", tile=(128, 256, 128), mechanism="multimem"),
    "float8": dict(dtype="float8_e4m3fn", tile=(128, 256, 128)),
    "float8, three b, gathered": dict(FULL, dtype="float8_e4m3fn", tile=(128, 256, 128)),
    "float8, one rank": dict(dtype="float8_e4m3fn", tile=(128, 256, 128), world=1, bias=False),
    "float8, by registers": dict(FULL, dtype="float8_e4m3fn", tile=(128, 128, 128), mechanism="register"),
    "float8, intra-SM": dict(FULL, dtype="float8_e4m3fn", tile=(128, 256, 128), schedule="intra_sm"),
    "float8, copy engine": dict(dtype="float8_e4m3fn", tile=(128, 256, 128), mechanism="copy_engine", comm_sms=2),
    "tile (256, 128, 64), gathered": dict(FULL, tile=(256, 128, 64)),
    "tile (128, 128, 64), 6 stages": dict(FULL, tile=(128, 128, 64), stages=6),
    "tile (128, 64, 64), 8 stages": dict(FULL, tile=(128, 64, 64), stages=8, b_t=False),
    "tile (64, 256, 64), 5 stages": dict(FULL, tile=(64, 256, 64), stages=5, b_t=False),
    "one shot": dict(rows=16, schedule="one_shot", tile=(64, 128, 64), stages=8),
    "one shot, three b, gathered, tiles shared, eight ranks": dict(
        FULL, rows=24, world=8, schedule="one_shot", tile=(128, 128, 64), stages=6, split=2, comm_sms=16
    ),
    "one shot, by registers, fp16": dict(
        rows=140, schedule="one_shot", mechanism="register", dtype="float16", tile=(128, 256, 64), b_t=False, bias=False
    ),
    "tile (64, 64, 64), 10 stages": dict(FULL, tile=(64, 64, 64), stages=10, split=2, rows=100),
}
