"""matmul_all_reduce: how it is computed, in one kernel, or by a matmul and an all-reduce."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tileweave.fabric import Fabric, Variant
from tileweave.ops.block_scales import as_bytes, dequantized_product, step_boxes
from tileweave.ops.collectives.operator import run as run_collective
from tileweave.ops.contract import DTYPES, Site
from tileweave.ops.descriptors import Box, as_operands, by_rows, in_one_piece, parallel_view, slots_box
from tileweave.ops.matmul_all_reduce.check import NAME, Call, problem_of
from tileweave.ops.matmul_all_reduce.kernel import matmul_all_reduce_kernel
from tileweave.planner import Plan
from tileweave.planner.matmul_all_reduce import (
    SHOTS,
    chunks_of,
    computing,
    count_tiles,
    place_of,
    result_buffers,
    slot_bytes,
)
from tileweave.planner.tiling import (
    GROUP_ROWS,
    LANE_COLS,
    PART_BYTES,
    WARPS,
    box_rows,
    columns_at_once,
    part_rows,
    whole_tiles,
)


class Extras(NamedTuple):
    """What is made of the sum, in the order of the operator: all in one piece and 16-byte aligned, or None."""

    bias: torch.Tensor | None
    residual: torch.Tensor | None
    norm_weight: torch.Tensor | None


Scales = tuple[torch.Tensor, torch.Tensor] | None  # of blocks along K


def unfused(
    fabric: Fabric, call: Call, a: torch.Tensor, b: torch.Tensor, extras: Extras, scales: Scales = None
) -> list[torch.Tensor]:
    """The fallback: the whole product, then the group's all-reduce, then the rest by PyTorch."""
    product = torch.matmul(a, b) if scales is None else dequantized_product(a, b, *scales).to(call.out_dtype)
    if fabric.nccl and product.numel() and not call.options.deterministic:  # as the planner predicts it
        return with_extras(call, fabric.all_reduce(product), extras)
    return finished(fabric, call, product, extras)


def finished(fabric: Fabric, call: Call, product: torch.Tensor, extras: Extras) -> list[torch.Tensor]:
    """The results of a call whose product is there. Sums are in float32 and rounded once."""
    if fabric.world_size > 1 and product.numel():
        deterministic = call.options.deterministic
        product = run_collective(fabric, "all_reduce", product, "sum", deterministic)
    return with_extras(call, product, extras)


def with_extras(call: Call, total: torch.Tensor, extras: Extras) -> list[torch.Tensor]:
    """The results of a call whose sum over ranks is there, by PyTorch. Added in float32, rounded once."""
    if call.bias or call.residual:
        wide = total.float()
        for extra in (extras.bias, extras.residual):
            wide = wide if extra is None else wide + extra
        total = wide.to(call.out_dtype)
    return normed(call, total, extras) if call.norm else [total]


def normed(call: Call, total: torch.Tensor, extras: Extras) -> list[torch.Tensor]:
    """The results of a call with a norm, whose sum is there: a pass over it, behind it on the stream."""
    return [torch.nn.functional.rms_norm(total, (call.n,), extras.norm_weight, call.options.norm_eps), total]


@dataclass(slots=True)
class Prepared:
    """A fused call but for its tensors' data: what depends on shapes, strides and options alone, made once.

    slots: the kernel's arguments that say where parts travel to; in the schedule "none" a box, for the result stands in
    for them; tail: the kernel's arguments after scratch; scratch: elements of it, for tiles that CTAs share; norms:
    whether the kernel makes the norm too, if there is one; blocks: of scales of blocks along K.
    """

    call: Call
    device: torch.device
    a: Box
    b: Box
    out: Box  # also the residual's
    slots: tuple | Box
    tail: tuple
    grid: int
    scratch: int
    norms: bool
    blocks: tuple[Box, Box] | None
    variant: Variant = field(default_factory=Variant)

    def launch(
        self, fabric: Fabric, a: torch.Tensor, b: torch.Tensor, extras: Extras, scales: Scales = None
    ) -> list[torch.Tensor]:
        """Launch on the current stream. a, b and scales are addressable by TMA, the extras as `Extras` says."""
        call, alone = self.call, isinstance(self.slots, Box)
        total = torch.empty(call.m, call.n, dtype=call.out_dtype, device=self.device)
        results = [torch.empty_like(total), total] if self.norms else [total]
        slots = (self.slots.at(total), total, 0, 0) if isinstance(self.slots, Box) else self.slots
        others = [total if x is None or alone else x for x in extras]
        scratch = torch.empty(self.scratch, dtype=torch.float32, device=self.device) if self.scratch else total
        scaling = None, None
        if self.blocks is not None and scales is not None:
            a, b = as_bytes(a), as_bytes(b)
            scaling = tuple(box.at(as_bytes(x)) for box, x in zip(self.blocks, scales, strict=True))
        args = (
            fabric.rank, self.a.at(a), self.b.at(b), self.out.at(total), self.out.at(others[1]), *slots, total,
            results[0], *others, call.options.norm_eps, *scaling, scratch, *self.tail,
        )  # fmt: skip
        fabric.launch(matmul_all_reduce_kernel, self.grid, args, num_warps=WARPS, variant=self.variant)
        if alone:
            return finished(fabric, call, total, extras)
        return normed(call, total, extras) if call.norm and not self.norms else results


def fused(
    fabric: Fabric, call: Call, a: torch.Tensor, b: torch.Tensor, extras: Extras, plan: Plan, scales: Scales = None
) -> tuple[list[torch.Tensor], Prepared | None]:
    """Launch the kernel on the current stream. Returns the results, and what to use for later calls with tensors like
    these; None if these had to be copied first."""
    a, b = as_bytes(a), as_bytes(b)  # torch copies no float4
    own_a, own_b = as_operands(a, b, call.dtype not in DTYPES)
    own, own_scales = Extras(*[in_one_piece(x) for x in extras]), None
    like_these = own_a.data_ptr() == a.data_ptr() and own_b.data_ptr() == b.data_ptr()
    like_these = like_these and all(x is y for x, y in zip(own, extras, strict=True))
    if scales is not None:
        own_scales = in_one_piece(scales[0]), in_one_piece(scales[1])
        like_these = like_these and own_scales[0] is scales[0] and own_scales[1] is scales[1]
    if call.k == 0:  # there is no descriptor of an empty tensor: multiply zeros, so that this rank still takes part
        own_a, own_b, like_these = a.new_zeros(call.m, 8), b.new_zeros(8, call.n), False
    prepared = prepare(fabric, call, own_a, own_b, plan, own_scales)
    return prepared.launch(fabric, own_a, own_b, own, own_scales), prepared if like_these else None


def prepare(
    fabric: Fabric, call: Call, a: torch.Tensor, b: torch.Tensor, plan: Plan, scales: Scales = None
) -> Prepared:
    """Everything of a launch but the tensors' data."""
    (bm, bn, bk), shots = plan.tile, SHOTS[plan.schedule]
    (a_rows, a_t), (b_rows, b_t) = by_rows(a), by_rows(b)
    problem = problem_of(Site.of(fabric), call)
    channel = fabric.channel(NAME, 0, slot_bytes(problem, plan))
    tiles, (rows, cols) = count_tiles(problem, plan), place_of(problem, plan)
    sms = computing(problem, plan)
    whole = whole_tiles(tiles, sms, plan.split)
    grid = min(sms, whole + (tiles - whole) * plan.split)
    norms, fabric_sums = call.norm and shots == 1, plan.mechanism == "multimem"
    part = (part_rows(plan.tile, plan.core), PART_BYTES // call.out_dtype.itemsize)
    out = a.new_empty(call.m, call.n, dtype=call.out_dtype)
    tail = (
        channel.flags, channel.flags.stride(0), channel.state, channel.timeout_us, call.m, rows, call.n, cols,
        a_rows.shape[0] if a_t else a_rows.shape[1], *chunks_of(problem, plan), whole, plan.split, problem.world,
        bm, bn, bk, plan.stages, result_buffers(problem, plan), plan.split > 1, GROUP_ROWS, a_t, b_t, shots,
        plan.comm_sms, fabric_sums, call.bias, call.residual, norms,
        columns_at_once(problem.world, problem.m, problem.n, problem.sms, problem.norm),
    )  # fmt: skip
    slots: tuple | Box = slots_box(out[None, None], part)
    if shots:
        places, stride = parallel_view(channel.staging, 2 * problem.world, (rows, cols), call.out_dtype)
        everywhere = channel.multicast(places) if fabric_sums and channel.multicast else 0
        slots = (slots_box(places, part).at(places), places[fabric.rank], everywhere, stride // LANE_COLS)
    return Prepared(
        call,
        a.device,
        Box(a_rows, (bk, bm) if a_t else (box_rows(call.m, bm), bk)),
        Box(b_rows, (bn, bk) if b_t else (bk, bn)),
        Box(out, part),
        slots,
        tail,
        plan.comm_sms + grid,
        grid * bm * bn if plan.split > 1 else 0,
        norms,
        step_boxes(call.dtype, scales, (call.m, call.n), plan.tile) if scales is not None else None,
    )
