"""Work done side by side in processes of one thread each."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, TypeVar

import torch

Task = TypeVar("Task")
Result = TypeVar("Result")


def pool(processes: int) -> ProcessPoolExecutor:
    """So many processes, in each of which PyTorch has one thread."""
    # A process with other threads cannot be forked safely; a new interpreter takes seconds to import PyTorch.
    forks = sys.platform == "linux" and threading.active_count() == 1
    context = multiprocessing.get_context("fork" if forks else "spawn")
    return ProcessPoolExecutor(processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,))


def each(
    function: Callable[[Task], Result], tasks: Iterable[Task], processes: int, more: Callable[[], bool] = lambda: True
) -> Iterator[Result]:
    """The function's results, in the order in which they are ready; with `processes` 1, in this process. Before it
    begins a task it asks whether there shall be `more`: if not, it ends with those that have begun."""
    if processes == 1:
        for task in tasks:
            if not more():
                return
            yield function(task)
        return
    with pool(processes) as workers:
        running: set[Future[Any]] = set()
        waiting = iter(tasks)
        while True:
            for task in waiting if more() else ():
                running.add(workers.submit(function, task))
                if len(running) >= 2 * processes:
                    break
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            if not more():
                running = {future for future in running if not future.cancel()}
            yield from (future.result() for future in done)
