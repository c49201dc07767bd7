"""The smallest calls of the ops that are a check: what tens of thousands of schedules can be run of.

Three ranks (one where ranks have nothing to do with each other) make two calls in each of the variants of `tileweave
check`, by plans with smaller tiles and rings; but for those with scales of blocks, whose tiles cannot be small. What
`too_small` asks for holds of each variant: every ring wraps in some CTA, every flag is raised by both calls; and a CTA
has several tiles.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from tileweave.checker.ops import OpCase
from tileweave.checker.problems import PROBLEMS, Options
from tileweave.checker.setups import small_constants
from tileweave.emulator.rebuild import edited


class Small(NamedTuple):
    """ranks; sms: CTAs of a rank that are resident; sizes: of the whole problem; tile: of plans, None: as they are;
    stages: of their rings."""

    ranks: int
    sms: int
    sizes: dict[str, int]
    tile: tuple[int, int, int] | None = None
    stages: int = 2


_TOKENS = {"tokens": 24, "hidden": 72, "inner": 72, "experts": 9, "topk": 2}
_MATRIX = Small(3, 2, {"m": 3 * 48, "n": 24})
_SMALL = {
    "matmul_reduce_scatter": Small(3, 2, {"m": 18, "n": 136, "k": 3 * 128}, (64, 64, 64)),
    "all_gather_matmul": Small(3, 2, {"m": 18, "n": 72, "k": 72}, (64, 64, 64)),
    "matmul_all_reduce": Small(3, 2, {"m": 6, "n": 520, "k": 3 * 128}, (64, 128, 64)),
    "all_gather": _MATRIX,
    "reduce_scatter": _MATRIX,
    "all_reduce": _MATRIX,
    "all_to_all": _MATRIX,
    "ring_attention": Small(3, 2, {"heads": 4, "kv_heads": 4, "seq": 30, "dim": 64}, (64, 16, 64), 3),
    "ulysses_attention": Small(3, 3, {"heads": 6, "kv_heads": 6, "seq": 192, "dim": 64}, (64, 64, 64), 3),
    "attention": Small(1, 1, {"heads": 2, "kv_heads": 1, "seq": 136, "dim": 64}),
    "grouped_matmul": Small(1, 2, {"tokens": 100, "hidden": 136, "inner": 72, "experts": 3}, (64, 64, 64)),
    "moe_dispatch_matmul": Small(3, 3, _TOKENS),
    "moe_matmul_combine": Small(3, 3, _TOKENS, (64, 64, 64)),
}


def small(op: str) -> OpCase:
    """The small calls of an op, in the variants of its default check that can be small."""
    of = _SMALL[op]
    case = OpCase(op, of.ranks, of.sizes, sms=of.sms)
    variants = OpCase(op, max(of.ranks, 2), of.sizes).all_variants  # a world of one has other names
    return replace(
        case, variants={name: _smaller(options, of) for name, options in variants.items() if "scaled" not in options}
    )


def _smaller(options: Options, of: Small) -> Options:
    options = dict(options)
    if "plan" in options:
        plan = options["plan"]
        options["plan"] = replace(plan, tile=of.tile or plan.tile, stages=of.stages)
    if "tiling" in options:
        options["tiling"] = replace(options["tiling"], bn=16)
    return options


@contextmanager
def as_if_large(op: str) -> Iterator[None]:
    """Within it, collectives do with small tensors what they do with large ones: move several tiles in several steps,
    and sum in two shots. Other ops are as they are."""
    if PROBLEMS[op].room != "collectives":
        yield
        return
    with small_constants(op), edited(lambda file, tree: tree):  # kernels built without these constants are forgotten
        yield
