"""The launches of an op between virtual ranks, kept so that they can be timed without the host's work."""

from collections.abc import Callable, Iterable, Sequence

import torch

from tileweave.fabric.base import BLOCK_WORDS, STATE_WORDS, Channel
from tileweave.fabric.variants import load, variant_of
from tileweave.fabric.virtual import Launch, VirtualFabric, launch_all


class Recorder(VirtualFabric):
    """A rank's fabric that keeps its launches instead of making them, so that timing holds no host work.

    With `alone` it is a world of one rank on that rank's share of the SMs.
    """

    def __init__(self, fabric: VirtualFabric, alone: bool):
        super().__init__(fabric.world, fabric.rank)
        self.kept: list[Launch] = []
        self.alone = alone
        if alone:
            self.rank, self.world_size = 0, 1

    def channel(self, op: str, adding_bytes: int, staging_bytes: int) -> Channel:
        if not self.alone:
            return super().channel(op, adding_bytes, staging_bytes)
        words = [torch.zeros(1, n, dtype=torch.int32, device=self.device) for n in (BLOCK_WORDS, STATE_WORDS)]
        nothing = torch.zeros(1, 512, dtype=torch.uint8, device=self.device)
        return Channel(op, words[0], words[1][0], nothing, nothing, 10**6)

    def launch(self, kernel, grid, args, *, num_warps, variant=None, copies=()) -> None:
        compiled = variant_of(kernel, grid, args, num_warps, variant)
        load(compiled, capturing=False)
        self.kept.append(Launch(compiled, grid, args, torch.cuda.current_stream().cuda_stream, False))


def together(launches: Sequence[Launch], streams: Sequence[torch.cuda.Stream], calls: int = 1) -> Callable[[], None]:
    """A contender: all ranks' launches, each on its stream, `calls` times in a row, as one replay of a graph."""

    def enqueue() -> None:
        here = torch.cuda.current_stream()
        start = here.record_event()
        for stream in streams:
            stream.wait_event(start)
        for _ in range(calls):
            launch_all(launches)
        for stream in streams:
            here.wait_stream(stream)

    enqueue()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        enqueue()

    def replay() -> None:
        assert launches  # they hold the memory that the graph reads and writes
        graph.replay()

    return replay


def poisoned(run: Callable[[], None], outs: Iterable[torch.Tensor]) -> None:
    """Run a contender once, to the end, whose results hold NaN before."""
    for out in outs:
        out.fill_(float("nan"))
    run()
    torch.cuda.synchronize()
