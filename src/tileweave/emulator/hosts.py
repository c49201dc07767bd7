"""Host threads of ranks: each runs until it needs the device, then the scheduler's thread goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from tileweave.emulator.errors import DeadlockError
from tileweave.emulator.places import Place, written_by_user

if TYPE_CHECKING:
    from tileweave.emulator.agents import Partition
    from tileweave.emulator.graphs import Graph
    from tileweave.emulator.world import World

_PACKAGE = __name__.rpartition(".")[0]


class _Stopped(BaseException):
    """The run is over; thrown into threads that still wait for the device."""


class Host:
    """One rank's thread and the token by which one thread runs at a time.

    `part` is the agent that stands for the thread in the scheduler: it lets the thread run up to its next job and
    then does that job.
    """

    def __init__(self, world: World, rank: int, fn: Callable[[int], Any], seat: threading.local):
        self.world, self.rank, self._fn, self._seat = world, rank, fn, seat
        self.part: Partition = None  # type: ignore[assignment]  # set by the world before the thread starts
        self.result: Any = None
        self.error: BaseException | None = None
        self.met: Any = None
        self.graph: Graph | None = None  # that is being made
        self.waiters: list = []
        self._job: Callable[[], Any] | None = None
        self._answer: Any = None
        self._caller: tuple = (None, 0)
        self._stopping = self._ended = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        # A thread that never comes back must not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._main, name=f"rank {rank}", daemon=True)
        self._started = self._lost = False

    def _main(self) -> None:
        self._go.acquire()
        self._seat.host = self
        try:
            if not self._stopping:
                self.result = self._fn(self.rank)
        except _Stopped:
            pass
        except BaseException as error:  # raised again by World.run
            self.error = error
        finally:
            self._ended = True
            self._job = None
            self._back.release()

    def submit(self, job: Callable[[], Any], what: str) -> Any:
        """From the rank's thread: let the scheduler do `job`, and wait for its result."""
        if self._stopping:
            raise _Stopped
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
            frame = frame.f_back
        self._caller = frame.f_code, frame.f_lasti
        self._job = job
        self._back.release()
        self._go.acquire()
        if self._stopping:
            raise _Stopped
        return self._answer

    def place(self, what: str) -> Place:
        """Where the thread is."""
        return Place(self.part, what, *self._caller)

    def drive(self) -> None:
        """Body of the agent: run the thread, do its jobs, until it ends."""
        self._thread.start()
        self._started = True
        while self._resume():
            assert self._job is not None
            self._answer = self._job()

    def _resume(self) -> bool:
        self._let_run()
        if self._lost:
            place = written_by_user(self.frame)
            raise DeadlockError(
                f"rank {self.rank}'s thread has run for {self.world.host_timeout:g} s without a call that lets another "
                f"rank go on{place and f', now at {place}'}. "
                "Ranks of an emulated world run one at a time and must meet through the group (or `rendezvous`) only: "
                "a lock, barrier or queue of the program's own waits for ever for a rank that cannot run. A "
                "computation that takes this long needs a larger host_timeout"
            )
        return not self._ended

    def _let_run(self) -> None:
        """Let the thread run up to its next job or its end; after `host_timeout` it is lost."""
        self._lost = True  # unless it comes back: an exception may end the wait
        self._go.release()
        self._lost = not self._back.acquire(timeout=self.world.host_timeout)

    @property
    def frame(self) -> FrameType | None:
        """Where the thread is."""
        return sys._current_frames().get(self._thread.ident or 0)

    def stop(self) -> None:
        """End and join the thread, whatever it waits for; one that is lost will end when it next calls the world."""
        if not self._started:
            return
        self._stopping = True
        if self._lost:
            self._go.release()
        while not (self._ended or self._lost):
            self._let_run()
        if not self._lost:
            self._thread.join()


def running(frame: FrameType | None) -> FrameType | None:
    """Where the program is whose scheduler is at `frame`: there, or in the thread of a rank that it waits for."""
    inner = frame
    while inner is not None:
        if inner.f_code is Host._let_run.__code__:
            return inner.f_locals["self"].frame
        inner = inner.f_back
    return frame
