"""Launches: ahead of the predecessor's end, larger than there is room for, ahead of a peer's."""

import pytest
import torch

from tests.emulator.kernels import launches as k
from tileweave.emulator import DeadlockError, EmulatorError, RaceError, World
from tileweave.lang.launches import launched_ahead
from tileweave.ops.descriptors import describe

SEEDS = range(4)


def chain(waits, between=None, seed=0):
    """x + 1 + 1 + ... through buffers used in turn, a launch for each of `waits`; returns the last result."""
    buffers, world = torch.zeros(2, 128), World(1, seed)

    def fn(rank):
        for i, wait in enumerate(waits):
            world.launch(k.passes_on, (2,), buffers[i % 2], buffers[1 - i % 2], wait)
            if between and i == 0:
                between(world, buffers)

    world.run(fn)
    return buffers[len(waits) % 2]


def test_behind_the_wait_all_that_the_stream_did_is_known():
    for seed in SEEDS:
        assert (chain(["first"] * 5, seed=seed) == 5).all()


@pytest.mark.parametrize("wait", ["late", "never"])
def test_an_access_before_the_wait_is_a_race_with_the_predecessor(wait):
    for seed in SEEDS:
        with pytest.raises(RaceError, match=r"missing: grid_dependency_wait\(\) in rank 0 CTA \d before its access"):
            chain(["first", wait], seed=seed)


def test_it_is_the_kernels_own_text_that_says_so():
    assert launched_ahead(k.passes_on) and launched_ahead(k.copies_in_a_partition)
    assert not launched_ahead(k.sets) and not launched_ahead(k.pushes)


def test_a_kernel_that_does_not_say_the_wait_begins_behind_its_predecessor():
    counter = torch.zeros(1, dtype=torch.int32)
    for seed in SEEDS:
        world = World(1, seed)

        def fn(rank, world=world):
            world.launch(k.counts, (2,), counter, 1)
            world.launch(k.sets, (1,), counter, 5)
            world.launch(k.counts, (2,), counter, 1)

        world.run(fn)
        assert counter.item() == 7


def test_atomics_do_not_race_with_those_of_the_predecessor_but_with_its_stores():
    counter = torch.zeros(1, dtype=torch.int32)
    world = World(1)
    world.run(lambda rank: [world.launch(k.counts, (2,), counter, 0) for _ in range(3)])
    assert counter.item() == 6

    def fn(rank):
        world.launch(k.sets, (1,), counter, 5)
        world.launch(k.counts, (2,), counter, 0)

    with pytest.raises(RaceError, match="grid_dependency_wait"):
        world.run(fn)


def test_what_the_predecessors_predecessor_did_is_known():
    """It had ended when the predecessor began."""
    a, b, counter, world = torch.zeros(128), torch.zeros(128), torch.zeros(1, dtype=torch.int32), World(1)

    def fn(rank):
        world.launch(k.passes_on, (2,), a, b, "first")
        world.launch(k.sets, (1,), counter, 5)
        world.launch(k.passes_on, (2,), b, a, "never")

    world.run(fn)
    assert (a == 2).all()


def test_a_meeting_of_all_ranks_is_as_good_as_the_wait():
    assert (chain(["first", "never"], lambda world, _: world.rendezvous()) == 2).all()


def test_what_the_host_does_on_the_stream_needs_the_wait_as_well():
    def writes(world, buffers):
        world.touch(buffers, "write")

    assert (chain(["first", "first"], writes) == 2).all()
    with pytest.raises(RaceError, match=r"(?s)host write.*missing: grid_dependency_wait"):
        x, y, world = torch.zeros(128), torch.zeros(128), World(1)

        def fn(rank):
            world.touch(x, "write")
            world.launch(k.passes_on, (2,), x, y, "never")

        world.run(fn)


@pytest.mark.parametrize(("own", "first"), [(1, 0), (0, 1), (0, 0)])
def test_partitions_know_what_was_waited_for_by_them_or_before_them(own, first):
    buffers = torch.zeros(3, 16, 64, dtype=torch.bfloat16)
    buffers[0] = 1
    for seed in SEEDS:
        world, views = World(1, seed), [describe(x, [16, 64]) for x in buffers]

        def fn(rank, world=world, views=views):
            for i in range(2):
                world.launch(k.copies_in_a_partition, (1,), views[i], views[i + 1], own, first, 16 * 64 * 2)

        if own or first:
            world.run(fn)
            assert (buffers == 1).all()
        else:
            with pytest.raises(RaceError, match="grid_dependency_wait"):
                world.run(fn)


def spinning(grid, sms, ahead, first, end, tell=1, seed=0):
    flags, world = torch.zeros(1, 32, dtype=torch.int32), World(1, seed, sms)
    world.run(lambda rank: world.launch(k.meets_a_cta, (grid,), flags, 32, ahead, first, end, tell))


@pytest.mark.parametrize(
    ("grid", "sms", "ahead", "first", "end"),
    [
        (4, 4, 1, 0, 4),  # all are resident
        (4, None, 1, 0, 4),
        (5, 1, -1, 1, 5),  # only earlier ones are waited for
        (3, 2, 2, 0, 1),  # CTA 1 ends, and the one that CTA 0 waits for takes its place
    ],
)
def test_ctas_may_wait_for_those_that_can_start(grid, sms, ahead, first, end):
    for seed in SEEDS:
        spinning(grid, sms, ahead, first, end, seed=seed)


@pytest.mark.parametrize(("grid", "sms", "ahead", "first", "end"), [(6, 3, 3, 0, 3), (4, 2, 2, 0, 2), (2, 1, 1, 0, 1)])
def test_a_wait_for_a_cta_that_cannot_start_is_told_as_such(grid, sms, ahead, first, end):
    for seed in SEEDS:
        what = rf"not co-resident: ranks \[0\] have room for {sms} CTAs"
        with pytest.raises(DeadlockError, match=what) as found:
            spinning(grid, sms, ahead, first, end, seed=seed)
        assert f"one of the {sms} resident CTAs to end so that CTA {sms} can start" in str(found.value)
        assert "gl.wait(flags, (me + AHEAD) % n, 1)" in str(found.value)


def test_a_deadlock_that_room_would_not_end_is_not_put_down_to_it():
    with pytest.raises(DeadlockError) as found:
        spinning(4, 2, 1, 0, 4, tell=0)
    assert "not co-resident" not in str(found.value) and "so that CTA 2 can start" in str(found.value)


def pushing(seed, slots, left_out=0, first=0, mask=1, calls=4, W=3):
    memory, out, state = torch.zeros(W, slots, W), torch.zeros(calls, W), torch.full((W,), first, dtype=torch.int32)
    flags, world = torch.full((W, 32), first, dtype=torch.int32), World(W, seed)
    flags[:, :16] = 0

    def fn(rank):
        for call in range(calls):
            args = rank, W, memory, out[call], flags, 32, state, float(call + rank), slots, left_out, mask
            world.launch(k.pushes, (1,), *args)

    world.run(fn)
    assert torch.equal(out[:, 0], torch.arange(calls) * W + W * (W - 1) / 2.0)


def test_with_two_slots_a_peer_may_write_before_a_rank_has_entered_the_call():
    for seed in range(12):
        pushing(seed, slots=2)


@pytest.mark.parametrize("first", [2**31 - 3, -3])
def test_slots_and_flags_by_an_epoch_that_wraps(first):
    for seed in SEEDS:
        pushing(seed, slots=2, first=first)


def test_a_slot_by_an_epoch_that_does_not_wrap_with_it():
    with pytest.raises(EmulatorError):
        for seed in SEEDS:
            pushing(seed, slots=2, first=2**31 - 3, mask=0)


@pytest.mark.parametrize(("slots", "left_out"), [(1, 0), (2, 1)])
def test_a_write_into_a_peer_that_is_too_far_behind(slots, left_out):
    """There is one slot; or there are two, but a call does not signal every peer, so one gets three calls behind."""
    texts = []
    for seed in range(12):
        with pytest.raises(RaceError) as found:
            pushing(seed, slots, left_out)
        texts.append(str(found.value))
    told = [text for text in texts if "may not have entered the call that is written for" in text]
    assert len(told) == len(texts)
