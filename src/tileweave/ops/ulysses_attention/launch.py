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
from tileweave.ops.sequence.travel import mover
from tileweave.ops.ulysses_attention.check import NAME, Call, blocks_at_most
from tileweave.ops.ulysses_attention.kernel import ulysses_attention_kernel
from tileweave.planner import Plan
from tileweave.planner.attention import ROWS, block_heads, query_bufs

PARTS = (4, 3, 2, 1)  # that the heads of a rank come in for the backward pass: the first number that divides them


def prepare(fabric: Fabric, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> Prepared:
    """Everything of a call but the data; q, k and v as of `as_heads`. Collective when the channel must grow."""
    s, world, (tile, keys, dim) = call.shape, fabric.world_size, plan.tile  # dim may be padded
    of_consumer = ROWS[plan.core]
    consumers, most = tile // of_consumer, blocks_at_most(world)
    heads, kv_heads = s.heads // world, max(s.kv_heads // world, 1)
    group, kv_batch_heads = heads // kv_heads, s.batch * kv_heads
    shapes = [(s.batch * heads, s.rows, dim)] * 2 + [(kv_batch_heads, s.kv_rows, dim)] * 2
    channel = fabric.channel(NAME, 0, world * place_bytes(shapes, call.dtype) if world > 1 else 0)
    padded = math.ceil(s.rows / tile) * tile
    of_a_head = group * padded // of_consumer + 2 * math.ceil(s.kv_rows / keys)
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
    query, key = (1, 1, of_consumer, dim), (1, 1, keys, dim)
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
    heads that several ranks have are summed, in float32. Where transfers go on by themselves, heads come in several
    parts, each while the one before it is worked at. Collective."""
    move, parts = mover(fabric), 1
    if move.overlaps:
        parts = next(n for n in PARTS if max(call.shape.kv_heads // call.world, 1) % n == 0)
    known, keys = (
        [heads_first(x, call.layout).unflatten(1, (call.world, parts, -1)) for x in some]
        for some in ((grad, q, out), (spread(call, k), spread(call, v)))
    )

    def sent(part: int) -> list[Callable[[], torch.Tensor]]:
        return [move(torch.cat([x[:, :, part] for x in xs], 2).flatten(1, 2), 1, 2) for xs in (known, keys)]

    arriving, home = sent(0), []
    for part, sums in enumerate(lse.chunk(parts, 1)):
        here, arriving = arriving, sent(part + 1) if part + 1 < parts else []
        (grad, q, out), (k, v) = (
            [x.contiguous() for x in come().chunk(n, 1)] for come, n in zip(here, (3, 2), strict=True)
        )
        dq, *of_keys = _attend_backward(call, grad, q, k, v, out, sums, ends)
        home.append([move(x, 2, 1) for x in (dq, torch.cat(of_keys, 1))])
    dq, dk_dv = (
        torch.stack([come().unflatten(1, (call.world, -1)) for come in comes], 2) for comes in zip(*home, strict=True)
    )
    dk, dv = (_gathered(call, x.flatten(1, 3)) for x in dk_dv.chunk(2, 3))
    dq, dk, dv = (heads_first(x, call.layout).contiguous() for x in (dq.flatten(1, 3), dk, dv))
    return dq, dk, dv


def _attend_backward(call: Call, grad, q, k, v, out, lse, ends: Sequence[int] | None) -> Tensors:
    """`attend_backward` for some of this rank's heads: those of k and v in the dtype that they are summed in."""
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
    return dq.to(call.dtype), dk.to(shared), dv.to(shared)


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
    """The gradient of a k or v, heads first, whose `spread` has the gradient x."""
    return x if call.copies == 1 else x.unflatten(1, (-1, call.copies)).sum(2).to(call.dtype)


def _to_heads(fabric: Fabric, call: Call, x: torch.Tensor) -> torch.Tensor:
    """All tokens of this rank's share of the heads, from this rank's tokens of all heads."""
    return collective(fabric, "all_to_all", x, *dims_of(call.layout))


def _to_rows(fabric: Fabric, call: Call, x: torch.Tensor) -> torch.Tensor:
    """The inverse of `_to_heads`."""
    return collective(fabric, "all_to_all", x, *reversed(dims_of(call.layout)))
