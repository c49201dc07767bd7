"""moe_dispatch_matmul in one kernel: its host side."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tileweave.fabric import Fabric, Variant
from tileweave.fabric.base import FLAGS
from tileweave.ops.descriptors import describe, in_one_piece, parallel_view, slots_box
from tileweave.ops.grouped_matmul import grouped_matmul
from tileweave.ops.grouped_matmul.kernel import grouped_tiles_kernel
from tileweave.ops.grouped_matmul.launch import as_matrices
from tileweave.ops.moe.check import NAME
from tileweave.ops.moe.kernel import BLOCK_ROWS, STEPS, moe_dispatch_matmul_kernel
from tileweave.ops.moe.routing import FAR, Sends, TokenRoute
from tileweave.ops.moe.unfused import dispatch
from tileweave.planner import Plan
from tileweave.planner.moe import most_row_tiles, placers_of
from tileweave.planner.tiling import GROUP_ROWS, PART_BYTES, WARPS, part_buffers, part_rows
from tileweave.tiles.grouped import ENTRY


class Lists(NamedTuple):
    """What travels, as the kernel reads it; fields as those of its Travel."""

    send_token: torch.Tensor
    send_place: torch.Tensor
    sent: torch.Tensor
    row_slot: torch.Tensor
    from_row: torch.Tensor


def lists_of(route: TokenRoute, sends: Sends, align: int) -> Lists:
    """The lists of a route, for experts whose rows begin at multiples of `align`."""
    world = sends.first.shape[1]
    order = sends.first.argsort(dim=0, stable=True)
    place = sends.first.gather(0, order)
    count = world * route.slots
    slot = torch.where(route.row_slot >= 0, route.row_slot, count).long()
    rows = torch.arange(slot.shape[0], device=slot.device)
    first = torch.full((count + 1,), FAR, dtype=torch.long, device=slot.device).scatter_reduce_(0, slot, rows, "amin")
    lists = order.t(), place.t(), (sends.first < FAR).sum(0), route.row_slot, aligned(first[slot], route.offsets, align)
    return Lists(*(as_words(each) for each in lists))


def aligned(rows: torch.Tensor, offsets: torch.Tensor, align: int) -> torch.Tensor:
    """Where rows lie if each expert's begin at a multiple of `align`."""
    sizes = offsets.long().diff(prepend=offsets.new_zeros(1).long())
    padded = (sizes + align - 1) // align * align
    apart = (padded.cumsum(0) - padded) - (sizes.cumsum(0) - sizes)
    expert = torch.bucketize(rows, offsets.long(), right=True).clamp(max=offsets.shape[0] - 1)
    return rows + apart[expert]


class _Products(torch.autograd.Function):
    """The kernel with gradients: rows are not kept but sent once more in the backward pass."""

    @staticmethod
    def forward(ctx, fabric, name, route, sends, most_experts, plan, x, *matrices):
        """Keep x and the matrices; launch."""
        ctx.name, ctx.route = name, route
        ctx.save_for_backward(x, *matrices)
        return tuple(fused(fabric, x, matrices, route, sends, most_experts, plan))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        """Gradients of x and the matrices. Collective."""
        x, *matrices = ctx.saved_tensors
        offsets = ctx.route.offsets
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            rows = dispatch(again, ctx.route, ctx.name)
        grads = [grad.contiguous() for grad in grads]
        pairs = zip(grads, matrices, strict=True)
        grad_rows = sum(grouped_matmul(grad, w.transpose(1, 2), offsets) for grad, w in pairs)
        (grad_x,) = torch.autograd.grad(rows, again, grad_rows)
        outer = torch.ops.tileweave.grouped_outer.default
        return None, None, None, None, None, None, grad_x, *(outer(rows.detach(), grad, offsets) for grad in grads)


def products(
    fabric: Fabric,
    name: str,
    x: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    route: TokenRoute,
    sends: Sends,
    most_experts: int,
    plan: Plan,
) -> tuple[torch.Tensor, ...]:
    """`fused`, with gradients where they are asked for."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in (x, *matrices)):
        return _Products.apply(fabric, name, route, sends, most_experts, plan, x, *matrices)
    return tuple(fused(fabric, x, matrices, route, sends, most_experts, plan))


def as_words(x: torch.Tensor) -> torch.Tensor:
    """`x` as contiguous int32, of which there is one element at least."""
    return x.to(torch.int32).contiguous() if x.numel() else x.new_zeros(1, dtype=torch.int32)


def fused(
    fabric: Fabric,
    x: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    route: TokenRoute,
    sends: Sends,
    most_experts: int,
    plan: Plan,
) -> list[torch.Tensor]:
    """Launch the kernel on the current stream: a product [R, I] for each of one or two matrices [E_local, H, I].

    most_experts: of the rank with most of them.
    """
    world, (bm, bn, bk) = fabric.world_size, plan.tile
    rows, (experts, k, n) = route.row_slot.shape[0], matrices[0].shape
    x = in_one_piece(x if x.shape[0] else x.new_zeros(1, k))
    own = alike([as_matrices(w) for w in matrices])
    b_t = own[0].stride(2) != 1 or own[0].stride(1) < n
    ws = [w.transpose(1, 2) if b_t else w for w in own]
    padded = -(-k // bk) * bk
    most = most_row_tiles(sends.most, most_experts, plan.tile) * bm
    channel = fabric.channel(NAME, 0, -(-most // 2) * padded * x.element_size())  # both halves are one slot
    slots, _ = parallel_view(channel.staging, 1, (most, padded), x.dtype)
    outs = [torch.empty(rows, n, dtype=x.dtype, device=x.device) for _ in ws]
    targets = outs if rows else [x.new_empty(1, n) for _ in ws]
    limit = most_row_tiles(rows, experts, plan.tile)
    table = torch.empty(1 + limit, ENTRY.value, dtype=torch.int32, device=x.device)
    for target in targets:
        tiling = route.offsets, table, target, rows, n, limit, experts, bm
        variant = variant_of(fabric, NAME, x, tiling[-2:])
        fabric.launch(grouped_tiles_kernel, fabric.sms, tiling, num_warps=WARPS, variant=variant)
    box, part = ((bn, bk) if b_t else (bk, bn)), (part_rows(plan.tile), PART_BYTES // x.element_size())
    lists, placers = lists_of(route, sends, bm), placers_of(plan)
    senders = plan.comm_sms - placers
    w_descs, out_descs = [describe(w, (1, *box)) for w in ws], [describe(out, part) for out in targets]
    args = (
        fabric.rank, x, describe(x, (bm, bk)), slots_box(slots, (bm, bk)).at(slots), w_descs[0], w_descs[-1],
        describe(ws[0][0], box), out_descs[0], out_descs[-1], targets[0], targets[-1], route.offsets, table,
        channel.flags, channel.flags.stride(0), channel.state, channel.timeout_us, max(route.tokens, 1), k // 8,
        padded // 8, slots, slots.stride(0) // 8, *lists, route.slots, block_of(route.slots, senders), rows,
        most, n, k, world, bm, bn, bk, plan.stages, part_buffers(plan.tile, plan.stages, x.element_size()),
        GROUP_ROWS, b_t, len(ws), senders, placers, FLAGS // (world + 1),
    )  # fmt: skip
    variant = variant_of(fabric, NAME, x, args[-13:])
    fabric.launch(moe_dispatch_matmul_kernel, fabric.sms, args, num_warps=WARPS, variant=variant)
    return outs


def variant_of(fabric: Fabric, name: str, x: torch.Tensor, constants: tuple) -> Variant:
    """What remembers the compiled kernel of calls of an op with these constants; all tensors of a call are 16-byte
    aligned."""
    views = fabric.views(name)
    return Variant() if views is None else views.setdefault((x.dtype, constants), Variant())


def alike(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The matrices in the stride order of the first; copied if need be."""
    flipped = matrices[0].stride(2) != 1

    def turned(w: torch.Tensor) -> torch.Tensor:
        if (w.stride(2) != 1) == flipped:
            return w
        return w.transpose(1, 2).contiguous().transpose(1, 2) if flipped else w.contiguous()

    return [turned(w) for w in matrices]


def block_of(slots: int, senders: int) -> int:
    """Tokens in a block: so many that a source with all slots in use has fewer rounds than a flag can count."""
    rows = BLOCK_ROWS.value
    return max(1, -(-slots // (rows * senders * (STEPS.value - 2)))) * rows
