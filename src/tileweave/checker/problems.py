"""The ops' problems: what the ranks hand in, the call itself, and the float32 truth of what each rank gets."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd, lcm
from typing import Any

import torch

import tileweave as tw
from tileweave.checker.scales import narrowed, widened
from tileweave.fabric import fabric_of
from tileweave.ops import all_gather_matmul as gather
from tileweave.ops import attention as core
from tileweave.ops import collectives, grouped_matmul, moe, ring_attention
from tileweave.ops import matmul_all_reduce as all_reduce
from tileweave.ops import matmul_reduce_scatter as scatter
from tileweave.ops.block_scales import as_bytes
from tileweave.ops.route import Route, fallback

Results = tuple[torch.Tensor, ...]
Options = dict[str, Any]


@dataclass(frozen=True)
class OpProblem:
    """What an op computes. room: its folder in ops; sizes: default sizes of the whole problem; grain: what a rank's
    share of each is a multiple of (for sizes that are shared out); operands: of each rank, from sizes, ranks and the
    number of the call; truth: of all ranks' operands, under a variant's options; tolerance: of the relative error, from
    ranks and whether the sum has a fixed order; call: the op, of one rank's operands, in a group, with options; route:
    what that call would do, raising what it would raise; replay: options without which a graph of a call cannot be
    replayed on other data, from sizes.
    """

    room: str
    sizes: dict[str, int]
    grain: dict[str, int]
    operands: Callable[[dict[str, int], int, int], list[tuple]]
    truth: Callable[[list[tuple], Options], list[Results]]
    tolerance: Callable[[int, bool], float]
    call: Callable[..., Results]
    route: Callable[..., Route]
    replay: Callable[[dict[str, int]], Options] = lambda sizes: {}

    def check_sizes(self, ranks: int, given: dict[str, int]) -> None:
        """ValueError for sizes that the op does not have, or of which no operands can be made for so many ranks."""
        unknown = sorted(set(given) - set(self.sizes))
        if unknown:
            raise ValueError(f"shape: there are {', '.join(self.sizes)}, got {', '.join(unknown)}")
        for name, size in given.items():
            if size < (least := int(name in _NEVER_ZERO)):
                raise ValueError(f"shape: {name} must be at least {least}, got {size}")
            # Ranks may outnumber heads of keys; how, the op says.
            if name in self.grain and name != "kv_heads" and size % ranks:
                below = size // ranks * ranks
                raise ValueError(
                    f"shape: {name}={size} is not divisible by the {ranks} ranks that share it; nearest legal: "
                    f"{f'{below} or ' if below else ''}{below + ranks}"
                )

    def sizes_for(self, ranks: int, given: dict[str, int]) -> dict[str, int]:
        """All sizes: those `given`, and defaults of the others that go with them and that the ranks can share."""
        grains = {name: self.grain[name] * ranks if name in self.grain else 1 for name in self.sizes}
        sizes = {name: _round_up(size, grains[name]) for name, size in self.sizes.items()} | given
        if "heads" in sizes and "heads" not in given:
            sizes["heads"] = _round_up(sizes["heads"], lcm(sizes["kv_heads"], grains["heads"]))
        elif "heads" in given and "kv_heads" not in given:
            sizes["kv_heads"] = gcd(sizes["heads"], sizes["kv_heads"])
        if "experts" in sizes and "experts" not in given:
            sizes["experts"] = max(sizes["experts"], ranks, sizes.get("topk", 0))
        return sizes


_NEVER_ZERO = ("heads", "kv_heads", "dim", "experts", "topk")


def _round_up(size: int, grain: int) -> int:
    return -(-size // grain) * grain


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _split_k(s: dict[str, int], ranks: int, call: int) -> list[tuple]:
    """a and b of each rank, and what all have: bias, residual, weights of a norm."""
    k, m, n = s["k"] // ranks, s["m"], s["n"]
    shared = [_normal(*shape, seed=1000 + 3 * call + i) for i, shape in enumerate(((n,), (m, n), (n,)))]
    seeds = [2 * (call * ranks + rank) for rank in range(ranks)]
    return [(_normal(m, k, seed=seed), _normal(k, n, seed=seed + 1), *shared) for seed in seeds]


def _split_m(s: dict[str, int], ranks: int, call: int) -> list[tuple]:
    rows, b = s["m"] // ranks, _normal(s["k"], s["n"], seed=1000 + call)
    return [(_normal(rows, s["k"], seed=call * ranks + rank), b) for rank in range(ranks)]


def _whole(s: dict[str, int], ranks: int, call: int) -> list[tuple]:
    return [(_normal(s["m"], s["n"], seed=call * ranks + rank),) for rank in range(ranks)]


def _shards(s: dict[str, int], ranks: int, call: int) -> list[tuple]:
    return [(_normal(s["m"] // ranks, s["n"], seed=call * ranks + rank),) for rank in range(ranks)]


def _sequence(s: dict[str, int], call: int) -> list[torch.Tensor]:
    heads = (s["heads"], s["kv_heads"], s["kv_heads"])
    return [_normal(1, h, s["seq"], s["dim"], seed=3 * call + i) for i, h in enumerate(heads)]


def _sequence_shards(s: dict[str, int], ranks: int, call: int) -> list[tuple]:
    """q, k, v of each rank, heads first, as `placement` "contiguous" has them."""
    return list(zip(*(x.chunk(ranks, 2) for x in _sequence(s, call)), strict=True))


def _sequences(s: dict[str, int], ranks: int, call: int) -> list[tuple]:
    """A whole sequence for each rank."""
    return [tuple(_sequence(s, call * ranks + rank)) for rank in range(ranks)]


def _experts_rows(s: dict[str, int], ranks: int, call: int) -> list[tuple]:
    """Rows of each rank's own experts, of which some have few and one has none."""
    found, w = [], _normal(s["experts"], s["hidden"], s["inner"], seed=1000 + call)
    for rank in range(ranks):
        g = torch.Generator().manual_seed(call * ranks + rank)
        ends = torch.randint(0, s["tokens"] + 1, (s["experts"] - 1,), generator=g).sort().values
        ends[1:2] = ends[:1]
        offsets = torch.cat([ends, torch.tensor([s["tokens"]])]).int()
        x = _normal(s["tokens"], s["hidden"], seed=2 * (call * ranks + rank))
        found.append((x, w, offsets))
    return found


_ROUTINGS: tuple[Callable[[torch.Tensor, int], torch.Tensor], ...] = (  # of numbers from 0 to 1, by call
    lambda u, experts: (u * (experts + 1)).long() - 1,  # some choices are dropped
    lambda u, experts: (u**3 * experts).long(),  # most go to few
    lambda u, experts: (u[:, :1] * experts).long().expand_as(u).contiguous(),  # one expert of a token
)


def _tokens(s: dict[str, int], ranks: int, call: int) -> list[tuple]:
    """Tokens, choices and weights, fewer of each next rank; the rank's experts and all, of three matrices."""
    h, i, experts = s["hidden"], s["inner"], s["experts"]
    shares = [2 * s["tokens"] * (ranks - rank) // (ranks * (ranks + 1)) for rank in range(1, ranks)]
    w, gate = (_normal(experts, h, i, seed=3 * call + j) / h**0.5 for j in range(2))
    down = _normal(experts, i, h, seed=3 * call + 2) / i**0.5
    found, first = [], 0
    for rank, count in enumerate((s["tokens"] - sum(shares), *shares)):
        u = torch.rand(2, count, s["topk"], generator=torch.Generator().manual_seed(call * ranks + rank))
        own = slice(first, first + experts // ranks + (rank < experts % ranks))
        first = own.stop
        x, index = _normal(count, h, seed=1000 + call * ranks + rank), _ROUTINGS[call % len(_ROUTINGS)](u[0], experts)
        found.append((x, index, u[1], w[own], gate[own], w, gate, down[own], down))
    return found


def capacity(s: dict[str, int]) -> int:
    """Rows of a rank that all choices fit in."""
    return max(s["tokens"] * s["topk"], 1)


def _as_tuple(result: Any) -> Results:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _called(function: Callable[..., Any]) -> Callable[..., Results]:
    """The call of an op that takes a rank's operands as they are."""
    return lambda x, group, **options: _as_tuple(function(*x, group, **options))


def _explained(name: str, **fixed: Any) -> Callable[..., Route]:
    """The route of an op that takes a rank's operands as they are."""
    return lambda x, group, **options: tw.explain(name, *x, group, **fixed, **options)


def _unzipped(operands: list[tuple]) -> list[list]:
    return [list(each) for each in zip(*operands, strict=True)]


def _of_few_bits(operands: list[tuple], options: Options) -> list[tuple]:
    """Operands as what they stand for where a call narrows a and b: in float32."""
    if "scaled" not in options:
        return operands
    scaled = options["scaled"]
    return [(*widened(*narrowed(a, b, scaled), scaled), *more) for a, b, *more in operands]


def _scattered(operands: list[tuple], options: Options) -> list[Results]:
    a, b, *_ = _unzipped(_of_few_bits(operands, options))
    return [(part,) for part in scatter.reference(a, b).chunk(len(operands))]


def _gathered(operands: list[tuple], options: Options) -> list[Results]:
    a, (b, *_) = _unzipped(_of_few_bits(operands, options))
    if not options.get("return_gathered"):
        return [(gather.reference(a, b),)] * len(a)
    gathered = torch.cat([as_bytes(_narrow(x, options)[0][0]).float() for x in operands])
    return [(gather.reference(a, b), gathered)] * len(a)


def _reduced(operands: list[tuple], options: Options) -> list[Results]:
    a, b, *more = _unzipped(_of_few_bits(operands, options))
    if not options.get("normed"):
        return [(all_reduce.reference(a, b),)] * len(operands)
    return [tuple(all_reduce.reference(a, b, *(each[0] for each in more)))] * len(operands)


def _collective(name: str, **fixed: Any) -> dict[str, Any]:
    """The call and the truth of a collective."""
    return {
        "call": _called(partial(getattr(tw, name), **fixed)),
        "route": _explained(name, **fixed),
        "truth": lambda operands, options: [
            (each,) for each in collectives.reference(name, _unzipped(operands)[0], **fixed)
        ],
    }


def _placed(x: torch.Tensor, ranks: int, placement: str) -> list[torch.Tensor]:
    return [tw.place_sequence(x, ranks, rank, 2, placement) for rank in range(ranks)]


def _attended(operands: list[tuple], options: Options) -> list[Results]:
    """Shards are taken to lie as `placement` says: so put together, and the truth cut again."""
    ranks, placement = len(operands), options.get("placement", "contiguous")
    q, k, v = (tw.unplace_sequence(shards, 2, placement) for shards in _unzipped(operands))
    results = ring_attention.reference(q, k, v, options.get("causal", False))
    parts = [_placed(x, ranks, placement) for x in results[: 1 + bool(options.get("return_lse"))]]
    return list(zip(*parts, strict=True))


def _attended_alone(operands: list[tuple], options: Options) -> list[Results]:
    seen = {name: options[name] for name in ("causal", "offset") if name in options}
    return [core.reference(*each, **seen)[:1] for each in operands]


def _attention_route(
    x: tuple, group: Any, causal: bool = False, offset: int = 0, tiling: core.Tiling | None = None
) -> Route:
    fabric = fabric_of(group)
    q, k, v = x
    call = core.check(q, k, v, causal, offset, None, "bhsd", False)
    if why := core.unsupported(fabric, call):
        raise ValueError(why)
    if tiling is not None:
        core.check_tiling(call, tiling)
    if call.rows * call.cols == 0:
        return fallback("attention", "no query has anything to attend to", "nothing to launch")
    return Route("attention", fabric.backend, True, "one kernel")


def _multiplied(operands: list[tuple], options: Options) -> list[Results]:
    return [(grouped_matmul.reference(*each),) for each in operands]


def _combined(operands: list[tuple], options: Options) -> list[Results]:
    x, index, weight, _, _, w, gate, _, _ = _unzipped(operands)
    return [(each,) for each in moe.reference(x, index, weight, w[0], gate[0] if options.get("gated") else None)]


def _combined_twice(operands: list[tuple], options: Options) -> list[Results]:
    x, index, weight, _, _, w, _, _, down = _unzipped(operands)
    results = moe.reference(x, index, weight, w[0], down=down[0])
    return [(each, -each) if options.get("again") else (each,) for each in results]


def _across(x: torch.Tensor) -> torch.Tensor:
    """The same with its last two dimensions the other way round in memory."""
    return x.mT.contiguous().mT


def _narrow(x: tuple, options: Options) -> tuple[tuple, Options]:
    """A rank's operands and the op's options, where a call narrows a and b: with scales."""
    options = dict(options)
    scaled, (a, b, *more) = options.pop("scaled", None), x
    if scaled is None:
        return x, options
    (a, scale_a), (b, scale_b) = narrowed(a, b, scaled)
    return (a, b, *more), options | {"scale_a": scale_a, "scale_b": scale_b}


def _narrowing(name: str) -> Callable[..., Route]:
    """The route of a matmul that narrows a and b if it is asked to."""

    def route(x: tuple, group: Any, **options: Any) -> Route:
        (a, b, *_), options = _narrow(x, options)
        return tw.explain(name, a, b, group, **options)

    return route


def _reduce_scatter(x: tuple, group: Any, transposed: bool = False, **options: Any) -> Results:
    (a, b, *_), options = _narrow(x, options)
    if transposed:
        a, b = _across(a), _across(b)
    return (tw.matmul_reduce_scatter(a, b, group, **options),)


def _all_reduce(x: tuple, group: Any, normed: bool = False, transposed: bool = False, **options: Any) -> Results:
    (a, b, *more), options = _narrow(x, options)
    if transposed:
        a, b = _across(a), _across(b)
    if normed:
        options |= dict(zip(("bias", "residual", "norm_weight"), more, strict=True))
    return _as_tuple(tw.matmul_all_reduce(a, b, group, **options))


def _all_gather_matmul(x: tuple, group: Any, **options: Any) -> Results:
    (a, b), options = _narrow(x, options)
    return tuple(map(as_bytes, _as_tuple(tw.all_gather_matmul(a, b, group, **options))))


def _grouped(x: tuple, group: Any, transposed: bool = False, **options: Any) -> Results:
    rows, w, offsets = x
    return (tw.grouped_matmul(rows, _across(w) if transposed else w, offsets, **options),)


def _dispatch(x: tuple, group: Any, gated: bool = False, transposed: bool = False, **options: Any) -> Results:
    tokens, index, weight, w, gate, everything, *_ = x
    if transposed:
        w, gate = _across(w), _across(gate)
    options |= {"w_gate": gate} if gated else {}
    total = everything.shape[0]
    y, route = tw.moe_dispatch_matmul(tokens, index, w, group, topk_weight=weight, experts=total, **options)
    return (tw.moe_combine(y, route, group),)


def _dispatch_route(x: tuple, group: Any, gated: bool = False, **options: Any) -> Route:
    tokens, index, weight, w, gate, everything, *_ = x
    options |= {"w_gate": gate} if gated else {}
    total = everything.shape[0]
    return tw.explain("moe_dispatch_matmul", tokens, index, w, group, topk_weight=weight, experts=total, **options)


def _combine(
    x: tuple, group: Any, transposed: bool = False, again: bool = False, capacity: int | None = None, **options: Any
) -> Results:
    """Behind a dispatch as the planner has it; and again, with other rows, when no dispatch holds ranks together."""
    tokens, index, weight, w, _, everything, _, down, _ = x
    total = everything.shape[0]
    y, route = tw.moe_dispatch_matmul(tokens, index, w, group, topk_weight=weight, experts=total, capacity=capacity)
    w = _across(down) if transposed else down
    return tuple(tw.moe_matmul_combine(h, w, route, group, **options) for h in ((y, -y) if again else (y,)))


_EXACT: Callable[[int, bool], float] = lambda ranks, deterministic: 0.0  # noqa: E731
_ROUNDED: Callable[[int, bool], float] = lambda ranks, deterministic: 2**-8  # noqa: E731
_ATTENDED: Callable[[int, bool], float] = lambda ranks, deterministic: core.tolerance(torch.bfloat16)  # noqa: E731
_SEQUENCE = {"heads": 8, "kv_heads": 4, "seq": 512, "dim": 64}
_ALONE = {"heads": 4, "kv_heads": 2, "seq": 320, "dim": 64}
# Every call of up to four ranks raises every flag, however routings differ: each rank sends tokens to each, and an
# exchange takes as many CTAs in each call, one for numbers of rows, all for the rows themselves.
_DISPATCHED = {"tokens": 200, "hidden": 136, "inner": 392, "experts": 10, "topk": 2}
_COMBINED = _DISPATCHED | {"inner": 136}
_MATRIX = {"m": 256, "n": 256}
_ROOMY: Callable[[dict[str, int]], Options] = lambda s: {"capacity": capacity(s)}  # noqa: E731
PROBLEMS = {
    "matmul_reduce_scatter": OpProblem(
        "matmul_reduce_scatter", {"m": 512, "n": 512, "k": 2048}, {"m": 16, "k": 128}, _split_k, _scattered,
        lambda ranks, deterministic: scatter.tolerance(torch.bfloat16, ranks, deterministic),
        _reduce_scatter, _narrowing("matmul_reduce_scatter"),
    ),
    "all_gather_matmul": OpProblem(
        "all_gather_matmul", {"m": 512, "n": 512, "k": 512}, {"m": 16}, _split_m, _gathered,
        lambda ranks, deterministic: scatter.tolerance(torch.bfloat16, 1, True), _all_gather_matmul,
        _narrowing("all_gather_matmul"),
    ),
    "matmul_all_reduce": OpProblem(
        "matmul_all_reduce", {"m": 512, "n": 512, "k": 2048}, {"k": 128}, _split_k, _reduced,
        lambda ranks, deterministic: all_reduce.tolerance(torch.bfloat16, ranks), _all_reduce,
        _narrowing("matmul_all_reduce"),
    ),
    "all_gather": OpProblem(
        "collectives", _MATRIX, {"m": 1}, _shards, tolerance=_EXACT, **_collective("all_gather")
    ),
    "reduce_scatter": OpProblem(
        "collectives", _MATRIX, {"m": 1}, _whole, tolerance=_ROUNDED, **_collective("reduce_scatter")
    ),
    "all_reduce": OpProblem("collectives", _MATRIX, {}, _whole, tolerance=_ROUNDED, **_collective("all_reduce")),
    "all_to_all": OpProblem(
        "collectives", _MATRIX, {"m": 1, "n": 1}, _whole, tolerance=_EXACT,
        **_collective("all_to_all", split_dim=0, concat_dim=1),
    ),
    "ring_attention": OpProblem(
        "ring_attention", _SEQUENCE, {"seq": 16}, _sequence_shards, _attended, _ATTENDED,
        _called(tw.ring_attention), _explained("ring_attention"),
    ),
    "ulysses_attention": OpProblem(
        "ulysses_attention", _SEQUENCE, {"seq": 16, "heads": 1, "kv_heads": 1}, _sequence_shards, _attended, _ATTENDED,
        _called(tw.ulysses_attention), _explained("ulysses_attention"),
    ),
    "attention": OpProblem(
        "attention", _ALONE, {}, _sequences, _attended_alone, _ATTENDED,
        _called(lambda q, k, v, group, **options: core.attention(fabric_of(group), q, k, v, **options)),
        _attention_route,
    ),
    "grouped_matmul": OpProblem(
        "grouped_matmul", {"tokens": 500, "hidden": 320, "inner": 320, "experts": 5}, {}, _experts_rows, _multiplied,
        lambda ranks, deterministic: scatter.tolerance(torch.bfloat16, 1, True),
        _grouped, lambda x, group, **options: tw.explain("grouped_matmul", *x, **options),
    ),
    "moe_dispatch_matmul": OpProblem(
        "moe", _DISPATCHED, {}, _tokens, _combined, lambda ranks, deterministic: 0.02, _dispatch, _dispatch_route,
        _ROOMY,
    ),
    "moe_matmul_combine": OpProblem(
        "moe", _COMBINED, {}, _tokens, _combined_twice, lambda ranks, deterministic: 0.02, _combine,
        lambda x, group, **options: _dispatch_route(x, group), _ROOMY,  # what refuses the one refuses the other
    ),
}  # fmt: skip
