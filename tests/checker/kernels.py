"""Functions to check: a tile passed on to the next rank, right, wrong in several ways, and by chance."""

import multiprocessing
import os
import runpy
import signal
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path

import torch

import tileweave
from tileweave.emulator import World

BARRIER = threading.Barrier(2)
CALLS = count(1)
_LESSON = runpy.run_path(str(Path(__file__).parents[2] / "examples/02_a_race_found.py"))


def passed_on():
    """Right."""
    assert _LESSON["run"](True, 0)


def told_too_early():
    """A race."""
    assert _LESSON["run"](False, 0)


def wrong_result(world):
    """A result that is wrong in every schedule."""
    assert world.size == 0, "there are ranks"


def broken():
    """A fault of the test itself."""
    raise KeyError("no such thing")


def interrupts():
    """Right; every third call in a process interrupts the check, as Ctrl-C does."""
    passed_on()
    if next(CALLS) % 3 == 0:
        os.kill(os.getppid() if multiprocessing.parent_process() else os.getpid(), signal.SIGINT)


def gives_up():
    """A test that would end the process, as a success."""
    print("so much for that")
    raise SystemExit(0)


def out_of_order():
    """Wrong in some schedules only: it relies on rank 0 being first."""
    came = []
    World(2).run(came.append)
    assert came[0] == 0, "rank 1 was first"


def endless():
    """Never comes to its end."""
    world = World(2)
    mine = torch.zeros(2)

    def program(rank):
        while True:
            world.touch(mine[rank], "write")

    world.run(program)


def endless_alone():
    """The same with one rank: nobody else ever can run."""
    world = World(1)
    mine = torch.zeros(2)

    def program(rank):
        while True:
            world.touch(mine, "write")

    world.run(program)


def stuck():
    """Waits for a party that never comes."""
    BARRIER.wait()


def stuck_in_a_rank(world):
    """Ranks meet by other means than the group."""
    world.run(lambda rank, group: BARRIER.wait())


def spinning():
    """An endless loop that catches what it can."""
    while True:
        with suppress(Exception):
            sum(range(100))


def a_run_each(world):
    """Two calls, in a run each."""
    for call in range(2):
        world.run(lambda rank, group, call=call: tileweave.all_gather(torch.full((8, 8), float(rank + call)), group))


def a_world_each():
    """Two calls, in a world each, which share no flag."""
    for _ in range(2):
        with tileweave.virtual_world(2, device="cpu") as world:
            world.run(lambda rank, group: tileweave.all_gather(torch.ones(8, 8), group))


def two(world, more):
    """Takes too much."""
