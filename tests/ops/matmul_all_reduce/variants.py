"""The variants of the kernel that compiling.py compiles, which only a process with a Triton of its own may import."""

ONE = dict(schedule="one_shot", tile=(64, 64, 64), stages=10)
TWO = dict(schedule="intra_sm", tile=(128, 256, 64), stages=4, m=4096, n=4096, extras="br")
INTER = dict(TWO, schedule="inter_sm", comm_sms=8)
FABRIC = dict(INTER, mechanism="multimem")
VARIANTS = {
    "one shot": dict(ONE, extras=""),
    "one shot, everything, eight ranks": dict(ONE, world=8, n=8192),
    "one shot, everything, two ranks": dict(ONE, world=2, n=8192),
    "one shot, everything, 72 ranks": dict(ONE, world=72),
    "one shot, shared tiles, fp16": dict(ONE, tile=(64, 128, 64), stages=8, split=4, dtype="float16"),
    "one shot, (64, 256, 64)": dict(ONE, tile=(64, 256, 64), stages=5, b_t=False),
    "one shot, (128, 128, 64)": dict(ONE, tile=(128, 128, 64), stages=6, world=8, m=256, n=8192),
    "two shots": TWO,
    "one shot, (128, 256, 64)": dict(ONE, tile=(128, 256, 64), stages=4, world=8, m=256, n=8192),
    "two shots, b not transposed, eight ranks": dict(TWO, b_t=False, world=8, extras=""),
    "two shots, (64, 64, 64)": dict(TWO, tile=(64, 64, 64), stages=10, world=8),
    "two shots, (64, 256, 64), shared tiles": dict(TWO, tile=(64, 256, 64), stages=5, m=512, n=512, split=2),
    "two shots, (256, 128, 64)": dict(TWO, tile=(256, 128, 64), stages=3, world=2),
    "slots beyond 2**31 elements": dict(TWO, m=1 << 17, n=1 << 15),
    "inter-SM": INTER,
    "inter-SM, eight ranks, (64, 64, 64)": dict(INTER, world=8, tile=(64, 64, 64), stages=10, extras=""),
    "inter-SM, (256, 128, 64), fp16": dict(INTER, tile=(256, 128, 64), stages=3, dtype="float16"),
    "inter-SM, multimem": FABRIC,
    "inter-SM, multimem, (256, 128, 64), fp16": dict(FABRIC, tile=(256, 128, 64), stages=3, dtype="float16"),
    "inter-SM, multimem, (64, 128, 64), shared tiles": dict(FABRIC, tile=(64, 128, 64), m=512, n=512, split=2),
}
