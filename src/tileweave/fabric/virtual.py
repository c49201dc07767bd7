"""Virtual ranks: n ranks in this process on one GPU, a thread, a stream and an equal share of the SMs each.

Kernels of different ranks wait for each other, which makes the host's part delicate. Compiling is harmless, but loading
a module, or allocating, may wait for the whole device, hence for a kernel that waits for a peer whose launch is still
to come. So a launch is a meeting: when all ranks have arrived, with all their earlier work enqueued, one thread loads
what is not loaded yet and then enqueues the kernels of all ranks, with nothing in between. That also keeps more streams
than the hardware has queues for (8 by default) from a kernel stuck behind one that waits for it.

A kernel that waits for no peer is launched without: whatever its load waits for is complete, as no rank's kernels are
ever on the GPU without those of all others. So ranks need not agree on such launches (`local_fabric`).
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tileweave.fabric.base import Abandoned, Channel, Copies, Outcome, Variant
from tileweave.fabric.capability import memory_bytes_of, tensor_cores
from tileweave.fabric.emulated import reduce_rows
from tileweave.fabric.meeting import Meeting
from tileweave.fabric.stamping import to_launch
from tileweave.fabric.variants import copy_beside, enqueue, load, variant_of
from tileweave.fabric.world import World, WorldFabric

T = TypeVar("T")
HOST_TIMEOUT = 60.0  # seconds that a rank's thread waits for the others at least: one of them may be compiling


@dataclass
class Launch:
    """A rank's part of a launch: a compiled kernel, its grid and arguments, the stream's handle."""

    kernel: Any
    grid: int
    args: Sequence[Any]
    stream: int
    capturing: bool


class VirtualWorld(World):
    """Ranks on one Hopper GPU. `run` waits for the GPU before it returns; FabricTimeout if a kernel waited in vain."""

    backend = "virtual"

    def __init__(self, size: int, device: torch.device, sms: int, timeout: float):
        super().__init__(size, device, sms, timeout)
        self.cores, self.memory_bytes = tensor_cores(device), memory_bytes_of(device)
        self.meeting = self._new_meeting()
        self._streams = [torch.cuda.Stream(device) for _ in range(size)]
        self.beside = [torch.cuda.Stream(device) for _ in range(size)]  # for copies
        self.last: list[torch.cuda.Stream | None] = [None] * size  # where each rank's latest launch went
        self._alone: dict[int, VirtualWorld] = {}  # of a rank alone, for its local launches

    def local_fabric(self, rank: int) -> "VirtualFabric":
        self.fabric(rank)  # raises outside of `run`
        if rank not in self._alone:
            self._alone[rank] = VirtualWorld(1, self.device, self.sms, self.timeout)
        return VirtualFabric(self._alone[rank], 0)

    def close(self) -> None:
        """Wait for the GPU, then release the world's memory."""
        torch.cuda.synchronize(self.device)
        super().close()

    def check(self) -> None:
        """Wait for the GPU. FabricTimeout if a kernel has waited in vain; the world's memory is then made anew."""
        torch.cuda.synchronize(self.device)
        timeout = self.workspace.timed_out()
        if timeout is not None:
            self.workspace.clear()
            raise timeout

    def _new_meeting(self) -> Meeting:
        return Meeting(self.size, max(self.timeout, HOST_TIMEOUT))

    def _make_fabric(self, rank: int) -> "VirtualFabric":
        return VirtualFabric(self, rank)

    def _run(self, body: Callable[[int], T]) -> list[T]:
        self.meeting = self._new_meeting()
        outcomes = [Outcome() for _ in range(self.size)]
        caller = torch.cuda.current_stream(self.device)

        def thread(rank: int) -> None:
            try:
                with torch.cuda.device(self.device), torch.cuda.stream(self._streams[rank]):
                    self._streams[rank].wait_event(start)
                    outcomes[rank].value = body(rank)
                self.meeting.leave(f"rank {rank}", "has returned")
            except BaseException as error:
                outcomes[rank].error = error
                self.meeting.leave(f"rank {rank}", f"has failed ({type(error).__name__}: {error})")

        start = caller.record_event()
        self._join([threading.Thread(target=thread, args=(r,), name=f"rank {r}") for r in range(self.size)])
        for stream in self._streams:
            caller.wait_stream(stream)
        return self._results(outcomes)

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        """Start and join all threads, also when this one is interrupted meanwhile."""
        started = []
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
            for thread in threads:
                thread.join()
        except BaseException:
            self.meeting.leave("the thread that runs the world", "was interrupted")
            for thread in started:
                thread.join()
            raise

    def _results(self, outcomes: list[Outcome]) -> list[Any]:
        """What the ranks returned; raises what went wrong in one of them or in its kernels."""
        failure = first_failure(outcomes)
        if failure.error is None:
            self.check()
            return [outcome.value for outcome in outcomes]
        self._recover(failure.error)
        outcomes.clear()  # the error's traceback holds these frames: no cycle may keep GPU memory alive
        try:
            raise failure.error
        finally:
            del failure

    def _recover(self, error: BaseException) -> None:
        """Make the world usable again after a rank has failed. Waits in kernels are bounded."""
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as failure:
            error.add_note(f"The GPU is no longer usable: {failure}")
        self.workspace.clear()


class VirtualFabric(WorldFabric):
    """One rank of a virtual world."""

    world: VirtualWorld

    def multicast_refusal(self) -> str | None:
        return "virtual ranks share one GPU, and multicast joins several"

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
        """Enqueue the kernel on this rank's current stream, when all ranks have come with the same kernel and grid.

        `args` are all its arguments, in order. A rank's launches follow each other also across streams (not across
        captured graphs).
        """
        self.check_grid(kernel, grid)
        with torch.cuda.device(self.device):
            compiled = to_launch(variant_of(kernel, grid, args, num_warps, variant), grid, self.rank)
            stream, capturing = torch.cuda.current_stream(), torch.cuda.is_current_stream_capturing()
            last = self.world.last[self.rank]
            if last is not None and last != stream and not capturing:
                stream.wait_stream(last)
            self.world.last[self.rank] = stream
            mine = Launch(compiled, grid, args, stream.cuda_stream, capturing)
            if copies:  # before any kernel of the meeting that waits for them: streams may share a hardware queue
                copy_beside(self.world.beside[self.rank], copies)
            self.exchange(f"launch of {kernel.__name__} with {grid} CTAs", mine, launch_all)
            if copies:
                stream.wait_stream(self.world.beside[self.rank])

    def _reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        label = f"reduce_scatter({tuple(x.shape)})"
        parts = self._gather(label, x)
        total = reduce_rows(parts, self.rank)
        self._gather(label, None)  # the peers' streams may change or free their x only when all have read it
        return total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        label = f"all_gather({tuple(x.shape)}, {x.dtype})"
        whole = torch.cat(self._gather(label, x))
        self._gather(label, None)  # as in _reduce_scatter
        return whole

    def _gather(self, label: str, value: T) -> list[T]:
        """All ranks' values; this rank's stream waits for what the peers' streams have been given so far."""
        stream = torch.cuda.current_stream(self.device)
        deposits = self.exchange(label, (stream.record_event(), value), list)
        for event, _ in deposits:
            stream.wait_event(event)
        return [value for _, value in deposits]

    def channel(self, op: str, adding_bytes: int, staging_bytes: int) -> Channel:
        channel = super().channel(op, adding_bytes, staging_bytes)
        channel.captured |= torch.cuda.is_current_stream_capturing()
        return channel

    def _check_growth(self, op: str) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{op}: its workspace must grow, which cannot be captured in a CUDA graph: "
                "call it once with this shape before the capture (warm up)"
            )

    def _quiesce(self) -> None:
        torch.cuda.synchronize(self.device)

    def _meet(self, deposit: Any, act: Callable[[list[Any]], Outcome]) -> Outcome:
        return self.world.meeting.meet(self.rank, deposit, act)


def first_failure(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of the rank that failed by itself, else of one that waited in vain, else one without an error."""
    failures = [outcome for outcome in outcomes if outcome.error is not None]
    by_themselves = [outcome for outcome in failures if not isinstance(outcome.error, Abandoned)]
    return next(iter(by_themselves + failures), Outcome())


def launch_all(launches: Sequence[Launch]) -> None:
    """Load what is not loaded, then enqueue the kernels of all ranks; the calling thread is one rank's."""
    for launch in launches:
        load(launch.kernel, launch.capturing)
    for launch in launches:
        enqueue(launch.kernel, launch.grid, launch.args, launch.stream)
