"""The float32 truth that every path of ring_attention and ulysses_attention is compared with."""

import torch


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, H, S, D], lse [B, H, S]) in float32 (float64 of float64) of a whole sequence on one device.

    q [B, H, S, D], k and v [B, G, T, D], H a multiple of G; causal: row i sees columns up to i, and S = T;
    cu_seqlens: rows and columns of one packed sequence see each other only, and S = T. lse is the
    natural log of the sum of the exponentials; a row without columns has out 0 and lse -inf. Differentiable.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    each = q.shape[1] // k.shape[1]
    q, k, v = q.to(wide), k.to(wide).repeat_interleave(each, 1), v.to(wide).repeat_interleave(each, 1)
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    if cu_seqlens is not None:
        tokens = torch.arange(q.shape[2], device=q.device)
        number = torch.searchsorted(cu_seqlens, tokens, right=True)
        scores = scores.masked_fill(number[:, None] != number, float("-inf"))
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)) @ v, lse
