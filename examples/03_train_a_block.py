"""Lesson 3: a small Llama-style model, trained with tensor parallelism; its loss is that of one process.

Attention and MLP are split over the ranks: query, key, value, gate and up projections by output features (column), the
projections behind them by input features (row). Between such pairs a rank has all tokens of its heads; outside, in
norms, residuals, embedding and loss, all features of its tokens (sequence parallel).

    python examples/03_train_a_block.py --ranks 2       in this process: virtual ranks on a Hopper GPU, else emulated
    python examples/03_train_a_block.py --emulate 4     in the emulator
    torchrun --nproc-per-node 2 examples/03_train_a_block.py    a process each: on GPUs, else on the CPU with gloo
"""

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import tileweave as tw
from tileweave.nn import column_parallel, parallelize, reduce_gradients

VOCABULARY, HIDDEN, INNER, HEAD, HEADS, KV_HEADS, LAYERS = 64, 64, 128, 8, 8, 4, 1
BATCH, SEQUENCE = 2, 32
TOLERANCE = 0.005  # of bfloat16 matmuls, relative to the loss
PLAN = {
    "layers.*.attention.[qkv]": "column",
    "layers.*.attention.out": "row",
    "layers.*.mlp.gate": "column",
    "layers.*.mlp.up": "column",
    "layers.*.mlp.down": "row",
}


class Attention(nn.Module):
    """Causal attention with rotary positions and fewer key and value heads than query heads."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * HEAD, bias=False)
        self.k = nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False)
        self.v = nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)

    def forward(self, x):
        # One gather for the three of them. -1 stands for this rank's heads.
        q, k, v = (y.unflatten(-1, (-1, HEAD)).transpose(1, 2) for y in column_parallel(x, self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotated(x):
    """x [batch, heads, tokens, HEAD] with rotary positions; all tokens are here."""
    frequencies = 10000 ** (-torch.arange(0, HEAD, 2, device=x.device) / HEAD)
    angles = torch.outer(torch.arange(x.shape[2], device=x.device), frequencies)
    a, b = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INNER, bias=False)
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x):
        gate, up = column_parallel(x, self.gate, self.up)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(HIDDEN), Attention()
        self.norm2, self.mlp = nn.RMSNorm(HIDDEN), MLP()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Next-token logits of this rank's tokens [batch, tokens]."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def train(model, tokens, steps, rank=0, world=1, group=None):
    """Losses of `steps` steps on tokens [BATCH, SEQUENCE + 1], of which rank r has the r-th part of the sequence."""
    inputs, targets = (part.chunk(world, 1)[rank] for part in (tokens[:, :-1], tokens[:, 1:]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits = model(inputs)
        # This rank's share of the mean over all tokens.
        share = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * SEQUENCE)
        share.backward()
        if world > 1:
            reduce_gradients(model)  # of norms, embedding and head; the others are complete
            losses.append(tw.all_reduce(share.detach(), group).item())
        else:
            losses.append(share.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def problem(device):
    """The model and the tokens, the same in every process."""
    torch.manual_seed(0)
    model = Model()
    # A walk with a rule to be learnt: each token is the last one times 5 plus 1, with some noise.
    walk = [torch.randint(VOCABULARY, (BATCH,))]
    for _ in range(SEQUENCE):
        walk.append((walk[-1] * 5 + 1 + torch.randint(2, (BATCH,))) % VOCABULARY)
    return model.to(device), torch.stack(walk, 1).to(device)


def in_one_process(ranks, device, steps):
    """Losses of the parallel model, rank 0's, and of the whole one; `ranks` threads of this process."""
    with tw.virtual_world(ranks, device=device) as world:
        model, tokens = problem(world.device)
        whole = copy.deepcopy(model)

        def rank_program(rank, group):
            mine = parallelize(copy.deepcopy(model), PLAN, group)
            return train(mine, tokens, steps, rank, ranks, group)

        print(f"{ranks} ranks, {world.backend}, on {world.device}")
        return world.run(rank_program)[0], train(whole, tokens, steps)


def in_processes(steps):
    """The same in a process of torchrun, which is one rank; None on all but the first."""
    gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, tokens = problem(device)
    whole = copy.deepcopy(model)
    losses = train(parallelize(model, PLAN), tokens, steps, rank, world)
    dist.barrier()
    dist.destroy_process_group()
    if rank:
        return None
    print(f"{world} processes on {device.type}")
    return losses, train(whole, tokens, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--emulate", type=int, metavar="N", help="N ranks in the emulator")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="N ranks in this process (2)")
    parser.add_argument("--steps", type=int, default=4, help="of training (4)")
    options = parser.parse_args()
    if "RANK" in os.environ and not options.emulate:
        both = in_processes(options.steps)
    elif options.emulate:
        both = in_one_process(options.emulate, "cpu", options.steps)
    else:
        both = in_one_process(options.ranks, "auto", options.steps)
    if both is None:
        return
    print("step   parallel   one process")
    for step, (mine, true) in enumerate(zip(*both, strict=True)):
        print(f"{step:4}   {mine:8.4f}   {true:11.4f}")
        assert abs(mine - true) <= TOLERANCE * true, "the losses differ"
    print(f"the losses agree within {TOLERANCE:.1%}")


if __name__ == "__main__":
    main()
