"""Where tokens go: from each rank's choice of experts to rows in expert order, on the device.

Rank d has consecutive experts; its rows are sorted by expert, then by the rank that the token comes from, then by
token and choice. A token that several experts of d want is sent to it once: into a *slot* of its source, in the order
in which d's experts need them. Each row names the slot that it is made of. Two exchanges make that known: how many rows
each rank has for each expert, then which slot each row is made of.

For the way back a rank has a *home* for every row of its own tokens, wherever it is: in the order of experts, then of
tokens and choices. The rows of one expert and one source follow each other in both orders, so counts are all it takes.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tileweave.fabric import Fabric

FAR = 1 << 30  # a row beyond all


@dataclass(frozen=True)
class TokenRoute:
    """Where the tokens of one dispatch went, as the way back needs it. Tensors on this rank's device, the caller's.

    offsets     int32 [E_local]: the end of each of this rank's experts' rows in y
    row_slot    int32 [R]: what a row of y is made of, source * slots + slot; -1 behind the last row
    row_home    int32 [R]: the home of a row of y at its source; 0 behind the last row
    row_weight  float32 [R] or None: what a row is multiplied with on the way back; carries topk_weight's gradient
    token_slot  int32 [T, world]: the slot that an own token was sent to at each rank; -1: not sent there
    place       int32 [T, k]: the row of each own choice at its expert's rank; -1: dropped
    home        int32 [T, k]: the home of each own choice's row; -1: dropped
    dropped     int32 []: how many own choices of an expert were dropped because their row was beyond `capacity`
    totals      int64 [E]: how many rows each expert of the group would have without a capacity
    slots, homes: how many slots each source has at each rank, and how many homes a rank has
    group: that of the dispatch
    """

    offsets: torch.Tensor
    row_slot: torch.Tensor
    row_home: torch.Tensor
    row_weight: torch.Tensor | None
    token_slot: torch.Tensor
    place: torch.Tensor
    home: torch.Tensor
    dropped: torch.Tensor
    totals: torch.Tensor
    slots: int
    homes: int
    group: object

    @property
    def tokens(self) -> int:
        """T, this rank's tokens."""
        return self.token_slot.shape[0]


class Sizes(NamedTuple):
    """This rank's rows, those of the rank with most of them, both the capacity if there is one; slots and homes."""

    rows: int
    most: int
    slots: int
    homes: int


class Experts(NamedTuple):
    """How experts are divided among ranks: as torch.tensor_split divides them."""

    total: int
    world: int

    def of(self, rank: int) -> tuple[int, int]:
        """The first expert of a rank, and the one past its last."""
        each, more = divmod(self.total, self.world)
        return rank * each + min(rank, more), (rank + 1) * each + min(rank + 1, more)

    @property
    def most(self) -> int:
        """Those of the rank with most of them."""
        return -(-self.total // self.world)

    def owner(self, expert: torch.Tensor) -> torch.Tensor:
        """The ranks that have these experts."""
        each, more = divmod(self.total, self.world)
        longer = more * (each + 1)
        return torch.where(expert < longer, expert // (each + 1), more + (expert - longer) // each)


def make_route(
    name: str,
    group: object,
    topk_index: torch.Tensor,
    topk_weight: torch.Tensor | None,
    experts: Experts,
    own: int,
    capacity: int | None,
    max_tokens: int | None,
) -> tuple[TokenRoute, int]:
    """The route of this rank's tokens in the group called `name`, and `Sizes.most`. own: experts of this rank.
    Collective. Without a capacity the host waits for the counts, once."""
    k, world = topk_index.shape[1], experts.world
    *found, sizes = torch.ops.tileweave.moe_route.default(topk_index, experts.total, own, capacity, max_tokens, name)
    offsets, row_slot, row_home, token_slot, place, home, dropped, totals = found
    size = Sizes(*sizes.tolist()) if capacity is None else sizes_of(world, k, capacity, max_tokens)
    row_weight = None
    if topk_weight is not None:
        rows = place.reshape(-1).long()
        owner = experts.owner(torch.where(rows >= 0, topk_index.reshape(-1).long(), 0))
        at = torch.where(rows >= 0, owner * size.most + rows, world * size.most)
        row_weight = _row_weights(name, world, at, topk_weight, size.most)[: size.rows]
    route = TokenRoute(
        offsets, row_slot, row_home, row_weight, token_slot, place, home, dropped, totals, size.slots, size.homes, group
    )
    return route, size.most


def sizes_of(world: int, k: int, capacity: int, max_tokens: int | None) -> Sizes:
    """Sizes that depend on no data. ValueError where slots cannot be numbered."""
    slots = min(capacity, max_tokens or capacity)
    if world * slots >= 1 << 31:
        raise ValueError(
            f"moe_dispatch_matmul: {world} ranks with {slots} slots each, by capacity and max_tokens, are more "
            f"than can be numbered in 32 bits; {((1 << 31) - 1) // world} slots would do"
        )
    return Sizes(
        capacity, capacity, slots, world * capacity if max_tokens is None else min(world * capacity, k * max_tokens)
    )


def find_route(
    fabric: Fabric, name: str, topk_index: torch.Tensor, experts: Experts, capacity: int | None, max_tokens: int | None
) -> list[torch.Tensor]:
    """Fields of a route, from `offsets` to `totals` but for `row_weight`, and its Sizes as int64 [4] of the host."""
    world, (tokens, k) = experts.world, topk_index.shape
    expert = topk_index.reshape(-1).long()
    valid = (expert >= 0) & (expert < experts.total)
    known = torch.where(valid, expert, 0)
    owner = experts.owner(known)
    counts, ahead = _counted(torch.where(valid, expert, experts.total), experts.total)
    wanted = first_rows(torch.where(valid, 0, FAR), owner, tokens, world) < FAR
    told = torch.cat([counts, wanted.sum(0)]).int()
    every = torch.ops.tileweave.all_gather.default(told, name, 0).view(world, -1).long()
    counts_of = every[:, : experts.total]
    totals = counts_of.sum(0)
    start, end = places_of(totals, experts)
    if capacity is None:
        last = torch.stack([end[experts.of(rank)[1] - 1] for rank in range(world)])
        most_sent = torch.stack([every[:, experts.total :].amax(), counts_of.sum(1).amax()])
        numbers = torch.cat([last, most_sent]).tolist()
        size = Sizes(numbers[fabric.rank], *(max(*each, 1) for each in (numbers[:world], numbers[-2:-1], numbers[-1:])))
    else:
        size = sizes_of(world, k, capacity, max_tokens)
    run = start + counts_of.cumsum(0) - counts_of  # the first row that each source has of each expert
    kept_of = torch.minimum((size.most - run).clamp(min=0), counts_of)
    home_run = kept_of.cumsum(1) - kept_of
    place = run[fabric.rank][known] + ahead
    kept = valid & (place < size.most)
    token_slot = _slots(first_rows(torch.where(kept, place, FAR), owner, tokens, world))
    at = torch.where(kept, owner * size.most + place, world * size.most)
    slot = token_slot[torch.arange(tokens, device=at.device).repeat_interleave(k), owner]
    first, behind = experts.of(fabric.rank)
    offsets = end[first:behind].clamp(max=size.rows).int()
    row_slot = _row_slots(name, world, at, slot, size.most, size.slots)[: size.rows].clone()
    return [
        offsets,
        row_slot,
        _row_homes((home_run - run)[:, first:behind], offsets, row_slot, size.slots),
        token_slot,
        torch.where(kept, place, -1).view(tokens, k).int(),
        torch.where(kept, home_run[fabric.rank][known] + ahead, -1).view(tokens, k).int(),
        (valid & ~kept).sum().int(),
        totals,
        torch.tensor(size),
    ]


def _counted(expert: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How many choices each of `count` experts has, and for each choice how many ahead of it have the same expert.
    Those of number `count` are nobody's."""
    counts = torch.zeros(count + 1, dtype=torch.long, device=expert.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    order = expert.argsort(stable=True)
    ahead = torch.arange(expert.shape[0], device=expert.device) - (counts.cumsum(0) - counts)[expert[order]]
    return counts[:-1], torch.empty_like(expert).scatter_(0, order, ahead)


def places_of(totals: torch.Tensor, experts: Experts, align: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The first row of each expert at its rank, and the one past its last, of how many it has, rounded up to a multiple
    of `align`."""
    totals = (totals + align - 1) // align * align
    sizes = [end - first for first, end in map(experts.of, range(experts.world))]
    end = torch.cat([part.cumsum(0) for part in totals.split(sizes)])
    return end - totals, end


def first_rows(place: torch.Tensor, owner: torch.Tensor, tokens: int, world: int) -> torch.Tensor:
    """[tokens, world]: the first row that a token has at a rank, FAR if it has none; `place` and `owner` are those of
    its choices, one token after the other."""
    found = torch.full((tokens, world), FAR, dtype=place.dtype, device=place.device)
    if tokens:
        found.scatter_reduce_(1, owner.view(tokens, -1), place.view(tokens, -1), "amin")
    return found


def _slots(first: torch.Tensor) -> torch.Tensor:
    """[tokens, world] int32: numbers of the tokens that are sent to a rank, in the order of their first rows there."""
    order = first.argsort(dim=0, stable=True)
    numbers = torch.arange(first.shape[0], device=first.device)[:, None].expand_as(order)
    return torch.where(first < FAR, torch.empty_like(order).scatter_(0, order, numbers), -1).int()


def _row_slots(name: str, world: int, at: torch.Tensor, slot: torch.Tensor, most: int, slots: int) -> torch.Tensor:
    """int32 [most]: what each row of this rank is made of; `at` and `slot` say it for each choice of this rank."""
    sent = torch.full((world * most + 1,), -1, dtype=torch.int32, device=at.device).index_copy_(0, at, slot)
    got = torch.ops.tileweave.all_to_all.default(sent[:-1], name, 0, 0).view(world, most)
    sources = slots * torch.arange(world, dtype=torch.int32, device=at.device)[:, None]
    return torch.where(got >= 0, got + sources, -1).amax(0)


def _row_homes(apart: torch.Tensor, offsets: torch.Tensor, row_slot: torch.Tensor, slots: int) -> torch.Tensor:
    """int32 [R]: the home of each row of this rank; `apart` [world, E_local] is how far from their rows those of each
    source and expert are."""
    rows = torch.arange(row_slot.shape[0], device=row_slot.device)
    expert = torch.bucketize(rows, offsets.long(), right=True).clamp(max=offsets.shape[0] - 1)
    return torch.where(row_slot >= 0, rows + apart[row_slot.clamp(min=0).long() // slots, expert], 0).int()


def _row_weights(name: str, world: int, at: torch.Tensor, weight: torch.Tensor, most: int) -> torch.Tensor:
    """float32 [most]: the weight of each row of this rank, 0 where there is none."""
    sent = weight.new_zeros(world * most + 1, dtype=torch.float32).index_add(0, at, weight.reshape(-1).float())
    return torch.ops.tileweave.all_to_all.default(sent[:-1], name, 0, 0).view(world, most).sum(0)
