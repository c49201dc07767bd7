"""The ways there and back through the group's all-to-all, with gradients."""

import torch

from tileweave.ops.moe.routing import TokenRoute


def slot_tokens(route: TokenRoute) -> torch.Tensor:
    """int64 [world * slots]: the own token that goes to each slot at each rank; T where none does."""
    tokens, world = route.token_slot.shape
    device = route.token_slot.device
    ranks = torch.arange(world, device=device).expand(tokens, world)
    at = torch.where(route.token_slot >= 0, ranks * route.slots + route.token_slot, world * route.slots)
    found = torch.full((world * route.slots + 1,), tokens, dtype=torch.long, device=device)
    numbers = torch.arange(tokens, device=device)[:, None].expand(tokens, world)
    return found.scatter_(0, at.reshape(-1), numbers.reshape(-1))[:-1]


def dispatch(x: torch.Tensor, route: TokenRoute, name: str) -> torch.Tensor:
    """[R, H]: the tokens `x` [T, H] of all ranks in the order of this rank's rows, then zeros. Collective."""
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
    got = torch.ops.tileweave.all_to_all.default(padded[slot_tokens(route)], name, 0, 0)
    rows = got[route.row_slot.clamp(min=0).long()]
    return torch.where((route.row_slot >= 0)[:, None], rows, 0)


def combine(y: torch.Tensor, route: TokenRoute, name: str) -> torch.Tensor:
    """[T, I]: for each own token the sum of its rows of `y` [R, I], weighted, at all ranks. Summed in float32 at each
    rank, rounded to y's dtype, sent, and summed again. Collective."""
    world = route.token_slot.shape[1]
    parts = torch.where((route.row_slot >= 0)[:, None], y, 0).float()
    if route.row_weight is not None:
        parts = parts * route.row_weight[:, None]
    count = world * route.slots
    slot = torch.where(route.row_slot >= 0, route.row_slot, count)
    sent = parts.new_zeros(count + 1, y.shape[1]).index_add(0, slot, parts)[:-1].to(y.dtype)
    got = torch.ops.tileweave.all_to_all.default(sent, name, 0, 0)
    out = parts.new_zeros(route.tokens + 1, y.shape[1]).index_add(0, slot_tokens(route), got.float())
    return out[:-1].to(y.dtype)
