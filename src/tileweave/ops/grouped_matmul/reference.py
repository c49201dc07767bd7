"""The truth that grouped_matmul is compared with."""

import torch


def reference(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """[T, I] float32: rows offsets[e - 1] to offsets[e] of x times w[e]; zeros in rows beyond the last offset.

    tolerance: as that of matmul_reduce_scatter in a world of one."""
    out = torch.zeros(x.shape[0], w.shape[2], dtype=torch.float32, device=x.device)
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        out[start:end] = x[start:end].float() @ w[expert].float()
        start = end
    return out
