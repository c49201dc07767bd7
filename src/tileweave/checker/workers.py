"""Work done side by side in processes of one thread each."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import torch

Task = TypeVar("Task")
Result = TypeVar("Result")


_OFTEN = 0.2  # seconds between two calls of `meanwhile`


def _nothing(n: int) -> None:
    """Nobody asks what tasks count."""


_add: Callable[[int], None] = _nothing


def count(n: int) -> None:
    """Within a task of `each`: add to what its `meanwhile` is told."""
    _add(n)


def _begin(shared: Any) -> None:
    """One thread for PyTorch. Who interrupts the program means the process that the workers are of, which ends them."""
    global _add

    def add(n: int) -> None:
        with shared.get_lock():
            shared.value += n

    _add = add
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


@contextmanager
def _pool(processes: int) -> Iterator[tuple[ProcessPoolExecutor, Any]]:
    """So many processes and what they count. An error, or an interrupt, ends them at once."""
    # A process with other threads cannot be forked safely; a new interpreter takes seconds to import PyTorch.
    forks = sys.platform == "linux" and threading.active_count() == 1
    context = multiprocessing.get_context("fork" if forks else "spawn")
    shared = context.Value("q", 0)
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(shared,)) as executor:
        try:
            yield executor, shared
        except BaseException:
            for process in list(executor._processes.values()):  # there is no public way before Python 3.14
                process.kill()
            raise


def each(
    function: Callable[[Task], Result], tasks: Iterable[Task], processes: int, more: Callable[[], bool] = lambda: True,
    meanwhile: Callable[[int], None] = _nothing,
) -> Iterator[Result]:  # fmt: skip
    """The function's results, in the order in which they are ready; with `processes` 1, in this process. Before it
    begins a task it asks whether there shall be `more`: if not, it ends with those that have begun. `meanwhile` is told
    now and then what all tasks together have counted by `count`. To close it ends the workers."""
    if processes == 1:
        yield from _one_by_one(function, tasks, more, meanwhile)
        return
    with _pool(processes) as (workers, counted):
        running: set[Future[Any]] = set()
        waiting = iter(tasks)
        while True:
            for task in islice(waiting, 2 * processes - len(running) if more() else 0):
                running.add(workers.submit(function, task))
            if not running:
                return
            done, running = wait(running, _OFTEN, FIRST_COMPLETED)
            meanwhile(counted.value)
            if not more():
                running = {future for future in running if not future.cancel()}
            yield from (future.result() for future in done)


def _one_by_one(
    function: Callable[[Task], Result],
    tasks: Iterable[Task],
    more: Callable[[], bool],
    meanwhile: Callable[[int], None],
) -> Iterator[Result]:
    global _add
    counted, before = 0, _add

    def add(n: int) -> None:
        nonlocal counted
        counted += n
        meanwhile(counted)

    _add = add
    try:
        for task in tasks:
            if not more():
                return
            yield function(task)
    finally:
        _add = before
