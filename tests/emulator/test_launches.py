"""Launches ahead of the predecessor's end: what is known before and behind `grid_dependency_wait`."""

import pytest
import torch

from tests.emulator.kernels import launches as k
from tileweave.emulator import RaceError, World
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
