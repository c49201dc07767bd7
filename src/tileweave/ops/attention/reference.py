"""The float32 truth that attention is compared with, and how far a result may be from it."""

import math

import torch

from tileweave.ops.matmul_reduce_scatter.reference import relative_error

__all__ = ["reference", "relative_error", "tolerance"]


def reference(
    q, k, v, *, causal=False, offset=0, scale=None, positions=None
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out [B, H, S, D], lse [B, H, S]) in float32 of q [B, H, S, D] and k, v [B, H / group, S_kv, D].

    positions: the rows' numbers under a causal mask, where q is a part of a sequence; 0, 1, ... by default.
    """
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    logits = q.float() @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        rows = torch.arange(q.shape[2], device=q.device) if positions is None else positions
        unseen = torch.arange(k.shape[2], device=q.device) > rows[:, None] + offset
        logits = logits.masked_fill(unseen, -math.inf)
    lse = logits.logsumexp(-1) if k.shape[2] else logits.new_full(logits.shape[:-1], -math.inf)
    weights = torch.exp(logits - lse.where(lse > -math.inf, 0.0)[..., None])
    return weights @ v, lse


def tolerance(dtype: torch.dtype) -> float:
    """Largest acceptable `relative_error`: weights and the result are rounded to `dtype`, once each."""
    return {torch.bfloat16: 5e-3, torch.float16: 7e-4}[dtype]
