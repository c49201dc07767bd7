"""Processes: one rank each, on GPUs that reach each other's memory, or several sharing one GPU.

The first use of a group is collective: its ranks tell each other what they can do and try to map memory of all. If one
cannot, all fall back to torch.distributed, with its reason.
"""

import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
import torch.distributed as dist

from tileweave import lang
from tileweave.fabric.agreement import check_facts
from tileweave.fabric.base import (
    BLOCK_WORDS,
    HEADER_WORDS,
    STATE_WORDS,
    Channel,
    Copies,
    FabricTimeout,
    Variant,
    debug_mode,
)
from tileweave.fabric.bound import check_bound, workspace_bound
from tileweave.fabric.capability import cuda_refusal, memory_bytes_of, multicast_refusal, sms_per_rank, tensor_cores
from tileweave.fabric.distributed import DistributedFabric
from tileweave.fabric.nodes import NCCL_SMS, Alarm, Nodes, by_nccl, forget_spread, node_name
from tileweave.fabric.stamping import to_launch
from tileweave.fabric.variants import copy_beside, enqueue, load, variant_of

if TYPE_CHECKING:
    from tileweave.fabric.peer_memory import PeerMemory

log = logging.getLogger("tileweave")
REPORT: int = lang.REPORT.value
REPORT_WORDS = 8
WATCH_SECONDS = 0.1


def timeout_seconds() -> float:
    """How long a kernel waits for a peer: TILEWEAVE_TIMEOUT seconds, 60 by default. ValueError if that is no time."""
    text = os.environ.get("TILEWEAVE_TIMEOUT", "60")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 2000:
        raise ValueError(f"TILEWEAVE_TIMEOUT: expected a number of seconds above 0 and up to 2000, got {text!r}")
    return seconds


@dataclass(frozen=True)
class Facts:
    """What a rank tells the others of itself.

    error: what is wrong with its settings, if anything; refusal: why it cannot take part, if so; machine, gpu:
    identities; timeout in seconds; debug: whether it asks for debug mode; multicast: why it must not use multicast, if
    so; cores, memory_bytes: those of its GPU.
    """

    error: str | None
    refusal: str | None
    machine: str
    gpu: str
    timeout: float
    bound: int | None
    debug: bool
    multicast: str | None
    cores: list[str]
    memory_bytes: int


@dataclass
class Memories:
    """One op's channel and the peer memory under it."""

    channel: Channel
    flags: "PeerMemory"
    adding: "PeerMemory"
    staging: "PeerMemory"
    report: torch.Tensor  # int32 [REPORT_WORDS], pinned: what this rank's kernels tell the host

    def __post_init__(self) -> None:
        self.told = self.report.numpy()  # the same words, read faster

    def close(self) -> None:
        """Unmap. Nothing uses the memory any more."""
        for memory in (self.flags, self.adding, self.staging):
            memory.close()


class ProcessFabric(DistributedFabric):
    """This process's side of a group of processes. Made by `of`, once per group and device."""

    _made: ClassVar["weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, ProcessFabric]]"] = (
        weakref.WeakKeyDictionary()
    )
    _node: int | None = None  # that these ranks are on, where the fabric is one inside a node, and what joins the nodes
    _alarm: Alarm | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> "ProcessFabric":
        """The fabric of a group; collective the first time."""
        fabrics = cls._made.get(group)
        if fabrics is None:
            fabrics = cls._made[group] = {}
        if device not in fabrics:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "group: the first use of a group makes its ranks meet, which cannot be captured in a CUDA graph: "
                    "call the op once before the capture (warm up)"
                )
            fabrics[device] = cls(group, device)
        return fabrics[device]

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._group = weakref.ref(group)  # the fabric must not keep its group alive
        super().__init__(group, device)
        self._ops: dict[str, Memories] = {}
        self._unmapped: dict[str, dict[Hashable, Any]] = {}  # what ops remember that have no channel
        self._captured: list[Memories] = []  # outgrown or given up, but some CUDA graph may still be replayed on it
        self._failed: FabricTimeout | None = None
        self._lock = threading.Lock()  # of _failed and the reports, which the watchdog looks at too
        self._last: torch.cuda.Stream | None = None  # that has the latest launch
        self._beside: torch.cuda.Stream | None = None  # for copies
        facts = [Facts(**each) for each in self.gather_values(asdict(_facts(device)))]
        errors = [f"rank {rank}: {fact.error}" for rank, fact in enumerate(facts) if fact.error]
        if errors:
            raise ValueError("; ".join(errors))
        self._why = self._disagreement(facts)
        self.timeout, self.bound = facts[0].timeout, facts[0].bound
        self.debug = any(fact.debug for fact in facts)  # a meeting is for all or for none
        if self._why is None:
            self.cores, self.memory_bytes = tuple(facts[0].cores), min(fact.memory_bytes for fact in facts)
            sharing = max(Counter(fact.gpu for fact in facts).values())
            self.linked = sharing == 1
            self.nccl = self.linked and by_nccl(group)
            self.sms = min(
                self.gather_values(sms_per_rank(sharing, device, None))
            )  # CTAs of different ranks may be paired
            self._why = self._try_memory()
        self._why_unicast = self._why or self._one_by_one(facts) or self._try_multicast()
        self.backend = "fallback" if self._why else "processes"
        self._nodes = self._on_nodes()
        self._finalizer = weakref.finalize(group, _close, self._ops, self._captured, device)
        if self._why is None:
            threading.Thread(target=_watch, args=(weakref.ref(self),), name="tileweave watchdog", daemon=True).start()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. RuntimeError if it has been destroyed."""
        group = self._group()
        if group is None:
            raise RuntimeError("group: this process group has been destroyed")
        return group

    @group.setter
    def group(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)

    @property
    def nodes(self) -> Nodes | None:
        if self._nodes is not None and self._nodes.alarm is not None and self._nodes.alarm.over:
            forget_spread(self.group)
            self._nodes = self._on_nodes()
        return self._nodes

    def _on_nodes(self) -> Nodes | None:
        """What `nodes` is; collective at the first use of a group, and at the first one after a FabricTimeout."""
        spread = self._spread()
        if spread.inside is None or spread.across is None:
            return None
        inside = ProcessFabric.of(spread.inside, self.device)
        inside.timeout, inside.bound = self.timeout, self.bound  # or one node would refuse a call that others make
        if inside.sms and by_nccl(spread.across):
            inside.sms = max(inside.sms - NCCL_SMS, 1)
        inside._node, inside._alarm = spread.across.rank(), Alarm(spread.name)
        mine = {
            "backend": inside.backend, "refusal": inside.refusal(), "unicast": inside.multicast_refusal(),
            "sms": inside.sms, "linked": inside.linked, "cores": inside.cores, "memory_bytes": inside.memory_bytes,
        }  # fmt: skip
        sites = self.gather_values(mine)[:: inside.world_size]
        return Nodes(inside, spread.across, tuple(sites), inside._alarm)

    def refusal(self) -> str | None:
        return self._why

    def multicast_refusal(self) -> str | None:
        return self._why_unicast

    def channel(self, op: str, adding_bytes: int, staging_bytes: int) -> Channel:
        found, capturing = self._ops.get(op), torch.cuda.is_current_stream_capturing()
        if found is not None:
            channel = found.channel
            if adding_bytes <= channel.adding.shape[1] // 2 and staging_bytes <= channel.staging.shape[1] // 2:
                channel.captured |= capturing
                return channel
        if capturing:
            raise RuntimeError(
                f"{op}: its workspace must grow, which cannot be captured in a CUDA graph: "
                "call it once with this shape before the capture (warm up)"
            )
        return self._grow(op, adding_bytes, staging_bytes).channel

    def channels(self) -> Sequence[Channel]:
        return [memories.channel for memories in self._ops.values()]

    def views(self, op: str) -> dict[Hashable, Any] | None:
        found = self._ops.get(op)
        if found is None:
            return self._unmapped.setdefault(op, {})
        self._unmapped.pop(op, None)  # it would be out of date if the channel went
        return found.channel.views

    def launch(
        self,
        kernel: Any,
        grid: int,
        args: Sequence[Any],
        *,
        num_warps: int,
        variant: Variant | None = None,
        copies: Copies = (),
    ) -> None:
        """Enqueue the kernel on the current stream, after this fabric's earlier launches on other streams."""
        self.check_grid(kernel, grid)
        self.look()
        if self._failed is not None:
            self._raise()
        index = self.device.index
        if index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self.launch(kernel, grid, args, num_warps=num_warps, variant=variant, copies=copies)
        compiled = to_launch(variant_of(kernel, grid, args, num_warps, variant), grid, self.rank)
        handle, capturing = torch._C._cuda_getCurrentRawStream(index), torch.cuda.is_current_stream_capturing()
        load(compiled, capturing)
        if not capturing and (self._last is None or handle != self._last.cuda_stream):
            stream = torch.cuda.current_stream()
            if self._last is not None:
                stream.wait_stream(self._last)
            self._last = stream
        if copies:
            self._beside = self._beside or torch.cuda.Stream(self.device)
            copy_beside(self._beside, copies)
        enqueue(compiled, grid, args, handle)
        if copies and self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)

    def check(self) -> None:
        """Wait for this rank's GPU; FabricTimeout if one of its kernels has waited in vain since the last time."""
        if self._nodes is not None:
            return self._nodes.inside.check()
        torch.cuda.synchronize(self.device)
        self.look()
        if self._failed is not None:
            self._raise()
        if self._alarm is not None and not self._alarm.over and (failed := self._alarm.heard()):
            self.give_up(failed)

    def give_up(self, failed: FabricTimeout) -> NoReturn:
        """Raise what a rank on another node has told, or a transfer from there, as if a kernel here had waited."""
        with self._lock:
            self._failed = failed = self._failed or failed
        if self._alarm is not None:
            self._alarm.tell(failed)
        self._raise()

    def look(self) -> None:
        """Read what the kernels have told the host; touches no GPU."""
        if not any(memories.told[0] for memories in self._memories()):
            return
        with self._lock:
            told = next((memories for memories in self._memories() if memories.told[0]), None)
            if told is None or self._failed is not None:
                return
            time.sleep(0.01)  # other CTAs may still be writing the same record
            index, expected, seen, rank = told.told[1:5].tolist()
            self._failed = failed = FabricTimeout(told.channel.op, rank, index, expected, seen, self._node)
            log.error("tileweave: %s", failed)
        if self._alarm is not None:
            self._alarm.tell(failed)

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes of peer memory by op: `own` is physical memory of this rank, `mapped` the range of addresses."""
        if self._nodes is not None:
            return self._nodes.inside.memory()
        blocks: dict[str, dict[PeerMemory, int]] = {}
        for memories in self._memories():  # which may have some in common
            of_op = blocks.setdefault(memories.channel.op, {})
            of_op |= {each: each.stride for each in (memories.flags, memories.adding, memories.staging)}
        held = {op: sum(of_op.values()) for op, of_op in blocks.items()}
        return {op: {"own": own, "mapped": own * self.world_size} for op, own in held.items()}

    def _raise(self) -> NoReturn:
        """Raise the timeout, once. The memory is forgotten: the next call, on all ranks, makes it anew."""
        torch.cuda.synchronize(self.device)  # every call in flight has told what it had to tell
        with self._lock:
            failed, self._failed = self._failed, None
            for memories in self._memories():
                memories.told[:] = 0
            for op in list(self._ops):
                memories = self._ops.pop(op)
                if memories.channel.captured or memories.channel.multicast:  # a late peer may still store to all
                    self._captured.append(memories)
                else:
                    memories.close()
        assert failed is not None
        if self._alarm is not None:
            self._alarm.over = True
        raise failed

    def _memories(self) -> list[Memories]:
        """All that kernels of this group may report from."""
        return [*self._ops.values(), *self._captured]

    def _grow(self, op: str, adding_bytes: int, staging_bytes: int) -> Memories:
        """Make room. All ranks come with the same sizes, and meet before old memory goes and new memory is used."""
        old = self._ops.get(op)
        torch.cuda.synchronize(self.device)
        facts = {
            "call": f"memory of {op}", "adding_bytes": str(adding_bytes), "staging_bytes": str(staging_bytes),
            "has some": str(old is not None),
        }  # fmt: skip
        told = self.gather_values({"facts": facts, "held": sum(each["own"] for each in self.memory().values())})
        check_facts([each["facts"] for each in told])
        more = self._more_bytes(old, adding_bytes, staging_bytes)
        check_bound(op, max(each["held"] for each in told), more, self.bound)
        if old is None:
            made = self._make(op, adding_bytes, staging_bytes)
        else:
            adding = self._larger(old.adding, adding_bytes)
            staging = self._larger(old.staging, staging_bytes, multicast=self._why_unicast is None)
            channel = replace(
                old.channel,
                adding=adding.tensor(torch.uint8),
                staging=staging.tensor(torch.uint8),
                multicast=self._address(staging),
            )
            made = replace(old, channel=channel, adding=adding, staging=staging)
            if old.channel.captured:
                channel.captured = True  # both have the same flags
                self._captured.append(old)
            else:  # all ranks have met, with no work in flight
                for before, now in ((old.adding, adding), (old.staging, staging)):
                    if now is not before:
                        before.close()
        self._ops[op] = made
        return made

    def _more_bytes(self, old: Memories | None, adding_bytes: int, staging_bytes: int) -> int:
        """Bytes of the blocks that `_grow` makes on each rank."""
        from tileweave.fabric.peer_memory import granule_of, whole_granules

        there = (old.flags.stride, old.adding.stride, old.staging.stride) if old else (-1, -1, -1)
        wanted = (4 * BLOCK_WORDS, False), (2 * adding_bytes, False), (2 * staging_bytes, self._why_unicast is None)
        return sum(
            whole_granules(nbytes, granule_of(nbytes, self.world_size, self.device, multicast))
            for (nbytes, multicast), stride in zip(wanted, there, strict=True)
            if nbytes > stride
        )

    def _larger(self, memory: "PeerMemory", slot_bytes: int, multicast: bool = False) -> "PeerMemory":
        """`memory`, or a larger one to take its place."""
        return memory if 2 * slot_bytes <= memory.stride else self._memory(2 * slot_bytes, multicast)

    def _make(self, op: str, adding_bytes: int, staging_bytes: int) -> Memories:
        """An op's first memory."""
        flags = self._memory(4 * BLOCK_WORDS)
        adding, staging = (
            self._memory(2 * adding_bytes),
            self._memory(2 * staging_bytes, multicast=self._why_unicast is None),
        )
        words = flags.tensor(torch.int32)
        report = torch.zeros(REPORT_WORDS, dtype=torch.int32, device="cpu", pin_memory=True)
        address = torch.tensor([report.data_ptr()], dtype=torch.int64, device="cpu").view(torch.int32)
        words[self.rank, REPORT : REPORT + 2] = address.to(self.device)
        torch.cuda.synchronize(self.device)
        state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=self.device)
        channel = Channel(
            op, words, state, adding.tensor(torch.uint8), staging.tensor(torch.uint8), int(self.timeout * 1e6),
            self._address(staging),
        )  # fmt: skip
        self.gather_values(None)
        return Memories(channel, flags, adding, staging, report)

    def _memory(self, nbytes: int, multicast: bool = False) -> "PeerMemory":
        from tileweave.fabric.peer_memory import PeerMemory

        timeout = max(self.timeout, 10.0)
        return PeerMemory(nbytes, self.rank, self.world_size, self.device, self.gather_values, timeout, multicast)

    def _address(self, staging: "PeerMemory") -> Callable[[torch.Tensor], Any] | None:
        """What its channel has as `multicast`."""
        return staging.multicast_address if self._why_unicast is None else None

    def _try_memory(self) -> str | None:
        """Whether memory of all ranks can be mapped here; if not, why."""
        try:
            self._memory(1).close()
        except RuntimeError as failure:
            return f"peers' memory cannot be mapped ({failure})"
        return None

    def _try_multicast(self) -> str | None:
        """Whether that memory can be seen at one multicast address too; if not, why. All ranks and GPUs allow it."""
        try:
            self._memory(1, multicast=True).close()
        except RuntimeError as failure:
            return str(failure)
        return None

    def agree(self, call: Hashable) -> None:
        if not torch.cuda.is_current_stream_capturing():  # a group's collectives may wait for the GPU
            super().agree(call)

    def gather_values(self, value: Any) -> list[Any]:
        with torch.cuda.device(self.device):
            return super().gather_values(value)

    @staticmethod
    def _disagreement(facts: Sequence[Facts]) -> str | None:
        """Why the ranks cannot work together; None if they can. The same on all ranks."""
        for rank, fact in enumerate(facts):
            if fact.refusal:
                return f"rank {rank}: {fact.refusal}"
        if len({fact.machine for fact in facts}) > 1:
            return f"the ranks are on {len({fact.machine for fact in facts})} machines; peer memory needs one"
        cores = sorted({core for fact in facts for core in fact.cores})
        if len(cores) > 1:
            return f"the ranks' GPUs are of several kinds, which multiply by {' and '.join(cores)}; a group has one"
        return None

    @staticmethod
    def _one_by_one(facts: Sequence[Facts]) -> str | None:
        """Why peers are to be reached one by one; None if nothing speaks against multicast. The same on all ranks."""
        for rank, fact in enumerate(facts):
            if fact.multicast:
                return f"rank {rank}: {fact.multicast}"
        if len({fact.gpu for fact in facts}) < len(facts):
            return "several ranks share a GPU, and multicast joins GPUs"
        return "there is but one rank" if len(facts) == 1 else None


def process_refusal(device: torch.device | str) -> str | None:
    """Why a process with this device cannot share memory with others, whatever they are; None if it may."""
    if refusal := cuda_refusal(device):
        return refusal
    # The parent is looked for first: find_spec raises where it is missing.
    if not find_spec("cuda") or not find_spec("cuda.bindings"):
        return "the package cuda-bindings is not installed"
    return None


def _facts(device: torch.device) -> Facts:
    error, timeout, bound, debug = None, 0.0, None, False
    try:
        timeout, bound, debug = timeout_seconds(), workspace_bound(), debug_mode()
    except ValueError as failure:
        error = str(failure)
    refusal = process_refusal(device)
    gpu = str(torch.cuda.get_device_properties(device).uuid) if refusal is None else ""
    multicast = refusal or multicast_refusal(device)
    cores, memory_bytes = ([], 0) if refusal else (list(tensor_cores(device)), memory_bytes_of(device))
    return Facts(error, refusal, node_name(), gpu, timeout, bound, debug, multicast, cores, memory_bytes)


def _close(ops: dict[str, Memories], captured: list[Memories], device: torch.device) -> None:
    """Unmap all memory of a group that has been destroyed."""
    everything = [*ops.values(), *captured]
    if everything:
        torch.cuda.synchronize(device)
    for memories in everything:
        memories.close()
    ops.clear()
    captured.clear()


def _watch(fabric: Callable[[], ProcessFabric | None]) -> None:
    """Watchdog: a graph replay runs no host code, so somebody must notice. Ends with its fabric."""
    while True:
        time.sleep(WATCH_SECONDS)
        here = fabric()
        if here is None:
            return
        here.look()
        del here


assert HEADER_WORDS >= REPORT + 2, "the report's address lies in the header of a flag block"
