"""ulysses_attention: how it is computed, in one kernel or between all-to-alls, its gradients, a caller's attention."""

import math
from collections.abc import Callable, Sequence

import torch

from tileweave.fabric import Fabric
from tileweave.ops.attention.launch import as_heads
from tileweave.ops.collectives.operator import OPERATORS
from tileweave.ops.collectives.operator import run as collective
from tileweave.ops.descriptors import Box
from tileweave.ops.sequence.contract import dims_of, heads_first, lse_dtype
from tileweave.ops.sequence.launch import LOG2_E, Prepared, Tensors
from tileweave.ops.sequence.local import attend, attend_backward
from tileweave.ops.sequence.packed import blocks_between, in_tiles
from tileweave.ops.sequence.tensors import place_bytes, slots
from tileweave.ops.ulysses_attention.check import NAME, Call, blocks_at_most
from tileweave.ops.ulysses_attention.kernel import ulysses_attention_kernel
from tileweave.planner import Plan
from tileweave.planner.attention import ROWS, block_heads, query_bufs


def prepare(fabric: Fabric, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> Prepared:
    """Everything of a call but the data; q, k and v as of `as_heads`. Collective when the channel must grow."""
    s, world, (tile, keys, dim) = call.shape, fabric.world_size, plan.tile  # dim may be padded
    consumers, most = tile // ROWS, blocks_at_most(world)
    heads, kv_heads = s.heads // world, max(s.kv_heads // world, 1)
    group, kv_batch_heads = heads // kv_heads, s.batch * kv_heads
    shapes = [(s.batch * heads, s.rows, dim)] * 2 + [(kv_batch_heads, s.kv_rows, dim)] * 2
    channel = fabric.channel(NAME, 0, world * place_bytes(shapes, call.dtype) if world > 1 else 0)
    padded = math.ceil(s.rows / tile) * tile
    of_a_head = group * padded // ROWS + 2 * math.ceil(s.kv_rows / keys)
    height = block_heads(kv_batch_heads, most, of_a_head, plan.comm_sms)
    across = world * padded // tile
    tiles = s.batch * heads * across
    computing = min(fabric.sms - plan.comm_sms, tiles)
    together = math.ceil(math.ceil(computing / across) / group) * group  # as many heads as are worked at anyway
    tail = (
        channel.flags, channel.flags.stride(0), channel.state, channel.timeout_us, tiles, call.scale * LOG2_E, heads,
        kv_heads, s.kv_heads, s.batch, group, s.rows, padded, s.kv_rows, together,
        math.ceil(kv_batch_heads / height), height, math.ceil(of_a_head * height / max(plan.comm_sms, 1)),
        computing * consumers + plan.comm_sms,
        world, call.causal, call.packed, most, consumers, plan.stages, query_bufs(dim), False, plan.comm_sms,
    )  # fmt: skip
    query, key = (1, 1, ROWS, dim), (1, 1, keys, dim)
    out = as_heads(q.new_empty(heads_first(q, call.layout).shape), call.layout)
    views = slots(channel.staging, 2 * world, shapes, call.dtype) if world > 1 else [x[None] for x in (q, q, k, v)]
    q_slots, out_slots, k_slots, v_slots = (
        Box(view, (1, *box), padding).at(view)
        for view, box, padding in zip(views, (query, query, key, key), ("zero", "nan", "nan", "zero"), strict=True)
    )
    return Prepared(
        ulysses_attention_kernel,
        channel.op,
        call,
        Box(q, query),
        Box(k, key),
        Box(v, key),
        Box(out, query),
        in_tiles([source * s.rows for source in range(world)], s.rows, padded, q.device) if call.packed else None,
        (q_slots, k_slots, v_slots, out_slots),
        computing + plan.comm_sms,
        tail,
    )


def unfused(
    fabric: Fabric, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: Sequence[int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fallback: (out in the layout of q, lse [B, H / world, S] of this rank's heads). `ends`: the values of
    cu_seqlens. Collective."""
    q, k, v = (_to_heads(fabric, call, x) for x in (q, spread(call, k), spread(call, v)))
    q, k, v = (heads_first(x, call.layout) for x in (q, k, v))
    if ends is None:
        out, lse = attend(q, k, v, call.causal, call.scale)
    else:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype))
        for rows, cols, diagonal in blocks_between(ends, 0, 0, q.shape[2], call.causal):
            some = attend(q[:, :, rows], k[:, :, cols], v[:, :, cols], diagonal, call.scale)
            out[:, :, rows], lse[:, :, rows] = some
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
    ends: Sequence[int] | None,
) -> Tensors:
    """Gradients of q, k and v: what is known of the rows goes to the heads once more, gradients come back. Those of
    heads that several ranks have are summed, in float32. Collective."""
    given = grad, q, spread(call, k), spread(call, v), out
    grad, q, k, v, out = (heads_first(_to_heads(fabric, call, x), call.layout) for x in given)
    shared = lse_dtype(call.dtype) if call.copies > 1 else call.dtype
    if ends is None:
        dq, dk, dv = attend_backward(grad, q, k, v, out, lse, call.causal, call.scale)
    else:
        dq, dk, dv = torch.empty_like(q), *(torch.empty_like(x, dtype=shared) for x in (k, v))
        for rows, cols, diagonal in blocks_between(ends, 0, 0, q.shape[2], call.causal):
            dq[:, :, rows], dk[:, :, cols], dv[:, :, cols] = attend_backward(
                grad[:, :, rows], q[:, :, rows], k[:, :, cols], v[:, :, cols], out[:, :, rows], lse[:, :, rows],
                diagonal, call.scale,
            )  # fmt: skip
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
