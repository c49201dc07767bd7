"""matmul_reduce_scatter: how it is computed, in one kernel, or by a matmul and a reduce-scatter."""

import math
from dataclasses import dataclass, field, replace

import torch

from tileweave.fabric import Channel, Fabric, Variant
from tileweave.ops.block_scales import as_bytes, dequantized_product, step_boxes
from tileweave.ops.collectives.operator import run as run_collective
from tileweave.ops.contract import DTYPES, FP8, Site
from tileweave.ops.descriptors import Box, as_operands, by_rows, in_one_piece, parallel_view, slots_box
from tileweave.ops.matmul_reduce_scatter.check import NAME, Call, problem_of
from tileweave.ops.matmul_reduce_scatter.kernel import matmul_reduce_scatter_kernel
from tileweave.planner import Plan, Problem
from tileweave.planner.plan import blocks_of, count_tiles, matmul_of
from tileweave.planner.tiling import (
    GROUP_ROWS,
    PART_BYTES,
    WARPS,
    box_rows,
    columns_at_once,
    part_buffers,
    part_rows,
    whole_tiles,
)

Scales = tuple[torch.Tensor, torch.Tensor] | None  # of operands of 8 or 4 bits


def unfused(
    fabric: Fabric, call: Call, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, scales: Scales
) -> torch.Tensor:
    """The fallback: the whole product, then the group's reduce-scatter."""
    if scales is not None and call.blocks:
        product = dequantized_product(a, b, *scales)
    elif scales is not None:
        product = torch.matmul(a.float(), b.float()) * scales[0].reshape(-1, 1) * scales[1].reshape(1, -1)
    else:
        product = torch.matmul(a.float(), b.float()) if call.out_dtype == torch.float32 else torch.matmul(a, b)
    if call.op == "avg":  # before the sum, which may not overflow where the mean does not
        product = product / fabric.world_size
    result = fabric.reduce_scatter(product.to(call.out_dtype).contiguous())
    return result if bias is None else result + bias.to(call.out_dtype)


def scattered(fabric: Fabric, call: Call, product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The schedule "none" behind its matmul: our own reduce-scatter, then the bias, added in float32."""
    total = run_collective(fabric, "reduce_scatter", product, 0, call.op, call.deterministic)
    return total if bias is None else (total.float() + bias).to(call.out_dtype)


@dataclass(slots=True)
class Prepared:
    """A fused call but for its tensors' data: what depends on shapes, strides and options alone, made once.

    slots: the kernel's arguments that say where parts travel to; where they stay, in a world of one or the schedule
    "none", a box instead, for the result stands in for them; numbers: the arguments between tensors and home; home: box
    and shape of what holds parts that communicators send, None without communicators; tail: the arguments after it;
    scratch: elements of it, for tiles that CTAs share; sums: whether the kernel sums places into the result behind its
    tiles; behind: the call that a reduce-scatter of the result completes; blocks: of scales of blocks along K.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    a: Box
    b: Box
    out: Box
    slots: tuple | Box
    numbers: tuple
    home: tuple[Box, tuple[int, ...]] | None
    tail: tuple
    grid: int
    scratch: int
    sums: bool
    behind: Call | None
    blocks: tuple[Box, Box] | None
    variant: Variant = field(default_factory=Variant)

    def launch(
        self, fabric: Fabric, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, scales: Scales
    ) -> torch.Tensor:
        """Launch the kernel on the current stream. a, b and bias are 16-byte aligned, scales in one piece, those of
        blocks aligned too."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        slots = (self.slots.at(out), out, 0) if isinstance(self.slots, Box) else self.slots
        extra = out if bias is None else bias
        scratch = torch.empty(self.scratch, dtype=torch.float32, device=self.device) if self.scratch else out
        home = None
        if self.home is not None:
            box, shape = self.home
            home = box.at(torch.empty(shape, dtype=self.dtype, device=self.device))
        scale_a, scale_b = scales or (out, out)
        scaling = scale_a, int(scale_a.numel() > 1), scale_b, int(scale_b.numel() > 1)
        if self.blocks is not None:
            a, b, scale_a, scale_b = map(as_bytes, (a, b, scale_a, scale_b))
            scaling = self.blocks[0].at(scale_a), 0, self.blocks[1].at(scale_b), 0
        rank = 0 if self.behind else fabric.rank
        operands, summed = (self.a.at(a), self.b.at(b)), out if self.sums else None
        tensors = *operands, self.out.at(out), *slots, extra, *scaling, scratch, summed
        args = (rank, *tensors, *self.numbers, home, *self.tail)
        fabric.launch(matmul_reduce_scatter_kernel, self.grid, args, num_warps=WARPS, variant=self.variant)
        return out if self.behind is None else scattered(fabric, self.behind, out, bias)


def fused(
    fabric: Fabric,
    call: Call,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    plan: Plan,
    scales: Scales = None,
) -> tuple[torch.Tensor, Prepared | None]:
    """Launch the kernel on the current stream. Returns the result, and what to use for later calls with tensors like
    these; None if these had to be copied first."""
    a, b = as_bytes(a), as_bytes(b)  # torch copies no float4
    own_a, own_b = as_operands(a, b, call.dtype not in DTYPES)
    own_bias = in_one_piece(bias)
    own_scales = None if scales is None else (in_one_piece(scales[0]), in_one_piece(scales[1]))
    like_these = own_a.data_ptr() == a.data_ptr() and own_b.data_ptr() == b.data_ptr() and own_bias is bias
    if scales is not None and own_scales is not None:
        like_these = like_these and own_scales[0] is scales[0] and own_scales[1] is scales[1]
    if call.k == 0:  # there is no descriptor of an empty tensor: multiply zeros, so that this rank still takes part
        own_a, own_b, like_these = a.new_zeros(call.m, 16), b.new_zeros(call.n, 16).t(), False
    prepared = prepare(fabric, call, own_a, own_b, plan, own_scales)
    return prepared.launch(fabric, own_a, own_b, own_bias, own_scales), prepared if like_these else None


def prepare(
    fabric: Fabric, call: Call, a: torch.Tensor, b: torch.Tensor, plan: Plan, scales: Scales = None
) -> Prepared:
    """Everything of a launch but the tensors' data. In the schedule "none" it is that of a world of one."""
    problem, (bm, bn, bk) = problem_of(Site.of(fabric), call), plan.tile
    behind = call if plan.schedule == "none" and problem.world > 1 else None
    if behind:
        call = replace(call, rows=call.m, op="sum", bias=False, deterministic=True)
    alone, one_shot = matmul_of(problem, plan), plan.schedule == "one_shot"
    if one_shot:  # whose parts are kept apart
        call = replace(call, deterministic=True)
    world = 1 if behind else problem.world
    (a_rows, a_t), (b_rows, b_t) = by_rows(as_bytes(a)), by_rows(as_bytes(b))
    out = torch.empty(call.rows, call.n, dtype=call.out_dtype, device=a.device)
    part = (part_rows(plan.tile, plan.core), PART_BYTES // out.element_size())
    above = part[0] if one_shot else 0  # rows of a place before those of its owner: see `store_to_owners`
    shard_bytes = (call.rows + above) * call.n * out.element_size() if world > 1 else 0
    channel = fabric.channel(
        NAME, 0 if call.deterministic else shard_bytes, world * shard_bytes if call.deterministic else 0
    )
    flags = channel.flags[fabric.rank :] if behind else channel.flags
    tiles = count_tiles(problem, plan)
    whole = whole_tiles(tiles, alone.sms, plan.split)
    grid = min(alone.sms, whole + (tiles - whole) * plan.split)
    home: tuple[Box, tuple[int, ...]] | None = None
    blocks: tuple[int | None, ...] = (None, None, None)
    if plan.comm_sms:
        held = out.new_empty(1, world, call.rows, call.n)
        home, blocks = (slots_box(held, part), held.shape), block_numbers(problem, plan, part[1])
    numbers = (
        flags, flags.stride(0), channel.state, channel.timeout_us, call.rows, call.n,
        a_rows.shape[0] if a_t else a_rows.shape[1], whole, plan.split,
    )  # fmt: skip
    tail = (
        *blocks, world, bm, bn, bk, plan.stages,
        part_buffers(plan.tile, plan.stages, out.element_size(), core=plan.core, scales=problem.scales),
        plan.split > 1, GROUP_ROWS, a_t, b_t, call.deterministic, call.bias,
        call.dtype == FP8 and not call.blocks, call.op == "avg",
        plan.comm_sms, columns_at_once(world, call.rows, call.n, alone.sms) if one_shot else 0, call.blocks,
    )  # fmt: skip
    return Prepared(
        (call.rows, call.n),
        call.out_dtype,
        a.device,
        Box(a_rows, (bk, bm) if a_t else (box_rows(call.m, bm), bk)),
        Box(b_rows, (bn, bk) if b_t else (bk, bn)),
        Box(out, part),
        parallel_slots(fabric, call, channel, part, above) if world > 1 else slots_box(out[None, None], part),
        numbers,
        home,
        tail,
        grid + plan.comm_sms,
        grid * bm * bn if plan.split > 1 else 0,
        one_shot,
        behind,
        step_boxes(call.dtype, scales, (call.m, call.n), plan.tile) if scales and call.blocks else None,
    )


def block_numbers(problem: Problem, plan: Plan, width: int) -> tuple[int, int, int]:
    """Blocks of an owner, tiles in one, and strips of `width` columns that each communicator sends of one."""
    tiles, blocks = blocks_of(problem, plan)
    return blocks, tiles, math.ceil(tiles * plan.tile[1] / width / plan.comm_sms)


def parallel_slots(fabric: Fabric, call: Call, channel: Channel, block: tuple[int, int], above: int) -> tuple:
    """The slots of all ranks as a descriptor, this rank's own, below the rows `above`, as a tensor, the distance of
    two slots in elements.

    The distance depends on the arena, not on the shape: call e + 1 may be of another shape while a slow peer is still
    in call e.
    """
    arena = channel.staging if call.deterministic else channel.adding
    count = 2 * fabric.world_size if call.deterministic else 2
    slots, stride = parallel_view(arena, count, (call.rows + above, call.n), call.out_dtype)
    return slots_box(slots, block).at(slots), slots[fabric.rank, :, above:], stride
