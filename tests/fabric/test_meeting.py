"""The meeting of a virtual world's threads."""

import threading
import time

import pytest

from tileweave.fabric.base import Abandoned, Outcome
from tileweave.fabric.meeting import Meeting


def run(size, body):
    """Call body(rank) on a thread each; the results, or the exceptions, in rank order."""
    results = [None] * size

    def thread(rank):
        try:
            results[rank] = body(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=thread, args=(rank,)) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
        assert not each.is_alive()
    return results


@pytest.mark.parametrize("size", [1, 2, 5])
def test_many_turns_in_a_row(size):
    meeting = Meeting(size, 10)

    def body(rank):
        sums = []
        for turn in range(200):
            outcome = meeting.meet(rank, turn * rank, lambda deposits: Outcome(value=list(deposits)))
            sums.append(outcome.get() == [turn * r for r in range(size)])
        return all(sums)

    assert run(size, body) == [True] * size


def test_one_thread_acts():
    meeting, calls = Meeting(4, 10), []
    run(4, lambda rank: meeting.meet(rank, None, lambda deposits: calls.append(deposits)))
    assert calls == [[None] * 4]


def test_a_long_action_is_no_late_rank():
    meeting = Meeting(2, 0.2)

    def act(deposits):
        time.sleep(0.6)
        return Outcome(value="done")

    assert [outcome.get() for outcome in run(2, lambda rank: meeting.meet(rank, rank, act))] == ["done", "done"]


def test_who_leaves_releases_those_who_wait():
    meeting = Meeting(3, 10)

    def body(rank):
        if rank == 2:
            time.sleep(0.1)
            return meeting.leave("rank 2", "has returned")
        return meeting.meet(rank, None, lambda deposits: Outcome())

    start = time.monotonic()
    first, second, _ = run(3, body)
    assert time.monotonic() - start < 5
    assert isinstance(first, Abandoned) and isinstance(second, Abandoned)
    assert "rank 0 waits" in str(first) and "rank 2 has returned" in str(first)


def test_a_rank_that_does_not_come_is_named():
    meeting = Meeting(3, 0.2)
    errors = run(3, lambda rank: rank == 1 or meeting.meet(rank, None, lambda deposits: Outcome()))
    assert "ranks [1] to make the same call" in str(errors[0])
