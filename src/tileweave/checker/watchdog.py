"""Ends what does not come back to the emulator when its time is up: a lock that nobody releases, an endless loop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

from tileweave.emulator.hosts import running
from tileweave.emulator.places import written_by_user

GRACE = 1.0  # seconds for which the emulator, which looks at the time by itself, may be late
_AGAIN = 5.0  # seconds after which code that has caught the exception gets another one


class OutOfTime(BaseException):
    """No more time for this schedule. stuck: the line of the user's program that did not come back to the emulator;
    empty if the emulator itself has looked at the time. No Exception, which the program might catch."""

    def __init__(self, stuck: str = ""):
        self.stuck = stuck


@contextmanager
def in_time(end: float | None, outermost: CodeType) -> Iterator[None]:
    """Within it, OutOfTime is raised a little after `end`, of time.monotonic(), wherever the program is; of the lines
    that it can be stuck in, those called by `outermost` count. A timer that runs already, for a test's time limit say,
    goes on afterwards. Does nothing without an end, in another thread than the main one, or where there are no timers
    (Windows)."""
    main = threading.current_thread() is threading.main_thread()
    if end is None or not main or not hasattr(signal, "setitimer"):
        yield
        return

    def over(number: int, frame: FrameType | None) -> None:
        raise OutOfTime(written_by_user(running(frame), outermost))

    handler, start = signal.signal(signal.SIGALRM, over), time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, max(end - start, 0.0) + GRACE, _AGAIN)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    finally:  # even if the time was up on the way into the line above
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - start), 1e-3), interval)
