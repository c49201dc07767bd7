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
    token_slot  int32 [T, world], by columns: the slot that an own token was sent to at each rank; -1: not sent there
    place       int32 [T, k]: the row of each own choice at its expert's rank; -1: dropped
    home        int32 [T, k]: the home of each own choice's row; -1: dropped
    dropped     int32 []: how many own choices of an expert were dropped because their row was beyond `capacity`
    bounds      int32 [world, Experts.most + 1]: the first row of each of a rank's experts, and the row behind the last
                one's, if there were no capacity, counted from the rank's first
    slots, homes: how many slots each source has at each rank, and how many homes a rank has
    experts, group: those of the dispatch
    """

    offsets: torch.Tensor
    row_slot: torch.Tensor
    row_home: torch.Tensor
    row_weight: torch.Tensor | None
    token_slot: torch.Tensor
    place: torch.Tensor
    home: torch.Tensor
    dropped: torch.Tensor
    bounds: torch.Tensor
    slots: int
    homes: int
    experts: "Experts"
    group: object

    @property
    def tokens(self) -> int:
        """T, this rank's tokens."""
        return self.token_slot.shape[0]

    @property
    def totals(self) -> torch.Tensor:
        """int64 [E]: how many rows each expert of the group would have without a capacity."""
        return self.experts.of_all(self.bounds.diff().view(-1)).long()


class Sizes(NamedTuple):
    """This rank's rows, those of the rank with most of them, both the capacity if there is one; slots and homes."""

    rows: int
    most: int
    slots: int
    homes: int


class Lists(NamedTuple):
    """What the kernel of a dispatch needs beside a route, int32; rows are counted from the first of their rank.

    row_first   [R]: the first row of the same token; 0 behind the last row
    sends       [2, world, T]: by rank and slot the token that is sent, its first row there; what is behind the last
                slot that is sent may be anything
    sent        [world]: how many slots are
    bounds      [world, Experts.most + 1]: as that of the route
    """

    row_first: torch.Tensor
    sends: torch.Tensor
    sent: torch.Tensor
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
        if more == 0:
            return known
        # of ranks with one less the experts behind their last: so many numbers are nobody's
        behind = torch.arange(more * self.most + each, self.total + 1, each, device=known.device)
        return known + torch.bucketize(known, behind, right=True)

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
    offsets, token_slot, dropped, rank, place, home, rows, sends, sent, bounds = found
    size = Sizes(*sizes.tolist()) if capacity is None else sizes_of(world, k, capacity, max_tokens)
    row_first, row_slot, row_home, *row_weights = rows[:, : size.rows]
    row_weight = row_weights[0].view(torch.float32) if row_weights else None
    if topk_weight is not None and topk_weight.requires_grad:
        row_weight = torch.ops.tileweave.moe_row_weight.default(topk_weight, row_weight, rank, place, size.most, name)
    route = TokenRoute(
        offsets, row_slot, row_home, row_weight, token_slot, place, home, dropped, bounds, size.slots, size.homes,
        experts, group,
    )  # fmt: skip
    return route, Lists(row_first, sends, sent, bounds), size.most


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
    """This rank's choices, T * k of them, and their order: of experts, then of tokens and choices, which is that of
    their rows at the experts' ranks. Experts are `Experts.numbered`, N of them in all.

    rank    int64 [T, k]: that of the expert; `world` where there is none
    number  int64 [2, T, k]: which one in order it is, from 0, and which one is the first of the same token and rank
    expert  int64 [T * k], in order: N where there is none
    firsts  int32 [T * k + 1], in order: how many of those ahead are such first ones
    starts  int32 [N + 1]: how many are ahead of each expert's, and of nobody's
    numbers int64 [T * k + 1 at least]: from 0
    """

    rank: torch.Tensor
    number: torch.Tensor
    expert: torch.Tensor
    firsts: torch.Tensor
    starts: torch.Tensor
    numbers: torch.Tensor


def choices_of(topk_index: torch.Tensor, experts: Experts) -> Choices:
    """All of them, by one sort. A token's slot at a rank is how many first ones of this rank are ahead of its own."""
    (tokens, k), known = topk_index.shape, experts.numbered(topk_index.reshape(-1))
    count, bounds = tokens * k, experts.world * experts.most + 1
    expert, order = known.sort(stable=True)
    numbers = torch.arange(max(count + 1, bounds), device=topk_index.device)
    rank = (known // experts.most).view(tokens, k)
    number = order.new_empty(2, tokens, k)
    number[0].view(-1).scatter_(0, order, numbers[:count])
    by_rank = numbers[count].expand(tokens, experts.world + 1).scatter_reduce(1, rank, number[0], "amin")
    torch.gather(by_rank, 1, rank, out=number[1])
    firsts = numbers.new_zeros(count + 1, dtype=torch.int32)
    firsts[1:].scatter_(0, number[1].view(-1), 1)
    starts = torch.searchsorted(expert, numbers[:bounds], out_int32=True)
    return Choices(rank, number, expert, firsts.cumsum(0, dtype=torch.int32), starts, numbers)


def find_route(
    fabric: Fabric,
    name: str,
    topk_index: torch.Tensor,
    topk_weight: torch.Tensor | None,
    experts: Experts,
    capacity: int | None,
    max_tokens: int | None,
) -> list[torch.Tensor]:
    """offsets, token_slot and dropped of a route; `Choices.rank`; place and home; of this rank's rows, int32 [3 or 4,
    `width_of`], row_first, row_slot, row_home, and the bits of row_weight if there is one; sends, sent and bounds of
    its Lists; its Sizes as int64 [4] of the host.

    By operators of PyTorch, for a world whose ranks no kernel reaches; elsewhere routing_launch.py has the same."""
    world, own, (tokens, k) = experts.world, choices_of(topk_index, experts), topk_index.shape
    ahead = own.firsts[own.starts[:: experts.most]]  # first ones ahead of each rank's
    told = own.starts if capacity is not None else torch.cat([own.starts, ahead])
    every = torch.ops.tileweave.all_gather.default(told.view(1, -1), name, 0)
    sums = every[:, : own.starts.shape[0]].cumsum(0, dtype=torch.int32)
    by_rank = sums[-1].unfold(0, experts.most + 1, experts.most)
    bounds = by_rank - by_rank[:, :1]
    if capacity is None:
        size = _exact_sizes(fabric.rank, every, bounds)
    else:
        size = sizes_of(world, k, capacity, max_tokens)
    run = bounds[:, :-1] - sums[fabric.rank, :-1].view(world, -1)  # an expert's first row of this rank, less its number
    if fabric.rank:
        run += sums[fabric.rank - 1, 1:].view(world, -1)
    place = pad(run.view(-1), (0, 1), value=FAR)[own.expert].add_(own.numbers[1 : tokens * k + 1])  # from 1
    kept = place <= size.most
    home = kept.cumsum(0, dtype=torch.int32)  # from 1
    ordered = torch.stack([home, place, own.firsts[1:]]).mul_(kept).sub_(1)  # from 0, -1 where dropped
    dropped = own.starts[-1] - (home[-1] if tokens * k else 0)
    found = ordered[:, own.number]
    (home, _), (place, leading), (_, slot) = found
    slot = (slot - ahead[own.rank]).clamp_(min=-1)
    token = torch.arange(tokens, dtype=torch.int32, device=slot.device)[:, None].expand(tokens, k)
    columns = [token, leading, slot + (fabric.rank * size.slots + 1), home]
    if topk_weight is not None:
        columns.append(topk_weight.float().view(torch.int32))
    words = torch.stack(columns)
    slots = slot.new_full((world + 1, tokens), -1).scatter_(0, own.rank.t(), slot.t())
    sends = slot.new_zeros(2, world + 1, tokens)
    sends[:, own.rank, slot] = words[:2]  # where some token has no slot the last one is nobody's
    slots = slots[:world]
    told = words.new_zeros(world + 1, words.shape[0] - 1, width_of(size.most))
    told[own.rank, :, place] = words[1:].permute(1, 2, 0)
    got = torch.ops.tileweave.all_to_all.default(told[:-1], name, 0, 0)
    rows = got.sum(0, dtype=torch.int32)  # a row is of one rank
    rows[1] -= 1
    first, end = experts.of(fabric.rank)
    return [
        bounds[fabric.rank, 1 : end - first + 1].clamp(max=size.rows),
        slots.t(),
        dropped,
        own.rank,
        place.clone(),
        home.clone(),
        rows,
        sends[:, :world].contiguous(),
        (slots >= 0).sum(1, dtype=torch.int32),
        bounds,
        torch.tensor(size),
    ]


def width_of(most: int) -> int:
    """Places for so many rows, and one for rows that are dropped, at -1: a multiple of 16 bytes."""
    return most // 4 * 4 + 4


def _exact_sizes(rank: int, every: torch.Tensor, bounds: torch.Tensor) -> Sizes:
    """Sizes by what all ranks tell. The host waits."""
    world = bounds.shape[0]
    choices, sent = every[:, -world - 2].amax(), every[:, -world - 1 :].diff().amax()
    *rows, slots, homes = torch.cat([bounds[:, -1], torch.stack([sent, choices])]).tolist()
    return Sizes(rows[rank], max(*rows, 1), max(slots, 1), max(homes, 1))
