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
from torch.nn.functional import pad

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


class Lists(NamedTuple):
    """What the kernel of a dispatch needs beside a route, int32; rows are counted from the first of their rank.

    row_first   [R]: the first row of the same token; -1 behind the last row
    sends       [2, world + 1, T]: by rank and slot the token that is sent, its first row there; rank `world` is none
    bounds      [world, Experts.most + 1]: the first row of each of a rank's experts, and the row behind the last one's
    """

    row_first: torch.Tensor
    sends: torch.Tensor
    bounds: torch.Tensor


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
        return self.numbered(expert) // self.most

    def numbered(self, expert: torch.Tensor) -> torch.Tensor:
        """int64: experts' numbers if each rank had `most` of them, the last one of some being nobody's choice;
        world * most for what is no expert."""
        known = expert.long().clamp(-1, self.total).remainder(self.total + 1)
        each, more = divmod(self.total, self.world)
        return known + ((known - more * self.most) // each).clamp(min=0) if more else known

    def of_all(self, numbered: torch.Tensor) -> torch.Tensor:
        """Of values in the order of `numbered` those of experts that there are."""
        each, more = divmod(self.total, self.world)
        if more == 0:
            return numbered
        by_rank = numbered.view(self.world, self.most)
        return torch.cat([by_rank[:more].reshape(-1), by_rank[more:, :each].reshape(-1)])


def make_route(
    name: str,
    group: object,
    topk_index: torch.Tensor,
    topk_weight: torch.Tensor | None,
    experts: Experts,
    own: int,
    capacity: int | None,
    max_tokens: int | None,
) -> tuple[TokenRoute, Lists, int]:
    """The route of this rank's tokens in the group called `name`, its lists and `Sizes.most`. own: experts of this
    rank. Collective. Without a capacity the host waits for the counts, once."""
    k, world = topk_index.shape[1], experts.world
    weight = None if topk_weight is None else topk_weight.detach()
    *found, sizes = torch.ops.tileweave.moe_route.default(
        topk_index, weight, experts.total, own, capacity, max_tokens, name
    )
    offsets, row_slot, row_home, token_slot, place, home, dropped, totals, row_weight, at = found[:10]
    lists = Lists(*found[10:])
    size = Sizes(*sizes.tolist()) if capacity is None else sizes_of(world, k, capacity, max_tokens)
    if topk_weight is None:
        row_weight = None
    elif topk_weight.requires_grad:
        row_weight = torch.ops.tileweave.moe_row_weight.default(topk_weight, row_weight, at, size.most, name)
    route = TokenRoute(
        offsets, row_slot, row_home, row_weight, token_slot, place, home, dropped, totals, size.slots, size.homes, group
    )
    return route, lists, size.most


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


class Choices(NamedTuple):
    """This rank's choices, T * k of them, in the order of experts, then of tokens and choices: that of their rows at
    the experts' ranks. Experts are `Experts.numbered`, N of them in all.

    order   int64 [T * k]: which choice each is
    expert  int64 [T * k]: N where there is none
    rank    int64 [T * k]: that of the expert; `world` where there is none
    token   int32 [T * k]
    cell    int64 [T * k]: the place of (token, rank) in a matrix [T, world + 1]
    number  int32 [T * k]: from 0
    first   int32 [T * k]: the number of the first choice of the same token and rank
    firsts  int32 [1 + T * k]: how many of those ahead are such first ones
    starts  int32 [2, N + 1]: how many choices, and how many first ones, are ahead of each expert's, and of nobody's
    """

    order: torch.Tensor
    expert: torch.Tensor
    rank: torch.Tensor
    token: torch.Tensor
    cell: torch.Tensor
    number: torch.Tensor
    first: torch.Tensor
    firsts: torch.Tensor
    starts: torch.Tensor


def choices_of(topk_index: torch.Tensor, experts: Experts) -> Choices:
    """All of them, by one sort. A token's slot at a rank is how many first ones of this rank are ahead of its own."""
    (tokens, k), device = topk_index.shape, topk_index.device
    expert, order = experts.numbered(topk_index.reshape(-1)).sort(stable=True)
    rank, token = expert // experts.most, (order // k).int()
    cell = torch.add(rank, token, alpha=experts.world + 1)
    number = torch.arange(tokens * k, dtype=torch.int32, device=device)
    first = number.new_full((tokens * (experts.world + 1),), FAR).scatter_reduce_(0, cell, number, "amin")[cell]
    firsts = pad((first == number).cumsum(0, dtype=torch.int32), (1, 0))
    bounds = torch.arange(experts.world * experts.most + 1, device=device)
    starts = torch.searchsorted(expert, bounds, out_int32=True)
    starts = torch.stack([starts, firsts[starts]])
    return Choices(order, expert, rank, token, cell, number, first, firsts, starts)


def find_route(
    fabric: Fabric,
    name: str,
    topk_index: torch.Tensor,
    topk_weight: torch.Tensor | None,
    experts: Experts,
    capacity: int | None,
    max_tokens: int | None,
) -> list[torch.Tensor]:
    """Fields of a route, from `offsets` to `totals` but for `row_weight`, which comes next, without rows if there is no
    topk_weight; int64 [T * k], the row of each own choice among those of all ranks, `Sizes.most` each, or the one
    behind them if it is dropped; its Lists; its Sizes as int64 [4] of the host."""
    world, own, (tokens, k) = experts.world, choices_of(topk_index, experts), topk_index.shape
    every = torch.ops.tileweave.all_gather.default(own.starts.view(1, -1), name, 0).view(world, 2, -1)
    ahead = every[:, 0].sum(0)
    by_rank = ahead.unfold(0, experts.most + 1, experts.most)
    bounds = (by_rank - by_rank[:, :1]).int()
    if capacity is None:
        size = _exact_sizes(fabric.rank, every, bounds)
    else:
        size = sizes_of(world, k, capacity, max_tokens)
    sources = every[: fabric.rank, 0].diff().sum(0, dtype=torch.int32)  # how many rows those ahead have of each expert
    run = bounds[:, :-1].reshape(-1) + sources - own.starts[0, :-1]
    place = pad(run, (0, 1), value=FAR)[own.expert] + own.number
    kept = place < size.most
    lost, behind = ~kept, kept.cumsum(0, dtype=torch.int32)  # the home behind each choice's own
    slot = own.firsts[own.first] - own.starts[1, :: experts.most][own.rank]
    leading = place[own.first]
    at = torch.add(place, own.rank, alpha=size.most).masked_fill_(lost, world * size.most)
    words = [slot + (fabric.rank * size.slots + 1), leading + 1, behind]
    if topk_weight is not None:
        words.append(topk_weight.reshape(-1).float()[own.order].view(torch.int32))
    row_slot, row_first, row_home, *row_weight = _rows(name, world, at, torch.stack(words, 1), size)
    token_slot = slot.new_full((tokens, world + 1), -1)
    token_slot.view(-1).scatter_(0, own.cell.masked_fill(lost, world), slot)
    first, end = experts.of(fabric.rank)
    return [
        bounds[fabric.rank, 1 : end - first + 1].clamp(max=size.rows),
        row_slot - 1,
        (row_home - 1).clamp_(min=0),
        token_slot[:, :world].contiguous(),
        _of_choices(place.masked_fill(lost, -1), own).view(tokens, k),
        _of_choices((behind - 1).masked_fill_(lost, -1), own).view(tokens, k),
        own.starts[0, -1] - kept.sum(dtype=torch.int32),
        experts.of_all(ahead.diff()),
        row_weight[0].contiguous().view(torch.float32) if row_weight else place.new_empty(0, dtype=torch.float32),
        _of_choices(at, own),
        row_first - 1,
        _sends(own, slot, leading, lost, world, tokens),
        bounds,
        torch.tensor(size),
    ]


def _exact_sizes(rank: int, every: torch.Tensor, bounds: torch.Tensor) -> Sizes:
    """Sizes by all ranks' `Choices.starts`. The host waits."""
    most = bounds.shape[1] - 1
    sent = every[:, 1, most::most] - every[:, 1, :-1:most]
    *rows, slots, homes = torch.cat([bounds[:, -1], torch.stack([sent.amax(), every[:, 0, -1].amax()])]).tolist()
    return Sizes(rows[rank], max(*rows, 1), max(slots, 1), max(homes, 1))


def _of_choices(values: torch.Tensor, own: Choices) -> torch.Tensor:
    """Values of `Choices` in the order of tokens and choices."""
    return torch.empty_like(values).scatter_(0, own.order, values)


def _rows(name: str, world: int, at: torch.Tensor, words: torch.Tensor, size: Sizes) -> tuple[torch.Tensor, ...]:
    """`words` [T * k, .] of the choices that this rank's rows are made of, a column each; 0 where there is none."""
    sent = words.new_zeros(world * size.most + 1, words.shape[1]).index_copy_(0, at, words)
    got = torch.ops.tileweave.all_to_all.default(sent[:-1], name, 0, 0).view(world, size.most, -1)
    return got.sum(0, dtype=torch.int32)[: size.rows].unbind(1)  # a row is of one rank


def _sends(
    own: Choices, slot: torch.Tensor, leading: torch.Tensor, lost: torch.Tensor, world: int, tokens: int
) -> torch.Tensor:
    """`Lists.sends`, of each choice's slot and its token's first row, which all choices of a token at a rank share."""
    at = torch.add(slot, own.rank, alpha=tokens).masked_fill_(lost, world * tokens)
    lists = slot.new_zeros(2, (world + 1) * tokens)
    return lists.index_copy_(1, at, torch.stack([own.token, leading])).view(2, world + 1, tokens)
