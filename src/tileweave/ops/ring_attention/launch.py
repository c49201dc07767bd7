"""ring_attention: how it is computed, in one kernel or block by block, and its gradients."""

import math
from collections.abc import Iterator, Sequence

import torch

from tileweave.fabric import Fabric
from tileweave.ops.attention.launch import as_heads
from tileweave.ops.descriptors import Box
from tileweave.ops.ring_attention.check import Call, blocks_at_most, blocks_of, channel_name, held_heads, runs_of
from tileweave.ops.ring_attention.kernel import ring_attention_kernel
from tileweave.ops.sequence.contract import heads_first, lse_dtype
from tileweave.ops.sequence.launch import LOG2_E, Prepared, Tensors
from tileweave.ops.sequence.local import attend, attend_backward, merge
from tileweave.ops.sequence.packed import in_tiles
from tileweave.ops.sequence.placement import pieces
from tileweave.ops.sequence.tensors import in_pieces, place_bytes, slots
from tileweave.ops.sequence.travel import traveller
from tileweave.planner import Plan
from tileweave.planner.attention import ROWS, TWO_BLOCKS, block_heads, query_bufs
from tileweave.tiles.communicator import LAG


def prepare(fabric: Fabric, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> Prepared:
    """Everything of a call but the data; q, k and v as of `as_heads`. Collective when the channel must grow."""
    s, world, (tile, keys, dim) = call.shape, fabric.world_size, plan.tile  # dim may be padded
    parts, consumers = pieces(call.placement), tile // ROWS[plan.core]
    rows, kv_batch_heads = s.rows // parts, s.batch * s.kv_heads
    two_blocks, high = plan.schedule == TWO_BLOCKS, math.ceil(s.kv_rows / keys)
    most = blocks_at_most(world, two_blocks)
    if two_blocks:
        height = held = held_heads(kv_batch_heads, world)
    else:
        height, held = block_heads(kv_batch_heads, most, 2 * high, plan.comm_sms), kv_batch_heads
    shapes = [(held, s.kv_rows, dim)] * 2
    channel = fabric.channel(channel_name(plan), 0, (world - 1) * place_bytes(shapes, call.dtype))
    padded = math.ceil(rows / tile) * tile
    across, group = parts * padded // tile, s.heads // s.kv_heads
    tiles = s.batch * s.heads * across
    computing = min(fabric.sms - plan.comm_sms, tiles)
    together = math.ceil(math.ceil(computing / across) / group)  # as many heads as are worked at anyway
    if two_blocks:  # and all tiles of a block before those of the next one
        together = max(n for n in range(1, min(together, height) + 1) if height % n == 0)
    share = math.ceil(2 * high * height / max(plan.comm_sms, 1))
    tail = (
        channel.flags, channel.flags.stride(0), channel.state, channel.timeout_us, tiles, call.scale * LOG2_E, s.heads,
        s.kv_heads, s.batch * s.heads, group, rows, padded, s.kv_rows, together * group,
        math.ceil(kv_batch_heads / height), height, held, max(share, LAG.value) if two_blocks else share,
        computing * consumers + plan.comm_sms,
        world, call.causal, call.packed, parts, most, consumers, plan.stages, query_bufs(dim), False, plan.comm_sms,
        two_blocks,
    )  # fmt: skip
    query, key = (1, 1, 1, ROWS[plan.core], dim), (1, 1, keys, dim)
    out = as_heads(q.new_empty(heads_first(q, call.layout).shape), call.layout)
    return Prepared(
        ring_attention_kernel,
        channel.op,
        call,
        Box(in_pieces(q, parts), query),
        Box(k, key),
        Box(v, key),
        Box(in_pieces(out, parts), query),
        in_tiles(runs_of(call, world, fabric.rank), rows, padded, q.device) if call.packed else None,
        _slots(slots(channel.staging, 2 * (world - 1), shapes, call.dtype) if world > 1 else [k[None], v[None]], key),
        computing + plan.comm_sms,
        tail,
    )


def _slots(views: Sequence[torch.Tensor], box: tuple[int, ...]) -> tuple:
    """Descriptors of the slots for K, which is NaN beyond its end, as an aborted wait wants it, and for V."""
    k, v = views
    return Box(k, (1, *box), "nan").at(k), Box(v, (1, *box)).at(v)


def unfused(
    fabric: Fabric, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: Sequence[int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fallback: (out in the layout of q, lse). Keys and values travel while those at hand are used. `ends`: the
    values of cu_seqlens. Collective."""
    q, keys = heads_first(q, call.layout).contiguous(), _stacked(call, k, v)
    wide = lse_dtype(q.dtype)
    out = torch.zeros_like(q, dtype=wide)
    lse = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)
    for source, (k, v) in traveller(fabric).blocks(keys):
        for rows, cols, diagonal in blocks_of(call, fabric.world_size, fabric.rank, source, ends):
            some = attend(q[:, :, rows], k[:, :, cols], v[:, :, cols], diagonal, call.scale)
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
    ends: Sequence[int] | None,
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
            for rows, cols, diagonal in blocks_of(call, fabric.world_size, fabric.rank, source, ends):
                dq, dk, dv = attend_backward(
                    grad[:, :, rows], q[:, :, rows], k[:, :, cols], v[:, :, cols], out[:, :, rows], lse[:, :, rows],
                    diagonal, call.scale,
                )  # fmt: skip
                grad_q[:, :, rows] += dq
                part[0, :, :, cols] += dk
                part[1, :, :, cols] += dv
            yield source, part

    grads = (grad_q, *travels.sum_home(parts()))
    dq, dk, dv = (heads_first(x.to(q.dtype), call.layout).contiguous() for x in grads)
    return dq, dk, dv


def _stacked(call: Call, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """k and v as one tensor [2, B, G, T, D], which travels as one message."""
    return torch.stack([heads_first(x, call.layout) for x in (k, v)])
