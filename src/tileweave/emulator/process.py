"""What runs want of their process, in which several may go on in threads: garbage sought seldom, torch in one thread."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_COLLECT = 100_000  # objects that a run makes between two looks for garbage in cycles, of which it makes little
_lock = threading.Lock()
_runs = 0
_usual: tuple[int, int, int] = (0, 0, 0)
_threads = 1


@contextmanager
def arranged() -> Iterator[None]:
    """A run. It makes little garbage in cycles: to look for it among all that the process held before takes as long as
    the run, and to look often a few percent of it. Its tiles are small: torch's threads would wait for each other longer
    than they compute. The last one to end leaves everything as the first found it."""
    global _runs, _usual, _threads
    with _lock:
        if _runs == 0:
            _usual = gc.get_threshold()
            if _usual[0]:
                gc.set_threshold(max(_usual[0], _COLLECT), *_usual[1:])
            _threads = torch.get_num_threads()
        torch.set_num_threads(1)
        _runs += 1
        gc.freeze()
    try:
        yield
    finally:
        with _lock:
            _runs -= 1
            if _runs == 0:
                gc.unfreeze()
                gc.set_threshold(*_usual)
            torch.set_num_threads(_threads)  # it counts for the calling thread, and for those that begin later
