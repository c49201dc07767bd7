"""ulysses_attention: how it is computed where no fused kernel does it, its gradients, and with a caller's attention."""

from collections.abc import Callable

import torch

from tileweave.fabric import Fabric
from tileweave.ops.collectives.operator import OPERATORS
from tileweave.ops.collectives.operator import run as collective
from tileweave.ops.sequence.contract import dims_of, heads_first, lse_dtype
from tileweave.ops.sequence.local import attend, attend_backward
from tileweave.ops.ulysses_attention.check import NAME, Call

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def unfused(
    fabric: Fabric, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fallback: (out in the layout of q, lse [B, H / world, S] of this rank's heads). Collective."""
    q, k, v = (_to_heads(fabric, call, x) for x in (q, spread(call, k), spread(call, v)))
    q, k, v = (heads_first(x, call.layout) for x in (q, k, v))
    out, lse = attend(q, k, v, call.causal, call.scale)
    return _to_rows(fabric, call, heads_first(out.to(call.dtype), call.layout)), lse


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
    """Gradients of q, k and v: what is known of the rows goes to the heads once more, gradients come back. Those of
    heads that several ranks have are summed, in float32. Collective."""
    given = grad, q, spread(call, k), spread(call, v), out
    grad, q, k, v, out = (heads_first(_to_heads(fabric, call, x), call.layout) for x in given)
    dq, dk, dv = attend_backward(grad, q, k, v, out, lse, call.causal, call.scale)
    shared = lse_dtype(call.dtype) if call.copies > 1 else call.dtype
    grads = zip((dq, dk, dv), (call.dtype, shared, shared), strict=True)
    dq, dk, dv = (_to_rows(fabric, call, heads_first(x.to(dtype), call.layout)) for x, dtype in grads)
    return dq, _gathered(call, dk), _gathered(call, dv)


def with_attention(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, name: str, attention: Callable, scale: float | None
) -> torch.Tensor:
    """The same by a caller's attention, between two all-to-alls of the group of this name. Differentiable."""
    head, row = dims_of(call.layout)
    move = OPERATORS["all_to_all"]
    whole = [move(x, name, head, row) for x in (q, spread(call, k), spread(call, v))]
    out = attention(*whole, causal=call.causal, scale=scale)
    if not isinstance(out, torch.Tensor) or out.shape != whole[0].shape:
        got = list(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise ValueError(f"{NAME}: attention must return a tensor like its q, {list(whole[0].shape)}, got {got}")
    return move(out, name, row, head)


def spread(call: Call, x: torch.Tensor) -> torch.Tensor:
    """k or v with each head as often as there are ranks that need it."""
    return x if call.copies == 1 else x.repeat_interleave(call.copies, dims_of(call.layout)[0])


def _gathered(call: Call, x: torch.Tensor) -> torch.Tensor:
    """The gradient of a k or v whose `spread` has the gradient x."""
    if call.copies == 1:
        return x
    head, _ = dims_of(call.layout)
    return x.unflatten(head, (-1, call.copies)).sum(head + 1).to(call.dtype)


def _to_heads(fabric: Fabric, call: Call, x: torch.Tensor) -> torch.Tensor:
    """All tokens of this rank's share of the heads, from this rank's tokens of all heads."""
    return collective(fabric, "all_to_all", x, *dims_of(call.layout))


def _to_rows(fabric: Fabric, call: Call, x: torch.Tensor) -> torch.Tensor:
    """The inverse of `_to_heads`."""
    return collective(fabric, "all_to_all", x, *reversed(dims_of(call.layout)))
