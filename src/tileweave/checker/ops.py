"""The ops as cases: calls back to back with new data, checked against float32, in the schedules that _TABLE lists. The
inter-SM schedule of matmul_all_reduce and what registers, copy engine and multicast carry have other tests."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

import tileweave as tw
from tileweave import Plan
from tileweave.ops import all_gather_matmul as gather
from tileweave.ops import collectives
from tileweave.ops import matmul_all_reduce as all_reduce
from tileweave.ops import matmul_reduce_scatter as scatter
from tileweave.planner import all_gather_matmul as gather_plans

CALLS = 2  # the second meets what the first left in the workspace
SMS = 4  # CTAs of a rank that are resident
_TILE, _STAGES = (
    (128, 256, 64),
    3,
)  # small enough for a CTA to have two tiles of the default problem, and the ring to wrap

Variants = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class _Op:
    """What an op needs. sizes: default sizes of the whole problem; grain: what a rank's share of each is a multiple of
    (for sizes that are shared out); variants: options by name, of which each schedule takes the next one."""

    sizes: dict[str, int]
    grain: dict[str, int]
    variants: Variants
    operands: Callable[[dict[str, int], int, int], list[tuple]]  # sizes, ranks, call -> per rank
    truth: Callable[[list[tuple]], list[torch.Tensor]]
    tolerance: Callable[[int, bool], float]


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _split_k(s: dict[str, int], ranks: int, call: int) -> list[tuple]:
    k = s["k"] // ranks
    seeds = [2 * (call * ranks + rank) for rank in range(ranks)]
    return [(_normal(s["m"], k, seed=seed), _normal(k, s["n"], seed=seed + 1)) for seed in seeds]


def _split_m(s: dict[str, int], ranks: int, call: int) -> list[tuple]:
    rows, b = s["m"] // ranks, _normal(s["k"], s["n"], seed=1000 + call)
    return [(_normal(rows, s["k"], seed=call * ranks + rank), b) for rank in range(ranks)]


def _whole(s: dict[str, int], ranks: int, call: int) -> list[tuple]:
    return [(_normal(s["m"], s["n"], seed=call * ranks + rank),) for rank in range(ranks)]


def _shards(s: dict[str, int], ranks: int, call: int) -> list[tuple]:
    return [(_normal(s["m"] // ranks, s["n"], seed=call * ranks + rank),) for rank in range(ranks)]


def _unzipped(operands: list[tuple]) -> list[list]:
    return [list(each) for each in zip(*operands, strict=True)]


def _scattered(operands: list[tuple]) -> list[torch.Tensor]:
    return list(scatter.reference(*_unzipped(operands)).chunk(len(operands)))


def _gathered(operands: list[tuple]) -> list[torch.Tensor]:
    return [gather.reference([a for a, _ in operands], operands[0][1])] * len(operands)


def _reduced(operands: list[tuple]) -> list[torch.Tensor]:
    return [all_reduce.reference(*_unzipped(operands))] * len(operands)


def _collective(name: str, **options: Any) -> Callable[[list[tuple]], list[torch.Tensor]]:
    return lambda operands: collectives.reference(name, [x for x, *_ in operands], **options)


def _matmul(schedule: str, **more: Any) -> dict[str, Any]:
    return {"plan": Plan(schedule=schedule, tile=_TILE, stages=_STAGES, **more)}


_EXACT: Callable[[int, bool], float] = lambda ranks, deterministic: 0.0  # noqa: E731
_ROUNDED: Callable[[int, bool], float] = lambda ranks, deterministic: 2**-8  # noqa: E731
_TABLE = {
    "matmul_reduce_scatter": _Op(
        {"m": 512, "n": 512, "k": 2048},
        {"m": 16, "k": 64},
        {
            "intra_sm": _matmul("intra_sm"),
            "intra_sm, deterministic": {**_matmul("intra_sm"), "deterministic": True},
            "inter_sm": _matmul("inter_sm", comm_sms=1),
            "none": _matmul("none"),
        },
        _split_k,
        _scattered,
        lambda ranks, deterministic: scatter.tolerance(torch.bfloat16, ranks, deterministic),
    ),
    "all_gather_matmul": _Op(
        {"m": 512, "n": 512, "k": 512},
        {"m": 16},
        {schedule: _matmul(schedule, comm_sms=1) for schedule in gather_plans.SCHEDULES},
        _split_m,
        _gathered,
        lambda ranks, deterministic: scatter.tolerance(torch.bfloat16, 1, True),
    ),
    "matmul_all_reduce": _Op(
        {"m": 512, "n": 512, "k": 2048},
        {"k": 64},
        {schedule: _matmul(schedule) for schedule in ("intra_sm", "one_shot", "none")},
        _split_k,
        _reduced,
        lambda ranks, deterministic: all_reduce.tolerance(torch.bfloat16, ranks),
    ),
    "all_gather": _Op({"m": 256, "n": 256}, {"m": 1}, {"": {}}, _shards, _collective("all_gather"), _EXACT),
    "reduce_scatter": _Op({"m": 256, "n": 256}, {"m": 1}, {"": {}}, _whole, _collective("reduce_scatter"), _ROUNDED),
    "all_reduce": _Op({"m": 256, "n": 256}, {}, {"": {}}, _whole, _collective("all_reduce"), _ROUNDED),
    "all_to_all": _Op(
        {"m": 256, "n": 256},
        {"m": 1, "n": 1},
        {"": {"split_dim": 0, "concat_dim": 1}},
        _whole,
        _collective("all_to_all", split_dim=0, concat_dim=1),
        _EXACT,
    ),
}
OPS = tuple(_TABLE)


@dataclass(frozen=True)
class OpCase:
    """`calls` calls of `op` by `ranks` emulated ranks, one after the other. `shape`: sizes of the whole problem (m, n,
    k of a product, m x n of a collective's tensor); what is left out has a default, rounded up so that the ranks can
    share it. `variants`: options of the op by name, of which each schedule takes the next; by default one for every
    schedule that the op has. ValueError for an unknown op, or sizes that it does not have or the ranks cannot share.
    """

    op: str
    ranks: int = 4
    shape: dict[str, int] = field(default_factory=dict)
    calls: int = CALLS
    sms: int = SMS
    variants: Variants = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.op not in _TABLE:
            raise ValueError(f"op {self.op!r} is none of those that can be checked: {', '.join(OPS)}")
        op = _TABLE[self.op]
        unknown = sorted(set(self.shape) - set(op.sizes))
        if unknown:
            raise ValueError(f"shape: {self.op} has sizes {', '.join(op.sizes)}, got {', '.join(unknown)}")
        for name, size in self.shape.items():
            if name in op.grain and size % self.ranks:
                raise ValueError(
                    f"shape: {name}={size} is not divisible by the {self.ranks} ranks that share it; "
                    f"nearest legal: {size // self.ranks * self.ranks} or {-(-size // self.ranks) * self.ranks}"
                )

    @property
    def name(self) -> str:
        """The op's."""
        return self.op

    @property
    def sizes(self) -> dict[str, int]:
        """All sizes of the whole problem."""
        op = _TABLE[self.op]
        grains = {name: op.grain[name] * self.ranks if name in op.grain else 1 for name in op.sizes}
        return {name: -(-size // grains[name]) * grains[name] for name, size in op.sizes.items()} | self.shape

    def run(self, seed: int) -> str:
        """The calls once, in the variant that is the seed's turn; AssertionError if one of the results is wrong."""
        variants = list((self.variants or _TABLE[self.op].variants).items())
        name, options = variants[seed % len(variants)]
        calls = _data(self.op, self.ranks, tuple(self.sizes.items()), self.calls)
        function = getattr(tw, self.op)
        with tw.virtual_world(self.ranks, device="cpu", seed=seed, sms=self.sms) as world:
            results = world.run(lambda rank, group: [function(*x[rank], group, **options) for x, _ in calls])
        limit = _TABLE[self.op].tolerance(self.ranks, bool(options.get("deterministic")))
        for call, (_, truth) in enumerate(calls):
            for rank, outs in enumerate(results):
                self._compare(call, rank, outs[call], truth[rank], limit)
        return name

    def _compare(self, call: int, rank: int, out: torch.Tensor, truth: torch.Tensor, limit: float) -> None:
        error = scatter.relative_error(out, truth) if truth.numel() else 0.0
        if out.shape != truth.shape or not error <= limit:
            raise AssertionError(
                f"call {call} of rank {rank}: relative error {error:.1e} against float32, {limit:.1e} is tolerable"
            )


@lru_cache(maxsize=8)
def _data(op: str, ranks: int, sizes: tuple, calls: int) -> list[tuple[list[tuple], list[torch.Tensor]]]:
    """Per call, the operands of all ranks and the true results."""
    made = [_TABLE[op].operands(dict(sizes), ranks, call) for call in range(calls)]
    return [(operands, _TABLE[op].truth(operands)) for operands in made]
