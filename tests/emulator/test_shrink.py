"""A failing schedule is cut down to the turns that it takes, and the short one fails as the long one did."""

import pytest

from tests.emulator.test_search import crossed_kernel, words
from tileweave.emulator import DeadlockError, World
from tileweave.emulator.search import RandomOrder, Recorded, Replay
from tileweave.emulator.shrink import shrink


def deadlocks(strategy):
    """Whether two CTAs that take two locks in opposite order end in each other's way."""
    world, locks = World(1, strategy=strategy), words(2)
    try:
        world.run(lambda rank: world.launch(crossed_kernel, (2,), locks, 2))
    except DeadlockError:
        return True
    return False


def failing():
    """What the first seed chose that fails."""
    for seed in range(200):
        recorded = Recorded(RandomOrder(seed))
        if deadlocks(recorded):
            return recorded
    pytest.fail("no seed fails")


def test_the_plain_schedule_is_right_and_the_short_one_is_not():
    assert not deadlocks(Replay())
    recorded = failing()
    short = shrink(deadlocks, recorded.turns, recorded.draws)
    assert short.was == len(recorded.turns) and len(short.turns) <= 4
    assert deadlocks(Replay(short.turns, short.draws))
    for i in range(len(short.turns)):  # no turn is too many
        assert not deadlocks(Replay(short.turns[:i] + short.turns[i + 1 :], short.draws))


def test_a_fault_of_every_schedule_needs_no_turn():
    short = shrink(lambda replay: True, failing().turns)
    assert short.turns == [] and short.tried == 1


def test_tries_are_bounded():
    turns = [(str(i), 1) for i in range(1000)]
    short = shrink(lambda replay: len(replay._turns) >= 900, turns, tries=5)
    assert short.tried == 5 and 900 <= len(short.turns) <= 1000
