"""The truth that every path of the collectives is compared with."""

from collections.abc import Sequence
from typing import Any

import torch


def reference(name: str, xs: Sequence[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """What a collective returns on every rank, from the `x` of all ranks, all on one device. `options` are its own.

    What is moved keeps its bits; sums of floating-point numbers are float32.
    """
    world = len(xs)
    if name == "all_gather":
        return [torch.cat(list(xs), options.get("dim", 0))] * world
    if name == "all_to_all":
        parts = [x.chunk(world, options["split_dim"]) for x in xs]
        return [torch.cat([of_source[rank] for of_source in parts], options["concat_dim"]) for rank in range(world)]
    total = torch.stack([x.float() for x in xs]).sum(0)
    if options.get("op", "sum") == "avg":
        total = torch.stack([x.float() / world for x in xs]).sum(0)
    return [total] * world if name == "all_reduce" else list(total.chunk(world, options.get("dim", 0)))
