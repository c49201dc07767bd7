"""Plain values from each process of a group to all of them, as JSON text in tensors.

Nothing is unpickled: whatever a peer sends, it can only be read as numbers, text, lists and dictionaries.
"""

import json
from typing import Any

import torch
import torch.distributed as dist

# Newer releases of PyTorch call it by the first name, and warn of the other.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_values(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """All ranks' values, in rank order: None, bools, numbers, text, and lists and dictionaries of these. Collective.

    Tuples come back as lists. Where the group has no backend for CPU tensors they travel on the current CUDA device.
    """
    device, world = _device(group), group.size()
    text = json.dumps(value).encode()
    sizes = torch.empty(world, dtype=torch.int64, device=device)
    ALL_GATHER(sizes, torch.tensor([len(text)], device=device), group=group)
    most = int(sizes.max())
    mine = torch.frombuffer(bytearray(text.ljust(most)), dtype=torch.uint8).to(device)
    every = torch.empty(world * most, dtype=torch.uint8, device=device)
    ALL_GATHER(every, mine, group=group)
    return [json.loads(bytes(part.tolist())) for part in every.view(world, most)]


def _device(group: dist.ProcessGroup) -> torch.device:
    """Where tensors lie that the group's collectives take."""
    backends = dist.get_backend_config(group).split(",")
    return torch.device("cpu" if any(each.startswith("cpu:") for each in backends) else "cuda")
