"""The attention core beside cuDNN and FlashAttention-3 on one GPU. `python -m tileweave.bench.attention`

Contenders are CUDA graphs, interleaved, on fresh random bfloat16 inputs. FlashAttention-3 takes part where the wheel
`fa3-fwd` is installed. Errors are those of a sample of rows against float32; a wrong result is no contender.

    --sweep     other tilings of the core beside its default
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tileweave as tw
from tileweave.bench.harness import Bench, Row, Shape, Work, main
from tileweave.bench.matmul import captured, timed
from tileweave.fabric import fabric_of
from tileweave.ops.attention import Tiling, attention, reference, tolerance
from tileweave.ops.attention.reference import relative_error

# batch, heads, heads of k and v, sequence, head dimension
SIZES = [
    (4, 16, 16, 4096, 128),
    (1, 16, 16, 16384, 128),
    (1, 16, 16, 65536, 128),
    (16, 16, 16, 1024, 128),
    (4, 32, 8, 4096, 128),
    (4, 32, 32, 4096, 64),
    (4, 8, 8, 4096, 256),
]
SHAPES = [dict(shape=size, causal=causal) for size in SIZES for causal in (False, True)]
SWEEP = {
    64: [Tiling(2, 128, 8, 2, True), Tiling(2, 64, 16), Tiling(2, 128, 10, 3)],
    128: [
        Tiling(2, 128, 5, 2, True),
        Tiling(2, 128, 4),
        Tiling(2, 128, 6, 1),
        Tiling(2, 64, 10),
        Tiling(2, 64, 10, 2, True),
    ],
    256: [Tiling(2, 32, 10, 1), Tiling(2, 32, 8, 1, True), Tiling(2, 64, 5, 1)],
}
SAMPLE = 64  # rows of each head that are compared with float32
ROUND_US = 1000.0  # of work per contender and round, at least


def key(tiling: Tiling) -> str:
    """A tiling's name in the figures."""
    turns = ", turns" if tiling.take_turns else ""
    return f"{tiling.consumers} x 64 x {tiling.bn}, {tiling.stages} stages, {tiling.q_bufs} queries{turns}"


def contenders(causal: bool, tilings: list[Tiling]) -> dict[str, Callable]:
    """Functions of q, k, v in layout "bhsd", and of the same in "bshd", whose result is in one of the two."""
    fabric = fabric_of(None, "cuda")

    def cudnn(q, k, v, *_: Any):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    runs: dict[str, Callable] = {"core": lambda q, k, v, *_: attention(fabric, q, k, v, causal=causal), "cudnn": cudnn}
    try:
        fa3 = importlib.import_module("fa3_fwd_interface").flash_attn_func
    except ImportError:
        fa3 = None
    if fa3 is not None:

        def flash3(_q: Any, _k: Any, _v: Any, q, k, v):
            out = fa3(q, k, v, causal=causal)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        runs["fa3"] = flash3
    for tiling in tilings:
        runs[key(tiling)] = lambda q, k, v, *_, tiling=tiling: attention(fabric, q, k, v, causal=causal, tiling=tiling)
    return runs


def measure(shape: tuple[int, ...], causal: bool, rounds: int, sweep: bool = False) -> Row:
    """One row: times, rates and errors of all contenders at one shape."""
    batch, heads, kv_heads, rows, dim = shape
    q, k, v = (
        torch.randn(batch, h, rows, dim, device="cuda", dtype=torch.bfloat16) for h in (heads, kv_heads, kv_heads)
    )
    given = (q, k, v, *(x.transpose(1, 2).contiguous() for x in (q, k, v)))
    sample = torch.randperm(rows, device="cuda")[:SAMPLE]
    truths = [
        reference(q[i : i + 1, :, sample], k[i : i + 1], v[i : i + 1], causal=causal, positions=sample)[0]
        for i in range(batch)
    ]
    truth = torch.cat(truths)
    del truths
    runs, errors = contenders(causal, SWEEP[dim] if sweep else []), {}
    for name, run in list(runs.items()):
        try:
            errors[name] = relative_error(run(*given)[:, :, sample], truth)
        except (RuntimeError, ValueError) as error:  # no kernel of cuDNN's or FlashAttention's for this shape
            print(f"  {name} cannot: {str(error).splitlines()[0]}", flush=True)
            del runs[name]
            continue
        assert errors[name] <= 2 * tolerance(torch.bfloat16), (name, shape, causal, errors[name])
    flops = flop(shape, causal)
    calls = max(1, min(16, int(ROUND_US / (flops / 600e6))))
    us = timed({name: captured(run, [given], calls) for name, run in runs.items()}, calls, rounds)
    tw.check()
    return {
        "shape": dict(batch=batch, heads=heads, kv_heads=kv_heads, rows=rows, dim=dim),
        "causal": causal,
        "us": us,
        "tflops_of_attention": {name: flops / each[0] / 1e6 for name, each in us.items()},
        "errors": errors,
    }


def flop(shape: tuple[int, ...], causal: bool) -> float:
    """Operations: two products, of which a causal mask leaves half."""
    batch, heads, _, rows, dim = shape
    return 4 * batch * heads * rows * rows * dim / (2 if causal else 1)


def label(shape: Shape) -> str:
    """A shape by name."""
    return "B{} H{}/{} S{} D{}".format(*shape["shape"]) + (" causal" if shape["causal"] else " full")


def told(row: Row) -> str:
    """A row in a line."""
    rates, core = row["tflops_of_attention"], row["us"]["core"][0]
    figures = "; ".join(f"{each} {rate:.0f} ({core / row['us'][each][0]:.3f})" for each, rate in rates.items())
    return f"TFLOP/s (speed over core's) {figures}"


BENCHES = [
    Bench(
        "attention", "one", SHAPES, measure, label, told, lambda shape, _: Work(flop(**shape)),
        quick=(2, 3), rounds=15,
    )
]  # fmt: skip
MORE = {"--sweep": dict(action="store_true")}

if __name__ == "__main__":
    main(__doc__, BENCHES, MORE)
