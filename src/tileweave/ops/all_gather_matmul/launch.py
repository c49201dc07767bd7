"""all_gather_matmul: how it is computed, in one kernel or by the group's all-gather and torch.matmul."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tileweave.fabric import MAX_RANKS, Channel, Fabric, Variant
from tileweave.ops.all_gather_matmul.check import MAX_B, NAME, Call, problem_of
from tileweave.ops.all_gather_matmul.kernel import all_gather_matmul_kernel
from tileweave.ops.contract import Site
from tileweave.ops.descriptors import Box, as_operand, by_rows, in_one_piece, parallel_view, slots_box
from tileweave.planner import Plan
from tileweave.planner.all_gather_matmul import block_tiles, computing_sms, tiles_of
from tileweave.planner.tiling import GROUP_ROWS, PART_BYTES, WARPS, part_buffers, part_rows, whole_tiles

Tensors = Sequence[torch.Tensor]


def unfused(fabric: Fabric, call: Call, a: torch.Tensor, b: Tensors, bias: Tensors) -> list[torch.Tensor]:
    """The fallback: the group's all-gather, then a matmul each. Collective unless `call.local`."""
    m = fabric.world_size * call.rows
    gathered = a.new_zeros(m, call.k) if call.local else fabric.all_gather(a)
    outs = [torch.matmul(gathered, x) for x in b]
    if bias:
        outs = [out + x for out, x in zip(outs, bias, strict=True)]
    return [*outs, gathered] if call.return_gathered else outs


@dataclass(slots=True)
class Step:
    """One launch of a call: a grid, the kernel's arguments after scratch."""

    grid: int
    tail: tuple
    variant: Variant = field(default_factory=Variant)


@dataclass(slots=True)
class Prepared:
    """A fused call but for its tensors' data: what depends on shapes, strides and options alone, made once.

    ns: columns of all results, those that are empty included; gathered: None unless it is asked for; slots: their
    descriptor, in a world of one a box instead, for `a` stands in for them; steps: launches, one after the other.
    """

    m: int
    ns: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    a: Box
    b: list[Box]
    outs: list[Box]
    gathered: tuple[Box, int] | None
    slots: object
    scratch: int
    steps: list[Step]

    def launch(self, fabric: Fabric, a: torch.Tensor, b: Tensors, bias: Tensors) -> list[torch.Tensor]:
        """Launch on the current stream. a and b are addressable by TMA, biases 16-byte aligned."""
        results = [torch.empty(self.m, n, dtype=self.dtype, device=self.device) for n in self.ns]
        wide = [i for i, n in enumerate(self.ns) if n]
        outs, matrices = [results[i] for i in wide], [b[i] for i in wide]
        biases = [bias[i] for i in wide] if bias else outs
        a_desc = self.a.at(a)
        gathered = a_desc
        if self.gathered is not None:
            box, k = self.gathered
            results.append(torch.empty(self.m, k, dtype=self.dtype, device=self.device))
            gathered = box.at(results[-1])
        scratch = torch.empty(self.scratch, dtype=torch.float32, device=self.device) if self.scratch else outs[0]
        slots = self.slots.at(a) if isinstance(self.slots, Box) else self.slots
        args = (
            fabric.rank, a_desc, slots, gathered,
            *_all([box.at(x) for box, x in zip(self.b, matrices, strict=True)]),
            *_all([box.at(x) for box, x in zip(self.outs, outs, strict=True)]),
            *_all(biases), scratch,
        )  # fmt: skip
        for step in self.steps:
            fabric.launch(
                all_gather_matmul_kernel, step.grid, (*args, *step.tail), num_warps=WARPS, variant=step.variant
            )
        return results


def _all(values: list) -> list:
    """As many as the kernel has arguments for; those beyond the last are not looked at."""
    return values + values[:1] * (MAX_B - len(values))


def fused(
    fabric: Fabric, call: Call, a: torch.Tensor, b: Tensors, bias: Tensors, plan: Plan
) -> tuple[list[torch.Tensor], Prepared | None]:
    """Launch the kernel on the current stream. Returns the results, and what to use for later calls with tensors like
    these; None if these had to be copied first."""
    own_a, own_b, own_bias = as_rows(a), alike(b), [in_one_piece(x) for x in bias]
    pairs = zip([own_a, *own_b, *own_bias], [a, *b, *bias], strict=True)
    like_these = all(own is given for own, given in pairs)
    prepared = prepare(fabric, call, own_a, own_b, plan)
    return prepared.launch(fabric, own_a, own_b, own_bias), prepared if like_these else None


def as_rows(a: torch.Tensor) -> torch.Tensor:
    """`a` as TMA can address it, its rows in one piece, as peers will read them; copied once if it lies otherwise."""
    own = as_operand(a)
    return own.contiguous() if by_rows(own)[1] else own


def alike(b: Tensors) -> list[torch.Tensor]:
    """The matrices as TMA can address them, in the stride order of the first that is not empty; copied if need be."""
    own = [as_operand(x) if x.numel() else x for x in b]
    flipped = next((by_rows(x)[1] for x in own if x.numel()), False)

    def turned(x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0 or by_rows(x)[1] == flipped:
            return x
        return x.t().contiguous().t() if flipped else x.contiguous()

    return [turned(x) for x in own]


def prepare(fabric: Fabric, call: Call, a: torch.Tensor, b: Tensors, plan: Plan) -> Prepared:
    """Everything of a call but the tensors' data."""
    world, (bm, bn, bk) = fabric.world_size, plan.tile
    m, ns = world * call.rows, [n for n in call.ns if n]
    rows_of_b = [by_rows(x) for x in b if x.numel()]
    b_t = rows_of_b[0][1]
    padded = math.ceil(call.k / bk) * bk
    channel = fabric.channel(NAME, 0, m * padded * a.element_size() if world > 1 else 0)
    part = (part_rows(plan.tile), PART_BYTES // a.element_size())
    results = [a.new_empty(world, call.rows, n) for n in ns]
    steps, scratch = steps_of(fabric, call, channel, b_t, plan)
    return Prepared(
        m,
        call.ns,
        call.dtype,
        a.device,
        Box(a, (bm, bk)),
        [Box(x, (bn, bk) if b_t else (bk, bn)) for x, _ in rows_of_b],
        [Box(x, (1, *part)) for x in results],
        (Box(a.new_empty(world, call.rows, call.k), (1, bm, bk)), call.k) if call.return_gathered else None,
        parallel_slots(channel, world, (call.rows, padded), call.dtype, (bm, bk)) if world > 1
        else slots_box(a[None, None], (bm, bk)),
        scratch,
        steps,
    )  # fmt: skip


def parallel_slots(channel: Channel, world: int, shape: tuple[int, int], dtype: torch.dtype, block: tuple[int, int]):
    """The slots of all ranks, for each of two calls in turn a place per source, as a descriptor.

    Where a place lies depends on the arena, not on the shape alone: call e + 1, perhaps of another shape, writes in
    the other half of it.
    """
    slots, _ = parallel_view(channel.staging, 2 * world, shape, dtype)
    return slots_box(slots, block).at(slots)


def steps_of(fabric: Fabric, call: Call, channel: Channel, b_t: bool, plan: Plan) -> tuple[list[Step], int]:
    """The launches of a call, and how many elements of scratch they need. The schedule "none" has two: communicators
    alone, then multipliers on all SMs."""
    world, (bm, bn, bk) = fabric.world_size, plan.tile
    problem = problem_of(Site.of(fabric), call)
    per = MAX_RANKS // world
    tiles, sms = tiles_of(problem, plan.tile), computing_sms(problem, plan)
    height, k_steps = block_tiles(problem, plan, per) if world > 1 else 1, math.ceil(call.k / bk)
    whole = whole_tiles(tiles, sms, plan.split)
    grid = min(sms, whole + (tiles - whole) * plan.split)
    ns = [n for n in call.ns if n]

    def step(grid: int, comm_sms: int, last: bool) -> Step:
        tail = (
            channel.flags, channel.flags.stride(0), channel.state, channel.timeout_us, *ns, *[0] * (MAX_B - len(ns)),
            call.rows, call.k, whole, plan.split, math.ceil(math.ceil(call.rows / bm) / height), height,
            math.ceil(height * k_steps / max(plan.comm_sms, 1)),
            world, bm, bn, bk, plan.stages, part_buffers(plan.tile, plan.stages, call.dtype.itemsize),
            plan.split > 1, GROUP_ROWS, b_t, len(ns), call.bias, call.return_gathered, plan.schedule == "intra_sm",
            last, per, comm_sms,
        )  # fmt: skip
        return Step(grid, tail)

    scratch = grid * bm * bn if plan.split > 1 else 0
    if plan.schedule == "none" and world > 1:
        return [step(plan.comm_sms, plan.comm_sms, False), step(grid, 0, True)], scratch
    return [step(grid + plan.comm_sms, plan.comm_sms, True)], scratch
