"""ring_attention: how it is computed where no fused kernel does it, and its gradients."""

from collections.abc import Iterator

import torch

from tileweave.fabric import Fabric
from tileweave.ops.ring_attention.check import Call, block_of
from tileweave.ops.sequence.contract import heads_first, lse_dtype
from tileweave.ops.sequence.local import attend, attend_backward, merge
from tileweave.ops.sequence.travel import traveller

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def unfused(
    fabric: Fabric, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fallback: (out in the layout of q, lse). Keys and values travel while those at hand are used. Collective."""
    q, keys = heads_first(q, call.layout).contiguous(), _stacked(call, k, v)
    wide = lse_dtype(q.dtype)
    out = torch.zeros_like(q, dtype=wide)
    lse = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)
    for source, (k, v) in traveller(fabric).blocks(keys):
        block = block_of(call, fabric.rank, source)
        if block is not None:
            rows, cols = slice(block.first, None), slice(block.end)
            some = attend(q[:, :, rows], k[:, :, cols], v[:, :, cols], block.diagonal, call.scale)
            merge(out[:, :, rows], lse[:, :, rows], *some)
    return heads_first(out.to(q.dtype), call.layout).contiguous(), lse


def unfused_backward(
    fabric: Fabric,
    call: Call,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> Tensors:
    """Gradients of q, k and v. Keys and values go round once more, and their gradients with them, in float32, until
    they are home. Collective."""
    grad, q, out = (heads_first(x, call.layout).contiguous() for x in (grad, q, out))
    keys, travels = _stacked(call, k, v), traveller(fabric)
    wide = lse_dtype(q.dtype)
    grad_q = torch.zeros_like(q, dtype=wide)

    def parts() -> Iterator[tuple[int, torch.Tensor]]:
        for source, (k, v) in travels.blocks(keys):
            part = torch.zeros_like(keys, dtype=wide)
            block = block_of(call, fabric.rank, source)
            if block is not None:
                rows, cols = slice(block.first, None), slice(block.end)
                dq, dk, dv = attend_backward(
                    grad[:, :, rows], q[:, :, rows], k[:, :, cols], v[:, :, cols], out[:, :, rows], lse[:, :, rows],
                    block.diagonal, call.scale,
                )  # fmt: skip
                grad_q[:, :, rows] += dq
                part[0, :, :, cols], part[1, :, :, cols] = dk, dv
            yield source, part

    grads = (grad_q, *travels.sum_home(parts()))
    dq, dk, dv = (heads_first(x.to(q.dtype), call.layout).contiguous() for x in grads)
    return dq, dk, dv


def _stacked(call: Call, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """k and v as one tensor [2, B, G, T, D], which travels as one message."""
    return torch.stack([heads_first(x, call.layout) for x in (k, v)])
