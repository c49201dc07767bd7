"""Problems for the kernels of tests/emulator/kernels: run one schedule, return the relative error and the world.

Results are poisoned beforehand, and each rank's host declares that it reads its own when its kernel has ended.
"""

import importlib.util
import math
from pathlib import Path

import torch

from tileweave import lang as gl
from tileweave.emulator import EmulatorError, World

KERNELS = Path(__file__).parent / "kernels"
D = gl.TensorDescriptor.from_tensor


def load(path: Path, name: str):
    """A kernel file as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mutant(tmp_path: Path, file: str | Path, edits):
    """A kernel file, here or at an absolute path, with edits (old, new), each of which must match exactly once."""
    source = KERNELS / file
    text = source.read_text()
    for old, new in edits:
        assert text.count(old) == 1, f"{text.count(old)} matches in {file} of {old!r}"
        text = text.replace(old, new)
    path = tmp_path / source.name
    path.write_text(text)
    return load(path, f"mutant_{path.stem}")


def outcome(run, module, seed, **options) -> tuple[str, str]:
    """What a run ends with: Race, Deadlock, Protocol, clean or WRONG (a result beyond tolerance), and its text."""
    try:
        error, _ = run(module, seed, **options)
    except EmulatorError as found:
        return type(found).__name__.removesuffix("Error"), str(found)
    return ("clean" if error < 1e-2 else "WRONG"), f"error {error:.1e}"


def randn(*shape, seed):
    """Normal bf16 numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def relative_error(got, reference) -> float:
    """Frobenius norm of the difference over that of the reference; NaN counts as wrong."""
    error = ((got.float() - reference).norm() / reference.norm()).item()
    return math.inf if math.isnan(error) else error


def poisoned(*shape):
    """bf16 NaN."""
    return torch.full(shape, float("nan"), dtype=torch.bfloat16)


def layout(rank=2):
    """A layout for TMA and wgmma."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def run_matmul(m, seed, kernel="matmul", M=512, N=512, K=256, BM=128, BN=128, BK=64, S=3, G=4, grid=3, **world):
    """One rank's matmul."""
    a, b, c = randn(M, K, seed=1), randn(N, K, seed=2), poisoned(M, N)
    w = World(1, seed, **world)

    def fn(rank):
        descs = D(a, [BM, BK], layout()), D(b, [BN, BK], layout()), D(c, [BM, BN], layout())
        w.launch(getattr(m, kernel), (grid,), *descs, M, N, K, BM, BN, BK, S, G, num_warps=4)
        w.touch(c, "read")

    w.run(fn)
    return relative_error(c, a.float() @ b.float().T), w


def run_reduce_scatter(
    m, seed, W=2, M=512, N=512, K=256, BM=128, BN=256, BK=64, S=3, G=8, grid=2, mode=0, zero="host", **world
):
    """matmul + reduce-scatter; zero="rank": each rank zeroes its own result, which nothing orders with the adds."""
    a = [randn(M, K, seed=r) for r in range(W)]
    b = [randn(N, K, seed=100 + r) for r in range(W)]
    outs = torch.zeros(W, M // W, N, dtype=torch.bfloat16)
    counters = torch.zeros(W, 64, dtype=torch.int32)
    w = World(W, seed, **world)

    def fn(rank):
        if zero == "rank":
            w.touch(outs[rank], "write")
        w.launch(
            m.matmul_reduce_scatter, (grid,), rank, D(a[rank], [BM, BK], layout()), D(b[rank], [BN, BK], layout()),
            D(outs, [1, BM, BN], layout(3)), counters, M, N, K, W, BM, BN, BK, S, G, mode, num_warps=8,
        )  # fmt: skip
        w.touch(outs[rank], "read")
        return outs[rank].clone()

    got = torch.cat(w.run(fn))
    return relative_error(got, sum(x.float() @ y.float().T for x, y in zip(a, b, strict=True))), w


def run_all_gather(
    m, seed, W=2, M=512, N=512, K=256, BM=128, BN=128, BK=64, S=3, G=4, grid=4, ncomm=1, KSPLIT=2, calls=1, **world
):
    """all-gather + matmul, `calls` times without anything between the calls."""
    rows, cols = M // W, N // W
    a = [randn(rows, K, seed=r) for r in range(W)]
    b = [randn(cols, K, seed=50 + r) for r in range(W)]
    gathered, flags = poisoned(W, M, K), torch.zeros(W, 1024, dtype=torch.int32)
    c = [poisoned(M, cols) for _ in range(W)]
    w = World(W, seed, **world)

    def fn(r):
        descs = (
            D(a[r], [BM, BK], layout()), D(gathered, [1, BM, BK], layout(3)), D(b[r], [BN, BK], layout()),
            D(c[r], [BM, BN], layout()),
        )  # fmt: skip
        for call in range(1, calls + 1):
            w.launch(
                m.all_gather_matmul, (grid,), r, *descs, flags, 1024, KSPLIT * call, rows // BM, cols, K, ncomm, W,
                KSPLIT, BM, BN, BK, S, G, num_warps=8,
            )  # fmt: skip
            w.touch(c[r], "read")

    w.run(fn)
    full = torch.cat(a).float()
    return max(relative_error(c[r], full @ b[r].float().T) for r in range(W)), w


def run_attention(m, seed, B=1, H=2, S=512, HEAD=128, BM=64, BN=64, ST=2, **world):
    """Attention forward."""
    q, k, v = (randn(B, H, S, HEAD, seed=i) for i in range(3))
    o = torch.full_like(q, float("nan"))
    w = World(1, seed, **world)

    def desc(t, rows):
        return D(t.view(B * H * S, HEAD), [rows, HEAD], layout())

    def fn(rank):
        args = desc(q, BM), desc(k, BN), desc(v, BN), desc(o, BM), S, math.log2(math.e) / math.sqrt(HEAD)
        w.launch(m.attention, (S // (2 * BM), B * H), *args, BM, BN, HEAD, ST, num_warps=4)
        w.touch(o, "read")

    w.run(fn)
    return relative_error(o, torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())), w


def run_ring_copy(m, seed, rows=512, BR=64, BC=64, S=3, grid=2, **world):
    """Copy through a ring of buffers."""
    src, dst = randn(2, rows, BC, seed=1), poisoned(2, rows, BC)
    w = World(1, seed, **world)

    def fn(rank):
        descs = D(src, [1, BR, BC], layout(3)), D(dst, [1, BR, BC], layout(3))
        w.launch(m.ring_copy, (grid,), *descs, 1, 0, rows, BR, BC, S, num_warps=1)
        w.touch(dst[1], "read")

    w.run(fn)
    return relative_error(dst[1], src[0].float()), w


def run_put(m, seed, kernel="put_tma", W=2, last=(2, 1), **world):
    """All ranks put a tile into everybody's box; `last` are the kernel's last two arguments."""
    shards = [randn(1, 64, 64, seed=r) for r in range(W)]
    box, outs = poisoned(W * W, 64, 64), [poisoned(W, 64, 64) for _ in range(W)]
    flags = torch.zeros(W, 64, dtype=torch.int32)
    w = World(W, seed, **world)

    def fn(r):
        tensors = shards[r], box, outs[r]
        if kernel == "put_tma":
            args = (*(D(t, [1, 64, 64], layout(3)) for t in tensors), flags, 64)
        else:
            args = (*tensors, flags)
        w.launch(getattr(m, kernel), (1,), r, W, *args, *last)
        w.touch(outs[r], "read")

    w.run(fn)
    return max(relative_error(o, torch.cat(shards).float()) for o in outs), w
