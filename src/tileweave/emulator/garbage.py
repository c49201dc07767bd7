"""The garbage collector during runs, of which several may go on in threads of one process."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_COLLECT = 100_000  # objects that a run makes between two looks for garbage in cycles, of which it makes little
_lock = threading.Lock()
_runs = 0
_usual: tuple[int, int, int] = (0, 0, 0)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """A run. It makes little garbage in cycles, and looking for it often takes a few percent of the run. The last to
    end leaves the collector as the first found it, which then finds what the run has left. (To freeze what the process
    held before would spare more, but what was frozen once is never new again: what runs leave would pile up.)"""
    global _runs, _usual
    with _lock:
        if _runs == 0:
            _usual = gc.get_threshold()
            if _usual[0]:
                gc.set_threshold(max(_usual[0], _COLLECT), *_usual[1:])
        _runs += 1
    try:
        yield
    finally:
        with _lock:
            _runs -= 1
            if _runs == 0:
                gc.set_threshold(*_usual)
