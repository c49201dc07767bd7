"""What all measurements of ops share: shapes by name, ranks, the loop over them, and where figures are written."""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tileweave.bench.measure import machine

Shape = dict[str, Any]
Row = dict[str, Any]
WHERE = {
    "one": "one GPU",
    "virtual": "virtual ranks of one GPU, which share its SMs and its memory: no link is measured",
    "several": "several GPUs, a process each",
}


@dataclass(frozen=True)
class Work:
    """What a GPU has to do at least: operations, and bytes that it sends to others over its link."""

    flop: float
    link_bytes: float = 0.0


@dataclass(frozen=True, eq=False)
class Bench:
    """How an op is measured.

    name: of the op; where: a key of WHERE; shapes: keyword arguments of `measure`, which gets `rounds` beside them and
    returns a row, with `us` or `ms`, [median, lowest, highest] by contender, each checked before, or says why there is
    none; label: a shape as a table says it; told: a row in a line; work: of a shape for so many ranks; quick: a few of
    the shapes, by index; caches: what the L2 cache holds when a contender starts; needs: bytes of GPU memory; divided:
    sizes of which each GPU has the same share.
    """

    name: str
    where: str
    shapes: Sequence[Shape]
    measure: Callable[..., Row | str]
    label: Callable[[Shape], str]
    told: Callable[[Row], str]
    work: Callable[[Shape, int], Work]
    quick: tuple[int, ...] = (0,)
    rounds: int = 11
    caches: str = "as the other contenders leave it, on the same operands"
    needs: Callable[[Shape], int] = field(default=lambda shape: 0)
    divided: Callable[[Shape], tuple[int, ...]] = field(default=lambda shape: ())

    def chosen(self, quick: bool = False, only: Sequence[str] = ("",)) -> list[Shape]:
        """The shapes whose name with the op's contains one of these texts; with `quick` a few."""
        shapes = [self.shapes[i] for i in self.quick] if quick else self.shapes
        return [shape for shape in shapes if any(text in f"{self.name} {self.label(shape)}" for text in only)]

    def row(self, shape: Shape, rounds: int, **options: Any) -> Row | str:
        """Measure one shape; why not, where it does not suit the GPUs. Collective where there are processes."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        if uneven := [size for size in self.divided(shape) if size % world]:
            return f"{world} GPUs cannot share {uneven[0]} evenly"
        torch.cuda.empty_cache()  # what the shape before has left is of other sizes
        if (needed := self.needs(shape)) > (free := free_bytes()):
            return f"needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} are free"
        return self.measure(**shape, rounds=rounds, **options)


def free_bytes() -> float:
    """Of GPU memory; of several GPUs' where it is the least, so that all ranks leave the same shapes out."""
    least = torch.tensor(float(torch.cuda.mem_get_info()[0]), dtype=torch.float64)
    if dist.is_initialized():
        least = least.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(least, dist.ReduceOp.MIN)
    return least.item()


@contextmanager
def ranks(several: bool) -> Iterator[bool]:
    """Within, this process is a rank of NCCL's default group, with the GPU that torchrun's LOCAL_RANK names, where
    there are `several`. Whether it is the one that speaks."""
    if not several:
        yield True
        return
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def write(path: Path | None, rows: Sequence[Row]) -> None:
    """Write rows with the machine that they are of, if there is a path."""
    if path:
        path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def main(doc: str, benches: Sequence[Bench], options: dict[str, dict[str, Any]] | None = None) -> None:
    """The command of a module: measure the shapes asked for, by default all, print a line for each, write JSON after
    each, so that a run that is cut short leaves what it has. `options` are further ones, handed to `measure`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(bench.name for bench in benches))
    parser.add_argument("ops", nargs="*", metavar="OP", help=", ".join(names))
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="shapes whose name contains one")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    for name, settings in (options or {}).items():
        parser.add_argument(name, **settings)
    asked = vars(parser.parse_args())
    ops, only, rounds, path = (asked.pop(name) for name in ("ops", "only", "rounds", "json"))
    if unknown := set(ops) - set(names):
        parser.error(f"unknown OP {', '.join(sorted(unknown))}: expected some of {', '.join(names)}")
    if path and not path.parent.is_dir():
        parser.error(f"--json {path}: there is no folder {path.parent}")
    several = "LOCAL_RANK" in os.environ
    here = [bench for bench in benches if (bench.where == "several") == several]
    if not here:
        parser.error("this is measured " + ("on one GPU, not under torchrun" if several else "under torchrun only"))
    tasks = [(b, shape) for b in here if not ops or b.name in ops for shape in b.chosen(only=only)]
    if not tasks:
        parser.error("no shape's name contains what --only says: " + ", ".join(map(repr, only)))
    found: list[Row] = []
    with ranks(several) as speaks:
        for bench, shape in tasks:
            row = bench.row(shape, rounds or bench.rounds, **asked)
            if isinstance(row, str):
                text = row
            else:
                found.append(row)
                text = bench.told(row)
            if speaks:
                print(f"{bench.name} {bench.label(shape)}: {text}", flush=True)
                write(path, found)
