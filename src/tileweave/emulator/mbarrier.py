"""Barriers in shared memory: phase, pending arrivals, pending bytes, and what a completed phase makes visible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from greenlet import getcurrent

from tileweave.emulator.clocks import GENERIC, Clock
from tileweave.emulator.errors import ProtocolError
from tileweave.emulator.memory import Access, Memory
from tileweave.emulator.places import Place
from tileweave.emulator.touches import Touch

if TYPE_CHECKING:
    from tileweave.emulator.agents import Partition

_TX_LIMIT = 1 << 20  # the hardware's range of a transaction count


class MBarrier:
    """One mbarrier. `visible` is the clock that the completion of the last phase carries.

    `birth` is its initialization, a write of its word, `uses` the latest read of it by each partition. These accesses
    are far too frequent for the history of a memory, and need none of it.
    """

    __slots__ = (
        "alive", "birth", "clock", "count", "memory", "name", "pending", "phase", "tx", "uses", "visible", "waiters",
    )  # fmt: skip

    def __init__(self, memory: Memory, name: str, count: int, clock: Clock, birth: Place):
        self.memory, self.name, self.alive, self.birth = memory, name, True, birth
        self.count, self.pending, self.tx, self.phase = count, count, 0, 0
        self.clock, self.visible = clock, clock.copy()
        self.waiters: list = []
        self.uses: dict[Partition, Place] = {birth.part: birth}

    def __str__(self):
        return (
            f"mbarrier {self.name} (phase {self.phase}, pending arrivals {self.pending} of {self.count}, "
            f"pending bytes {self.tx})"
        )

    def use(self, place: Place) -> None:
        """Enter a use; a race where nothing orders it after the initialization."""
        if place.part not in self.uses:
            self._check(self.birth, place, "read")
        self.uses[place.part] = place

    def end(self, place: Place) -> None:
        """End its life, or begin another one; a race where nothing orders that after all uses."""
        for use in self.uses.values():
            self._check(use, place, "write")
        self.alive, self.birth, self.uses = False, place, {place.part: place}

    def _check(self, earlier: Place, later: Place, kind: str) -> None:
        first, part = earlier.part, later.part
        if first is not part and part.clock.knows(GENERIC, part.cta, first.cta, first.lane) < earlier.event:
            x = Access("write" if earlier is self.birth else "read", first, earlier)
            self.memory.found(x, Access(kind, part, later), part, "order")

    def update(self, agent, arrivals: int = 0, tx: int = 0) -> None:
        """Arrivals and transaction bytes by a partition or an asynchronous operation; may complete the phase."""
        if agent.world.footprint is not None:
            self._touch(agent, "arrive")
        self.pending -= arrivals
        self.tx += tx
        clock = self.clock
        if agent.is_async:  # tells of its own accesses only, not of what its issuer did before
            clock.see(agent.lane, agent.count)
        else:
            clock.join(agent.clock)
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
        if me.world.footprint is not None:
            self._touch(me, "read", lambda phase: phase & 1 != parity)
        me.join(self.visible)

    def _touch(self, agent, kind: str, passes=None) -> None:
        where = self.name, agent.cta.rank, agent.cta.launch, agent.cta.id
        agent.world.footprint.append(Touch(self, where, kind, state=self.phase, passes=passes))

    def _describe(self, parity: int) -> str:
        return f"parity {parity} of {self}"
