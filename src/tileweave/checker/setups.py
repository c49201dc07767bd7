"""Small calls that between them reach all of an op's kernel: rings wrap, CTAs have several tiles or share one, flags
and slots are used again. Each is of one variant, so that it is known which of them come by a statement.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tileweave import Plan
from tileweave.checker.ops import OpCase
from tileweave.checker.problems import PROBLEMS
from tileweave.lang import constexpr
from tileweave.ops.all_gather_matmul import kernel as gather_kernel
from tileweave.ops.attention import Tiling
from tileweave.ops.collectives import launch, passes
from tileweave.ops.moe import kernel as moe_kernel
from tileweave.tiles import exchange

RANKS, CALLS = 3, 3
Sizes = dict[str, int]
Setup = tuple[str, Sizes, int, dict[str, Any]]  # its name, sizes, SMs, options


def _plan(
    schedule: str, mechanism: str = "tma", comm_sms: int = 0, tile: tuple[int, int, int] = (128, 128, 64),
    stages: int = 2, split: int = 1, core: str = "wgmma",
) -> dict[str, Any]:  # fmt: skip
    return {"plan": Plan(mechanism, schedule, tile, stages, split, comm_sms, core=core)}


def _scaled(scaled: str, schedule: str, comm_sms: int = 0) -> dict[str, Any]:
    """Of operands with scales of blocks along K."""
    return {**_plan(schedule, comm_sms=comm_sms, tile=(128, 128, 128), core="tcgen05"), "scaled": scaled}


_RAGGED = {"m": 3 * 136, "n": 200, "k": 3 * 200}
_SPLIT = {"m": 3 * 72, "n": 72, "k": 3 * 200}
_FEW = {"m": 72, "n": 136, "k": 3 * 200}
_OWNED = {"m": 3 * 60, "n": 72, "k": 3 * 72}  # tiles with rows of several ranks
_GATHERED = _RAGGED | {"k": 200}
_NVFP4 = {"n": 392, "k": 3 * 320}  # a K step, and one that is not whole
# Parts of several tiles and steps, and of one: several steps alone would make up for a missing slot.
_PARTS: list[Setup] = [("steps", {"m": 3 * 70, "n": 24}, 2, {}), ("a step", {"m": 3 * 8, "n": 24}, 2, {})]
_SEQUENCE = {"heads": 6, "kv_heads": 3, "seq": 3 * 100, "dim": 64}
_HEADS = {"heads": 9, "kv_heads": 9, "seq": 3 * 70, "dim": 64}
_ATTENDING = _plan("inter_sm", comm_sms=2, tile=(64, 64, 64), stages=3)
_HELD = _plan("two_blocks", comm_sms=2, tile=(64, 64, 64), stages=3)
_TOKENS = {"tokens": 260, "hidden": 72, "inner": 72, "experts": 5, "topk": 3}
_ALONE = {"heads": 3, "kv_heads": 3, "seq": 150, "dim": 64}
_DISPATCH = _plan("inter_sm", comm_sms=4, tile=(64, 64, 64))
_SETUPS: dict[str, list[Setup]] = {
    "matmul_reduce_scatter": [
        ("intra_sm", _RAGGED, 2, _plan("intra_sm")),
        ("deterministic", _RAGGED, 2, {**_plan("intra_sm"), "deterministic": True, "transposed": True}),
        ("split", _SPLIT, 9, _plan("intra_sm", split=3)),
        # Two communicators, who count for each other, and one store for each item, so that waits leave no slack.
        ("inter_sm", _RAGGED, 4, _plan("inter_sm", comm_sms=2, tile=(64, 128, 64))),
        ("one_shot", _OWNED, 3, _plan("one_shot", tile=(128, 64, 64))),
        ("tcgen05", _RAGGED | {"n": 136}, 2, _plan("intra_sm", tile=(128, 64, 64), core="tcgen05")),
        ("mxfp8", {"m": 3 * 128, "n": 264, "k": 3 * 256}, 2, _scaled("mxfp8", "intra_sm")),
        ("nvfp4", {"m": 3 * 40} | _NVFP4, 1, _scaled("nvfp4", "one_shot")),
    ],
    "all_gather_matmul": [
        # As above, and more items in two blocks than waits for stores may leave in flight.
        ("inter_sm", _GATHERED | {"m": 3 * 264, "n": 72}, 4, _plan("inter_sm", comm_sms=2, tile=(128, 64, 64))),
        ("intra_sm", _GATHERED, 3, {**_plan("intra_sm", comm_sms=1), "return_gathered": True}),
        ("one_shot", _OWNED, 3, {**_plan("one_shot", comm_sms=1, tile=(128, 64, 64)), "return_gathered": True}),
        ("register", _GATHERED, 4, _plan("inter_sm", "register", 2, (64, 128, 64))),
        ("intra_sm register", _GATHERED, 4, _plan("intra_sm", "register", 2, (64, 128, 64))),
        ("multimem", _GATHERED, 4, _plan("inter_sm", "multimem", 2, (64, 128, 64))),
        ("copy_engine", _GATHERED, 3, _plan("inter_sm", "copy_engine", 0, (64, 128, 64))),
        ("scaled", _GATHERED | {"k": 208}, 4, {**_plan("inter_sm", "multimem", 2, (64, 128, 128)), "scaled": "rows"}),
        ("split", _SPLIT | {"k": 200}, 10, _plan("inter_sm", comm_sms=1, split=3)),
        ("mxfp8", {"m": 3 * 264, "n": 72, "k": 256}, 4, _scaled("mxfp8", "inter_sm", 2)),
        ("nvfp4", {"m": 3 * 72, "n": 264, "k": 320}, 3, {**_scaled("nvfp4", "intra_sm", 1), "return_gathered": True}),
    ],
    "matmul_all_reduce": [
        ("intra_sm", _RAGGED, 3, _plan("intra_sm")),
        ("one_shot", _FEW, 2, _plan("one_shot", tile=(64, 64, 64))),
        ("inter_sm", _RAGGED, 4, _plan("inter_sm", comm_sms=2, tile=(128, 64, 64))),
        ("multimem", _RAGGED, 4, _plan("inter_sm", "multimem", 2, (128, 64, 64))),
        ("normed", _FEW, 2, {**_plan("intra_sm", tile=(64, 64, 64)), "normed": True}),
        ("split", _SPLIT, 18, _plan("intra_sm", split=3)),
        ("none", _FEW, 2, {**_plan("none", tile=(64, 64, 64)), "transposed": True}),
        ("mxfp8", {"m": 136, "n": 520, "k": 3 * 256}, 3, _scaled("mxfp8", "intra_sm")),
        ("nvfp4", {"m": 72} | _NVFP4, 1, _scaled("nvfp4", "one_shot")),
    ],
    "all_gather": _PARTS,
    "reduce_scatter": _PARTS,
    "all_reduce": _PARTS,
    "all_to_all": _PARTS,
    "ring_attention": [
        ("zigzag", _SEQUENCE, 4, {**_ATTENDING, "causal": True, "placement": "zigzag"}),
        ("contiguous", _SEQUENCE, 4, {**_ATTENDING, "causal": True}),
        ("all", _SEQUENCE, 4, _ATTENDING),
        ("two_blocks", _SEQUENCE | {"heads": 5, "kv_heads": 5}, 4, {**_HELD, "causal": True, "placement": "zigzag"}),
    ],
    "ulysses_attention": [
        ("causal", _HEADS, 4, {**_ATTENDING, "causal": True}),
        ("all", _HEADS, 4, _ATTENDING),
    ],
    "attention": [
        ("causal", _ALONE, 2, {"causal": True, "offset": -20, "tiling": Tiling(2, 16, 3)}),
        ("in turns", _ALONE, 2, {"causal": True, "offset": -20, "tiling": Tiling(2, 16, 4, take_turns=True)}),
        ("tcgen05", _ALONE | {"heads": 2, "kv_heads": 2, "seq": 300}, 1,
         {"causal": True, "offset": -20, "tiling": Tiling(2, 32, 3, core="tcgen05")}),
    ],
    "grouped_matmul": [
        ("two multipliers", {"tokens": 300, "hidden": 200, "inner": 136, "experts": 5}, 2, _plan("intra_sm")),
        ("transposed", {"tokens": 300, "hidden": 72, "inner": 72, "experts": 5}, 2,
         {**_plan("intra_sm", tile=(64, 64, 64)), "transposed": True}),
    ],
    "moe_dispatch_matmul": [
        ("capacity", _TOKENS, 7, {**_DISPATCH, "capacity": 800, "max_tokens": 150}),
        # Two communicators, of 32 tokens a round each, have several.
        ("gated", _TOKENS, 5, {**_plan("inter_sm", comm_sms=2, tile=(64, 128, 64)), "gated": True, "transposed": True}),
    ],
    # Of two SMs the dispatch ahead has one that communicates.
    "moe_matmul_combine": [
        ("two multipliers", _TOKENS, 2, _plan("intra_sm", "register")),
        ("transposed", _TOKENS | {"tokens": 60}, 2,
         {**_plan("intra_sm", "register", tile=(64, 64, 64)), "transposed": True}),
        ("ranks without rows", _TOKENS | {"tokens": 3, "topk": 1}, 2, {**_plan("intra_sm", "register"), "again": True}),
    ],
}  # fmt: skip
_WITHOUT_PEERS = ("attention", "grouped_matmul")  # of one rank: the others would do the same


def setups(op: str) -> list[OpCase]:
    """The setups of an op. ValueError for one that has none."""
    if op not in _SETUPS:
        raise ValueError(f"op {op!r} has no catalogue: {', '.join(_SETUPS)} have")
    ranks = 1 if op in _WITHOUT_PEERS else RANKS
    return [OpCase(op, ranks, sizes, CALLS, sms, {name: options}) for name, sizes, sms, options in _SETUPS[op]]


# Constants that large tensors and long runs are for, and what they are for these setups.
_REFRESH = constexpr(2)
_SMALL: dict[str, list[tuple[Any, str, Any]]] = {
    "collectives": [
        (passes, "TILE", 64),
        (passes, "STEP_TILES", 1),
        (passes, "STEPS", 4),
        (launch, "STEPS", 4),
        (passes, "ONE_SHOT_BYTES", 4096),
    ],
    "all_gather_matmul": [(gather_kernel, "REFRESH", _REFRESH)],
    "ring_attention": [(exchange, "REFRESH", _REFRESH)],
    "ulysses_attention": [(exchange, "REFRESH", _REFRESH)],
    "moe": [(moe_kernel, "REFRESH", _REFRESH)],
}


@contextmanager
def small_constants(op: str) -> Iterator[None]:
    """Within it, small tensors have what large ones have, and the second call what one in a million has: collectives
    move several tiles, in several steps, an all-reduce sums in two shots, flags that are left out are raised. Kernels
    must be rebuilt within it, as `planted` and `reaching` do."""
    small = _SMALL.get(PROBLEMS[op].room, [])
    before = [(module, name, getattr(module, name)) for module, name, _ in small]
    try:
        for module, name, value in small:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
