"""All measurements of ops, by where they run."""

from functools import cache
from importlib import import_module

from tileweave.bench.harness import Bench

MODULES = (
    "matmul", "attention", "grouped_matmul", "matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce",
    "sequence", "moe", "collectives", "between", "between_sequence",
)  # fmt: skip


@cache
def registered() -> tuple[Bench, ...]:
    """Every module's, in this order."""
    return tuple(bench for name in MODULES for bench in import_module(f"tileweave.bench.{name}").BENCHES)


def chosen(several: bool, ops: list[str]) -> list[Bench]:
    """Those for one process per GPU, or else for one GPU; of `ops`, if there are any. ValueError for an unknown op."""
    here = [bench for bench in registered() if (bench.where == "several") == several]
    names = list(dict.fromkeys(bench.name for bench in here))
    if unknown := [op for op in ops if op not in names]:
        raise ValueError(f"OP {unknown[0]!r} is not measured here; there are: {', '.join(names)}")
    return [bench for bench in here if not ops or bench.name in ops]
