"""moe_dispatch_matmul: what the protocol costs on virtual ranks. `python -m tileweave.bench.moe`

H 7168, I 2048, 256 experts of which a token has 8, drawn evenly. On virtual ranks W ranks share one GPU, each with 1/W
of the SMs and of the tokens, so no link is measured. Contenders, interleaved, all ranks at once unless said otherwise:

    fused       the op's kernels: table of tiles, then dispatch + grouped matmul; its route is made before
    local       grouped_matmul of rows that are there, same tile, on as many SMs as multiply in `fused`:
                fused / local - 1 is the overhead of the protocol
    local, all  the same on all SMs: what communicators take away as well
    torch       a copy of all tokens for each rank (which stands for a gather), index, torch's grouped_mm on the whole
                GPU, one rank after the other
    grouped_mm  torch's grouped_mm alone

Beside them: how long the slowest rank takes to make a route, with its exchanges and its host time.
Each contender is checked against a float32 truth first. Bytes between ranks are counted as the op sends them, a token
once to a rank, and as peers do that send a row for each choice.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tileweave.bench.measure import interleaved, machine
from tileweave.bench.recording import Recorder, together
from tileweave.fabric import group_name, virtual_world
from tileweave.fabric.virtual import VirtualWorld
from tileweave.ops.contract import Like
from tileweave.ops.grouped_matmul import reference
from tileweave.ops.grouped_matmul.check import check
from tileweave.ops.grouped_matmul.launch import fused as grouped
from tileweave.ops.matmul_reduce_scatter import relative_error, tolerance
from tileweave.ops.moe import Experts
from tileweave.ops.moe.launch import fused
from tileweave.ops.moe.routing import make_route
from tileweave.planner import Plan
from tileweave.planner.moe import DispatchProblem, dispatch_plan_for

HIDDEN, INNER, EXPERTS, CHOICES = 7168, 2048, 256, 8
SHAPES = [(world, tokens << 10) for tokens in (8, 32, 128) for world in (2, 4, 8)]


def record(world: VirtualWorld, x: list, index: list, w: list, plan: Plan) -> dict[str, Any]:
    """All ranks' launches, results and streams of each contender made of kernels of ours; and what was sent."""
    experts = Experts(EXPERTS, world.size)
    every = torch.cat(index).reshape(-1)
    order = every.argsort(stable=True)

    def rank_program(rank, group):
        real = group.world.fabric(rank)
        asked = real, group, group_name(group), index[rank], None, experts, None, None, plan.tile[0]
        make_route(*asked)
        torch.cuda.synchronize()
        start = time.perf_counter()
        route, sends = make_route(*asked)
        torch.cuda.synchronize()
        route_us = 1e6 * (time.perf_counter() - start)
        first, end = experts.of(rank)
        own = (every[order] >= first) & (every[order] < end)
        tokens = order[own] // CHOICES
        rows = torch.cat(x)[tokens]
        made = {"fused": Recorder(real, False)}
        (out,) = fused(made["fused"], x[rank], [w[rank]], route, sends, experts.most, plan)
        outs = {"fused": out}
        for name, sms in (("local", real.sms - plan.comm_sms), ("local, all", real.sms)):
            made[name] = Recorder(real, True)
            made[name].sms = sms
            call = check(*map(Like.of, (rows, w[rank], route.offsets)))
            alone = replace(plan, schedule="intra_sm", comm_sms=0)
            outs[name] = grouped(made[name], call, rows, w[rank], route.offsets, alone)
        sent = (route.token_slot >= 0).sum() - (route.token_slot[:, rank] >= 0).sum()
        chosen = ((index[rank] < first) | (index[rank] >= end)).sum()
        kept = {name: recorder.kept for name, recorder in made.items()}
        return kept, outs, torch.cuda.current_stream(), (tokens, rows, route.offsets, int(sent), int(chosen), route_us)

    kept, outs, streams, others = zip(*world.run(rank_program), strict=True)
    launches = {
        name: [launch for step in zip(*(each[name] for each in kept), strict=True) for launch in step]
        for name in kept[0]
    }
    return {"launches": launches, "outs": outs, "streams": streams, "others": others}


def measure(size: int, tokens: int, rounds: int, comm_sms: int | None) -> dict:
    """One row: errors against float32 with poisoned results, then times."""
    x = [torch.randn(tokens // size, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(size)]
    index = [torch.rand(tokens // size, EXPERTS, device="cuda").topk(CHOICES).indices for _ in range(size)]
    w = [
        torch.randn(EXPERTS // size, HIDDEN, INNER, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5
        for _ in range(size)
    ]
    with virtual_world(size, "cuda", timeout=20.0) as world:
        assert isinstance(world, VirtualWorld)
        plan = dispatch_plan_for(DispatchProblem(size, EXPERTS // size, INNER, HIDDEN, world.sms))
        plan = plan if comm_sms is None else replace(plan, comm_sms=comm_sms)
        made = record(world, x, index, w, plan)
        contenders: dict[str, Callable[[], None]] = {}
        for name, launches in made["launches"].items():
            contenders[name] = together(launches, made["streams"])
            for out in made["outs"]:
                out[name].fill_(float("nan"))
            contenders[name]()
            torch.cuda.synchronize()
            for (_, rows, offsets, *_), out, matrices in zip(made["others"], made["outs"], w, strict=True):
                end = int(offsets[1])
                truth = reference(rows[:end], matrices[:2], offsets[:2])
                error = relative_error(out[name][:end], truth)
                assert error <= tolerance(torch.bfloat16, 1, True) and out[name].isfinite().all(), (name, error)

        def torch_all() -> None:
            for (numbers, _, offsets, *_), matrices in zip(made["others"], w, strict=True):
                torch.nn.functional.grouped_mm(torch.cat(x)[numbers], matrices, offs=offsets)

        def torch_grouped() -> None:
            for (_, rows, offsets, *_), matrices in zip(made["others"], w, strict=True):
                torch.nn.functional.grouped_mm(rows, matrices, offs=offsets)

        times = interleaved({**contenders, "torch": torch_all, "grouped_mm": torch_grouped}, rounds)
        world.check()
    flop = 2.0 * tokens * CHOICES * HIDDEN * INNER
    sent, chosen, route_us = (max(each[i] for each in made["others"]) for i in (3, 4, 5))
    return {
        "world": size, "tokens": tokens, "plan": plan.to_dict(), "route_us": route_us,
        "bytes_per_token": 2 * HIDDEN * sent, "bytes_per_choice": 2 * HIDDEN * chosen,
        "ms": {name: [t.median, t.low, t.high] for name, t in times.items()},
        "tflops": {name: flop / t.median / 1e9 for name, t in times.items()},
        "overhead_percent": 100 * (times["fused"].median / times["local"].median - 1),
    }  # fmt: skip


def main() -> None:
    """Measure all shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--comm-sms", type=int, help="communicators instead of the planner's")
    parser.add_argument("--tokens", type=int, nargs="*", help="numbers of tokens instead of 8k, 32k and 128k")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    found: list[dict] = []
    for world, tokens in SHAPES:
        if options.tokens and tokens not in options.tokens:
            continue
        found.append(row := measure(world, tokens, options.rounds, options.comm_sms))
        rates = "  ".join(f"{name} {rate:.0f}" for name, rate in row["tflops"].items())
        told = "W={world} tokens={tokens}, {plan[comm_sms]} communicators, route {route_us:.0f} us:".format(**row)
        sent = row["bytes_per_choice"] / max(row["bytes_per_token"], 1)
        print(
            told, rates, f" overhead {row['overhead_percent']:+.1f}%, {sent:.2f} times the bytes by choice", flush=True
        )
        if options.json:
            options.json.write_text(json.dumps({"machine": machine(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
