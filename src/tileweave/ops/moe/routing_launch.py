"""The route of a dispatch, made by kernels: their host side."""

from functools import lru_cache
from typing import NamedTuple

import torch

from tileweave.fabric import Fabric, Variant
from tileweave.ops.descriptors import in_one_piece
from tileweave.ops.moe.routing import FAR, Experts, Lists, Sizes, sizes_of, width_of
from tileweave.ops.moe.routing_kernel import (
    CHUNK,
    WORDS,
    align_rows_kernel,
    count_choices_kernel,
    exchange_counts_kernel,
    lacking_kernel,
    send_rows_kernel,
)

COUNTS, ROWS = "moe_route_counts", "moe_route_rows"  # channels
WARPS, PAIR_WARPS = 8, 16
MOST_COUNTS = 8192  # of experts at ranks, that one CTA has at once
LINE = 4  # words that 16 bytes are


def power(n: int) -> int:
    """n or the next power of two."""
    return 1 << (n - 1).bit_length()


def fits(k: int, experts: Experts) -> bool:
    """Whether the kernels can make a route of so many choices a token."""
    return power(k) <= CHUNK.value and power(experts.world) * power(experts.most) <= MOST_COUNTS


class Variants(NamedTuple):
    """The kernels of calls that Triton compiles alike."""

    counting: Variant
    exchange: Variant
    sending: Variant


@lru_cache(maxsize=256)
def variants(dtype: torch.dtype, world: int, topk: int, most: int, weighted: bool, device: torch.device) -> Variants:
    """Those of a call; topk and most are powers of two."""
    return Variants(Variant(), Variant(), Variant())


def some(x: torch.Tensor) -> torch.Tensor:
    """`x` as a kernel's argument: in one piece, 16-byte aligned, of one element at least."""
    return in_one_piece(x) if x.numel() else x.new_zeros(1)


def find_route(
    fabric: Fabric,
    topk_index: torch.Tensor,
    topk_weight: torch.Tensor | None,
    experts: Experts,
    capacity: int | None,
    max_tokens: int | None,
) -> list[torch.Tensor]:
    """What `routing.find_route` returns, by launches on the current stream. Collective."""
    world, rank, (tokens, k) = experts.world, fabric.rank, topk_index.shape
    (more, each), most, device = divided(experts), experts.most, topk_index.device
    numbered, constants, weighted = world * most, (world, power(k)), topk_weight is not None
    chunks = max(1, -(-tokens // (CHUNK.value // power(k))))
    split = tokens, k, experts.total, more, each, most, chunks
    index, before = some(topk_index), -(-world // LINE) * LINE
    made = variants(index.dtype, *constants, power(most), weighted, device)

    def words(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    zeros = torch.zeros(before + 2 * numbered * chunks, dtype=torch.int32, device=device)
    sent, table = zeros[:world], zeros[before:]
    counting = index, table, *split, *constants
    fabric.launch(count_choices_kernel, fabric.sms, counting, num_warps=PAIR_WARPS, variant=made.counting)
    sums = table.cumsum(0, dtype=torch.int32)
    firsts, bounds, told = words(3, numbered), words(world, most + 1), words(3 + world)
    first, end = experts.of(rank)
    offsets, limit = words(end - first), FAR if capacity is None else capacity
    channel = fabric.channel(COUNTS, 0, 8 * numbered * world)
    slots = channel.staging.view(torch.int32)
    exchange = (
        rank, sums, slots, slots.stride(0), slots.shape[1] // 2, channel.flags, channel.flags.stride(0), channel.state,
        channel.timeout_us, most, chunks, limit, end - first, firsts, bounds, offsets, told, world, power(world),
        power(most),
    )  # fmt: skip
    fabric.launch(exchange_counts_kernel, 1, exchange, num_warps=WARPS, variant=made.exchange)
    size = exact_sizes(rank, told) if capacity is None else sizes_of(world, k, capacity, max_tokens)
    channel = fabric.channel(ROWS, 0, -(-size.most * WORDS.value * 4 // 2))  # both halves are one slot
    slots = channel.staging.view(torch.int32)
    owner = torch.empty(tokens, k, dtype=torch.int64, device=device)
    place, home, sends = words(tokens, k), words(tokens, k), words(2, world, tokens)
    token_slot = torch.full((world, tokens), -1, dtype=torch.int32, device=device)
    rows = words(WORDS.value if weighted else WORDS.value - 1, width_of(size.most))
    weight = index if topk_weight is None else some(topk_weight.float().view(torch.int32))
    sending = (
        rank, index, weight, sums, firsts, bounds, slots, slots.stride(0), channel.flags, channel.flags.stride(0),
        channel.state, channel.timeout_us, some(owner), some(place), some(home), some(token_slot), some(sends), sent,
        rows, *split, size.slots, size.most, size.rows, rows.shape[1], *constants, weighted,
    )  # fmt: skip
    fabric.launch(send_rows_kernel, fabric.sms, sending, num_warps=PAIR_WARPS, variant=made.sending)
    found = offsets, token_slot.t(), told[0], owner, place, home, rows, sends, sent, bounds
    return [*found, torch.tensor(size)]


def divided(experts: Experts) -> tuple[int, int]:
    """How many ranks have one expert more than the others, and how many the others have."""
    each, more = divmod(experts.total, experts.world)
    return more, each


def exact_sizes(rank: int, told: torch.Tensor) -> Sizes:
    """Sizes by what all ranks tell. The host waits."""
    _, choices, sent, *rows = told.tolist()
    return Sizes(rows[rank], max(*rows, 1), max(sent, 1), max(choices, 1))


@lru_cache(maxsize=256)
def align_variants(world: int, most: int, align: int, device: torch.device) -> tuple[Variant, Variant]:
    """The kernels of `aligned`, of calls that Triton compiles alike."""
    return Variant(), Variant()


def aligned(fabric: Fabric, lists: Lists, align: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where rows lie if those of each expert begin at a multiple of `align`: those of the tokens that are sent, int32
    [world, T], and of `row_first`, [R]; of one element at least. By launches on the current stream."""
    (_, world, tokens), rows, most = lists.sends.shape, lists.row_first.shape[0], lists.bounds.shape[1] - 1
    sizes = world * most, max(world * tokens, 1), max(rows, 1)
    apart, places, from_row = (lists.bounds.new_empty(n) for n in sizes)
    lacking, align_rows = align_variants(world, power(most), align, apart.device)
    bounds = lists.bounds, apart, most, world, power(most), align
    fabric.launch(lacking_kernel, 1, bounds, num_warps=WARPS, variant=lacking)
    args = (
        fabric.rank, some(lists.sends), some(lists.sent), some(lists.row_first), lists.bounds, apart, places, from_row,
        tokens, rows, most, world, power(most),
    )  # fmt: skip
    fabric.launch(align_rows_kernel, fabric.sms, args, num_warps=WARPS, variant=align_rows)
    return places, from_row
