"""What a collective comes to on the device: one launch of the kernel, or two; and the path of a call.

All of it follows from what is the same on every rank: shapes, dtypes, options, the world. A rank's strides or addresses
have no part in it, so all ranks come to the same.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tileweave.fabric.base import FLAGS
from tileweave.ops.collectives.check import CONTRACTS, Call
from tileweave.ops.contract import Site, out_of_reach
from tileweave.ops.nodes import DIRECT_BYTES, PIECES, pieces
from tileweave.ops.route import Route, fallback, over_nodes

LINE_BYTES = 16  # the widest access of a thread
SUMMED = (torch.bfloat16, torch.float16, torch.float32)  # what the kernel adds
MAX_UNITS = 2**31 - 2**24  # of a part: they are counted in 32 bits, and the last block reaches beyond
# An all-reduce in two shots sends less but launches twice. One shot is faster up to (W - 1) (W - 2) / W times this many
# bytes, which is what a link of 370 GB/s carries in the six microseconds of a launch. Always so for two ranks.
ONE_SHOT_BYTES = 2 << 20
WARPS = 16
TILE = (
    2048  # units that a CTA moves at once: four 16-byte accesses in flight per thread; of narrower ones twice as many
)
STEPS = 16  # of a call at most, see the kernel
STEP_TILES = 8  # in a step at least: 256 KiB, so that its flags cost little


class Shares(NamedTuple):
    """How a grid of CTAs moves a part: in `steps` of `block` units each, `tile` units of all parts at once."""

    grid: int
    steps: int
    block: int
    tile: int


@dataclass(frozen=True)
class Pass:
    """One launch of the kernel, in the terms of its protocol. Sizes are in units of `vec` elements of `element`."""

    element: torch.dtype
    vec: int
    part: int
    split_run: int
    concat_run: int
    x_units: int
    out_units: int
    split: bool
    reduction: str | None

    @property
    def unit_bytes(self) -> int:
        """Bytes that a thread moves at once."""
        return self.vec * self.element.itemsize

    @property
    def part_lines(self) -> int:
        """Lines of LINE_BYTES that a part takes in a slot."""
        return -(-self.part * self.unit_bytes // LINE_BYTES)

    def slot_bytes(self, world: int) -> int:
        """Bytes of a slot."""
        return self.part_lines * LINE_BYTES * (world if self.split else 1)

    def shares(self, world: int, sms: int) -> "Shares":
        """How the units of a part are shared out."""
        tile = TILE if self.unit_bytes == LINE_BYTES else 2 * TILE
        rows = max(tile // (1 << (world - 1).bit_length()), 1)
        tiles = -(-self.part // rows)
        grid = max(min(tiles, sms, FLAGS // world), 1)
        of_a_cta = -(-tiles // grid)
        in_a_step = -(-of_a_cta // min(STEPS, -(-of_a_cta // STEP_TILES)))
        return Shares(grid, -(-of_a_cta // in_a_step), in_a_step * rows, tile)


def passes(call: Call, world: int) -> tuple[Pass, ...]:
    """The launches of a call whose result is not empty, in order; the second takes the first one's result."""
    return passes_in(call, world, "two_shots" if is_two_shot(call, world) else "one_shot")


def passes_in(call: Call, world: int, schedule: str) -> tuple[Pass, ...]:
    """The same by schedule, "one_shot" or, of an all-reduce, "two_shots"."""
    if schedule == "two_shots":
        return _two_shots(call, world)
    size, shape = call.dtype.itemsize, list(call.shape)
    if call.split is not None:
        shape[call.split] //= world
    part = math.prod(shape) * size
    split_run = part if call.split is None else math.prod(shape[call.split :]) * size
    concat_run = part if call.concat is None else math.prod(shape[call.concat :]) * size
    unit = math.gcd(LINE_BYTES, split_run, concat_run)
    return (
        Pass(
            *_elements(call.dtype, unit, call.reduction),
            part // unit,
            split_run // unit,
            concat_run // unit,
            math.prod(call.shape) * size // unit,
            math.prod(call.out_shape) * size // unit,
            call.split is not None,
            call.reduction,
        ),
    )


def is_two_shot(call: Call, world: int) -> bool:
    """Whether every rank sums its share and hands it out, rather than every rank everything."""
    nbytes = math.prod(call.shape) * call.dtype.itemsize
    return call.name == "all_reduce" and nbytes * (world - 1) * (world - 2) > ONE_SHOT_BYTES * world


def _two_shots(call: Call, world: int) -> tuple[Pass, ...]:
    """A reduce-scatter of the flat x, whose last parts may be short or missing, then an all-gather."""
    nbytes = math.prod(call.shape) * call.dtype.itemsize
    unit = math.gcd(LINE_BYTES, nbytes)
    total, part = nbytes // unit, -(-nbytes // unit // world)
    summed, moved = _elements(call.dtype, unit, call.reduction), _elements(call.dtype, unit, None)
    return (
        Pass(*summed, part, part, part, total, part, True, call.reduction),
        Pass(*moved, part, part, part, part, total, False, None),
    )


def _elements(dtype: torch.dtype, unit: int, reduction: str | None) -> tuple[torch.dtype, int]:
    """As what a unit of so many bytes is accessed: numbers where they are summed, else whatever is as wide."""
    if not reduction:
        dtype = {1: torch.int8, 2: torch.int16}.get(unit, torch.int32)
    return dtype, unit // dtype.itemsize


def choose(site: Site, call: Call, device: torch.device) -> Route:
    """The path of a call."""
    world = site.world
    if world == 1:
        return Route(call.name, site.backend, False, "the world has one rank: the result is a copy of x")
    empty = 0 in call.out_shape
    if site.inside is not None and not empty:
        return _over_nodes(site, site.inside, call, device)
    refusal = out_of_reach(site, device, "x", cores=())
    if refusal is None and call.reduction and call.dtype not in SUMMED:
        refusal = f"the kernel sums bfloat16, float16 and float32, not {call.dtype}"
    if refusal is None and not empty:
        refusal = _too_large(passes(call, world)[0])
    if refusal:
        return fallback(call.name, refusal, "the group's own collective")
    if empty:
        return Route(call.name, site.backend, False, "the result is empty: nothing to launch")
    return Route(call.name, site.backend, True, "; then ".join(_describe(p, site) for p in passes(call, world)))


def pieces_over_nodes(call: Call, each: int) -> tuple[slice, ...]:
    """The flat pieces of an all-reduce over nodes with `each` ranks; none where it goes between nodes as a whole."""
    size = math.prod(call.shape)
    if size * call.dtype.itemsize <= DIRECT_BYTES:
        return ()
    return pieces(size, each, min(size * call.dtype.itemsize // (DIRECT_BYTES * each), PIECES))


def _over_nodes(site: Site, within: Site, call: Call, device: torch.device) -> Route:
    """The route of a call that is composed over nodes, `within` one of which a rank sees the others."""
    name, shape, calls = call.name, list(call.shape), site.nodes
    options: tuple = tuple(each for each in (call.split, call.concat) if each is not None)
    if call.reduction is not None:
        options += (call.reduction, call.deterministic)
    if call.split is not None:
        shape[call.split] //= site.nodes
        how = "what is for each node in turn, its own last, which travels while the next is put together"
    elif call.reduction is None:
        how = "what is of each node in turn, its own first, while the others arrive"
    elif parts := pieces_over_nodes(call, within.world):
        name, shape, calls = "reduce_scatter", [_up(parts[0].stop, within.world)], len(parts)
        options = (0, *options)
        how = "each piece summed in the node, shares over the nodes, then gathered in the node"
    else:
        calls, how = 1, "the sum in the node, then over the nodes"
    inner = CONTRACTS[name](within.world, tuple(shape), call.dtype, *options)
    return over_nodes(call.name, site, how, choose(within, inner, device), calls)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _too_large(first: Pass) -> str | None:
    if first.part < MAX_UNITS:
        return None
    return f"a part has {first.part} units of {first.unit_bytes} bytes, more than the {MAX_UNITS} that are counted"


def _describe(p: Pass, site: Site) -> str:
    shares = p.shares(site.world, site.sms)
    return (
        f"a grid of {shares.grid} lays out {p.slot_bytes(site.world)} bytes and "
        f"{'sums' if p.reduction else 'takes'} {p.part * p.unit_bytes} of every rank, "
        f"by {p.unit_bytes}-byte accesses, steps: {shares.steps}"
    )
