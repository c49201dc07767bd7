"""Graphs: what is done again, with which arguments, and what a replay shows of a call that counts on the host."""

import pytest
import torch

import tileweave as tw
from tests.emulator.kernels import launches as k
from tileweave.emulator import DeadlockError, RaceError, World
from tileweave.ops.collectives.operator import OPERATORS

SEEDS = range(6)
W = 3


def replayed(seed, numbered, replays=3):
    """A call of `pushes_values`, captured and then done again with other values; the sums that a rank gets."""
    slots, sums, state = torch.zeros(W, 2, W), torch.zeros(1 + replays, W), torch.zeros(W, dtype=torch.int32)
    flags, world = torch.zeros(W, 32, dtype=torch.int32), World(W, seed)
    values, out = torch.arange(float(W)), torch.zeros(W)

    def fn(rank):
        mine = values[rank : rank + 1]
        with world.capture() as graph:
            doubled = mine * 2
            args = rank, W, slots, out, flags, 32, state, doubled, 1, numbered
            world.launch(k.pushes_values, (1,), *args)
        sums[0, rank] = out[rank]
        for n in range(1, replays + 1):
            mine += 1
            graph.replay()
            sums[n, rank] = out[rank]

    world.run(fn)
    return sums


def test_a_replay_takes_what_now_lies_where_its_inputs_lay():
    for seed in SEEDS:
        assert torch.equal(replayed(seed, numbered=0)[:, 0], 2.0 * (torch.arange(4) * W + 3))


def test_a_call_that_is_numbered_by_the_host_cannot_be_replayed():
    """A graph freezes the number: flags that came for the first call let the second one go on."""
    for seed in SEEDS:
        with pytest.raises(RaceError, match="race on global memory slots"):
            replayed(seed, numbered=1)


def by_operator(x, group):
    """The same through PyTorch's dispatcher."""
    return OPERATORS["all_reduce"](x, group.group_name, "sum", False)


@pytest.mark.parametrize("sum_of", [tw.all_reduce, by_operator])
def test_an_op_in_a_graph(sum_of):
    x = torch.ones(2, 16, 8)

    def fn(rank, group):
        sum_of(x[rank], group)
        with group.world.capture() as graph:
            out = sum_of(x[rank] + 1, group)
        x[rank] = 5.0 + rank
        graph.replay()
        return out

    with tw.virtual_world(2, device="cpu") as world:
        assert all((out == 13).all() for out in world.run(fn))


def test_what_cannot_be_in_a_graph():
    def reads(rank):
        with world.capture():
            torch.zeros(1).item()

    def nests(rank):
        with world.capture(), world.capture():
            pass

    for fn, text in ((reads, "item: the host must not look"), (nests, "graphs do not nest")):
        world = World(1)
        with pytest.raises(RuntimeError, match=text):
            world.run(fn)


def test_a_replay_without_its_peers_waits_for_them():
    flags, out, world = torch.zeros(2, 32, dtype=torch.int32), torch.zeros(2), World(2)
    slots, state, value = torch.zeros(2, 2, 2), torch.zeros(2, dtype=torch.int32), torch.ones(2, 1)

    def fn(rank):
        with world.capture() as graph:
            world.launch(k.pushes_values, (1,), rank, 2, slots, out, flags, 32, state, value[rank], 1, 0)
        if rank == 0:
            graph.replay()

    with pytest.raises(DeadlockError, match="flag 1 of rank 0 to reach 2"):
        world.run(fn)
