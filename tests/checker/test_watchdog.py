"""The end of what does not come back: it leaves the process's timer and handler as they were."""

import signal
import time

import pytest

from tileweave.checker import watchdog
from tileweave.checker.watchdog import OutOfTime, in_time


@pytest.fixture
def rang():
    """Times at which a timer of somebody else's has rung."""
    times = []
    handler = signal.signal(signal.SIGALRM, lambda *_: times.append(time.monotonic()))
    timer = signal.setitimer(signal.ITIMER_REAL, 0.0)
    yield times
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *timer)


def within(end):
    with in_time(end, within.__code__):
        pass


def test_a_timer_that_runs_already_goes_on(rang):
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    start = time.monotonic()
    within(start + 60)
    assert not rang
    while not rang and time.monotonic() < start + 5:
        time.sleep(0.01)
    assert rang


def test_one_that_was_due_meanwhile_rings_afterwards(rang):
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    with in_time(time.monotonic() + 60, within.__code__):
        time.sleep(0.05)
        assert not rang
    time.sleep(0.05)
    assert len(rang) == 1


def test_time_that_is_up_at_the_very_end_leaves_nothing_behind(rang, monkeypatch):
    """The signal comes when the body is over, before the timer has been stopped."""
    handler, setitimer = signal.getsignal(signal.SIGALRM), signal.setitimer
    late = [signal.SIGALRM]

    def stop(which, seconds, *interval):
        if seconds == 0.0 and late:
            signal.raise_signal(late.pop())
        return setitimer(which, seconds, *interval)

    monkeypatch.setattr(watchdog.signal, "setitimer", stop)
    with pytest.raises(OutOfTime):
        within(time.monotonic() + 60)
    assert signal.getsignal(signal.SIGALRM) is handler and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
