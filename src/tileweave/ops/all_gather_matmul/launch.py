"""all_gather_matmul: how it is computed, in one kernel or by the group's all-gather and torch.matmul."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tileweave.fabric import Channel, Fabric, Variant
from tileweave.ops.all_gather_matmul.check import MAX_B, NAME, Call, problem_of
from tileweave.ops.all_gather_matmul.kernel import all_gather_matmul_kernel
from tileweave.ops.all_gather_matmul.places import (
    COPY_ENGINE,
    MULTIMEM,
    Copying,
    Places,
    as_words,
    copied_tiles,
    copying,
    flags_each,
    places_of,
    scale_words_box,
)
from tileweave.ops.block_scales import as_blocks, as_bytes, dequantized, side_by_side, step_box
from tileweave.ops.contract import DTYPES, Site
from tileweave.ops.descriptors import ALIGN, Box, as_operand, by_rows, in_one_piece, is_addressable, slots_box
from tileweave.planner import Plan
from tileweave.planner.all_gather_matmul import block_tiles, computing_sms, item_tiles, joined, tiles_of
from tileweave.planner.tiling import GROUP_ROWS, PART_BYTES, WARPS, part_buffers, part_rows, whole_tiles

Tensors = Sequence[torch.Tensor]
Scales = tuple[torch.Tensor, Tensors] | None  # of 8-bit operands: of this rank's rows, and of the columns of each b


def unfused(
    fabric: Fabric, call: Call, a: torch.Tensor, b: Tensors, bias: Tensors, scales: Scales = None
) -> list[torch.Tensor]:
    """The fallback: the group's all-gather, then a matmul each. Collective unless `call.local`."""
    m = fabric.world_size * call.rows
    if scales is not None:
        return (_unfused_blocks if call.blocks else _unfused_scaled)(fabric, call, a, b, bias, scales)
    gathered = a.new_zeros(m, call.k) if call.local else fabric.all_gather(a)
    outs = [torch.matmul(gathered, x) for x in b]
    if bias:
        outs = [out + x for out, x in zip(outs, bias, strict=True)]
    return [*outs, gathered] if call.return_gathered else outs


def _unfused_scaled(
    fabric: Fabric, call: Call, a: torch.Tensor, b: Tensors, bias: Tensors, scales: tuple[torch.Tensor, Tensors]
) -> list[torch.Tensor]:
    """`unfused` of 8-bit operands: gathered as bytes, which every group can, and multiplied in float32."""
    of_rows = scales[0].expand(call.rows, 1).contiguous()
    m = fabric.world_size * call.rows
    if call.local:
        gathered, of_rows = a.new_zeros(m, call.k), of_rows.new_ones(m, 1)
    else:
        gathered = fabric.all_gather(a.contiguous().view(torch.uint8)).view(a.dtype)
        of_rows = fabric.all_gather(of_rows)
    outs = []
    for i, (x, of_columns) in enumerate(zip(b, scales[1], strict=True)):
        out = torch.matmul(gathered.float(), x.float()) * of_rows * of_columns.view(1, -1)
        outs.append((out + bias[i].float() if bias else out).to(call.out_dtype))
    return [*outs, gathered] if call.return_gathered else outs


def _unfused_blocks(
    fabric: Fabric, call: Call, a: torch.Tensor, b: Tensors, bias: Tensors, scales: tuple[torch.Tensor, Tensors]
) -> list[torch.Tensor]:
    """`unfused` of operands with scales of blocks along K, which each rank's rows have from a block on."""
    world, gathered = fabric.world_size, as_bytes(a).new_zeros(fabric.world_size * call.rows, call.k).view(a.dtype)
    if not call.local:
        gathered = fabric.all_gather(a.contiguous().view(torch.uint8)).view(a.dtype)
        of_rows = fabric.all_gather(scales[0].reshape(-1).view(torch.uint8)).view(scales[0].dtype).chunk(world)
        shards = zip(gathered.split(call.rows), of_rows, strict=True)
        wide = torch.cat([dequantized(*each) for each in shards])
    outs = []
    for i, (n, x, scale) in enumerate(zip(call.ns, b, scales[1], strict=True)):
        out = a.new_zeros(len(gathered), n, dtype=torch.float32) if call.local else wide @ dequantized(x.t(), scale).t()
        outs.append((out + bias[i].float() if bias else out).to(call.out_dtype))
    return [*outs, gathered] if call.return_gathered else outs


class Blocks(NamedTuple):
    """Boxes of scales of blocks along K: of own rows, of all columns, and where those of peers' rows lie; in a world of
    one a box instead, for own rows stand in for them."""

    a: Box
    b: Box
    slots: Any

    def at(self, scale_a: torch.Tensor, scale_b: Tensors) -> tuple:
        """The kernel's arguments, of scales in one piece."""
        own, columns = as_bytes(scale_a), as_bytes(side_by_side(scale_b))
        slots = self.slots.at(as_words(own.view(-1))) if isinstance(self.slots, Box) else self.slots
        return self.a.at(own), self.b.at(columns), slots


@dataclass(slots=True)
class Step:
    """One launch of a call: a grid, the kernel's arguments after scratch."""

    grid: int
    tail: tuple
    variant: Variant = field(default_factory=Variant)


@dataclass(slots=True)
class Prepared:
    """A fused call but for its tensors' data: what depends on shapes, strides and options alone, made once.

    ns: columns of all results, those that are empty included; gathered: None unless it is asked for; slots: where the
    peers' rows lie, in a world of one a box instead, for `a` stands in for them; copying: what a copy engine does, if
    there is anything; steps: launches, one after the other; blocks: of scales of blocks along K.
    """

    m: int
    ns: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    a: Box
    b: list[Box]
    outs: list[Box]
    gathered: tuple[Box, int, torch.dtype] | None
    slots: Places | Box
    copying: Copying | None
    scratch: int
    steps: list[Step]
    blocks: Blocks | None

    def launch(
        self, fabric: Fabric, a: torch.Tensor, b: Tensors, bias: Tensors, scales: Scales = None
    ) -> list[torch.Tensor]:
        """Launch on the current stream. a and b are addressable by TMA, biases and scales 16-byte aligned."""
        results = [torch.empty(self.m, n, dtype=self.dtype, device=self.device) for n in self.ns]
        wide = [i for i, n in enumerate(self.ns) if n]
        outs, matrices = [results[i] for i in wide], [b[i] for i in wide]
        biases = [bias[i] for i in wide] if bias else outs
        scale_a, scale_b = (scales[0], [scales[1][i] for i in wide]) if scales else (outs[0], outs)
        scaling: tuple = (None, None, None)
        if self.blocks is not None:
            scaling, scale_a, scale_b = self.blocks.at(scale_a, scale_b), outs[0], outs
            a, matrices = as_bytes(a), [as_bytes(x) for x in matrices]
        a_desc = self.a.at(a)
        gathered = a_desc
        if self.gathered is not None:
            box, k, dtype = self.gathered
            results.append(torch.empty(self.m, k, dtype=dtype, device=self.device))
            gathered = box.at(as_bytes(results[-1]))
        scratch = torch.empty(self.scratch, dtype=torch.float32, device=self.device) if self.scratch else outs[0]
        slots, *places = self._places(a, scale_a)
        args = (
            fabric.rank, a_desc, slots, gathered, as_words(a), scale_a, int(scale_a.numel() > 1),
            *_all([box.at(x) for box, x in zip(self.b, matrices, strict=True)]),
            *_all([box.at(x) for box, x in zip(self.outs, outs, strict=True)]),
            *_all(biases), *_all(scale_b), scratch,
            a.stride(0) * a.element_size() // ALIGN, *places, *scaling,
        )  # fmt: skip
        copies = self._copies(fabric, a, scale_a if scales else None)
        for step in self.steps:
            fabric.launch(
                all_gather_matmul_kernel,
                step.grid,
                (*args, *step.tail),
                num_warps=WARPS,
                variant=step.variant,
                copies=copies,
            )
        return results

    def _places(self, a: torch.Tensor, scale_a: torch.Tensor) -> tuple:
        """The kernel's arguments that say where the peers' rows lie."""
        if isinstance(self.slots, Box):
            words = as_words(a)
            return self.slots.at(words), words, scale_a, 0, 0, 0, None, None
        places = self.slots
        return places.descriptor, places.rows, places.scales, places.everywhere, *places.lines, *places.joined

    def _copies(self, fabric: Fabric, a: torch.Tensor, scale_a: torch.Tensor | None):
        """What the copy engine copies beside the kernel. Launches what goes ahead of that."""
        if self.copying is None:
            return ()
        if scale_a is not None:
            scale_a = scale_a.expand(a.shape[0], 1).contiguous()
        self.copying.await_places(fabric)
        return self.copying.copies(a, scale_a)


def _all(values: list) -> list:
    """As many as the kernel has arguments for; those beyond the last are not looked at."""
    return values + values[:1] * (MAX_B - len(values))


def fused(
    fabric: Fabric, call: Call, a: torch.Tensor, b: Tensors, bias: Tensors, plan: Plan, scales: Scales = None
) -> tuple[list[torch.Tensor], Prepared | None]:
    """Launch the kernel on the current stream. Returns the results, and what to use for later calls with tensors like
    these; None if these had to be copied first."""
    a, b = as_bytes(a), [as_bytes(x) for x in b]  # torch copies no float4
    own_a, own_b, own_bias = as_rows(a), alike(b, call.dtype not in DTYPES), [in_one_piece(x) for x in bias]
    if plan.mechanism == COPY_ENGINE:
        own_a = in_whole_steps(own_a, plan.tile[2])
    own_scales: Scales = None
    pairs = [*zip([own_a, *own_b, *own_bias], [a, *b, *bias], strict=True)]
    if scales is not None:
        own_scales = in_one_piece(scales[0]), [of_columns(x, n, call) for x, n in zip(scales[1], call.ns, strict=True)]
        pairs += zip([own_scales[0], *own_scales[1]], [scales[0], *scales[1]], strict=True)
    like_these = all(own is given for own, given in pairs)
    prepared = prepare(fabric, call, own_a, own_b, plan, own_scales)
    return prepared.launch(fabric, own_a, own_b, own_bias, own_scales), prepared if like_these else None


def of_columns(scale: torch.Tensor, n: int, call: Call) -> torch.Tensor:
    """A scale of a b with `n` columns as the kernel takes it: in one piece, for each column if any b's is."""
    return in_one_piece(scale.view(1, 1).expand(1, n) if call.by_column and scale.numel() == 1 else scale)


def in_whole_steps(a: torch.Tensor, step: int) -> torch.Tensor:
    """`a` as a copy engine takes it, which copies bytes: contiguous, with zeros up to a multiple of `step` columns."""
    rows, k = a.shape
    if k % step == 0:
        return a.contiguous()
    padded = a.new_zeros(rows, math.ceil(k / step) * step)
    padded[:, :k] = a
    return padded


def as_rows(a: torch.Tensor) -> torch.Tensor:
    """`a` as TMA can address it, its rows in one piece, as peers will read them; copied once if it lies otherwise."""
    own = as_operand(a)
    return own.contiguous() if by_rows(own)[1] else own


def alike(b: Tensors, inner_last: bool) -> list[torch.Tensor]:
    """The matrices as TMA can address them, in the stride order of the first that is not empty, or (`inner_last`) with
    the inner dimension in one piece, as the tensor cores take 8-bit operands; copied if need be."""
    if inner_last:
        fits = [x.numel() == 0 or (x.stride(0) == 1 and is_addressable(x)) for x in b]
        return [x if fit else as_operand(x.t(), True).t() for x, fit in zip(b, fits, strict=True)]
    own = [as_operand(x) if x.numel() else x for x in b]
    flipped = next((by_rows(x)[1] for x in own if x.numel()), False)

    def turned(x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0 or by_rows(x)[1] == flipped:
            return x
        return x.t().contiguous().t() if flipped else x.contiguous()

    return [turned(x) for x in own]


def prepare(fabric: Fabric, call: Call, a: torch.Tensor, b: Tensors, plan: Plan, scales: Scales = None) -> Prepared:
    """Everything of a call but the tensors' data."""
    world, (bm, bn, bk) = fabric.world_size, plan.tile
    m, ns = world * call.rows, [n for n in call.ns if n]
    rows_of_b = [by_rows(x) for x in b if x.numel()]
    b_t = rows_of_b[0][1]
    part = (part_rows(plan.tile, plan.core), PART_BYTES // call.out_dtype.itemsize)
    as_one = joined(problem_of(Site.of(fabric), call), plan)
    shape = (1, m) if as_one else (world, call.rows)
    results = [a.new_empty(*shape, n, dtype=call.out_dtype) for n in ns]
    slots: Places | Box
    if world > 1:
        channel, slots = places_of(fabric, call, plan, as_one)
    else:
        channel, slots = (
            fabric.channel(NAME, 0, 0),
            slots_box(as_words(a)[None, None], (bm, bk * a.element_size() // 2)),
        )
    steps, scratch, copied = steps_of(fabric, call, channel, slots, b_t, plan)
    return Prepared(
        m,
        call.ns,
        call.out_dtype,
        a.device,
        Box(a, (bm, bk)),
        [Box(x, (bn, bk) if b_t else (bk, bn)) for x, _ in rows_of_b],
        [Box(x, (1, *part)) for x in results],
        (Box(a.new_empty(*shape, call.k), (1, bm, bk)), call.k, call.dtype) if call.return_gathered else None,
        slots,
        copied,
        scratch,
        steps,
        blocks_of(call, scales, slots, plan) if call.blocks and scales is not None else None,
    )


def blocks_of(call: Call, scales: tuple[torch.Tensor, Tensors], slots: Places | Box, plan: Plan) -> Blocks:
    """Boxes of scales of blocks along K; one for the columns of all b, each of which begins at a whole tile."""
    (bm, bn, _), dtype = plan.tile, call.dtype
    own = step_box(scales[0], call.rows, dtype, bm)
    wide = [i for i, n in enumerate(call.ns) if n]
    columns = sum(math.ceil(call.ns[i] / bn) * bn for i in wide)
    of_b = step_box(side_by_side([scales[1][i] for i in wide]), columns, dtype, bn)
    if isinstance(slots, Places):
        return Blocks(own, of_b, slots.blocks)
    words = as_words(as_blocks(scales[0], call.rows))
    return Blocks(own, of_b, scale_words_box(words.view(1, 1, len(words), -1, 128), call))


def steps_of(
    fabric: Fabric, call: Call, channel: Channel, slots: Places | Box, b_t: bool, plan: Plan
) -> tuple[list[Step], int, Copying | None]:
    """The launches of a call, how many elements of scratch they need, and what a copy engine does beside them. The
    schedule "none" has two: communicators alone, then multipliers on all SMs."""
    world, (bm, bn, bk) = fabric.world_size, plan.tile
    problem = problem_of(Site.of(fabric), call)
    by_copies = isinstance(slots, Places) and plan.mechanism == COPY_ENGINE
    by_multicast = world > 1 and plan.mechanism == MULTIMEM
    per = flags_each(world, plan) if world > 1 else 1
    tiles, sms = tiles_of(problem, plan), computing_sms(problem, plan)
    k_steps = math.ceil(call.k / bk)
    height, copied = block_tiles(problem, plan, per) if world > 1 else 1, None
    if isinstance(slots, Places) and by_copies:
        height = copied_tiles(call.rows, k_steps * bk * call.dtype.itemsize, bm, per)
        copied = copying(fabric, call, plan, channel, slots, height * bm)
    whole = whole_tiles(tiles, sms, plan.split)
    grid = min(sms, whole + (tiles - whole) * plan.split)
    ns = [n for n in call.ns if n]

    def step(grid: int, comm_sms: int, last: bool) -> Step:
        tail = (
            channel.flags, channel.flags.stride(0), channel.state, channel.timeout_us, *ns, *[0] * (MAX_B - len(ns)),
            call.rows, call.k, whole, plan.split, math.ceil(math.ceil(call.rows / bm) / height), height,
            math.ceil(height * k_steps / max(plan.comm_sms * item_tiles(plan), 1)),
            world, bm, bn, bk, plan.stages,
            part_buffers(plan.tile, plan.stages, call.out_dtype.itemsize, core=plan.core, scales=problem.scales),
            plan.split > 1, GROUP_ROWS, b_t, len(ns), call.bias, call.scaled, call.by_column, call.return_gathered,
            plan.schedule == "intra_sm", plan.mechanism == "register", by_multicast, last, 1 if by_copies else 2, per,
            comm_sms,
        )  # fmt: skip
        return Step(grid, tail)

    scratch = grid * bm * bn if plan.split > 1 else 0
    if by_copies:
        return [step(grid, 0, True)], scratch, copied
    if plan.schedule == "none" and world > 1:
        return [step(plan.comm_sms, plan.comm_sms, False), step(grid, 0, True)], scratch, None
    return [step(grid + plan.comm_sms, plan.comm_sms, True)], scratch, None
