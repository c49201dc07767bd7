"""Barriers in shared memory: phase, pending arrivals, pending bytes, and what a completed phase makes visible."""

from __future__ import annotations

from greenlet import getcurrent

from tileweave.emulator.clocks import Clock
from tileweave.emulator.errors import ProtocolError
from tileweave.emulator.places import Place

_TX_LIMIT = 1 << 20  # the hardware's range of a transaction count


class MBarrier:
    """One mbarrier. `visible` is the clock that the completion of the last phase carries."""

    __slots__ = ("clock", "count", "name", "pending", "phase", "tx", "visible", "waiters")

    def __init__(self, name: str, count: int, clock: Clock):
        self.name, self.count, self.pending, self.tx, self.phase = name, count, count, 0, 0
        self.clock, self.visible = clock, clock.copy()
        self.waiters: list = []

    def __str__(self):
        return (
            f"mbarrier {self.name} (phase {self.phase}, pending arrivals {self.pending} of {self.count}, "
            f"pending bytes {self.tx})"
        )

    def update(self, agent, arrivals: int = 0, tx: int = 0) -> None:
        """Arrivals and transaction bytes by a partition or an asynchronous operation; may complete the phase."""
        self.pending -= arrivals
        self.tx += tx
        clock = self.clock
        clock.join(agent.clock)
        if agent.is_async:
            clock.see(agent.lane, agent.count)
        else:
            agent.tick()
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            self.visible = clock.copy()
            if self.waiters:
                agent.world.wake(self.waiters)
        elif self.pending < 0:
            raise ProtocolError(
                f"more arrivals than the {self.count} of its mbarrier_init at {self}: "
                f"{agent.place if agent.is_async else Place(agent, 'arrive')}"
            )
        elif abs(self.tx) >= _TX_LIMIT:
            raise ProtocolError(f"transaction count out of range (below {_TX_LIMIT} bytes is legal) at {self}")

    def wait(self, parity: int) -> None:
        """Let the current partition wait until the phase of this parity has completed, and learn what it carries."""
        me = getcurrent()
        me.pause()
        while self.phase & 1 == parity:
            me.block(self.waiters, self._describe, parity)
        me.join(self.visible)

    def _describe(self, parity: int) -> str:
        return f"parity {parity} of {self}"
