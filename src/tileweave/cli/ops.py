"""The ops that `tileweave run` runs: what the command has to know of each, as plain values and small functions."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tileweave.ops.all_gather_matmul import reference as gathered_product
from tileweave.ops.collectives import reference as collective
from tileweave.ops.grouped_matmul import reference as grouped_product
from tileweave.ops.matmul_all_reduce import reference as reduced_product
from tileweave.ops.matmul_all_reduce import tolerance as reduced_tolerance
from tileweave.ops.matmul_reduce_scatter import reference as scattered_product
from tileweave.ops.matmul_reduce_scatter import tolerance
from tileweave.ops.moe import moe_combine
from tileweave.ops.moe import reference as summed_experts

Shape = tuple[int, ...]
Sizes = Mapping[str, int]
Operands = Sequence[Sequence[torch.Tensor]]  # of each rank


@dataclass(frozen=True)
class Op:
    """What the command has to know of an op.

    sizes: of the whole problem, unless the command line says otherwise; shared: those of which each rank has its share,
    with what that is, and what divides a default share, so that TMA can address it for 3, 5, 6 and 7 ranks too;
    shapes: what a rank hands in, and gets, from sizes of which those in `shared` are its share and `ranks` is one more;
    options: those of the command that the op has; fixed: arguments that it always gets; truth: what each rank should
    get, in float32, from all ranks' operands and biases; limit: the largest relative error of that, from dtype, ranks
    and whether it was to be deterministic; alone, within, between: how it is computed without a kernel, by one rank, by
    ranks of one process, and by several processes; more: options worth trying next, each with what it shows; integers:
    those of a rank's operands that are no random floats, by place; finish: what makes of what it returns, and the
    group, a tensor that can be checked.
    """

    sizes: Sizes
    shared: Mapping[str, tuple[str, int]]
    shapes: Callable[[Sizes], tuple[list[Shape], Shape]]
    options: tuple[str, ...]
    truth: Callable[[Operands, list[torch.Tensor] | None], list[torch.Tensor]]
    limit: Callable[[torch.dtype, int, bool], float]
    alone: str
    within: str
    between: str
    more: tuple[tuple[str, str], ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    own_bias: bool = False  # whether a rank has its share of the bias, instead of all of it
    local: bool = False  # whether it takes no group
    integers: Callable[[Sizes, torch.Generator], Mapping[int, torch.Tensor]] = lambda sizes, generator: {}
    finish: Callable[[Any, Any], torch.Tensor] = lambda out, group: out

    def share(self, sizes: Sizes, ranks: int) -> dict[str, int]:
        """A rank's share of the whole problem, as `shapes` takes it."""
        return {name: size // ranks if name in self.shared else size for name, size in sizes.items()} | {"ranks": ranks}

    def least_bytes(self, sizes: Sizes, ranks: int, itemsize: int, calls: int) -> int:
        """Bytes of all ranks' operands of `calls` calls and of all ranks' results of one in float32."""
        operands, result = self.shapes(self.share(sizes, ranks))
        return ranks * (calls * itemsize * sum(map(math.prod, operands)) + 4 * math.prod(result))


def _bias(biases: list[torch.Tensor] | None, rank: int = 0) -> torch.Tensor | None:
    return None if biases is None else biases[rank]


def _turned(operands: Operands) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """All ranks' a, and all ranks' b."""
    return [a for a, _ in operands], [b for _, b in operands]


ROWS, COLUMNS, DEPTH = "each rank {} m / ranks rows", "each rank {} n / ranks columns", "each rank holds k / ranks {}"
RAGGED = "sizes that no tile divides"
MATMUL = {"m": 512, "n": 512, "k": 2048}


def _collective(
    name: str,
    shared: Mapping[str, tuple[str, int]],
    shapes: Callable[[Sizes], tuple[list[Shape], Shape]],
    within: str,
    more: tuple[str, str],
    **fixed: Any,
) -> Op:
    """A collective of one tensor; what is moved keeps its bits, sums are rounded."""
    sums = name in ("reduce_scatter", "all_reduce")
    return Op(
        sizes={"m": 512, "n": 512},
        shared=shared,
        shapes=shapes,
        options=("deterministic",) if sums else (),
        truth=lambda operands, biases: collective(name, [x for (x,) in operands], **fixed),
        limit=tolerance if sums else lambda dtype, ranks, deterministic: 0.0,
        alone="a copy",
        within=f"{within} by torch",
        between=f"the process group's {name.replace('_', '-')}",
        more=(more,),
        fixed=fixed,
    )


TOKENS = {"tokens": 384, "hidden": 128, "inner": 128, "experts": 8}


def _ends(sizes: Sizes, generator: torch.Generator) -> dict[int, torch.Tensor]:
    """Where the rows of each expert end, drawn at random."""
    ends = torch.randint(0, sizes["tokens"] + 1, (sizes["experts"],), generator=generator).sort().values
    ends[-1] = sizes["tokens"]
    return {2: ends.int()}


def _choices(sizes: Sizes, generator: torch.Generator) -> dict[int, torch.Tensor]:
    """Experts of all ranks, drawn at random for each token."""
    total = sizes["experts"] * sizes["ranks"]
    return {1: torch.randint(0, total, (sizes["tokens"], sizes["topk"]), generator=generator)}


def _sums_of_experts(operands: Operands, biases: list[torch.Tensor] | None) -> list[torch.Tensor]:
    x, index, w = ([each[i] for each in operands] for i in range(3))
    return summed_experts(x, index, [None] * len(x), torch.cat(w))


ODD = "rows of an odd number of elements"
OPS: dict[str, Op] = {
    "matmul_reduce_scatter": Op(
        sizes=MATMUL,
        shared={"m": (ROWS.format("gets"), 16), "k": (DEPTH.format("columns of A"), 64)},
        shapes=lambda s: ([(s["m"] * s["ranks"], s["k"]), (s["k"], s["n"])], (s["m"], s["n"])),
        options=("deterministic", "bias"),
        truth=lambda operands, biases: list(
            scattered_product(*_turned(operands), "sum", _bias(biases)).chunk(len(operands))
        ),
        limit=tolerance,
        alone="torch.matmul alone",
        within="torch.matmul, then a sum over the {} ranks",
        between="torch.matmul, then the process group's reduce-scatter",
        more=(
            ("--deterministic", "a slot per source, added in a fixed order"),
            ("--ranks 3 --shape m=300,n=200,k=960", RAGGED),
        ),
    ),
    "all_gather_matmul": Op(
        sizes={"m": 512, "n": 2048, "k": 512},
        shared={"m": (ROWS.format("holds"), 16), "n": (COLUMNS.format("gets"), 64)},
        shapes=lambda s: ([(s["m"], s["k"]), (s["k"], s["n"])], (s["m"] * s["ranks"], s["n"])),
        options=("bias",),
        truth=lambda operands, biases: [
            gathered_product(_turned(operands)[0], b, _bias(biases, rank)) for rank, (_, b) in enumerate(operands)
        ],
        limit=lambda dtype, ranks, deterministic: tolerance(dtype, 1, True),
        alone="torch.matmul alone",
        within="the rows of the {} ranks put together, then torch.matmul",
        between="the process group's all-gather, then torch.matmul",
        more=(("--bias", "a bias, each rank its columns' own"), ("--ranks 3 --shape m=300,n=600,k=200", RAGGED)),
        own_bias=True,
    ),
    "matmul_all_reduce": Op(
        sizes=MATMUL,
        shared={"k": (DEPTH.format("columns of A"), 64)},
        shapes=lambda s: ([(s["m"], s["k"]), (s["k"], s["n"])], (s["m"], s["n"])),
        options=("deterministic", "bias"),
        truth=lambda operands, biases: [reduced_product(*_turned(operands), _bias(biases))] * len(operands),
        limit=lambda dtype, ranks, deterministic: reduced_tolerance(dtype, ranks),
        alone="torch.matmul alone",
        within="torch.matmul, then a sum over the {} ranks",
        between="torch.matmul, then the process group's all-reduce",
        more=(
            ("--shape m=4", "few rows, as in decoding: every rank sums all"),
            ("--ranks 3 --shape m=300,n=200,k=960", RAGGED),
        ),
    ),
    "all_gather": _collective(
        "all_gather",
        {"m": (ROWS.format("holds"), 16)},
        lambda s: ([(s["m"], s["n"])], (s["m"] * s["ranks"], s["n"])),
        "the tensors of the {} ranks put together",
        ("--ranks 3 --shape m=30,n=7", ODD),
    ),
    "reduce_scatter": _collective(
        "reduce_scatter",
        {"m": (ROWS.format("gets"), 16)},
        lambda s: ([(s["m"] * s["ranks"], s["n"])], (s["m"], s["n"])),
        "a sum over the {} ranks",
        ("--ranks 3 --shape m=30,n=7", ODD),
    ),
    "all_reduce": _collective(
        "all_reduce",
        {},
        lambda s: ([(s["m"], s["n"])], (s["m"], s["n"])),
        "a sum over the {} ranks",
        ("--ranks 3 --shape m=1,n=77", "little to send: every rank sums all"),
    ),
    "all_to_all": _collective(
        "all_to_all",
        {"m": (ROWS.format("holds"), 16), "n": (COLUMNS.format("gets"), 16)},
        lambda s: ([(s["m"], s["n"] * s["ranks"])], (s["m"] * s["ranks"], s["n"])),
        "the tensors of the {} ranks cut and put together",
        ("--ranks 3 --shape m=30,n=21", ODD),
        split_dim=1,
        concat_dim=0,
    ),
    "grouped_matmul": Op(
        sizes=TOKENS,
        shared={"tokens": ("each rank multiplies tokens / ranks rows", 16)},
        shapes=lambda s: (
            [(s["tokens"], s["hidden"]), (s["experts"], s["hidden"], s["inner"]), (s["experts"],)],
            (s["tokens"], s["inner"]),
        ),
        options=(),
        truth=lambda operands, biases: [grouped_product(*each) for each in operands],
        limit=lambda dtype, ranks, deterministic: tolerance(dtype, 1, True),
        alone="a torch.matmul for each expert",
        within="a torch.matmul for each expert",
        between="a torch.matmul for each expert",
        more=(("--shape experts=40", "experts of few rows, and some of none"),),
        local=True,
        integers=_ends,
    ),
    "moe_dispatch_matmul": Op(
        sizes=TOKENS | {"topk": 2},
        shared={
            "tokens": ("each rank holds tokens / ranks of them", 16),
            "experts": ("each rank has experts / ranks of them", 1),
        },
        shapes=lambda s: (
            [(s["tokens"], s["hidden"]), (s["tokens"], s["topk"]), (s["experts"], s["hidden"], s["inner"])],
            (s["tokens"], s["inner"]),
        ),
        options=(),
        truth=_sums_of_experts,
        limit=lambda dtype, ranks, deterministic: 2 * tolerance(dtype, 1, True),  # rounded again on the way back
        alone="a torch.matmul for each expert",
        within="tokens by an all-to-all of the {} ranks, a torch.matmul for each expert",
        between="tokens by the process group's all-to-all, a torch.matmul for each expert",
        more=(("--shape topk=6", "tokens that several experts of a rank want travel once"),),
        integers=_choices,
        finish=lambda out, group: moe_combine(out[0], out[1], group),
    ),
}
