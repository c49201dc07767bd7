"""A ring of buffers between two roles of a CTA: pairs of mbarriers named ready and empty, and their phases.

| barrier | arrives | waits | covers |
|---|---|---|---|
| ready[i] | producer: `publish`, or the bytes of TMA loads it expects there | consumer: `consumer_wait` | slot i is filled |
| empty[i] | consumer: `release` | producer: `producer_wait` | slot i may be filled again |

The n-th use of the ring is slot n % STAGES in round n // STAGES. A barrier completes one phase a round, so a wait names
the parity of its round; the first round's `producer_wait` passes at once. Phase arithmetic lives here only.
"""

from tileweave import lang as gl


@gl.aggregate
class Channel:
    """STAGES slots; `n` is always the running number of the use, counted by each role for itself."""

    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gl.constexpr_function
    def __init__(self, ready, empty, STAGES):
        self.ready = ready
        self.empty = empty
        self.STAGES = gl.constexpr(STAGES)

    @gl.jit
    def slot(self, n):
        """The slot of use n."""
        return n % self.STAGES

    @gl.jit
    def ready_at(self, n):
        """The barrier that says slot `n` is filled, for TMA loads to complete on."""
        return self.ready.index(n % self.STAGES)

    @gl.jit
    def producer_wait(self, n):
        """Wait until the consumer has released the slot's previous use."""
        gl.mbarrier_wait(self.empty.index(n % self.STAGES), ((n // self.STAGES) & 1) ^ 1)

    @gl.jit
    def publish(self, n):
        """Say that the slot is filled by what this partition has written."""
        gl.mbarrier_arrive(self.ready.index(n % self.STAGES), count=1)

    @gl.jit
    def consumer_wait(self, n):
        """Wait until the slot is filled."""
        gl.mbarrier_wait(self.ready.index(n % self.STAGES), (n // self.STAGES) & 1)

    @gl.jit
    def release(self, n, pred=True):
        """Hand the slot back to the producer."""
        gl.mbarrier_arrive(self.empty.index(n % self.STAGES), count=1, pred=pred)


@gl.jit
def make_channel(STAGES: gl.constexpr):
    """Allocate and initialize a channel with one producer and one consumer."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], gl.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], gl.MBarrierLayout())
    for i in gl.static_range(STAGES):
        gl.mbarrier_init(ready.index(i), count=1)
        gl.mbarrier_init(empty.index(i), count=1)
    return Channel(ready, empty, STAGES)
