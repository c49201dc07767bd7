"""matmul_reduce_scatter: how it is computed, in one kernel or by torch.matmul and the group's reduce-scatter."""

from typing import NamedTuple

import torch

from tileweave.fabric import Channel, Fabric
from tileweave.lang import TensorDescriptor
from tileweave.ops.descriptors import as_operand, describe, parallel_view
from tileweave.ops.matmul_reduce_scatter.check import NAME, Call, usable_sms
from tileweave.ops.matmul_reduce_scatter.kernel import matmul_reduce_scatter_kernel
from tileweave.planner import Plan
from tileweave.planner.plan import GROUP_ROWS, WARPS

VIEWS = 256  # kinds of calls whose slots a channel remembers


class Slots(NamedTuple):
    """Where parts travel to, as the kernel takes it. own: this rank's slots as a pointer; stride: from one to the next
    in elements."""

    desc: TensorDescriptor
    own: torch.Tensor
    stride: int


def unfused(fabric: Fabric, call: Call, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The fallback: the whole product, then the group's reduce-scatter."""
    product = torch.matmul(a.float(), b.float()) if call.out_dtype == torch.float32 else torch.matmul(a, b)
    result = fabric.reduce_scatter(product.to(call.out_dtype).contiguous(), call.op)
    return result if bias is None else result + bias.to(call.out_dtype)


def fused(
    fabric: Fabric, call: Call, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, plan: Plan
) -> torch.Tensor:
    """Launch the kernel on the current stream."""
    world, (bm, bn, bk) = fabric.world_size, plan.tile
    if call.k == 0:  # there is no descriptor of an empty tensor: multiply zeros, so that this rank still takes part
        a, b, = a.new_zeros(call.m, 8), b.new_zeros(8, call.n)  # fmt: skip
    a, a_t = as_operand(a)
    b, b_t = as_operand(b)
    out = torch.empty(call.rows, call.n, dtype=call.out_dtype, device=a.device)
    shard_bytes = call.rows * call.n * out.element_size() if world > 1 else 0
    channel = fabric.channel(
        NAME, 0 if call.deterministic else shard_bytes, world * shard_bytes if call.deterministic else 0
    )
    if world > 1:
        slots = parallel_slots(fabric, call, channel, bm, bn)
    else:  # none are needed: the result stands in for them
        slots = Slots(describe_slots(out[None, None], bm, bn), out, 0)
    args = (
        fabric.rank,
        describe(a, (bk, bm) if a_t else (bm, bk)),
        describe(b, (bn, bk) if b_t else (bk, bn)),
        describe(out, (bm, bn)),
        *slots,
        out if bias is None else bias.contiguous(),
        channel.flags,
        channel.flags.stride(0),
        channel.state,
        channel.timeout_ns // 1000,
        call.rows,
        call.n,
        a.shape[0] if a_t else a.shape[1],
        world,
        bm,
        bn,
        bk,
        plan.stages,
        GROUP_ROWS,
        a_t,
        b_t,
        call.deterministic,
        bias is not None,
        call.op == "avg",
    )
    tiles = -(-call.rows // bm) * -(-call.n // bn) * world
    fabric.launch(matmul_reduce_scatter_kernel, min(usable_sms(fabric.sms, call), tiles), args, num_warps=WARPS)
    return out


def parallel_slots(fabric: Fabric, call: Call, channel: Channel, bm: int, bn: int) -> Slots:
    """The slots of all ranks for this call. Remembered by the channel, as making them takes longer than the launch.

    The distance depends on the arena, not on the shape: call e + 1 may be of another shape while a slow peer is still
    in call e.
    """
    key = (call.deterministic, call.rows, call.n, call.out_dtype, bm, bn)
    found = channel.views.get(key)
    if found is None:
        arena = channel.staging if call.deterministic else channel.adding
        count = 2 * fabric.world_size if call.deterministic else 2
        slots, stride = parallel_view(arena, count, (call.rows, call.n), call.out_dtype)
        if len(channel.views) == VIEWS:
            channel.views.clear()
        found = channel.views[key] = Slots(describe_slots(slots, bm, bn), slots[fabric.rank], stride)
    return found


def describe_slots(slots: torch.Tensor, bm: int, bn: int) -> TensorDescriptor:
    """TMA descriptor of slots `[world, slots, rows, N]`. Out of bounds it reads NaN: what an aborted wait makes a
    result of."""
    return describe(slots, (1, 1, bm, bn), padding="nan")
