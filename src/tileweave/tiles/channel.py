"""A ring of buffers between two roles of a CTA: pairs of mbarriers named ready and empty, and their phases.

| barrier | arrives | waits | covers |
|---|---|---|---|
| ready[i] | producer: `publish`, or the bytes of TMA loads it expects there | consumer: `consumer_wait` | slot i is filled |
| empty[i] | consumer: `release` | producer: `producer_wait` | slot i may be filled again |

A role goes through the ring with a `Place` of its own: `at = ring.start()`, and `at = ring.next(at)` after each use. A
barrier completes one phase a round, so a wait names the parity of its round; the first round's `producer_wait` passes at
once. Slots and parities are counted along, as a division by STAGES at every step would cost a tile loop several percent.
"""

from tileweave import lang as gl


@gl.aggregate
class Place:
    """Where a role is in a ring: the slot of its next use, and the parity of the round."""

    slot: gl.tensor
    parity: gl.tensor

    @gl.constexpr_function
    def __init__(self, slot, parity):
        self.slot = slot
        self.parity = parity


@gl.aggregate
class Channel:
    """STAGES slots, from slot FIRST of the barriers on."""

    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    FIRST: gl.constexpr
    STAGES: gl.constexpr

    @gl.constexpr_function
    def __init__(self, ready, empty, FIRST, STAGES):
        self.ready = ready
        self.empty = empty
        self.FIRST = gl.constexpr(FIRST)
        self.STAGES = gl.constexpr(STAGES)

    @gl.jit
    def behind(self, SLOTS: gl.constexpr):
        """The ring of the SLOTS slots behind these, which `make_channel` has allocated with them."""
        return Channel(self.ready, self.empty, self.FIRST + self.STAGES, SLOTS)

    @gl.jit
    def start(self):
        """The place of a role's first use."""
        return Place(gl.to_tensor(self.FIRST), gl.to_tensor(0))

    @gl.jit
    def next(self, at):
        """The place after `at`."""
        slot = at.slot + 1
        wraps = slot == self.FIRST + self.STAGES
        return Place(gl.where(wraps, self.FIRST, slot), at.parity ^ wraps.to(gl.int32))

    @gl.jit
    def ready_at(self, at):
        """The barrier that says a slot is filled, for TMA loads to complete on."""
        return self.ready.index(at.slot)

    @gl.jit
    def empty_at(self, at):
        """The barrier that says a slot may be filled again, for commits of the products that read it."""
        return self.empty.index(at.slot)

    @gl.jit
    def producer_wait(self, at):
        """Wait until the consumer has released the slot's previous use."""
        gl.mbarrier_wait(self.empty.index(at.slot), at.parity ^ 1)

    @gl.jit
    def publish(self, at):
        """Say that the slot is filled by what this partition has written."""
        gl.mbarrier_arrive(self.ready.index(at.slot), count=1)

    @gl.jit
    def consumer_wait(self, at):
        """Wait until the slot is filled."""
        gl.mbarrier_wait(self.ready.index(at.slot), at.parity)

    @gl.jit
    def release(self, at, pred=True):
        """Hand the slot back to the producer."""
        gl.mbarrier_arrive(self.empty.index(at.slot), count=1, pred=pred)


@gl.jit
def make_channel(STAGES: gl.constexpr, CONSUMERS: gl.constexpr, BEHIND: gl.constexpr = 0):
    """Allocate and initialize a channel from one producer to CONSUMERS roles, each of which uses and releases every slot,
    and, for its `behind`, BEHIND slots more."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES + BEHIND, 1], gl.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES + BEHIND, 1], gl.MBarrierLayout())
    for i in gl.static_range(STAGES + BEHIND):
        gl.mbarrier_init(ready.index(i), count=1)
        gl.mbarrier_init(empty.index(i), count=CONSUMERS)
    return Channel(ready, empty, 0, STAGES)
