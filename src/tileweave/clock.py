"""What a call takes on a GPU, without the host: calls in CUDA graphs, whose replays are timed by events."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from tileweave.fabric import Channel, Fabric

Timer = Callable[[], float]  # measures anew each time: microseconds of a call
Clock = Callable[[Callable[[], Any]], Timer]
CALLS = 5  # of a graph, one behind the other
ASLEEP = 2_000_000  # cycles of the GPU, a millisecond at least: by then the host has enqueued what is timed
# The threads of virtual ranks share torch's generator of random numbers, which keeps a list of all graphs without a
# lock, and while a thread captures refuses to give numbers to others.
_graphs = threading.RLock()


@contextmanager
def gpu_clock(fabric: Fabric) -> Iterator[Clock]:
    """A clock for calls in this group. Within, the current stream is the one that they are captured on.

    A call that it is given has been made before. All ranks give it the same calls in the same order, and meet behind
    the last one before any uses a `Timer`: a replay waits for the others on the GPU, and they may still wait for the
    GPU in a capture. Timers are good until the clock goes, and with it all memory that their graphs had.
    """
    stream = here = torch.cuda.current_stream()
    if here == torch.cuda.default_stream():  # which cannot be captured
        stream = torch.cuda.Stream()
        stream.wait_stream(here)
    # One pool, so that memory for results is there once, whatever the number of graphs. It ends with the last graph
    # that has it, after which torch captures none there: so none is reset before all are.
    pool = torch.cuda.graph_pool_handle()
    graphs: list[torch.cuda.CUDAGraph] = []
    marks: list[tuple[Channel, bool]] = []

    def timer(call: Callable[[], Any]) -> Timer:
        marks.extend((channel, channel.captured) for channel in fabric.channels())
        graph = torch.cuda.CUDAGraph()
        with _graphs:
            graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            for _ in range(CALLS):
                call()
        finally:
            graph.capture_end()
        graphs.append(graph)
        return partial(_replayed_us, graph)

    # Ranks that do not meet would capture while others draw random numbers: one after the other.
    with _graphs if fabric.world_size == 1 else nullcontext(), torch.cuda.stream(stream):
        try:
            yield timer
        finally:
            with _graphs:
                for graph in graphs:
                    graph.reset()
            for channel, captured in reversed(marks):  # no graph of ours holds their memory any more
                channel.captured = captured
        torch.cuda.empty_cache()  # else the pool would be kept until memory runs out, which a capture cannot mend
        fabric.rendezvous()  # so that no rank frees memory while another captures


def _replayed_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one of the graph's CALLS calls, behind a replay that is not counted, in which ranks meet."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(ASLEEP)
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / CALLS
