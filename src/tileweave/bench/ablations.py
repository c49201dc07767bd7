"""What each part of the protocol of matmul_reduce_scatter costs. `python -m tileweave.bench.ablations`

Virtual ranks, as in bench/matmul_reduce_scatter.py. Each contender is the op's own kernel with one thing taken out or
done otherwise, by an edit of its source; results are then wrong, or right by luck, and are not looked at:

    op              as it is, adding (or storing, where two ranks make that the same)
    deterministic   stores into a place per source instead of adds
    stores local    foreign parts are stored at home: no other rank's memory is touched, but all else is done
    flags off       nobody waits for, or tells, a peer
    not rotated     all ranks send to rank 0 first, then all to rank 1, ...
    wait per tile   a storer waits for each tile to be performed before it goes on, instead of once an owner
    local           no peers at all: W one-rank grids of the kernel, tiling and SM share
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tileweave.bench.harness import write
from tileweave.bench.matmul_reduce_scatter import record
from tileweave.bench.measure import interleaved
from tileweave.bench.recording import together
from tileweave.fabric import virtual_world
from tileweave.ops.matmul_reduce_scatter import launch
from tileweave.planner import Problem, plan_for

SHAPES = [(w, 8192, 8192, k) for k in (4096, 2048) for w in (2, 4, 8)]
SOURCES = Path(launch.__file__).parents[2]
KERNEL, TEMPLATE = "ops/matmul_reduce_scatter/kernel.py", "tiles/matmul.py"
STORE = "gl.store_async(work.slots, owner, [slot * work.flags.world + work.flags.rank, row, col], buf)"
ADD = "gl.store_add_async(work.slots, owner, [slot, row, col], buf)"
Edits = dict[str, list[tuple[str, str]]]
EDITS: dict[str, Edits] = {
    "stores local": {
        KERNEL: [(STORE, STORE.replace("owner", "work.flags.rank")), (ADD, ADD.replace("owner", "work.flags.rank"))]
    },
    "flags off": {
        KERNEL: [
            ("met = gl.wait_all(work.flags, first, work.flags.world, epoch, skip=phase)", "met = epoch == epoch"),
            ("gl.signal(work.flags, owner, work.flags.rank, epoch)", "pass"),
        ]
    },
    "not rotated": {KERNEL: [("(work.flags.rank + 1 + t // per) % work.flags.world", "(t // per) % work.flags.world")]},
    "wait per tile": {TEMPLATE: [("if (next_owner != owner) | (after >= mm.tiles):", "if after >= 0:")]},
}


def edited(edits: Edits, folder: Path) -> Any:
    """The op's kernel from sources with these edits, each of whose old texts must occur exactly once."""
    modules: dict[str, str] = {}
    for path in (TEMPLATE, KERNEL):
        text = (SOURCES / path).read_text()
        for old, new in edits.get(path, []):
            if text.count(old) != 1:
                raise ValueError(f"{path}: the text to edit occurs {text.count(old)} times, not once: {old!r}")
            text = text.replace(old, new)
        for name, module in modules.items():
            text = text.replace(f"from tileweave.{name} import", f"from {module} import")
        target = folder / f"{folder.name}_{Path(path).parent.name}_{Path(path).stem}.py"
        target.write_text(text)
        modules[path.removesuffix(".py").replace("/", ".")] = target.stem
        found = _load(target)
    return found.matmul_reduce_scatter_kernel


def _load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    sys.modules[file.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(world_size: int, m: int, n: int, k: int, rounds: int, kernels: dict[str, Any]) -> dict:
    """One row: milliseconds of each contender; k is one rank's share."""
    a = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(world_size)]
    b = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16).t() for _ in range(world_size)]
    with virtual_world(world_size, "cuda", timeout=5.0) as world:
        plan = plan_for(Problem(m, n, k, world_size, 2, world.sms, linked=False))
        contenders: dict[str, Callable[[], None]] = {}
        for name, kernel in kernels.items():
            launch.matmul_reduce_scatter_kernel = kernel
            launches, _, streams = record(
                world, a, b, name == "local", plan, deterministic=name == "deterministic" or world_size == 2
            )
            contenders[name] = together(launches, streams)
        launch.matmul_reduce_scatter_kernel = kernels["op"]
        times = interleaved(contenders, rounds)
    ms = {name: [t.median, t.low, t.high] for name, t in times.items()}
    return {"world": world_size, "m": m, "n": n, "k_local": k, "plan": plan.to_dict(), "ablations_ms": ms}


def main() -> None:
    """Measure all shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    op = launch.matmul_reduce_scatter_kernel
    rows = []
    with tempfile.TemporaryDirectory(prefix="ablation") as folder:
        kernels = {"op": op, "deterministic": op, "local": op}
        for i, (name, edits) in enumerate(EDITS.items()):
            place = Path(folder) / f"ablation{i}"
            place.mkdir()
            kernels[name] = edited(edits, place)
        for shape in SHAPES:
            rows.append(row := measure(*shape, options.rounds, kernels))
            base = row["ablations_ms"]["op"][0]
            told = "  ".join(f"{name} {100 * (t[0] / base - 1):+.1f}%" for name, t in row["ablations_ms"].items())
            print("W={} M={} N={} K_local={}:".format(*shape), f"op {base:.3f} ms; against it: {told}", flush=True)
    write(options.json, rows)


if __name__ == "__main__":
    main()
