"""Ops over two nodes beside the group's own collectives: network namespaces of this machine, gloo, no GPU.

    python -m tileweave.bench.nodes [--mbit 200 1000] [--rounds 5]

Two namespaces, two ranks in each, are joined by a link of so many megabits a second, which needs root and the commands
`ip` and `tc`. Inside a node nothing is fused on a CPU, so what shows is what composing does: fewer bytes over the link,
and transfers beside products. Contenders take turns, the slowest rank counts: `tileweave`, the op; `gloo`, torch.matmul
and one collective of the whole group. Times are of this machine's CPUs, so their ratio says more.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave.fabric.distributed import REDUCE_SCATTER
from tileweave.fabric.gathering import ALL_GATHER
from tileweave.ops.matmul_reduce_scatter import relative_error

ADDRESSES = ("10.237.41.1", "10.237.41.2")
PORT = 29537
SIZES = (4096, 1024, 1024)  # M, N, K of the whole product
Runs = dict[str, Callable[[], Any]]


@contextmanager
def namespaces(mbit: int | None = None) -> Iterator[list[tuple[str, str]]]:
    """Two network namespaces, the name of each and of its device; the devices are joined, and carry `mbit` megabits a
    second each way. RuntimeError where this process may not make them."""
    names, devices = ([f"{prefix}{os.getpid()}{side}" for side in "ab"] for prefix in ("tw", "twv"))
    made = []
    try:
        for name in names:
            _call("ip", "netns", "add", name)
            made.append(name)
        _call("ip", "link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for name, device, address in zip(names, devices, ADDRESSES, strict=True):
            _call("ip", "link", "set", device, "netns", name)
            _call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
            for each in (device, "lo"):
                _call("ip", "-n", name, "link", "set", each, "up")
            if mbit is not None:
                limit = ("tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "400ms")
                _call("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", device, "root", *limit)
        yield list(zip(names, devices, strict=True))
    finally:
        for name in made:  # its devices go with it
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _call(*command: str) -> None:
    """Run a command; RuntimeError with what it says where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as failure:
        raise RuntimeError(f"{command[0]}: {failure}") from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def contenders(m: int, n: int, k: int, group: dist.ProcessGroup) -> dict[str, tuple[Runs, torch.Tensor]]:
    """By op who is measured, and this rank's part of the truth. Collective in the group, whose operands all make."""
    world, rank = group.size(), group.rank()
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((m, k), (k, n)))
    whole = a.float() @ b.float()
    part, weight = a.chunk(world, 1)[rank].contiguous(), b.chunk(world)[rank]  # of K
    rows, columns = a.chunk(world)[rank], b.chunk(world, 1)[rank]

    def summed() -> torch.Tensor:
        product = part @ weight
        dist.all_reduce(product, group=group)
        return product

    def scattered() -> torch.Tensor:
        mine = a.new_empty(m // world, n)
        REDUCE_SCATTER(mine, part @ weight, group=group)
        return mine

    def gathered() -> torch.Tensor:
        every = a.new_empty(m, k)
        ALL_GATHER(every, rows, group=group)
        return every @ columns

    return {
        "matmul_reduce_scatter": (
            {"tileweave": lambda: tw.matmul_reduce_scatter(part, weight, group), "gloo": scattered},
            whole.chunk(world)[rank],
        ),
        "all_gather_matmul": (
            {"tileweave": lambda: tw.all_gather_matmul(rows, columns, group), "gloo": gathered},
            whole.chunk(world, 1)[rank],
        ),
        "matmul_all_reduce": (
            {"tileweave": lambda: tw.matmul_all_reduce(part, weight, group), "gloo": summed},
            whole,
        ),
    }


def measured(runs: Runs, truth: torch.Tensor, rounds: int, group: dist.ProcessGroup) -> dict[str, float]:
    """Median seconds of each contender, which all are checked first; the slowest rank's. AssertionError for a wrong
    one."""
    for name, run in runs.items():
        error = relative_error(run(), truth)
        assert error < 0.02, (name, error)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            dist.barrier(group)
            start = time.perf_counter()
            run()
            spent = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(spent, dist.ReduceOp.MAX, group=group)
            times[name].append(spent.item())
    return {name: statistics.median(each) for name, each in times.items()}


def member(rounds: int) -> None:
    """What a rank does, started by torchrun with a group of hosts for a node."""
    os.environ.setdefault("TILEWEAVE_NODE", os.environ["GROUP_RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    for op, (runs, truth) in contenders(*SIZES, group).items():
        seconds = measured(runs, truth, rounds, group)
        if group.rank() == 0:
            told = ", ".join(f"{name} {1e3 * each:.0f} ms" for name, each in seconds.items())
            print(f"{op}: {told}, ratio {seconds['tileweave'] / seconds['gloo']:.2f}", flush=True)
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mbit", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args(arguments)
    if "RANK" in os.environ:
        return member(asked.rounds)
    for mbit in asked.mbit:
        print(f"{mbit} Mbit/s between two nodes of 2 ranks, {SIZES} in bfloat16", flush=True)
        try:
            with namespaces(mbit) as nodes:
                started = [_start(i, *node, asked.rounds) for i, node in enumerate(nodes)]
                codes = [each.wait() for each in started]
                if any(codes):
                    sys.exit("a node has failed")
        except RuntimeError as refusal:
            sys.exit(f"network namespaces cannot be made here: {refusal}")


def _start(index: int, name: str, device: str, rounds: int) -> subprocess.Popen:
    """The ranks of a node."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(index)]
    place = ["--nproc-per-node", "2", "--master-addr", ADDRESSES[0], "--master-port", str(PORT)]
    command = ["ip", "netns", "exec", name, *torchrun, *place, "-m", "tileweave.bench.nodes", "--rounds", str(rounds)]
    env = os.environ | {"GLOO_SOCKET_IFNAME": device, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env)


if __name__ == "__main__":
    main()
