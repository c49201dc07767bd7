"""Runs kernels written in `tileweave.lang` on the CPU, tile by tile, and reports races, deadlocks and misuse.

    world = World(ranks=2, seed=0)
    world.run(lambda rank: world.launch(kernel, (4,), *args_of(rank), num_warps=8))

Every warp partition of every CTA of every rank, and every asynchronous operation, is an agent of a seeded, hostile
scheduler; vector clocks say what happens before what, through mbarriers, bulk and wgmma groups, release and acquire
at a scope, proxy fences and kernel boundaries. Works with Triton installed and without.

What is modelled: TMA loads, stores and reduce-adds that read late and land later; wgmma that reads until waited for;
mbarriers with phase, arrivals and bytes; the async proxies of shared and global memory and their fences; multicast
addresses and alias fences; atomics with order and scope; flags, of which a wait learns no more than its value tells;
the first, the elected and the other threads of a partition; the order of an mbarrier's initialization and end with its
uses; CTAs that are not co-resident; ranks that drift apart. What is not: docs/emulator.md lists it.
"""

from tileweave.emulator.errors import DeadlockError, EmulatorError, ProtocolError, RaceError
from tileweave.emulator.views import Multicast
from tileweave.emulator.world import World

__all__ = ["DeadlockError", "EmulatorError", "Multicast", "ProtocolError", "RaceError", "World"]
