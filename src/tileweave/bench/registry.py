"""All measurements of ops, by where they run."""

from collections.abc import Sequence
from functools import cache
from importlib import import_module

from tileweave.bench.harness import Bench

MODULES = (
    "matmul", "attention", "grouped_matmul", "matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce",
    "sequence", "moe", "collectives", "between", "between_sequence", "between_moe",
)  # fmt: skip


@cache
def registered() -> tuple[Bench, ...]:
    """Every module's, in this order."""
    return tuple(bench for name in MODULES for bench in import_module(f"tileweave.bench.{name}").BENCHES)


def chosen(several: bool | None, ops: Sequence[str]) -> list[Bench]:
    """Those for one process per GPU, or else for one GPU, or, with None, both; of `ops`, if there are any. ValueError
    for an op that is not measured there."""
    here = [bench for bench in registered() if several is None or (bench.where == "several") == several]
    names = list(dict.fromkeys(bench.name for bench in here))
    for op in ops:
        if op not in names:
            elsewhere = any(bench.name == op for bench in registered())
            where = "on one GPU only" if several else "between GPUs only"
            raise ValueError(
                f"OP {op!r} is measured {where}; there are here: {', '.join(names)}"
                if elsewhere
                else f"OP {op!r} is not measured; there are: {', '.join(names)}"
            )
    return [bench for bench in here if not ops or bench.name in ops]
