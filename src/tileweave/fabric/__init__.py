"""What joins the ranks of a group: `fabric_of` finds it, `virtual_world` makes one within this process."""

from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist

from tileweave.fabric.arguments import MOST_RANKS, place, ranks, seconds, whole_number
from tileweave.fabric.base import MAX_RANKS, Channel, Fabric, FabricTimeout, Variant
from tileweave.fabric.capability import cuda_refusal, sms_per_rank
from tileweave.fabric.distributed import DistributedFabric
from tileweave.fabric.emulated import EmulatedWorld
from tileweave.fabric.names import Group, check_own, group_name, group_size, named_group, resolve_group
from tileweave.fabric.processes import ProcessFabric
from tileweave.fabric.virtual import VirtualFabric, VirtualWorld
from tileweave.fabric.world import VirtualGroup, World, current_group

__all__ = [
    "MAX_RANKS", "Channel", "Fabric", "FabricTimeout", "Group", "Variant", "VirtualGroup", "World",
    "check", "cuda_refusal", "fabric_of", "group_name", "group_size", "local_fabric", "memory_report", "named_fabric",
    "virtual_world",
]  # fmt: skip

EMULATED_SMS = 4


def fabric_of(group: Group = None, device: torch.device | str | None = None) -> Fabric:
    """The fabric of a group. For processes it depends on the tensors' `device` (None: CPU); a world has its own.

    `group` is what `World.run` hands to a rank, a ProcessGroup or a 1-D DeviceMesh. None means the world that the
    calling thread is a rank of, else the default process group, else this process alone.
    TypeError for anything else; ValueError if a mesh has more dimensions, this process is no member of the group, or
    the group is that of another rank; RuntimeError if the group's world is not running or this thread is no rank of it.
    """
    group = resolve_group(group)
    if isinstance(group, VirtualGroup):
        check_own(group)
    return _fabric(group, device)


def named_fabric(name: str, device: torch.device) -> Fabric:
    """The fabric of the group of this name, for this thread's rank. RuntimeError if `named_group` knows no such."""
    return _fabric(named_group(name), device)


def local_fabric(device: torch.device) -> Fabric:
    """The fabric for kernels that wait for no peer: that of the world whose rank this thread is, else of this process
    alone, whatever process groups it is in. What a rank launches there concerns no other rank."""
    group = current_group()
    return _alone(_indexed(device)) if group is None else group.world.local_fabric(group.rank)


def _fabric(group: VirtualGroup | dist.ProcessGroup | None, device: torch.device | str | None) -> Fabric:
    """The fabric of a resolved group; None is this process alone."""
    if isinstance(group, VirtualGroup):
        return group.world.fabric(group.rank)
    device = _indexed(torch.device("cpu" if device is None else device))
    if group is None:
        return _alone(device)
    return DistributedFabric(group, device) if device.type == "cpu" else ProcessFabric.of(group, device)


def virtual_world(
    n: int,
    device: str | torch.device = "auto",
    *,
    seed: int = 0,
    sms: int | None = None,
    delayed: Sequence[int] = (),
    timeout: float = 60.0,
) -> World:
    """A world of `n` ranks within this process, to be used as a context manager.

        with virtual_world(4) as world:
            results = world.run(lambda rank, group: ...)

    `device`   "cpu": emulated ranks; "cuda": virtual ranks that share one Hopper GPU; "auto": "cuda" where that works
    `seed`     of the emulator's schedules (CPU only)
    `delayed`  ranks that run only when no other can, so that the others get ahead of them (CPU only)
    `sms`      SMs per rank; by default 4 in the emulator, an equal share of the GPU's otherwise
    `timeout`  seconds that a kernel waits for a peer before it gives up, up to 2000; the emulator knows when
               nobody can go on

    TypeError and ValueError for impossible arguments; RuntimeError for "cuda" without a Hopper GPU or Triton.
    """
    n = whole_number("n", n, 1, f"1 to {MOST_RANKS} ranks", MOST_RANKS)
    seed = whole_number("seed", seed, 0, "a whole number from 0 up")
    sms = None if sms is None else whole_number("sms", sms, 1, "at least 1 SM per rank")
    late, timeout, kind = ranks("delayed", delayed, n), seconds("timeout", timeout), place("device", device)
    if kind.type == "cpu":
        return EmulatedWorld(n, seed, sms or EMULATED_SMS, late, timeout)
    if late:
        raise ValueError(f"delayed: only the emulator can delay ranks, but device is {str(kind)!r}; leave it empty")
    refusal = cuda_refusal(kind)
    if refusal:
        raise RuntimeError(f"device: virtual ranks cannot run on {str(kind)!r}: {refusal}; device='cpu' emulates them")
    return VirtualWorld(n, _indexed(kind), sms_per_rank(n, kind, sms), timeout)


def check(group: Group = None, device: torch.device | str | None = None) -> None:
    """Wait for this rank's GPU and raise FabricTimeout if a kernel of the group has waited in vain for a peer.

    A timeout is also raised by the next call of an op and logged by a watchdog thread; graph replays, which run no
    host code, should be followed by this. `device` as in `memory_report`.
    """
    fabric_of(group, _default(device)).check()


def memory_report(group: Group = None, device: torch.device | str | None = None) -> dict[str, dict[str, int]]:
    """Bytes of workspace that the library holds for a group on this rank, by op; empty before the first call.

    `own` is physical memory of this rank, `mapped` the range of addresses in which it sees the memory of all ranks.
    `device`: the current CUDA device by default, the CPU where there is none.
    """
    return fabric_of(group, _default(device)).memory()


def _default(device: torch.device | str | None) -> torch.device | str:
    """The device that a process's tensors are on, unless told otherwise."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device is None else place("device", device)


def _indexed(device: torch.device) -> torch.device:
    """A device with its number, so that "cuda" equals the current one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@cache
def _alone(device: torch.device) -> Fabric:
    """The fabric of a process without a process group: one rank, which has the whole GPU."""
    if cuda_refusal(device):
        return DistributedFabric(None, device)
    return VirtualFabric(VirtualWorld(1, device, sms_per_rank(1, device, None), 60.0), 0)
