"""Where the threads of a virtual world meet: a barrier with values, an action, and a way out if a rank is missing."""

import threading
import time
from collections.abc import Callable
from typing import Any

from tileweave.fabric.base import Abandoned, Outcome


class Meeting:
    """A reusable meeting of `size` threads. Waiting is bounded by `timeout` seconds; the time of the action is not."""

    def __init__(self, size: int, timeout: float):
        self.size, self.timeout = size, timeout
        self._changed = threading.Condition()
        self._deposits: dict[int, Any] = {}
        self._missing = ""
        self._turn = 0
        self._outcome = Outcome()

    def meet(self, rank: int, deposit: Any, act: Callable[[list[Any]], Outcome]) -> Outcome:
        """Deposit a value and wait for the others; the last calls `act(deposits in rank order)`; all get its result.

        Abandoned if a rank has left or does not come in time.
        """
        with self._changed:
            self._deposits[rank] = deposit
            if len(self._deposits) == self.size:
                deposits = [self._deposits[r] for r in range(self.size)]
                self._deposits.clear()
                # Nobody overwrites this before all have read it: the next turn needs all of them.
                self._outcome = act(deposits)
                self._turn += 1
                self._changed.notify_all()
                return self._outcome
            self._wait(rank, self._turn)
            return self._outcome

    def leave(self, who: str, how: str) -> None:
        """Say that somebody will not come any more ("rank 1", "has returned"); those who wait are released."""
        with self._changed:
            self._missing = self._missing or f"{who} {how}"
            self._changed.notify_all()

    def _wait(self, rank: int, turn: int) -> None:
        deadline = time.monotonic() + self.timeout
        while self._turn == turn:
            if self._missing:
                raise Abandoned(f"rank {rank} waits for all ranks to make the same call, but {self._missing}")
            left = deadline - time.monotonic()
            if left <= 0:
                missing = [r for r in range(self.size) if r not in self._deposits]
                raise Abandoned(
                    f"rank {rank} has waited {self.timeout:g} s for ranks {missing} to make the same call: "
                    "every rank must take part in every collective call"
                )
            self._changed.wait(left)
