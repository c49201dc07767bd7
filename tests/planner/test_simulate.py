"""The simulation of tiles, messages and flags, where its result is known."""

import dataclasses
from itertools import pairwise

import pytest

from tileweave.planner.simulate import Schedule, simulate

HIDDEN = Schedule("scatter", 4, 16, slice_us=10.0, message_us=5.0, launch_us=3.0, sync_us=1.0)


def test_messages_that_take_less_than_tiles_are_hidden():
    end, events = simulate(HIDDEN)
    assert end == pytest.approx(3 + 16 * 10 + 5 + 1)  # own tiles wait for the last of them, and its flag
    assert {event.lane for event in events} == {"SMs", "link", "waits"}


def test_messages_that_take_more_bound_the_whole():
    end, events = simulate(dataclasses.replace(HIDDEN, message_us=40.0))
    assert end == pytest.approx(3 + 10 + 12 * 40 + 1 + 4 * 10)  # the first tile, all messages, a flag, own tiles
    assert any(event.lane == "waits" for event in events)
    sent = sorted((event.start_us, event.end_us) for event in events if event.lane == "link")
    assert all(first[1] <= second[0] for first, second in pairwise(sent))  # one at a time


def test_ranks_that_begin_with_the_same_peer_get_in_each_others_way():
    apart, _ = simulate(HIDDEN)
    crowded, _ = simulate(dataclasses.replace(HIDDEN, rotated=False))
    assert crowded > 1.1 * apart


def test_a_gather_starts_with_own_rows_and_waits_for_the_others():
    end, events = simulate(dataclasses.replace(HIDDEN, kind="gather"))
    assert end == pytest.approx(3 + 16 * 10) and not any(event.lane == "waits" for event in events)
    end, events = simulate(dataclasses.replace(HIDDEN, kind="gather", message_us=40.0))
    assert end == pytest.approx(3 + 12 * 40 + 1 + 10)


def test_sums_that_go_back_take_the_link_again():
    once, _ = simulate(dataclasses.replace(HIDDEN, message_us=20.0))
    twice, _ = simulate(dataclasses.replace(HIDDEN, kind="reduce", message_us=20.0))
    assert twice >= once + 3 * 20


def test_one_rank_only_computes():
    assert simulate(Schedule("scatter", 1, 8, 10.0, 5.0, 3.0, 1.0))[0] == pytest.approx(83)
