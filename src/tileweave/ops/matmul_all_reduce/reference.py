"""The float32 truth that every path of matmul_all_reduce is compared with, and how far each may be from it."""

import torch

from tileweave.ops.matmul_reduce_scatter.reference import relative_error
from tileweave.ops.matmul_reduce_scatter.reference import tolerance as reduce_scatter_tolerance

__all__ = ["reference", "relative_error", "tolerance"]


def reference(a, b, bias=None, residual=None, norm_weight=None, norm_eps=1e-6):
    """float32 [M, N]: the sum over ranks of a[r] @ b[r], plus bias, plus residual.

    With `norm_weight` [N] a pair: that sum's root-mean-square norm over rows times the weight, and the sum. a, b: one
    operand per rank, `[M, K_r]` and `[K_r, N]`, all on one device.
    """
    total = sum(x.float() @ y.float() for x, y in zip(a, b, strict=True))
    for extra in (bias, residual):
        if extra is not None:
            total = total + extra.float()
    if norm_weight is None:
        return total
    return torch.nn.functional.rms_norm(total, total.shape[-1:], norm_weight.float(), norm_eps), total


def tolerance(dtype: torch.dtype, world: int) -> float:
    """Largest acceptable `relative_error` for results of `dtype`: of parts that are rounded once each, of their
    rounded sum, and of a norm of that."""
    return 1.5 * reduce_scatter_tolerance(dtype, world, False)
