"""all_gather_matmul: where the rows of the peers lie in a rank's memory, and how a copy engine brings them there."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tileweave.fabric import MAX_RANKS, Channel, Fabric, Variant
from tileweave.fabric.base import HEADER_WORDS
from tileweave.ops.all_gather_matmul.check import NAME, Call
from tileweave.ops.all_gather_matmul.kernel import await_places_kernel
from tileweave.ops.block_scales import ROWS, WIDE, scales_in_step
from tileweave.ops.descriptors import ALIGN, Box, parallel_view, slots_box
from tileweave.planner import Plan
from tileweave.tiles.matmul import FIRST_SHARE, OWN_WORDS

COPY_ENGINE, MULTIMEM = "copy_engine", "multimem"
COPIES = 8  # blocks of a shard at most, each a copy of its own
# Bytes of such a block at least, where the shard is so large. Measured between two H200s: 123 GB/s with copies of 1 MB,
# 310 with 4, 355 with 16.
COPY_BYTES = 4 << 20
CHANNELS = NAME, f"{NAME}/{COPY_ENGINE}"  # a copy engine has another protocol, hence flags and an epoch of its own


def channel_name(plan: Plan) -> str:
    """The channel of a call with this plan."""
    return CHANNELS[plan.mechanism == COPY_ENGINE]


def flags_each(world: int, plan: Plan) -> int:
    """How many flags a source has, hence blocks at most. With a copy engine each rank has one more, its own last."""
    if plan.mechanism == COPY_ENGINE:
        return min(COPIES, FIRST_SHARE.value // world - 1)
    return MAX_RANKS // world


def copied_tiles(rows: int, row_bytes: int, tile_rows: int, blocks: int) -> int:
    """Rows of tiles in each of at most `blocks` blocks that a copy engine copies."""
    tiles = math.ceil(rows / tile_rows)
    return max(math.ceil(tiles / blocks), min(tiles, math.ceil(COPY_BYTES / (tile_rows * row_bytes))))


def as_words(x: torch.Tensor) -> torch.Tensor:
    """A matrix of 16-bit words: TMA fills none of 8-bit floats with NaN, nor do loads of them take 16 bytes."""
    return x if x.element_size() == 2 else x.view(torch.bfloat16)


@dataclass(slots=True)
class Places:
    """Where the rows of each source lie in each rank's memory, for one of `slots` calls in turn.

    descriptor: [world, slot x source, rows, k in whole steps] for TMA, as 16-bit words; rows, scales: the same as
    tensors, of scales [world, slot x source, rows]; everywhere: of all ranks at once, for a kernel, or 0; lines:
    distances of ranks and places, in 16 bytes; joined: where sources lie one behind the other, for TMA [world, slot,
    world x rows, k in whole steps], and the distance of the two slots in places; blocks: of scales of blocks along K,
    for TMA as `scale_words_box` has them.
    """

    descriptor: object
    rows: torch.Tensor
    scales: torch.Tensor
    everywhere: Any
    lines: tuple[int, int]
    joined: tuple[object, int] | tuple[None, None] = (None, None)
    blocks: object = None


def joined_places(fabric: Fabric, call: Call, plan: Plan) -> tuple[Channel, Places]:
    """`places_of` a call whose sources lie one behind the other, without scales. The second slot begins in the other
    half of the arena, a whole number of places from the first, so a half has room for one place more than it holds."""
    world, (bm, _, bk) = fabric.world_size, plan.tile
    words = math.ceil(call.k / bk) * bk
    step = call.rows * words
    nbytes = 2 * (world + 1) * step + world * ALIGN  # and for what other calls' slots lie short of the half
    channel = fabric.channel(NAME, 0, nbytes)
    elements = channel.staging.view(call.dtype)
    distance, between = elements.stride(0), math.ceil(elements.shape[1] // 2 / step)
    rows = elements.as_strided((world, between + world, call.rows, words), (distance, step, words, 1))
    whole = elements.as_strided((world, 2, world * call.rows, words), (distance, between * step, words, 1))
    descriptor, of_all = slots_box(rows, (bm, bk)).at(rows), slots_box(whole, (bm, bk)).at(whole)
    lines = 2 * distance // ALIGN, 2 * step // ALIGN
    return channel, Places(descriptor, rows, rows, 0, lines, (of_all, between))


def scale_words_box(words: torch.Tensor, call: Call) -> Box:
    """The box of a K step's scales of blocks, as 16-bit words [world, place, blocks of rows, 2 x blocks along K, 128].
    What is beyond reads as NaN, whatever type of scales it is."""
    return Box(words, (1, 1, 1, 2 * scales_in_step(call.dtype) // WIDE, 128), padding="nan", swizzle=0)


def blocks_behind(rows: torch.Tensor, call: Call, steps: int, behind: int) -> object:
    """A descriptor of the places for scales of blocks, in so many K steps, `behind` words from each of `rows`."""
    tall, wide = math.ceil(call.rows / ROWS), 2 * steps * scales_in_step(call.dtype) // WIDE
    (*strides, _, _), shape = rows.stride(), (*rows.shape[:2], tall, wide, 128)
    words = rows.as_strided(shape, (*strides, wide * 128, 128, 1), rows.storage_offset() + behind)
    return scale_words_box(words, call).at(words)


def places_of(fabric: Fabric, call: Call, plan: Plan, joined: bool) -> tuple[Channel, Places]:
    """The channel of a call, and the places in it, `joined` or each on its own. Collective where it must grow.

    Where a place lies depends on the arena, not on the shape alone: call e + 1, perhaps of another shape, writes in
    the other half of it.
    """
    if joined:
        return joined_places(fabric, call, plan)
    world, (bm, _, bk) = fabric.world_size, plan.tile
    slots = 1 if plan.mechanism == COPY_ENGINE else 2
    wide = torch.bfloat16 if call.dtype.itemsize == 1 else call.dtype
    steps = math.ceil(call.k / bk)
    words = steps * bk * call.dtype.itemsize // 2
    scale_bytes = math.ceil(4 * call.rows / ALIGN) * ALIGN if call.scaled else 0
    if call.blocks:
        scale_bytes = math.ceil(call.rows / ROWS) * ROWS * steps * scales_in_step(call.dtype)
    whole = math.ceil(call.rows / bm) * bm if plan.mechanism == MULTIMEM else call.rows  # rows that there is room for
    nbytes = world * (2 * whole * words + scale_bytes)
    channel = fabric.channel(channel_name(plan), 0, math.ceil(slots * nbytes / 2 / ALIGN) * ALIGN)
    arena = channel.staging
    rows, step = parallel_view(arena, slots * world, (call.rows, words), wide)
    floats, behind = arena.view(torch.float32), whole * words // 2
    shape, strides = (world, slots * world, call.rows), (floats.stride(0), step // 2, 1)
    scales = floats.as_strided(shape, strides, floats.storage_offset() + behind) if call.scaled else rows
    box = slots_box(rows, (bm, bk * call.dtype.itemsize // 2))
    lines = arena.stride(0) // ALIGN, 2 * step // ALIGN
    everywhere = channel.multicast(rows) if plan.mechanism == MULTIMEM and channel.multicast else 0
    blocks = blocks_behind(rows, call, steps, whole * words) if call.blocks else None
    return channel, Places(box.at(rows), rows, scales, everywhere, lines, blocks=blocks)


@dataclass(slots=True)
class Copying:
    """What a copy engine does for a call: its rows, block by block, to each receiver's place, a flag behind each block.

    args: of `await_places_kernel`, which must be launched ahead of the copies.
    """

    args: tuple
    places: Places
    flags: torch.Tensor
    words: torch.Tensor  # of `state`, one for each flag of a source
    rank: int
    blocks: list[slice]
    variant: Variant = field(default_factory=Variant)

    def await_places(self, fabric: Fabric) -> None:
        """Launch what goes ahead, on the current stream."""
        fabric.launch(await_places_kernel, 1, self.args, num_warps=1, variant=self.variant)

    def copies(self, a: torch.Tensor, scale: torch.Tensor | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(target, source) one behind the other: of `a` [rows, k in whole steps] and its scales, both contiguous."""
        return list(self._pairs(as_words(a), None if scale is None else scale.view(-1)))

    def _pairs(self, a: torch.Tensor, scale: torch.Tensor | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        world, per, last = self.flags.shape[0], len(self.words), len(self.blocks) - 1
        for distance in range(1, world):
            peer = (self.rank - distance) % world
            for i, block in enumerate(self.blocks):
                yield self.places.rows[peer, self.rank, block], a[block]
                if scale is not None:
                    yield self.places.scales[peer, self.rank, block], scale[block]
                end = per if i == last else i + 1  # so that calls of few blocks leave none behind
                first = HEADER_WORDS + self.rank * per
                yield self.flags[peer, first + i : first + end], self.words[i:end]


def copying(fabric: Fabric, call: Call, plan: Plan, channel: Channel, places: Places, block_rows: int) -> Copying:
    """The copies of a call in blocks of so many rows."""
    world, per = fabric.world_size, flags_each(fabric.world_size, plan)
    flags, first = channel.flags, OWN_WORDS.value + world
    args = fabric.rank, flags, flags.stride(0), channel.state, channel.timeout_us, world, per
    blocks = [slice(row, min(row + block_rows, call.rows)) for row in range(0, call.rows, block_rows)]
    return Copying(args, places, flags, channel.state[first : first + per], fabric.rank, blocks)
