"""The ways there and back through the group's all-to-all, each the other's adjoint, of a TokenRoute's fields."""

import torch


def slot_tokens(token_slot: torch.Tensor, slots: int) -> torch.Tensor:
    """int64 [world * slots]: the own token that goes to each slot at each rank; T where none does."""
    tokens, world = token_slot.shape
    device = token_slot.device
    ranks = torch.arange(world, device=device).expand(tokens, world)
    at = torch.where(token_slot >= 0, ranks * slots + token_slot, world * slots)
    found = torch.full((world * slots + 1,), tokens, dtype=torch.long, device=device)
    numbers = torch.arange(tokens, device=device)[:, None].expand(tokens, world)
    return found.scatter_(0, at.reshape(-1), numbers.reshape(-1))[:-1]


def dispatch(x: torch.Tensor, row_slot: torch.Tensor, token_slot: torch.Tensor, slots: int, name: str) -> torch.Tensor:
    """[R, H]: the tokens `x` [T, H] of all ranks in the order of this rank's rows, then zeros. Collective."""
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
    got = torch.ops.tileweave.all_to_all.default(padded[slot_tokens(token_slot, slots)], name, 0, 0)
    rows = got[row_slot.clamp(min=0).long()]
    return torch.where((row_slot >= 0)[:, None], rows, 0)


def combine(
    y: torch.Tensor,
    row_weight: torch.Tensor | None,
    row_slot: torch.Tensor,
    token_slot: torch.Tensor,
    slots: int,
    name: str,
) -> torch.Tensor:
    """[T, I]: for each own token the sum of its rows of `y` [R, I], weighted, at all ranks. Summed in float32 at each
    rank, rounded to y's dtype, sent, and summed again. Collective."""
    tokens, world = token_slot.shape
    parts = torch.where((row_slot >= 0)[:, None], y, 0).float()
    if row_weight is not None:
        parts = parts * row_weight[:, None]
    count = world * slots
    slot = torch.where(row_slot >= 0, row_slot, count)
    sent = parts.new_zeros(count + 1, y.shape[1]).index_add(0, slot, parts)[:-1].to(y.dtype)
    got = torch.ops.tileweave.all_to_all.default(sent, name, 0, 0)
    out = parts.new_zeros(tokens + 1, y.shape[1]).index_add(0, slot_tokens(token_slot, slots), got.float())
    return out[:-1].to(y.dtype)
