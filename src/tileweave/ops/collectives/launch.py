"""The collectives: how they are computed, by the kernel or by the group's own collectives."""

from dataclasses import dataclass, field
from typing import Any

import torch

from tileweave.fabric import Channel, Fabric, Variant
from tileweave.ops.collectives.check import Call
from tileweave.ops.collectives.kernel import collective_kernel
from tileweave.ops.collectives.passes import LINE_BYTES, STEPS, WARPS, Pass, passes
from tileweave.ops.nodes import wide_sum

CHANNEL = "collectives"  # all of them share one channel's memory


@dataclass(slots=True)
class Launch:
    """A pass but for its tensors' data. args: the kernel's arguments after x and out."""

    element: torch.dtype
    args: tuple[Any, ...]
    grid: int
    variant: Variant = field(default_factory=Variant)

    def __call__(self, fabric: Fabric, x: torch.Tensor, out: torch.Tensor) -> None:
        """Launch on the current stream; x and out are contiguous and 16-byte aligned."""
        flat = (t.view(-1).view(self.element) for t in (x, out))
        fabric.launch(
            collective_kernel, self.grid, (fabric.rank, *flat, *self.args), num_warps=WARPS, variant=self.variant
        )


@dataclass(slots=True)
class Prepared:
    """A call but for its tensors' data: what depends on shapes and options alone, made once."""

    call: Call
    launches: tuple[Launch, ...]
    share: int  # elements between two launches

    def launch(self, fabric: Fabric, x: torch.Tensor) -> torch.Tensor:
        """Launch the kernel on the current stream; returns the result."""
        x = as_flat(x)
        if len(self.launches) == 2:
            share = x.new_empty(self.share)
            self.launches[0](fabric, x, share)
            x = share
        out = torch.empty(self.call.out_shape, dtype=self.call.dtype, device=x.device)
        self.launches[-1](fabric, x, out)
        return out


def as_flat(x: torch.Tensor) -> torch.Tensor:
    """`x` as the kernel can address it: contiguous and 16-byte aligned; anything else is copied once."""
    x = x.resolve_conj().resolve_neg().contiguous()
    return x.clone() if x.data_ptr() % LINE_BYTES else x


def prepare(fabric: Fabric, call: Call) -> Prepared:
    """Everything of a call but its tensors' data. Collective when the channel must grow."""
    world = fabric.world_size
    todo = passes(call, world)
    channel = fabric.channel(CHANNEL, 0, max(p.slot_bytes(world) for p in todo))
    share = todo[0].out_units * todo[0].unit_bytes // call.dtype.itemsize
    return Prepared(call, tuple(_prepare_pass(fabric, channel, p) for p in todo), share)


def _prepare_pass(fabric: Fabric, channel: Channel, p: Pass) -> Launch:
    """One launch. The distance of two slots depends on the arena alone: a slow peer may be in an earlier call."""
    arena, world = channel.staging, fabric.world_size
    shares = p.shares(world, fabric.sms)
    args = (
        arena.view(p.element),
        arena.stride(0) // LINE_BYTES,
        arena.shape[1] // 2 // LINE_BYTES,
        p.part_lines,
        channel.flags,
        channel.flags.stride(0),
        channel.state,
        channel.timeout_us,
        p.part,
        p.split_run,
        p.concat_run,
        p.x_units,
        p.out_units,
        shares.block,
        shares.steps,
        world,
        p.split,
        p.reduction is not None,
        p.reduction == "avg",
        p.vec,
        LINE_BYTES // p.element.itemsize,
        shares.tile,
        STEPS,
    )
    return Launch(p.element, args, shares.grid)


def unfused(fabric: Fabric, call: Call, x: torch.Tensor) -> torch.Tensor:
    """The fallback: the group's own collectives, on rows. A sum is that of the group, in its dtype, or, if it is to be
    deterministic, in rank order in float32."""
    world = fabric.world_size
    if world == 1:
        return x.clone(memory_format=torch.contiguous_format)
    if 0 in call.out_shape:
        return x.new_empty(call.out_shape)
    x = x.resolve_conj().resolve_neg()
    if (
        call.reduction == "avg" and not call.deterministic
    ):  # before the sum, which may not overflow if the mean does not
        x = x / world
    if call.reduction is None:
        return _moved(fabric, call, x)
    if call.split is None:
        if call.deterministic:
            return _ordered_sum(fabric.all_gather(x.unsqueeze(0).contiguous()), call)
        return fabric.all_reduce(x.contiguous())
    rows = x.movedim(call.split, 0).contiguous()
    if call.deterministic:
        total = _ordered_sum(fabric.all_to_all(rows).unflatten(0, (world, -1)), call)
    else:
        total = fabric.reduce_scatter(rows)
    return total.movedim(0, call.split).contiguous()


def _moved(fabric: Fabric, call: Call, x: torch.Tensor) -> torch.Tensor:
    """all_gather and all_to_all, as bytes: a group's collectives do not know all dtypes."""
    first = 0 if call.split is None else call.split
    rows = x.movedim(first, 0).contiguous()
    flat = rows.view(rows.shape[0], -1)
    flat = flat.as_strided(flat.shape, (flat.shape[1], 1))  # a dimension of size 1 may have any stride
    as_bytes = flat.view(torch.uint8)
    whole = fabric.all_gather(as_bytes) if call.split is None else fabric.all_to_all(as_bytes)
    assert call.concat is not None
    parts = whole.view(call.dtype).view(fabric.world_size, -1, *rows.shape[1:])
    return torch.cat([part.movedim(0, first) for part in parts], dim=call.concat)


def _ordered_sum(parts: torch.Tensor, call: Call) -> torch.Tensor:
    """Sum or mean over the first dimension, in order, 16-bit floats in float32."""
    return wide_sum(parts, call.reduction == "avg").to(call.dtype)
