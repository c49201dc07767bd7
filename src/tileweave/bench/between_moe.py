"""moe_dispatch_matmul and moe_matmul_combine between GPUs, beside NCCL and grouped_mm. One process per GPU:

    python -m torch.distributed.run --nproc-per-node 2 -m tileweave.bench.between_moe

H 7168, I 2048, 256 experts of which a token has 8, as in figure 17 of arXiv 2511.13940: drawn evenly or, skewed, by
weights that are exp of a normal variable. Contenders, timed as in `bench.between`:

    tileweave   the op; the dispatch with a capacity that holds all rows, so that the host waits for nothing
    nccl        dispatch: all-gathers of tokens and choices, a sort, an index, torch's grouped_mm. Combine: grouped_mm,
                an all-to-all of rows, whose sizes the host knows before, an index, the weighted sum
    matmul      grouped_mm of rows that are there: what the transfer would cost nothing beside
    own matmul  tileweave.grouped_matmul of them
    comet       dispatch: that of Flux, where it is installed (`bench.adapters`)

Each is checked first: samples of each rank's rows, or tokens, against float32. bfloat16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import comb
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tileweave as tw
from tileweave.bench.adapters import experts, joined
from tileweave.bench.between import Runs, checked, timed, told
from tileweave.bench.harness import Bench, Row, Shape, Work, main
from tileweave.bench.moe import CHOICES, EXPERTS, HIDDEN, INNER, LIMIT, SAMPLE
from tileweave.ops.moe import Experts
from tileweave.ops.route import Route

SHAPES: list[Shape] = [
    *(dict(tokens=tokens << 10, skewed=False) for tokens in (8, 16, 32, 64, 128)),
    dict(tokens=32 << 10, skewed=True),
]


class Sizes(NamedTuple):
    """Of the whole problem; tokens: of all ranks."""

    tokens: int
    hidden: int = HIDDEN
    inner: int = INNER
    experts: int = EXPERTS
    choices: int = CHOICES


@dataclass(frozen=True)
class Part:
    """What a rank has, and what comes to it.

    x [T, H], index [T, k], weight [T, k]: own tokens, their experts, and what their rows are multiplied with on the way
    back; up [E, H, I], down [E, I, H]: own experts; order [R]: which choice of which token of all ranks each row is
    made of, sorted by expert; offsets int32 [E]: ends of the experts' rows.
    """

    sizes: Sizes
    x: torch.Tensor
    index: torch.Tensor
    weight: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    order: torch.Tensor
    offsets: torch.Tensor
    capacity: int


def gathered(x: torch.Tensor) -> torch.Tensor:
    """All ranks' rows."""
    whole = x.new_empty(dist.get_world_size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(whole, x)
    return whole


def sort_rows(every: torch.Tensor, first: int, own: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`order` and `offsets` of the rank whose `own` experts begin with `first`, of all ranks' choices."""
    mine = every.reshape(-1) - first
    key, order = torch.where((mine >= 0) & (mine < own), mine, own).sort(stable=True)
    return order[:rows], torch.searchsorted(key, torch.arange(own, device=key.device), right=True).int()


def prepare(sizes: Sizes, skewed: bool, device: torch.device) -> Part:
    """Random tokens, choices and experts. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    each = sizes.tokens // world
    same = torch.Generator(device).manual_seed(0)  # as all ranks draw by the same weights
    odds = torch.randn(sizes.experts, device=device, generator=same).exp() if skewed else torch.ones(sizes.experts)
    index = torch.multinomial(odds.to(device).expand(each, -1), sizes.choices)
    weight = torch.rand(each, sizes.choices, device=device)
    first, end = Experts(sizes.experts, world).of(rank)
    random = partial(torch.randn, device=device, dtype=torch.bfloat16)
    up = random(end - first, sizes.hidden, sizes.inner) / sizes.hidden**0.5
    down = random(end - first, sizes.inner, sizes.hidden) / sizes.inner**0.5
    every = gathered(index)
    rows = ((every >= first) & (every < end)).sum()
    dist.all_reduce(most := rows.clone(), dist.ReduceOp.MAX)
    order, offsets = sort_rows(every, first, end - first, int(rows))
    return Part(sizes, random(each, sizes.hidden), index, weight, up, down, order, offsets, int(most))


def dispatch(part: Part) -> tuple[Runs, torch.Tensor, torch.Tensor, Route]:
    """Contenders for moe_dispatch_matmul; a sample of a rank's rows, and what they should be; the way ours takes."""
    sizes, first = part.sizes, Experts(part.sizes.experts, dist.get_world_size()).of(dist.get_rank())[0]
    tokens = gathered(part.x)
    rows = tokens[part.order // sizes.choices]
    operands = part.x, part.index, part.up
    options: dict[str, Any] = dict(capacity=part.capacity, experts=sizes.experts, max_tokens=part.x.shape[0])

    def nccl() -> torch.Tensor:
        order, offsets = sort_rows(gathered(part.index), first, part.up.shape[0], part.order.shape[0])
        return F.grouped_mm(gathered(part.x)[order // sizes.choices], part.up, offs=offsets)

    runs: Runs = {
        "tileweave": lambda: tw.moe_dispatch_matmul(*operands, **options)[0],
        "nccl": nccl,
        "matmul": lambda: F.grouped_mm(rows, part.up, offs=part.offsets),
        "own matmul": lambda: tw.grouped_matmul(rows, part.up, part.offsets),
    }
    joined(runs, experts(part.x, gathered(part.index), part.up, sizes.experts, part.order.shape[0]))
    sample, owners = sampled(part)
    truth = torch.stack([rows[r].float() @ part.up[e].float() for r, e in zip(sample, owners, strict=True)])
    return runs, sample, truth, tw.explain("moe_dispatch_matmul", *operands, **options)


def combine(part: Part) -> tuple[Runs, torch.Tensor, torch.Tensor, Route]:
    """Contenders for moe_matmul_combine; a sample of a rank's tokens, and what they should be; the way ours takes."""
    sizes, world = part.sizes, dist.get_world_size()
    options: dict[str, Any] = dict(capacity=part.capacity, experts=sizes.experts, max_tokens=part.x.shape[0])
    _, route = tw.moe_dispatch_matmul(part.x, part.index, part.up, topk_weight=part.weight, **options)
    h = part.x.new_zeros(part.capacity, sizes.inner)
    rows = h[: part.order.shape[0]].normal_()
    source = part.order // part.index.numel()
    to_source, counts = source.argsort(stable=True), source.bincount(minlength=world)
    dist.all_to_all_single(come := torch.empty_like(counts), counts)
    sent, got = counts.tolist(), come.tolist()
    place = part.index.reshape(-1).argsort(stable=True).argsort()  # of each choice among what comes, by expert
    weight = part.weight.bfloat16()[:, None]

    def nccl() -> torch.Tensor:
        y = F.grouped_mm(rows, part.down, offs=part.offsets)[to_source]
        back = y.new_empty(part.index.numel(), sizes.hidden)
        dist.all_to_all_single(back, y, got, sent)
        return torch.bmm(weight, back[place].view(-1, sizes.choices, sizes.hidden))[:, 0]

    runs: Runs = {
        "tileweave": lambda: tw.moe_matmul_combine(h, part.down, route),
        "nccl": nccl,
        "matmul": lambda: F.grouped_mm(rows, part.down, offs=part.offsets),
        "own matmul": lambda: tw.grouped_matmul(rows, part.down, part.offsets),
    }
    sample = torch.linspace(0, part.x.shape[0] - 1, SAMPLE, device=h.device).long()
    return runs, sample, combined(part, rows, sample), tw.explain("moe_matmul_combine", h, part.down, route)


def sampled(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Some of a rank's rows, and the expert of each by its number on this rank."""
    sample = torch.linspace(0, part.order.shape[0] - 1, SAMPLE, device=part.x.device).long()
    return sample, torch.searchsorted(part.offsets, sample.int(), right=True)


def combined(part: Part, rows: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """What the sample of own tokens should be, in float32: each rank adds what its rows make of all ranks' samples."""
    each, choices = part.x.shape[0], part.sizes.choices
    weights = gathered(part.weight).reshape(-1)
    ranks = torch.arange(dist.get_world_size(), device=sample.device)[:, None]
    wanted = (ranks * each + sample).reshape(-1)  # tokens by their number among those of all ranks
    total = torch.zeros(len(wanted), part.sizes.hidden, device=rows.device)
    tokens = part.order // choices
    for i, token in enumerate(wanted.tolist()):
        for row in (tokens == token).nonzero()[:, 0].tolist():
            expert = int((part.offsets <= row).sum())
            total[i] += weights[part.order[row]] * (rows[row].float() @ part.down[expert].float())
    dist.all_reduce(total)
    return total.chunk(dist.get_world_size())[dist.get_rank()]


CONTENDERS: dict[str, Callable[[Part], tuple[Runs, torch.Tensor, torch.Tensor, Route]]] = {
    "moe_dispatch_matmul": dispatch,
    "moe_matmul_combine": combine,
}


def measure(op: str, tokens: int, skewed: bool, rounds: int) -> Row:
    """One row."""
    world = dist.get_world_size()
    part = prepare(Sizes(tokens), skewed, torch.device("cuda", torch.cuda.current_device()))
    runs, sample, truth, route = CONTENDERS[op](part)

    def of_sample(name: str) -> torch.Tensor:
        return runs[name]()[sample]

    samples: Runs = {name: partial(of_sample, name) for name in runs}
    errors = checked(samples, truth, LIMIT)
    found = timed({name: runs[name] for name in samples}, rounds)
    tw.check()
    flop = work(op, dict(tokens=tokens), world).flop
    return {
        "op": op, "world": world, "tokens": tokens, "routing": "skewed" if skewed else "even",
        "shape": label(dict(tokens=tokens, skewed=skewed)),
        "rows": part.order.shape[0], "capacity": part.capacity, "rel_error": errors, **found,
        "tflops_per_gpu": {name: flop / us[0] / 1e6 for name, us in found["us"].items()}, "route": route.to_dict(),
    }  # fmt: skip


def label(shape: Shape) -> str:
    """A shape by name."""
    return f"{shape['tokens']} tokens, {'skewed' if shape['skewed'] else 'even'}"


def work(op: str, shape: Shape, world: int) -> Work:
    """Of one of so many GPUs, if tokens choose evenly: a token goes, or its sum comes, once for each other rank that
    has an expert of it."""
    others = comb(EXPERTS - EXPERTS // world, CHOICES) / comb(EXPERTS, CHOICES)  # that a rank has none
    sent = 2.0 * shape["tokens"] / world * HIDDEN * (world - 1) * (1 - others)
    return Work(2.0 * shape["tokens"] * CHOICES * HIDDEN * INNER / world, sent)


BENCHES = [
    Bench(
        op,
        "several",
        SHAPES,
        partial(measure, op),
        label,
        told,
        partial(work, op),
        quick=(0, 2),
        rounds=7,
        divided=lambda shape: (shape["tokens"],),
    )
    for op in CONTENDERS
]

if __name__ == "__main__":
    main(__doc__, BENCHES)
