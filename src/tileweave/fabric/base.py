"""What every fabric offers: the ranks of a group, memory they share, launches of kernels that wait for peers."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tileweave import lang
from tileweave.fabric.agreement import check_facts, facts_of

if TYPE_CHECKING:
    from tileweave.fabric.nodes import Nodes

# Words of a flag block, as in lang.wait: RECORD is followed by index, expected, seen, rank.
HEADER_WORDS: int = lang.HEADER_WORDS.value
ABORT: int = lang.ABORT.value
RECORD: int = lang.RECORD.value
FLAGS = 448  # most ops' own 128, then two for each CTA; attention between ranks has them all
BLOCK_WORDS = HEADER_WORDS + FLAGS
STATE_WORDS = 512  # the epoch, the count of CTAs that are done, counters
TRANSFER = "transfer between nodes"  # in place of an op
MAX_RANKS = 126  # a flag for each peer among the 128
Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]


def debug_mode() -> bool:
    """Whether TILEWEAVE_DEBUG=1 asks for debug mode. ValueError unless it is 0, 1, empty or not set."""
    text = os.environ.get("TILEWEAVE_DEBUG", "")
    if text not in ("", "0", "1"):
        raise ValueError(f"TILEWEAVE_DEBUG: expected 0 or 1, got {text!r}")
    return text == "1"


class FabricTimeout(RuntimeError):
    """A kernel waited for a peer's flag, or a transfer for another node, longer than the world's timeout.

    Fields: `op` (the op whose channel it was, or TRANSFER), `rank` (that waited), `index` (of the flag), `expected` and
    `seen` (its values), `node` (that the rank is on, of which it is then counted; None where there is but one). Of a
    transfer `index` is the node that was waited for, -1 for any, and the values are 0. The results of the calls in
    flight are poisoned with NaN, or, of several nodes, not there; the world can be used again.
    """

    def __init__(self, op: str, rank: int, index: int, expected: int, seen: int, node: int | None = None):
        self.op, self.rank, self.index, self.expected, self.seen, self.node = op, rank, index, expected, seen, node
        who = f"rank {rank}" if node is None else f"rank {rank} of node {node}"
        what = f"its flag {index}: expected at least {expected}, last seen {seen}"
        if op == TRANSFER:
            what = "the others" if index < 0 else f"that of node {index}"
        super().__init__(f"{op}: {who} waited in vain for {what}")


@dataclass
class Channel:
    """One rank's view of the memory that an op's kernels communicate through. Owned by the fabric.

    `flags`    int32 [world, BLOCK_WORDS], parallel: HEADER_WORDS words of header, FLAGS flags each; zero at first
    `state`    int32 [STATE_WORDS], this rank's own: epoch and counters; zero at first
    `adding`   uint8 [world, 2 * n], parallel: two slots of n bytes; all zero whenever no call is in flight
    `staging`  uint8 [world, 2 * m], parallel: two slots of m bytes, contents undefined
    `timeout_us` bounds every wait on the flags.

    n and m are at least what was asked for; the distance of two ranks' slices is a multiple of 256 bytes.

    `multicast` makes of a view `[world, ...]` of `staging` a kernel's argument, of which `lang.multicast_pointer` makes
               a pointer to all ranks' slices at once; None where the fabric has no multicast

    `views`    what the op has derived from these tensors, for its next calls; gone with them
    `captured` whether a CUDA graph holds a call that uses them: then they stay as long as the group, also when the
               channel has grown or been made anew, since a replay may come at any time
    """

    op: str
    flags: torch.Tensor
    state: torch.Tensor
    adding: torch.Tensor
    staging: torch.Tensor
    timeout_us: int
    multicast: Callable[[torch.Tensor], Any] | None = None
    views: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)
    captured: bool = field(default=False, init=False)


@dataclass(slots=True)
class Variant:
    """The compiled kernel of launches whose arguments Triton specializes alike, once it is known."""

    compiled: Any = None


class Fabric(ABC):
    """One rank's side of what joins the ranks of a group.

    `backend`     "emulated", "virtual", "processes" or "fallback"
    `rank`, `world_size`
    `device`      where this rank's tensors live
    `sms`         how many SMs this rank's kernels may use, which is the largest grid of `launch`; 0: no kernels
    `linked`      whether each rank has a GPU of its own, so that a link lies between any two
    `nccl`        whether, besides, the group's own collectives between GPUs are NCCL's
    `cores`       what its tensor cores can be told to do: "wgmma", "tcgen05"; the emulator does both
    `memory_bytes` of the smallest GPU of a rank; 0 where there is none
    `tuned`       what `tileweave.tune` has measured for this group's calls; it outlives the fabric where that is short
    `debug`       whether `agree` compares the ranks' calls: debug mode when the fabric was made
    """

    backend: str
    rank: int
    world_size: int
    device: torch.device
    sms: int
    debug: bool
    linked: bool = False
    nccl: bool = False
    memory_bytes: int = 0
    tuned: tuple[Any, ...] = ()
    cores: tuple[str, ...] = ("wgmma",)

    @abstractmethod
    def refusal(self) -> str | None:
        """Why fused kernels cannot run here; None if they can."""

    def multicast_refusal(self) -> str | None:
        """Why its channels have no multicast addresses; None if they have them. The same on all ranks."""
        return self.refusal()

    @property
    def nodes(self) -> "Nodes | None":
        """What joins the nodes that the ranks are on, if these are several with equally many ranks each, one behind the
        other; else None. Collective at the first use of a group."""
        return None

    @property
    def uneven(self) -> str | None:
        """Why there are no `nodes` though the ranks are on several. Collective at the first use of a group."""
        return None

    @abstractmethod
    def channel(self, op: str, adding_bytes: int, staging_bytes: int) -> Channel:
        """The memory for a call of `op` with slots of at least these sizes in bytes.

        Collective when it must grow, so all ranks give the same arguments. Growing waits for all earlier launches of
        all ranks; sizes never shrink. While a CUDA graph is being captured it raises RuntimeError instead of growing.
        """

    def channels(self) -> Sequence[Channel]:
        """Those that `channel` would find, of all ops."""
        return ()

    def views(self, op: str) -> dict[Hashable, Any] | None:
        """What `op` has left for its next calls, in its channel where it has one; None where that cannot be kept."""
        return None

    @abstractmethod
    def launch(
        self,
        kernel: Any,
        grid: int,
        args: Sequence[Any],
        *,
        num_warps: int,
        variant: "Variant | None" = None,
        copies: Copies = (),
    ) -> None:
        """Enqueue `kernel` with `grid` CTAs (at most `sms`) on this rank's current stream. Collective.

        `variant` is the caller's, for launches that Triton would compile alike: the fabric keeps the kernel there.

        `copies` are contiguous tensors (target, source), of any ranks' memory, which the copy engine copies one behind
        the other on a stream of its own: after what the current stream held before, while the kernel runs. The current
        stream goes on after both. A copied word is there only when all that was copied ahead of it is.
        """

    @abstractmethod
    def gather_values(self, value: Any) -> list[Any]:
        """All ranks' values, in rank order: None, bools, numbers, text, lists and dictionaries of these. Collective."""

    def rendezvous(self) -> None:
        """All ranks meet."""
        self.gather_values(None)

    @abstractmethod
    def _reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """`reduce_scatter` of checked arguments."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' `x` [rows, ...], of one shape and dtype, in rank order: a new tensor [world * rows, ...].

        `x` is left as it is; the result is contiguous, on this rank's current stream. Collective.
        """

    @property
    def compares(self) -> bool:
        """Whether `agree` does anything: in debug mode; always between the ranks of one process, and on CPUs."""
        return self.debug

    def agree(self, call: Hashable) -> None:
        """In debug mode, and between processes with CPU tensors, a meeting of all ranks before they make `call`.

        `call` says all that the ranks must agree on; equal ones compare equal. RuntimeError on every rank, with the
        values of each, if they differ. Ranks of one process compare their calls without debug mode too, but do not
        meet for it: the rank that comes second to a call that differs is told.
        """
        if self.debug:
            check_facts(self.gather_values(facts_of(call)))

    def hold(self, fault: str | None) -> None:
        """In debug mode, a meeting of all ranks; ValueError on each if one of them has found a `fault` in its data.
        Not while capturing: to look at data the host waits for the GPU."""
        if self.debug:
            faults = self.gather_values(fault)
            if any(faults):
                raise ValueError("; ".join(f"rank {rank}: {each}" for rank, each in enumerate(faults) if each))

    def check(self) -> None:
        """Wait for this rank's GPU; FabricTimeout if one of its kernels has waited in vain for a peer."""
        return  # nothing waits in a fallback, nor in the emulator, where it would be a deadlock

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes of workspace by op: `own`, this rank's, and `mapped`, the addresses that cover all ranks'."""
        return {}

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks of `x` [M, ...], of which rank r returns rows r * M / world on.

        `x` is left as it is; the result is a new tensor [M / world, ...] of its dtype, on this rank's current stream.
        ValueError if M is no multiple of the world size.
        """
        if x.dim() == 0 or x.shape[0] % self.world_size:
            raise ValueError(
                f"x: the first dimension must be a multiple of the world size {self.world_size}, "
                f"got shape {tuple(x.shape)}"
            )
        return self._reduce_scatter(x)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Rows d * M / world on of each rank's `x` [M, ...] go to rank d: a new tensor [M, ...], sources in rank order.

        All ranks' `x` are of one shape and dtype, and M is a multiple of the world size. `x` is left as it is; the
        result is contiguous, on this rank's current stream. Collective.
        """
        whole = self.all_gather(x.unsqueeze(0)).unflatten(1, (self.world_size, -1))
        return whole[:, self.rank].flatten(0, 1).contiguous()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks of `x`, of one shape and dtype: a new tensor of both, on this rank's current stream.

        `x` is left as it is. Collective.
        """
        return self.all_gather(x.unsqueeze(0)).sum(0, dtype=x.dtype)

    def check_grid(self, kernel: Any, grid: int) -> None:
        """Raise ValueError unless all CTAs of a grid of this size can be resident at once."""
        if not 1 <= grid <= self.sms:
            raise ValueError(
                f"grid: CTAs of {kernel.__name__} wait for each other, so all must be resident: "
                f"expected 1 to {self.sms} (the SMs of a rank), got {grid}"
            )


class Abandoned(RuntimeError):
    """Thrown in a rank that waits for another one which has failed or returned."""


@dataclass
class Outcome:
    """What an action left: its value, or the error that every rank raises."""

    value: Any = None
    error: BaseException | None = None

    @classmethod
    def of(cls, action: Callable[[], Any]) -> "Outcome":
        """Run `action` and keep what comes of it."""
        try:
            return cls(value=action())
        except Exception as error:
            return cls(error=error)

    def get(self) -> Any:
        """The value; raises the error if there is one."""
        if self.error is None:
            return self.value
        try:
            raise self.error
        finally:
            del self  # the error's traceback holds this frame: no cycle may keep process groups or GPU memory alive
