"""Groups whose ranks are on several nodes, between which there is no peer memory.

Where every node has equally many ranks of a group, one behind the other, each rank gets two more groups at the first
use: `inside`, the ranks of its node, which kernels can join, and `across`, those with its place on the other nodes, for
torch.distributed. With `each` ranks on a node, rank r is on node r // each and has the place r % each.
"""

import json
import os
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tileweave.fabric.base import TRANSFER, FabricTimeout
from tileweave.fabric.gathering import ALL_GATHER

if TYPE_CHECKING:
    from tileweave.fabric.base import Fabric
    from tileweave.fabric.processes import ProcessFabric

NODE = "TILEWEAVE_NODE"
LOOK = timedelta(seconds=0.1)  # between looks at the alarm
NCCL_SMS = 16  # for NCCL between nodes, whose kernels need SMs of their own while ours wait for peers
Pending = Callable[[], torch.Tensor]  # waits, on the current stream, and returns what has come
_spreads: "weakref.WeakKeyDictionary[dist.ProcessGroup, Spread]" = weakref.WeakKeyDictionary()


def node_name() -> str:
    """The node that this process is on: TILEWEAVE_NODE if it is set, else an identity of the machine's boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return os.environ.get(NODE) or (boot.read_text().strip() if boot.exists() else "unknown")


@dataclass(frozen=True)
class Spread:
    """How a group lies on nodes. inside, across: see above, None where it is not composed; uneven: why it is not though
    it is on several nodes; name: one that no other spread has had, the same on all ranks."""

    inside: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None
    uneven: str | None = None
    name: str = ""


class Alarm:
    """What a rank that has given up tells all others of a group on several nodes, through the store of the job. The
    first word counts. Only those who wait on the host, or are asked to `check`, look at it.

    `over`: whether this rank has raised it. Then `across` is of no more use, as transfers that were started may still
    wait there, and would be taken for those of later calls.
    """

    def __init__(self, name: str):
        self._store = dist.PrefixStore(f"tileweave:{name}", c10d._get_default_store())
        self.over = False

    def tell(self, failed: FabricTimeout) -> None:
        """Tell all others. Whoever cannot be told, as the store is gone, has its own timeout."""
        fields = failed.op, failed.rank, failed.index, failed.expected, failed.seen, failed.node
        with suppress(RuntimeError):
            self._store.compare_set("gave up", "", json.dumps(fields))

    def heard(self) -> FabricTimeout | None:
        """What was told, if anything."""
        with suppress(RuntimeError):
            if self._store.check(["gave up"]):
                return FabricTimeout(*json.loads(self._store.get("gave up")))
        return None


@dataclass(frozen=True)
class Nodes:
    """A group on several nodes as one rank sees it. inside: the fabric of this node's ranks; its kernels leave SMs to
    NCCL, where that joins the nodes. sites: what decides on plans inside each node, the same on all ranks, by name as
    in Fabric; () where nothing can differ. alarm: None where `inside` has no kernels, and nothing but the process
    group's timeout bounds a wait."""

    inside: "Fabric"
    across: dist.ProcessGroup
    sites: tuple[dict[str, Any], ...] = ()
    alarm: Alarm | None = None

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return self.across.size()

    @property
    def each(self) -> int:
        """How many ranks each of them has."""
        return self.inside.world_size

    @property
    def index(self) -> int:
        """Which of them this rank is on."""
        return self.across.rank()

    def exchange(self, x: torch.Tensor, to: int, source: int) -> Pending:
        """Start to send `x` to this rank's place on the node `to`, and to take what the one on `source` sends to here:
        of the same shape and dtype. Collective in `across`. `x` must not be changed before the result is there."""
        x = x.contiguous()
        come = torch.empty_like(x)
        if x.numel() == 0:
            return lambda: come
        sent, taken = [0] * self.count, [0] * self.count
        sent[to] = taken[source] = x.numel() * x.element_size()
        work = dist.all_to_all_single(_bytes(come), _bytes(x), taken, sent, group=self.across, async_op=True)
        return self._after(work, come, x, source)

    def gather(self, x: torch.Tensor) -> Pending:
        """Start to gather the contiguous `x` of this place on all nodes, [nodes, *shape]. Collective in `across`."""
        come = x.new_empty(self.count, *x.shape)
        work = ALL_GATHER(_bytes(come), _bytes(x), group=self.across, async_op=True)
        return self._after(work, come, x)

    def all_reduce(self, x: torch.Tensor) -> Pending:
        """Start to sum the contiguous `x` of this place on all nodes, in place. Collective in `across`."""
        return self._after(dist.all_reduce(x, group=self.across, async_op=True), x, x)

    def _after(self, work: Any, come: torch.Tensor, kept: torch.Tensor, source: int = -1) -> Pending:
        """`come`, once `work` is done, which reads `kept` and takes what the node `source` sends."""
        on_host = not (kept.is_cuda and by_nccl(self.across))

        def wait(_: torch.Tensor = kept) -> torch.Tensor:
            if on_host and self.alarm is not None:
                self._hold(work, source if self.count > 2 else 1 - self.index, self.alarm)
            work.wait()
            return come

        return wait

    def _hold(self, work: Any, source: int, alarm: Alarm) -> None:
        """Wait until `work` is done, or has failed. FabricTimeout, on all ranks, if one of them gives up before, or
        that takes longer than a kernel would wait."""
        inside: ProcessFabric = self.inside  # type: ignore[assignment]  # no other has an alarm
        end = time.monotonic() + inside.timeout
        while not work.is_completed():
            with suppress(RuntimeError):  # it takes longer, or has failed, of which the caller's wait tells
                work.wait(LOOK)
                return
            failed = alarm.heard()
            if failed is None and time.monotonic() > end:
                failed = FabricTimeout(TRANSFER, inside.rank, source, 0, 0, self.index)
            if failed is not None and not work.is_completed():
                inside.give_up(failed)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor that is not empty as bytes, which every backend can move."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)  # a dimension of size 1 may have any stride


def spread_of(group: dist.ProcessGroup, gather_values: Callable[[Any], list[Any]]) -> Spread:
    """How the group lies on nodes; collective the first time, when it makes the groups. Remembered with the group."""
    spread = _spreads.get(group)
    if spread is None:
        names = gather_values(node_name()) if group.size() > 1 else []
        spread = Spread()
        if len(set(names)) > 1:
            uneven = unevenness(names)
            spread = Spread(uneven=uneven) if uneven else _divided(group, names, gather_values)
        _spreads[group] = spread
    return spread


def forget_spread(group: dist.ProcessGroup) -> None:
    """Let the next `spread_of` make new groups. The old ones, in which somebody may wait, go with `group`."""
    _spreads.pop(group, None)


def unevenness(names: Sequence[str]) -> str | None:
    """Why ops cannot be composed of calls inside nodes and transfers between them; None if they can. names: the node of
    each rank."""
    runs = [len(list(run)) for _, run in groupby(names)]
    needs = "ops are composed over nodes with equally many ranks each, one behind the other"
    if len(runs) > len(set(names)):
        return f"the ranks of a node are not one behind the other: {needs}"
    if len(set(runs)) > 1:
        return f"the nodes have {', '.join(map(str, runs[:-1]))} and {runs[-1]} ranks: {needs}"
    return None


def _divided(group: dist.ProcessGroup, names: Sequence[str], gather_values: Callable[[Any], list[Any]]) -> Spread:
    """Make the two groups of this rank, inside first, on all ranks. They go with `group`."""
    each, rank = names.count(names[0]), group.rank()
    token = gather_values(secrets.token_hex(8))[0]  # a name that no group had before
    members = c10d.get_process_group_ranks(group)
    node, place = divmod(rank, each)
    inside = _new_group(group, f"{token}:node:{node}", members[node * each : (node + 1) * each])
    across = _new_group(group, f"{token}:place:{place}", members[place::each], NCCL_SMS)
    weakref.finalize(group, _destroy, inside, across).atexit = False
    return Spread(inside, across, name=token)


def _new_group(parent: dist.ProcessGroup, name: str, members: list[int], max_ctas: int = 0) -> dist.ProcessGroup:
    """A process group of these global ranks, in this order, with the parent's backends and timeout. They alone meet.

    `dist.new_group` is collective in the default group; with `use_local_synchronization` it names a group by how many
    each process is in, which may differ between ranks, or come again when the store still has an older group's keys.
    """
    config = dist.get_backend_config(parent)
    device = torch.device(config.partition(":")[0])
    timeout = parent._get_backend(device).options._timeout
    options = None
    if max_ctas and by_nccl(parent):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout  # another than the argument is warned of
        options.config.max_ctas = max_ctas
    default = c10d._get_default_group()
    bound = default.bound_device_id
    if bound is not None:  # NCCL would split the default group's communicator, in which all of its ranks take part
        default.bound_device_id = None
    try:
        made, _ = c10d._new_process_group_helper(
            len(members), members.index(dist.get_rank()), members, config, c10d._get_default_store(),
            f"tileweave:{name}",  # type: ignore[arg-type]  # GroupName, another str
            backend_options=options, timeout=timeout,
        )  # fmt: skip
    finally:
        if bound is not None:
            default.bound_device_id = bound
    c10d._world.pg_group_ranks[made] = {member: rank for rank, member in enumerate(members)}
    return made


def by_nccl(group: dist.ProcessGroup) -> bool:
    """Whether the group's collectives between GPUs are NCCL's."""
    return "cuda:nccl" in dist.get_backend_config(group).split(",")


def _destroy(*groups: dist.ProcessGroup) -> None:
    """Destroy groups, unless they went with the default group."""
    for group in groups:
        with suppress(ValueError):
            dist.destroy_process_group(group)
