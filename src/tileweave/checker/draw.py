"""Random calls for `tileweave.checker.stress`: an op, sizes, options, dtype, strides and delays, each from a seed."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

from tileweave.checker.ops import OpCase
from tileweave.checker.problems import PROBLEMS, Options, Results

RANKS = (1, 2, 3, 4, 5, 6, 7, 8)
FEW, MANY = 4, 24  # what sizes are multiplied with at most: in the emulator, on a GPU
STRIDES = ("as it is", "transposed", "of wider rows")
VERSIONS = 2  # of a call's data: so that what is left of an earlier call would be wrong


@dataclass(frozen=True)
class Call:
    """A call that all ranks of a world make. sizes: of the whole problem; options: of the op, by name; planned: whether
    the planner chooses; strides: one of STRIDES for all operands that have rows."""

    op: str
    ranks: int
    sizes: tuple[tuple[str, int], ...]
    variant: str
    planned: bool
    dtype: torch.dtype
    strides: str

    @classmethod
    def drawn(cls, ranks: int, kind: Any, shape: Any, most: int, unicast: bool) -> "Call":
        """What `kind` stands for, with the sizes that `shape` stands for: equal ones give equal calls. unicast: the
        fabric has no multicast."""
        rng = Random(f"{ranks} {kind}")
        op = rng.choice(list(PROBLEMS))
        variants = OpCase(op, ranks).all_variants
        usual = [name for name, options in variants.items() if "scaled" not in options]  # they take whole blocks of K
        drawn = usual.index(rng.choice([name for name in usual if not (unicast and "multimem" in name)]))
        planned = rng.random() < 0.5
        dtype, strides = rng.choice((torch.bfloat16, torch.float16)), rng.choice(STRIDES)
        sizes = _sizes(op, ranks, Random(f"{ranks} {kind} {shape}"), most)
        names = list(OpCase(op, ranks, sizes).all_variants)  # which may name what the sizes ask for
        return cls(op, ranks, tuple(sizes.items()), names[min(drawn, len(names) - 1)], planned, dtype, strides)

    def options(self) -> Options:
        """Those of the op."""
        options = dict(OpCase(self.op, self.ranks, dict(self.sizes)).all_variants[self.variant])
        plan = options.pop("plan", None)
        if plan is not None and not self.planned:  # copies within one GPU need an SM of each rank
            plan = replace(plan, comm_sms=1) if plan.mechanism == "copy_engine" else plan
            options["plan"] = plan
        return options

    def problem(self, version: int, device: torch.device) -> tuple[list[tuple], list[Results]]:
        """The operands of all ranks, on the device, and what each should get, in float32."""
        op = PROBLEMS[self.op]
        drawn = [tuple(map(self._typed, each)) for each in op.operands(dict(self.sizes), self.ranks, version)]
        asked = {name: x for name, x in self.options().items() if name not in ("plan", "tiling")}
        truth = [tuple(x.to(device) for x in each) for each in op.truth(drawn, asked)]
        return [tuple(_strided(x, self.strides).to(device) for x in each) for each in drawn], truth

    @property
    def limit(self) -> float:
        """The largest tolerable relative error, that of bfloat16."""
        return PROBLEMS[self.op].tolerance(self.ranks, bool(self.options().get("deterministic")))

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes)
        way = f"{self.variant or 'as planned'}{', planned' if self.planned else ''}"
        return f"{self.op} {sizes}, {self.ranks} ranks, {self.dtype}, {way}, operands {self.strides}"

    def _typed(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype) if x.dtype == torch.bfloat16 else x


def _strided(x: torch.Tensor, strides: str) -> torch.Tensor:
    """The same values with other strides."""
    if x.dim() < 2 or strides == "as it is":
        return x
    if strides == "transposed":
        return x.mT.contiguous().mT
    return torch.nn.functional.pad(x, (0, 8))[..., :-8]


def _sizes(op: str, ranks: int, rng: Random, most: int) -> dict[str, int]:
    """Sizes of the whole problem that keep the op's contract."""

    def lines(unit: int, least: int = 1) -> int:
        return unit * rng.randint(least, most)

    match op:
        case "matmul_reduce_scatter" | "all_gather_matmul" | "matmul_all_reduce":
            rows = ranks * lines(rng.choice((1, 5, 16)), least=0)
            return {"m": rows, "n": lines(rng.choice((8, 24))), "k": ranks * lines(8)}
        case "all_gather" | "reduce_scatter" | "all_reduce" | "all_to_all":
            return {"m": ranks * lines(rng.choice((1, 8))), "n": ranks * lines(rng.choice((1, 8)))}
        case "ring_attention" | "ulysses_attention":
            kv_heads = ranks if op == "ulysses_attention" else rng.choice((1, 2))
            seq = ranks * 2 * lines(rng.choice((1, 8)))
            return {
                "heads": kv_heads * rng.choice((1, 2)),
                "kv_heads": kv_heads,
                "seq": seq,
                "dim": rng.choice((64, 72)),
            }
        case "attention":
            return {"heads": 4, "kv_heads": rng.choice((1, 2, 4)), "seq": lines(16), "dim": 64}
        case "grouped_matmul":
            return {"tokens": lines(16, least=0), "hidden": lines(8), "inner": lines(8), "experts": rng.randint(2, 9)}
        case _:
            experts = ranks * rng.randint(1, 3) + rng.choice((0, 1))
            tokens, topk = ranks * lines(4), min(rng.randint(1, 3), experts)
            return {"tokens": tokens, "hidden": lines(8), "inner": lines(8), "experts": experts, "topk": topk}
