"""Figures of the hardware that the cost model uses, each with where it comes from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """Sizes and rates of one GPU and its link. GB/s: 10^9 bytes a second."""

    name: str
    sms: int
    memory_gbs: float
    link_gbs: float  # one direction, TMA tiles
    launch_us: float
    sync_us: float  # a flag from one GPU to another, with the wait
    shared_bytes: int  # shared memory a CTA can have
    l2_bytes: int


# One H200: device memory measured by us; link: TMA put of 16 KB tiles from 16 SMs between two
# H200s over 18 NVLinks, measured by us; launch and flag latency are estimates.
H200 = Hardware("h200", 132, 4300.0, 350.0, 3.0, 3.0, 227 * 1024, 50 << 20)
