"""ring_attention and ulysses_attention between GPUs, beside their rivals. One process per GPU:

    python -m torch.distributed.run --nproc-per-node 2 -m tileweave.bench.between_sequence

Contenders, timed as in `bench.between`:

    tileweave       the op
    nccl            ring: an all-gather of k and v, then PyTorch's attention, by cuDNN or flash attention. Ulysses:
                    all-to-alls of q, k and v, PyTorch's attention, an all-to-all of the result
    torch, gather   PyTorch's own ring (torch.distributed.tensor.experimental.context_parallel) in its two ways,
    torch, rotate   cuDNN's kernel for each block. There is no Ulysses of PyTorch's
    yunchang, xdit  those libraries' ring or Ulysses attention, where they are installed (`bench.adapters`)
    attention       that of `nccl` with all data there before: what the transfer would cost nothing beside

Each is checked first: samples of two heads of each rank against float32. bfloat16, head dimension 128.
"""

from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _cp_options, set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel

import tileweave as tw
from tileweave.bench.adapters import attentions, joined
from tileweave.bench.attention_case import DIM, SAMPLE, Case
from tileweave.bench.between import CALLS, Runs, checked, timed, told
from tileweave.bench.harness import Bench, Row, main
from tileweave.ops.attention import reference, tolerance
from tileweave.ops.route import Route
from tileweave.ops.sequence.local import attend, merge
from tileweave.ops.sequence.placement import place_sequence

CASES = [
    Case(op, batch, heads, rows, causal)
    for op, batch, heads, causal in (
        ("ring_attention", 16, 16, False),
        ("ring_attention", 16, 16, True),
        ("ulysses_attention", 1, 128, True),
    )
    # 768 * 2**i for each rank, as in figures 15 and 16 of arXiv 2511.13940, whose ranks are eight.
    for rows in (3072, 12288, 49152, 6144, 24576, 98304, 196608, 393216)
]
LONG = 20e-3 * 600e12  # operations of a GPU from which on a call is so long that one is enough


def by_pieces(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: list[int]) -> torch.Tensor:
    """Causal attention of zigzag rows to all keys, which lie in order: each piece sees itself and what is before."""
    size, outs = q.shape[2] // len(pieces), []
    for piece, own in zip(pieces, q.chunk(len(pieces), 2), strict=True):
        start, end = piece * size, (piece + 1) * size
        out, lse = attend(own, k[:, :, start:end], v[:, :, start:end], True, DIM**-0.5)
        if start:
            out = out.float()
            merge(out, lse, *attend(own, k[:, :, :start], v[:, :, :start], False, DIM**-0.5))
        outs.append(out.to(q.dtype))
    return torch.cat(outs, 2)


def gathered(x: torch.Tensor, placement: str) -> torch.Tensor:
    """The whole sequence in order [B, H, S, D], of all ranks' rows x [B, H, S / world, D]."""
    world = dist.get_world_size()
    whole = x.new_empty(world * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(whole, x)
    return tw.unplace_sequence(whole.chunk(world), 2, placement)


def exchanged(x: torch.Tensor, to_heads: bool) -> torch.Tensor:
    """All rows of a share of the heads, of own rows of all heads; or the way back. [B, heads, rows, D]."""
    parts = torch.stack(x.chunk(dist.get_world_size(), 1 if to_heads else 2))
    come = torch.empty_like(parts)
    dist.all_to_all_single(come, parts)
    return torch.cat(come.unbind(), 2 if to_heads else 1)


def ring(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, later: ExitStack) -> tuple[Runs, Route]:
    """Contenders, of the whole q, k and v, and the way that ours takes; `later` will end what PyTorch's ring needs."""
    rank, world = dist.get_rank(), dist.get_world_size()
    q, k_own, v_own = (place_sequence(x, world, rank, 2, case.placement).contiguous() for x in (q, k, v))

    def attention(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if case.causal:
            return by_pieces(q, k, v, [rank, 2 * world - 1 - rank])
        return attend(q, k, v, False, DIM**-0.5)[0]

    def torch_ring(method: str) -> torch.Tensor:
        set_rotate_method(method)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k_own, v_own, is_causal=case.causal)

    _cp_options.enable_load_balance = case.causal  # its way of doing so is the zigzag order
    unused = q.new_zeros(2 * world)
    mesh = init_device_mesh(q.device.type, (world,))
    later.enter_context(context_parallel(mesh, buffers=[unused], buffer_seq_dims=[0]))
    options: dict[str, Any] = dict(causal=case.causal, placement=case.placement)
    runs: Runs = {
        "tileweave": lambda: tw.ring_attention(q, k_own, v_own, **options),
        "nccl": lambda: attention(gathered(k_own, case.placement), gathered(v_own, case.placement)),
        "torch, gather": lambda: torch_ring("allgather"),
        "torch, rotate": lambda: torch_ring("alltoall"),
        "attention": lambda: attention(k, v),
    }
    return joined(runs, attentions(case, q, k_own, v_own)), tw.explain("ring_attention", q, k_own, v_own, **options)


def ulysses(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: ExitStack) -> tuple[Runs, Route]:
    """Contenders, of the whole q, k and v, and the way that ours takes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = tuple(place_sequence(x, world, rank, 2).contiguous() for x in (q, k, v))
    q, k, v = (x.chunk(world, 1)[rank].contiguous() for x in (q, k, v))  # all rows of its heads

    def nccl() -> torch.Tensor:
        q, k, v = (exchanged(x, True) for x in own)
        return exchanged(attend(q, k, v, case.causal, DIM**-0.5)[0], False)

    runs: Runs = {
        "tileweave": lambda: tw.ulysses_attention(*own, causal=case.causal),
        "nccl": nccl,
        "attention": lambda: attend(q, k, v, case.causal, DIM**-0.5)[0],
    }
    return joined(runs, attentions(case, *own)), tw.explain("ulysses_attention", *own, causal=case.causal)


CONTENDERS = {"ring_attention": ring, "ulysses_attention": ulysses}


def bytes_needed(case: Case) -> int:
    """Of GPU memory, about: the whole q, k and v; k and v once more as they come, and in order; shards and results."""
    return 2 * case.batch * case.heads * case.rows * DIM * (3 + 2 + 2 + 1)


def divided(case: Case) -> tuple[int, ...]:
    """Sizes that the GPUs share; of a zigzag sequence each has two pieces."""
    if case.op == "ulysses_attention":
        return case.rows, case.heads
    return (case.rows // (2 if case.placement == "zigzag" else 1),)


def measure(case: Case, rounds: int) -> Row:
    """One row."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), torch.device("cuda", torch.cuda.current_device())
    drawn = torch.Generator(device).manual_seed(case.rows)  # the same whole on every rank
    sizes = case.batch, case.heads, case.rows, DIM
    q, k, v = (torch.randn(sizes, device=device, dtype=torch.bfloat16, generator=drawn) for _ in range(3))
    places = place_sequence(torch.arange(case.rows, device=device), world, rank, 0, case.placement)
    sample = torch.randperm(len(places), device=device)[:SAMPLE]
    some = torch.tensor([0, case.heads - 1], device=device)
    picked = q[-1:, some][:, :, places[sample]], k[-1:, some], v[-1:, some]
    truth, _ = reference(*picked, causal=case.causal, positions=places[sample])
    with ExitStack() as ended:
        runs, route = CONTENDERS[case.op](case, q, k, v, ended)

        def of_sample(name: str) -> torch.Tensor:
            return runs[name]()[-1:, some][:, :, sample]

        samples: Runs = {name: partial(of_sample, name) for name in runs}
        errors = checked(samples, truth, 2 * tolerance(torch.bfloat16))
        calls = 1 if case.flop / world > LONG else CALLS
        found = timed({name: runs[name] for name in samples}, rounds, calls)
    tw.check()
    rates = {name: case.flop / world / us[0] / 1e6 for name, us in found["us"].items()}
    return {
        **asdict(case), "shape": case.shape, "world": world, "rel_error": errors, **found, "tflops_per_gpu": rates,
        "route": route.to_dict(),
    }  # fmt: skip


BENCHES = [
    Bench(
        op, "several", [dict(case=case) for case in CASES if case.op == op], measure,
        lambda shape: shape["case"].shape, told, lambda shape, world: shape["case"].work(world),
        quick=(1,), needs=lambda shape: bytes_needed(shape["case"]),
        divided=lambda shape: divided(shape["case"]),
    )
    for op in CONTENDERS
]  # fmt: skip

if __name__ == "__main__":
    main(__doc__, BENCHES)
