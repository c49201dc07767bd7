"""Runs in the order of modelled time: what takes how long, what shares what, and the events that a viewer reads."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.emulator.kernels import primitives, puts
from tests.emulator.problems import D, layout, randn
from tileweave.emulator import World
from tileweave.emulator.timeline import FLAG, REGISTERS, Rates, TimeOrder, chrome_trace

HEADER = 16
AT_ONCE = Rates(*[1e12] * 6, *[0.0] * 5)  # whatever is not said otherwise takes no time


def order_of(**rates):
    return TimeOrder(replace(AT_ONCE, **rates))


def ping(order, parallel=True, **options):
    """Two ranks store 1024 bytes each for the other one, signal, wait and copy what they got."""
    data, out = torch.zeros(2, 256, dtype=torch.int32), torch.full((2, 256), -1, dtype=torch.int32)
    flags = torch.zeros(2, HEADER + 8, dtype=torch.int32)
    world = World(2, sms=4, strategy=order, parallel=lambda address: parallel)
    world.run(lambda r: world.launch(primitives.ping, (1,), r, 2, data, out, flags, HEADER + 8, 0, 1, 0, 0))
    assert torch.equal(out[0], torch.arange(256, dtype=torch.int32) + 1)
    return world


def copy(order, grid, target):
    """Rank 0 copies 64 KB from its slice to that of `target`."""
    src, dst = randn(2, 512, 64, seed=1), torch.zeros(2, 512, 64, dtype=torch.bfloat16)
    world = World(2, sms=4, strategy=order, parallel=lambda address: True)
    descs = D(src, [1, 64, 64], layout(3)), D(dst, [1, 64, 64], layout(3))

    def program(rank):
        if rank == 0:
            world.launch(puts.ring_copy, (grid,), *descs, target, 0, 512, 64, 64, 3)

    world.run(program)
    assert torch.equal(dst[target], src[0])
    return order.now


def test_registers_pass_the_link_to_a_peer_and_the_memory_within_a_rank():
    ways = {}
    for parallel in (True, False):
        order = order_of(link_bytes=1024 / 50, memory_bytes=1024 / 5)
        ping(order, parallel)
        copies = [s for s in order.spans if s.kind == REGISTERS and s.rank == 0 and s.end - s.start > 1]
        ways[parallel] = [s.end - s.start for s in copies]
    assert ways[True] == pytest.approx([50, 5, 5], rel=0.05)  # the store to the peer, and the copy of what came
    assert ways[False][0] < 25  # its memory alone


@pytest.mark.parametrize("late", ["peer_us", "link_bytes"])
def test_a_wait_ends_when_the_signal_has_come(late):
    """Also one that begins after its signal: the ranks here are in step, and both signal before either waits."""
    order = order_of(peer_us=100.0) if late == "peer_us" else order_of(peer_us=100.0, link_bytes=1024 / 300)
    ping(order)
    assert len(order.flows) == 2
    for flow in order.flows:
        assert flow.source[0] != flow.target[0]
        assert flow.target[3] - flow.source[3] == pytest.approx(100, abs=1)
    waits = [span for span in order.spans if span.kind == FLAG]
    assert [span.rank for span in sorted(waits, key=lambda span: span.rank)] == [0, 1]


def test_sms_share_the_link_and_the_memory_of_their_rank():
    link, memory = {"link_bytes": 65536 / 80}, {"memory_bytes": 65536 / 40}
    assert copy(order_of(**link), 1, target=1) == pytest.approx(80, rel=0.05)
    assert copy(order_of(**link), 4, target=1) == pytest.approx(80, rel=0.05)
    assert copy(order_of(**link), 4, target=0) < 4
    assert copy(order_of(**memory), 4, target=0) == pytest.approx(80, rel=0.05)  # it is read, and written
    each = {"sm_bytes": 65536 / 40}
    assert copy(order_of(**each), 4, target=1) == pytest.approx(copy(order_of(**each), 1, target=1) / 4, rel=0.1)


def test_latencies_and_launches_take_their_time():
    assert copy(order_of(launch_us=30.0), 1, target=1) == pytest.approx(30, abs=2)
    started = order_of(launch_us=30.0)
    ping(started)
    assert min(span.start for span in started.spans if span.cta is not None) >= 30


def test_a_schedule_in_time_order_is_the_same_again():
    first, again = order_of(link_bytes=100.0), order_of(link_bytes=100.0)
    assert ping(first).trace == ping(again).trace
    assert first.spans == again.spans


def test_events_of_a_thread_do_not_overlap_and_flows_have_two_ends():
    order = order_of(link_bytes=10_000.0, memory_bytes=20_000.0, peer_us=3.0, gpu_us=1.0)
    ping(order)
    copy(order, 2, target=1)
    told = chrome_trace(order.spans, order.flows, "a title", "modelled")
    assert told["otherData"] == {"title": "a title", "times": "modelled"}
    threads, ends = defaultdict(list), defaultdict(list)
    names = {(e["pid"], e["tid"]) for e in told["traceEvents"] if e["name"] == "thread_name"}
    for event in told["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] >= 0 and (event["pid"], event["tid"]) in names
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "sf":
            ends[event["id"]].append((event["ph"], event["ts"]))
    assert len(threads) > 4 and len(ends) == 2
    for spans in threads.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    for (_, start), (_, end) in ends.values():
        assert start < end
