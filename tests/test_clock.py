"""The clock of `tileweave.tune`: what it captures, times and gives back, on a GPU that notes what is asked of it."""

import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tileweave import virtual_world
from tileweave.clock import CALLS, gpu_clock
from tileweave.fabric import fabric_of

DEFAULT, OWN, NEW = "the default stream", "a stream of its own", "a new stream"


class Stream(str):
    """A stream by its name."""

    def wait_stream(self, other):
        assert (self, other) == (NEW, DEFAULT)


@pytest.fixture
def gpu(monkeypatch):
    """What is asked of it in order, and `current`, its current stream."""
    gpu = SimpleNamespace(log=[], current=Stream(DEFAULT))

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            assert (pool, capture_error_mode) == ("pool", "thread_local")
            gpu.log.append("begin")

        def capture_end(self):
            gpu.log.append("end")

        def replay(self):
            gpu.log.append("replay")

        def reset(self):
            gpu.log.append("reset")

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            gpu.log.append("event")

        def synchronize(self):
            gpu.log.append("wait")

        def elapsed_time(self, end):
            return 0.5

    def enter(stream):
        gpu.entered = stream
        return nullcontext()

    fakes = {
        "CUDAGraph": Graph, "Event": Event, "graph_pool_handle": lambda: "pool", "stream": enter,
        "Stream": lambda: Stream(NEW), "current_stream": lambda: gpu.current, "default_stream": lambda: Stream(DEFAULT),
        "_sleep": lambda cycles: gpu.log.append("sleep"), "empty_cache": lambda: gpu.log.append("empty"),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return gpu


def fabric(*channels, world_size=2):
    return SimpleNamespace(world_size=world_size, channels=lambda: channels, rendezvous=lambda: None)


def test_one_replay_is_timed_behind_another_that_the_gpu_sleeps_before(gpu):
    with gpu_clock(fabric()) as timer:
        us = timer(lambda: gpu.log.append("call"))
        assert gpu.log == ["begin", *["call"] * CALLS, "end"]
        for _ in range(2):
            gpu.log.clear()
            assert us() == 500 / CALLS
            assert gpu.log == ["sleep", "replay", "event", "replay", "event", "wait"]


def test_graphs_are_all_kept_until_none_is_needed(gpu):
    """Torch captures no more in a pool once all graphs there have been reset."""
    with gpu_clock(fabric()) as timer:
        for _ in range(3):
            timer(lambda: None)
        assert gpu.log == ["begin", "end"] * 3
        gpu.log.clear()
    assert gpu.log == ["reset"] * 3 + ["empty"]


@pytest.mark.parametrize("current, captured", [(DEFAULT, NEW), (OWN, OWN)])
def test_the_default_stream_is_not_captured(gpu, current, captured):
    gpu.current = Stream(current)
    with gpu_clock(fabric()):
        assert gpu.entered == captured


def test_what_graphs_held_may_go_but_not_what_others_hold(gpu):
    """Also where a call fails."""
    ours, users = SimpleNamespace(captured=False), SimpleNamespace(captured=True)

    def call():
        ours.captured = users.captured = True

    def broken():
        call()
        raise OSError("no call")

    with gpu_clock(fabric(ours, users)) as timer:
        timer(call)
        timer(call)
        assert ours.captured
    assert not ours.captured and users.captured
    with pytest.raises(OSError, match="no call"), gpu_clock(fabric(ours, users)) as timer:
        timer(call)
        timer(broken)
    assert not ours.captured and users.captured and gpu.log[-3:] == ["begin", "end", "reset"]


@pytest.mark.parametrize("world_size, together", [(1, False), (2, True)])
def test_ranks_that_meet_no_other_have_the_clock_one_after_the_other(gpu, world_size, together):
    inside = threading.Event()

    def other():
        with gpu_clock(fabric(world_size=world_size)):
            inside.set()

    thread = threading.Thread(target=other)
    with gpu_clock(fabric(world_size=world_size)):
        thread.start()
        assert inside.wait(10.0 if together else 0.2) == together
    thread.join()
    assert inside.is_set()


@pytest.mark.gpu
def test_the_host_has_no_part_in_it():
    """Calls of a few microseconds for which the host takes a thousand, on ranks that share one Python; then a sleep of
    the GPU that takes 100 at least. Memory is given back."""

    def run(rank, group):
        x = torch.zeros(1 << 10, device="cuda")

        def call():
            time.sleep(1e-3)
            x.add_(1.0)

        def sleep():
            torch.cuda._sleep(200_000)
            torch.empty(64 << 20, dtype=torch.uint8, device="cuda")

        fabric = fabric_of(group, "cuda")
        with gpu_clock(fabric) as timer:
            call()
            sleep()
            fabric.rendezvous()
            timers = timer(call), timer(sleep)
            fabric.rendezvous()
            found = [us() for us in timers]
        torch.cuda.synchronize()
        return found, x[0].item()

    with virtual_world(2, device="cuda") as world:
        before = torch.cuda.memory_reserved()
        outs = world.run(run)
        torch.cuda.empty_cache()
    for (short, long), total in outs:
        assert 0 < short < 50 and 90 < long < 1000
        assert total == 1 + 2 * CALLS
    assert torch.cuda.memory_reserved() - before < 32 << 20
