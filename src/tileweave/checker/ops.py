"""The ops as cases: calls back to back with new data, checked against float32, in every schedule and by every mechanism
that an op has."""

import warnings
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

import tileweave as tw
from tileweave import Plan
from tileweave.checker.problems import PROBLEMS, OpProblem, Options, Results, capacity
from tileweave.checker.trial import GROUPS, REPLAY, STREAMS
from tileweave.ops.attention import Tiling
from tileweave.ops.matmul_reduce_scatter import relative_error
from tileweave.planner.attention import padded_dim

CALLS = 2  # the second meets what the first left in the workspace
SMS = 4  # CTAs of a rank that are resident
OPS = tuple(PROBLEMS)

Variants = dict[str, Options]


def _plans(tile: tuple[int, int, int], stages: int, *ways: str) -> Variants:
    """A plan for each way, "schedule" or "schedule, mechanism"."""
    found: Variants = {}
    for way in ways:
        schedule, _, mechanism = way.partition(", ")
        comm_sms = {"inter_sm": 1, "two_blocks": 1, "intra_sm": 0, "none": 0, "one_shot": 0}[schedule]
        found[way] = {"plan": Plan(mechanism or "tma", schedule, tile, stages, comm_sms=comm_sms)}
    return found


def _scaled(comm_sms: int, **ways: str) -> Variants:
    """By operands with scales of blocks along K, of each of these formats in one schedule."""
    return {
        f"{schedule}, {scaled}": {
            "plan": Plan("tma", schedule, (128, 128, 128), 2, comm_sms=comm_sms, core="tcgen05"),
            "scaled": scaled,
        }
        for scaled, schedule in ways.items()
    }


# Small enough for a CTA to have two tiles of the default problem, and for the ring to wrap.
_TILE, _STAGES = (128, 256, 64), 3
_REDUCING = _plans(_TILE, _STAGES, "intra_sm", "inter_sm", "one_shot", "none")
_GATHERING = (
    "inter_sm", "intra_sm", "one_shot", "none", "inter_sm, register", "intra_sm, register", "inter_sm, multimem",
)  # fmt: skip
_ATTENDING, _TWO_BLOCKS = _plans((64, 64, 0), 3, "inter_sm", "two_blocks").values()  # of any head dimension
_VARIANTS: dict[str, Variants] = {
    "matmul_reduce_scatter": {
        "intra_sm": _REDUCING["intra_sm"],
        "intra_sm, deterministic": {**_REDUCING["intra_sm"], "deterministic": True},
        "inter_sm": _REDUCING["inter_sm"],
        "one_shot": _REDUCING["one_shot"],
        "none": _REDUCING["none"],
    }
    # Shards whose rows are no whole blocks of scales go in one shot.
    | _scaled(0, mxfp8="one_shot", nvfp4="one_shot"),
    "all_gather_matmul": {
        name: {"plan": replace(options["plan"], comm_sms=1)}
        for name, options in _plans(_TILE, _STAGES, *_GATHERING).items()
    }
    | _plans(_TILE, _STAGES, "inter_sm, copy_engine")
    | _scaled(1, mxfp8="inter_sm", nvfp4="intra_sm"),
    "matmul_all_reduce": _plans(_TILE, _STAGES, "intra_sm", "one_shot", "none", "inter_sm", "inter_sm, multimem")
    | _scaled(0, mxfp8="intra_sm", nvfp4="one_shot"),
    "ring_attention": {
        "zigzag, causal": {**_ATTENDING, "causal": True, "placement": "zigzag"},
        "contiguous, causal": {**_ATTENDING, "causal": True},
        "all": {**_ATTENDING, "return_lse": True},
        "zigzag, causal, two blocks": _TWO_BLOCKS | {"causal": True, "placement": "zigzag"},
    },
    "ulysses_attention": {"causal": {**_ATTENDING, "causal": True}, "all": _ATTENDING},
    "attention": {
        "causal": {"causal": True, "tiling": Tiling(2, 64, 3)},
        "all, in turns": {"tiling": Tiling(2, 64, 3, take_turns=True)},
    },
    "grouped_matmul": _plans((128, 128, 64), _STAGES, "intra_sm"),
    "moe_matmul_combine": _plans((128, 128, 64), _STAGES, "intra_sm, register"),
    "moe_dispatch_matmul": {
        "capacity": {"plan": Plan("tma", "inter_sm", (64, 64, 64), _STAGES, comm_sms=2), "capacity": None},
        "gated": {"plan": Plan("tma", "inter_sm", (64, 128, 64), _STAGES, comm_sms=2), "gated": True},
    },
}


@dataclass(frozen=True)
class OpCase:
    """`calls` calls of `op` by `ranks` emulated ranks, one after the other. `shape`: sizes of the whole problem (m, n,
    k of a product, m x n of a collective's tensor, heads, kv_heads, seq and dim of attention, tokens, hidden, inner,
    experts and topk of experts); what is left out has a default, rounded up so that the ranks can share it. `variants`:
    options of the op by name, of which each schedule takes the next; by default one for every schedule and mechanism
    that the op has, in a world of one those that the planner chooses; `left_out`: those that `fitted` left out, and
    why. ValueError for an unknown op, or sizes that it does not have or the ranks cannot share.
    """

    op: str
    ranks: int = 4
    shape: dict[str, int] = field(default_factory=dict)
    calls: int = CALLS
    sms: int = SMS
    variants: Variants = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.op not in PROBLEMS:
            raise ValueError(f"op {self.op!r} is none of those that can be checked: {', '.join(OPS)}")
        PROBLEMS[self.op].check_sizes(self.ranks, self.shape)

    @property
    def name(self) -> str:
        """The op's."""
        return self.op

    @property
    def sizes(self) -> dict[str, int]:
        """All sizes of the whole problem."""
        return PROBLEMS[self.op].sizes_for(self.ranks, self.shape)

    @property
    def all_variants(self) -> Variants:
        """The options that schedules take in turn, by name."""
        if self.variants:
            return self.variants
        sizes = self.sizes
        variants = {name: _sized(options, sizes) for name, options in _VARIANTS.get(self.op, {"": {}}).items()}
        if self.ranks > 1:
            return variants
        planned = [{key: x for key, x in options.items() if key != "plan"} for options in variants.values()]
        return {", ".join(f"{key}={x}" for key, x in options.items()): options for options in planned}

    @property
    def ways(self) -> tuple[str, ...]:
        """A graph of one call replayed, calls of another op between them, and calls in another group."""
        return REPLAY, STREAMS, GROUPS

    def fitted(self) -> "OpCase":
        """The case with those of its variants that run a kernel on its sizes. ValueError, with the reason, if none
        does."""
        op, variants = PROBLEMS[self.op], self.all_variants
        x = _operands(self.op, self.ranks, tuple(self.sizes.items()), 0)[0]

        def refusals(rank: int, group: Any) -> list[str | None]:
            return [_refusal(op, x, group, options) if rank == 0 else None for options in variants.values()]

        with tw.virtual_world(self.ranks, device="cpu", sms=self.sms) as world:
            why = dict(zip(variants, world.run(refusals)[0], strict=True))
        left_out = {name: reason for name, reason in why.items() if reason is not None}
        if len(left_out) == len(variants):
            raise ValueError(f"shape: {next(iter(left_out.values()))}")
        return replace(
            self, variants={name: variants[name] for name in variants if name not in left_out}, left_out=left_out
        )

    def variant(self, seed: int) -> str:
        """The name of the one that is the seed's turn."""
        names = list(self.all_variants)
        return names[seed % len(names)]

    def run(self, seed: int, way: str = "") -> None:
        """The calls once, in the variant that is the seed's turn; AssertionError if one of the results is wrong."""
        options = self.all_variants[self.variant(seed)]
        op, sizes = PROBLEMS[self.op], tuple(self.sizes.items())
        if way == REPLAY:
            options = op.replay(self.sizes) | options
        calls = [_operands(self.op, self.ranks, sizes, call) for call in range(self.calls)]
        with tw.virtual_world(self.ranks, device="cpu", seed=seed, sms=self.sms) as world:
            if way == GROUPS:
                results = _in_two_groups(op, calls, world, options)
            else:
                made = {"": _one_by_one, REPLAY: _replayed, STREAMS: _in_turn}[way]
                results = world.run(lambda rank, group: made(op, [x[rank] for x in calls], group, options))
        asked = tuple((key, x) for key, x in options.items() if key not in ("plan", "tiling"))
        limit = op.tolerance(self.ranks, bool(options.get("deterministic")))
        for call in range(self.calls):
            truth = _truth(self.op, self.ranks, sizes, call, asked)
            for i, outs in enumerate(results):  # of the ranks, and of those of another group
                rank = i % self.ranks
                self.compare(call, rank, outs[call], truth[rank], limit)

    def compare(self, call: int, rank: int, outs: Results, truths: Results, limit: float) -> None:
        """AssertionError unless a rank's results of a call are within `limit` of the true ones."""
        for out, truth in zip(outs, truths, strict=True):
            error = relative_error(out, truth) if truth.numel() else 0.0
            if out.shape != truth.shape or not error <= limit:
                raise AssertionError(
                    f"call {call} of rank {rank}: relative error {error:.1e} against float32, {limit:.1e} is tolerable"
                )


def _sized(options: Options, sizes: dict[str, int]) -> Options:
    """A variant's options, those that depend on sizes filled in: a tile's head dimension, room for all rows."""
    options = dict(options)
    if "capacity" in options:
        options["capacity"] = capacity(sizes)
    if "plan" in options and not options["plan"].tile[2]:
        tile = *options["plan"].tile[:2], padded_dim(sizes["dim"])
        options["plan"] = replace(options["plan"], tile=tile)
    return options


def _refusal(op: OpProblem, x: tuple, group: Any, options: Options) -> str | None:
    """Why a call with these options runs no kernel; None if it runs one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the plan is not used is the answer
        try:
            if op.route(x, group, **options).fused:
                return None
            options = {key: x for key, x in options.items() if key != "plan"}
            return f"no kernel would run: {op.route(x, group, **options).reason}"
        except (TypeError, ValueError) as error:
            return str(error)


def _made(x: tuple, group: Any) -> tuple:
    """A rank's operands, its own as in a process of its own, made by its stream just before the call."""
    made = tuple(each.clone(memory_format=torch.preserve_format) for each in x)
    for each in made:
        group.world.touch(each, "write")
    return made


def _one_by_one(op: OpProblem, calls: list[tuple], group: Any, options: Options) -> list[Results]:
    return [op.call(_made(x, group), group, **options) for x in calls]


def _replayed(op: OpProblem, calls: list[tuple], group: Any, options: Options) -> list[Results]:
    """A call to warm up, another one captured on memory that the graph knows, and that one replayed for each call."""
    held = _made(calls[-1], group)
    op.call(held, group, **options)
    with group.world.capture() as graph:
        outs = op.call(held, group, **options)
    results = []
    for x in calls:
        for mine, new in zip(held, x, strict=True):
            mine.copy_(new)
            group.world.touch(mine, "write")
        graph.replay()
        results.append(tuple(out.clone() for out in outs))
    return results


def _in_turn(op: OpProblem, calls: list[tuple], group: Any, options: Options) -> list[Results]:
    """Each behind a sum over all ranks, which has flags and slots of its own; the sums must be right as well."""
    ranks, results = group.size(), []
    for call, x in enumerate(calls):
        mine = torch.full((3, 8), float(group.rank + call))
        total = tw.all_reduce(mine, group)
        results.append(op.call(_made(x, group), group, **options))
        if not (total == call * ranks + ranks * (ranks - 1) / 2).all():
            raise AssertionError(f"call {call} of the other op, all_reduce, on rank {group.rank}: got {total}")
    return results


def _in_two_groups(op: OpProblem, calls: list[list[tuple]], world: Any, options: Options) -> list[list[Results]]:
    """Each call by the world, and by a group of its ranks in reverse order: what the ranks of both got."""
    ranks = world.size
    other = world.part(range(ranks)[::-1])

    def program(rank: int, group: Any) -> list[list[Results]]:
        groups, got = (group, other.of(rank)), ([], [])  # type: ignore[var-annotated]
        for x in calls:
            for each, results in zip(groups, got, strict=True):
                results.append(op.call(_made(x[each.rank], each), each, **options))
        return list(got)

    got = world.run(program)
    return [of_rank[0] for of_rank in got] + [of_rank[1] for of_rank in got[::-1]]


@lru_cache(maxsize=32)
def _operands(op: str, ranks: int, sizes: tuple, call: int) -> list[tuple]:
    """The operands of all ranks."""
    return PROBLEMS[op].operands(dict(sizes), ranks, call)


@lru_cache(maxsize=128)
def _truth(op: str, ranks: int, sizes: tuple, call: int, asked: tuple) -> list[Results]:
    """The true results of all ranks, of a call with options."""
    return PROBLEMS[op].truth(_operands(op, ranks, sizes, call), dict(asked))
