"""The cost model: the terms of a call, which every op fills in, and what the plain way takes.

    T = T_launch + max(T_compute, T_memory, T_communicate) + T_exposed + T_sync

with corrections that measurements ask for: a launch is part of each term that it delays, what runs beside that which
bounds a kernel slows it by a part of its own time, and a product is faster at first than for long, see `overlapped`.
"""

from dataclasses import dataclass

from tileweave.planner.hardware import Hardware
from tileweave.planner.tiling import SLOWING, overlapped

WORKING = 0.8  # of what an SM can push alone, what it is counted on to push while others multiply
NCCL_RANK_US = 1.5  # what each rank beyond two adds to a collective of NCCL, an estimate
PLAIN_MARGIN = 1.05  # the plain way is taken where the fused one is predicted to take so much more
ERROR = 0.10  # of a prediction, in about half of all cases: docs/planner.md


@dataclass(frozen=True)
class Cost:
    """The terms of a call in microseconds. compute_us, memory_us, communicate_us: what goes on at once, each with the
    launch before it, 0 for what does not occur; exposed_us: what nothing hides; sync_us: flags; slowing: of a
    product by what travels beside it; delaying: the other way round."""

    compute_us: float
    memory_us: float
    communicate_us: float = 0.0
    exposed_us: float = 0.0
    sync_us: float = 0.0
    slowing: float = SLOWING
    delaying: float = SLOWING

    @property
    def product_us(self) -> float:
        """The product, slowed by device memory and by what travels beside it."""
        return overlapped(self.compute_us, self.memory_us) + self.slowing * self.communicate_us

    @property
    def travel_us(self) -> float:
        """What travels, slowed by the product."""
        return self.communicate_us + self.delaying * overlapped(self.compute_us, self.memory_us)

    @property
    def total_us(self) -> float:
        """T."""
        return max(self.product_us, self.travel_us) + self.exposed_us + self.sync_us

    @property
    def bound(self) -> str:
        """Which of the terms that go on at once is the longest: "compute", "memory" or "communication"."""
        terms = {"compute": self.compute_us, "memory": self.memory_us, "communication": self.communicate_us}
        return max(terms, key=lambda name: terms[name])


def push_rate(mechanism: str, sms: int, hardware: Hardware, linked: bool = True) -> float:
    """Bytes a microsecond that `sms` communicators push to peers while others multiply; a link bounds it."""
    registers = mechanism in ("register", "multimem")
    one = hardware.register_sm_gb_per_s if registers else WORKING * hardware.sm_gb_per_s
    most = hardware.register_gb_per_s if registers else hardware.link_gb_per_s
    return 1e3 * (min(sms * one, most) if linked else sms * one)


def collective_us(kind: str, world: int, total_bytes: float, hardware: Hardware) -> float | None:
    """Microseconds of NCCL's all_gather, reduce_scatter or all_reduce in which a rank sends `total_bytes`.

    A world larger than the GPUs that links join sends from each of them its share of what one domain has to tell the
    others over the network, at the same time. None if the profile does not say what NCCL takes.
    """
    within = hardware.transfer_us("nccl", kind, total_bytes)
    if within is None or world == 1:
        return within if world > 1 else 0.0
    within += NCCL_RANK_US * (min(world, hardware.ranks) - 2)
    if world <= hardware.ranks:
        return within
    return max(within, total_bytes / hardware.ranks / (hardware.network_gb_per_s * 1e3)) + hardware.sync_us
