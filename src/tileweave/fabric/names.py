"""Names of groups: what a registered operator's schema can hold in place of a group.

A name is "SIZE:NAME", for instance "4:0": the number of ranks and, for a process group, torch.distributed's own name.
The size has to be in it, because torch.compile keeps compiled graphs on disk by what they say, and the shape of a
result depends on it; the group called "0" has another size in the next job.

`group_name` is written so that torch.compile can trace it: a compiled function is guarded by the thread's world and
the group's name, hence shared by all ranks of a virtual world and compiled anew for another world.
"""

from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from tileweave.fabric.world import VirtualGroup, current_group, find_world

Group: TypeAlias = VirtualGroup | dist.ProcessGroup | DeviceMesh | None
NO_RANK = (
    "group: this thread is no rank of that world, or the world is not running; use a world's group inside world.run "
    "only, on the thread that it was given to"
)
ALONE = "1:tileweave:alone"  # a process without any group


def default_group() -> VirtualGroup | dist.ProcessGroup | None:
    """What `group=None` means here: the thread's world, else the default process group, else None: a world of one."""
    return current_group() or (dist.group.WORLD if dist.is_initialized() else None)


def resolve_group(group: Group) -> VirtualGroup | dist.ProcessGroup | None:
    """The group meant by `group`: None becomes the default group, a mesh its process group.

    TypeError for anything that is no group; ValueError if a mesh has more dimensions than one or this process is no
    member of the group.
    """
    if group is None:
        return default_group()
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: expected a 1-D DeviceMesh, got {group.ndim} dimensions {group.mesh_dim_names or ''}: "
                "take one of them, as in mesh['tp']"
            )
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: this process is not a member of the group")
    if isinstance(group, VirtualGroup):
        return group
    if isinstance(group, dist.ProcessGroup):
        return group
    raise TypeError(
        "group: expected a torch.distributed ProcessGroup, a 1-D DeviceMesh, the group that world.run gives to a rank, "
        f"or None, got {type(group).__name__}"
    )


def group_name(group: Group) -> str:
    """The name of a group, the same on all ranks, by which `named_group` finds it again.

    Raises as `resolve_group`; also ValueError for the group of another rank than this thread's, which a name would
    lose (a compiled function, which all ranks share, does not look).
    """
    group = resolve_group(group)
    if group is None:
        return ALONE
    if not isinstance(group, VirtualGroup):
        return f"{group.size()}:{group.group_name}"
    if not torch.compiler.is_compiling():
        mine = current_group()
        if mine is not None and mine.world is group.world:
            check_own(group)
    return group.group_name


def check_own(group: VirtualGroup) -> None:
    """ValueError for the group of another rank than this thread's; RuntimeError if it is none of its world."""
    mine = group.world.seen_by(current_group())
    if mine is None:
        raise RuntimeError(NO_RANK)
    if mine.rank != group.rank:
        raise ValueError(f"group: expected this thread's, of rank {mine.rank}, got that of rank {group.rank}")


def named_group(name: str) -> VirtualGroup | dist.ProcessGroup | None:
    """The group of a name, seen from this thread; None for a world of one.

    ValueError if it is no name of a group; RuntimeError if its world or process group is gone, has another size, or is
    a virtual world that this thread is no rank of: a name says nothing of the rank, which is the thread's.
    """
    if name == ALONE:
        return None
    world = find_world(name)
    if world is None:
        size, pure = group_size(name), name.partition(":")[2]
        group: dist.ProcessGroup = _resolve_process_group(pure)  # type: ignore[arg-type]  # GroupName, another str
        if group.size() != size:
            raise RuntimeError(f"group: the process group {pure!r} has {group.size()} ranks, not {size} as in {name!r}")
        return group
    mine = world.seen_by(current_group())
    if mine is None:
        raise RuntimeError(NO_RANK)
    return mine


def group_size(name: str) -> int:
    """The number of ranks of the group of this name; ValueError if it is no name of a group."""
    size, colon, _ = name.partition(":")
    if not colon or not size.isdecimal():
        raise ValueError(f"group_name: expected what group_name gives, such as '4:0', got {name!r}")
    return int(size)
