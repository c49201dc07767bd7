"""Names of the variants in compiling.py, which only a process with a Triton of its own may import."""

from tileweave.planner.tiling import TILINGS


def tiling_name(tiling, split):
    """The variant that has a tile configuration of the planner, its last wave shared by `split` CTAs a tile."""
    return f"tile {tiling.tile}, {tiling.stages} stages, split {split}"


NAMES = (
    "add",
    "deterministic",
    "fp16 average, a transposed, b not",
    "float8 operands",
    "float8 operands, one rank, largest tile",
    "float32 result",
    "one rank",
    "eight ranks",
    "slots beyond 2**31 elements",
    "one rank, shared tiles",
    "deterministic, shared tiles",
    "float32 result, shared tiles",
    "average, a transposed, b not, shared tiles",
    "inter-SM, add",
    "inter-SM, deterministic, shared tiles",
    "inter-SM, float32 result, one multiplier",
    "inter-SM, float8 operands",
    "one shot",
    "one shot, average, eight ranks, largest tile",
    "one shot, float32 result, shared tiles, a transposed, b not",
    "one shot, float8 operands",
    "one shot, shared tiles",
    *(tiling_name(tiling, split) for tiling in TILINGS for split in (1, 2)),
    "words",
    "probe: TMA, 16 KB tiles",
    "probe: TMA, 1 KB tiles",
    "probe: registers",
    "probe: the naive way",
    "probe: flags",
    "probe: mbarriers",
)
