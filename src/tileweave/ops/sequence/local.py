"""Attention to one block of keys and values by PyTorch's own kernels, and how blocks are put together.

    out, lse = attend(q, k, v, causal, scale)           lse [B, H, S]: the natural log of the sum of the exponentials
    merge(out, lse, more_out, more_lse)                 as if all keys had been there at once
    dq, dk, dv = attend_backward(grad, q, k, v, out, lse, causal, scale)    this block's share, out and lse being merged

q [B, H, S, D], k and v [B, G, T, D], H a multiple of G; with `causal` S = T and row i sees columns up to i. On CUDA
that is the kernel of cuDNN or of flash attention, in the dtype of q; elsewhere, and for what they do not take, plain
math in float32 (float64 of float64). Rows that see nothing have out = 0 and lse = -inf.
"""

from typing import Any

import torch

from tileweave.ops.sequence.contract import lse_dtype

aten = torch.ops.aten
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def kernel_of(q: torch.Tensor, k: torch.Tensor) -> str:
    """What computes a block: "cudnn", "flash" or "math"; q and k have equally many heads."""
    dim = q.shape[3]
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or dim % 8 or dim > 256:
        return "math"
    if torch.cuda.get_device_capability(q.device)[0] < 8:
        return "math"
    # cuDNN is about twice as fast on Hopper; kept to the sizes that all of its releases take.
    hopper = torch.cuda.get_device_capability(q.device)[0] >= 9 and torch.backends.cudnn.is_available()
    return "cudnn" if hopper and dim in (64, 128) and not (q.shape[2] % 128 or k.shape[2] % 128) else "flash"


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> tuple[Any, Any]:
    """(out, lse) of one block; out in the dtype of q, or wider."""
    heads = q.shape[1]
    if 0 in (q.numel(), k.numel()) or kernel_of(q, k) == "math":
        return _math(q, k, v, causal, scale)
    q, k, v = _equal_heads(q, k, v, causal)
    if kernel_of(q, k) == "cudnn":
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    else:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    rows = q.shape[2] * q.shape[1] // heads
    return out.reshape(-1, heads, rows, q.shape[3]), lse.reshape(-1, heads, rows)


def attend_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    causal: bool, scale: float,
) -> Tensors:  # fmt: skip
    """Gradients of q, k and v through one block. All in the dtype of q but lse; out and lse are those of all blocks."""
    if 0 in (q.numel(), k.numel()) or kernel_of(q, k) == "math":
        return _math_backward(grad, q, k, v, out, lse, causal, scale)
    shape, shape_k = q.shape, k.shape
    q, k, v = _equal_heads(q, k, v, causal)
    # in the order [B, H, S, D] of q's memory, as these kernels want all of them
    grad, out = (x.reshape(q.shape).contiguous() for x in (grad, out))
    lse = lse.reshape(q.shape[:3]).contiguous()
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of the dropout that there is not
    if kernel_of(q, k) == "cudnn":
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.unsqueeze(-1), seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
            scale=scale,
        )  # fmt: skip
    else:
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed, scale=scale
        )
    if k.shape != shape_k:
        dk, dv = (x.unflatten(1, (shape_k[1], -1)).sum(2, dtype=torch.float32) for x in (dk, dv))
    return dq.reshape(shape), dk, dv


def merge(out: torch.Tensor, lse: torch.Tensor, more_out: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Take another block into `out` and `lse`, in place: both wide, for a start zeros and -inf."""
    total = torch.logaddexp(lse, more_lse)
    base = total.masked_fill(total.isneginf(), 0.0)
    out.mul_((lse - base).exp_().unsqueeze(-1)).add_(more_out * (more_lse - base).exp_().unsqueeze(-1))
    lse.copy_(total)


def _equal_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Tensors:
    """As many heads of k and v as of q. Where no mask tells the rows apart, the queries of a group are rows of one head
    instead: a view of a contiguous q; otherwise k and v are repeated."""
    groups, each = k.shape[1], q.shape[1] // k.shape[1]
    if each == 1:
        return q, k, v
    if not causal:
        return q.reshape(q.shape[0], groups, each * q.shape[2], q.shape[3]), k, v
    return q, k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    """[B, G, H / G, S, T] in the wide dtype, -inf where a row may not look."""
    wide = lse_dtype(q.dtype)
    scores = q.unflatten(1, (k.shape[1], -1)).to(wide) @ k.unsqueeze(2).to(wide).mT * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill_(later, float("-inf"))
    return scores


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The softmax, given its log-sum-exp; 0 in rows that see nothing."""
    return (scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)).exp_()


def _math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> tuple[Any, Any]:
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    out = _weights(scores, lse) @ v.unsqueeze(2).to(scores.dtype)
    return out.flatten(1, 2), lse.flatten(1, 2)


def _math_backward(grad, q, k, v, out, lse, causal: bool, scale: float) -> Tensors:
    groups = k.shape[1]
    scores = _scores(q, k, causal, scale)
    wide = scores.dtype
    weights = _weights(scores, lse.unflatten(1, (groups, -1)))
    grad, out, q = (x.unflatten(1, (groups, -1)).to(wide) for x in (grad, out, q))
    k, v = (x.unsqueeze(2).to(wide) for x in (k, v))
    of_scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    dk, dv = ((x.mT @ y).sum(2) for x, y in ((of_scores, q), (weights, grad)))
    return (of_scores @ k).flatten(1, 2), dk, dv
