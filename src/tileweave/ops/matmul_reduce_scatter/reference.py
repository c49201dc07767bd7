"""The float32 truth that every path of matmul_reduce_scatter is compared with, and how far each may be from it."""

import torch


def reference(a, b, op="sum", bias=None, scales=None) -> torch.Tensor:
    """[M, N] float32: the sum ("sum") or mean ("avg") over ranks of a[r] @ b[r], plus bias once.

    scales: for each rank a pair that its product is multiplied with.

    a, b: one operand per rank, `[M, K_r]` and `[K_r, N]`, all on one device. The shards of the ranks are its rows in
    order.
    """
    scales = scales or [(1.0, 1.0)] * len(a)
    total = sum((x.float() @ y.float()) * s * t for x, y, (s, t) in zip(a, b, scales, strict=True))
    if op == "avg":
        total = total / len(a)
    return total if bias is None else total + bias.float()


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the truth; NaN or infinity if `got` has any."""
    if truth.numel() == 0:
        return 0.0
    scale = truth.norm()
    return ((got.float() - truth).norm() / (scale if scale > 0 else 1.0)).item()


def tolerance(dtype: torch.dtype, world: int, deterministic: bool) -> float:
    """Largest acceptable `relative_error` for results of `dtype`.

    One rounding of a bf16 result costs 1.7e-3 in this norm (fp16 2.1e-4, float32 nothing). A deterministic sum rounds
    each peer's part once, so its error stays flat; adding in the message type rounds once more for each peer, which
    grows like the square root of their number. The factor 2 is head room.
    """
    rounding = {torch.bfloat16: 1.7e-3, torch.float16: 2.1e-4, torch.float32: 2e-6}[dtype]
    roundings = 2 if deterministic else max(world, 2)
    return 2 * rounding * roundings**0.5
