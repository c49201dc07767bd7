"""What a rank does when, by a plan: simulated where tiles and messages overlap, else by the terms of the cost."""

import math

from tileweave.planner.cost import Cost
from tileweave.planner.hardware import Hardware
from tileweave.planner.plan import Plan
from tileweave.planner.simulate import Event, Schedule, simulate, slices_of

KINDS = {"matmul_reduce_scatter": "scatter", "all_gather_matmul": "gather", "matmul_all_reduce": "reduce"}


def timeline(
    op: str, ranks: int, shape: dict[str, int], plan: Plan, cost: Cost, sms: int, hardware: Hardware
) -> tuple[float, tuple[Event, ...]]:
    """Microseconds until all ranks are done, and what rank 0 does meanwhile; `shape` as `tileweave.plan` takes it."""
    if op in KINDS and ranks > 1 and plan.schedule in ("intra_sm", "inter_sm"):
        return simulate(schedule_of(op, ranks, shape, plan, cost, sms, hardware))
    return _terms(cost)


def schedule_of(
    op: str, ranks: int, shape: dict[str, int], plan: Plan, cost: Cost, sms: int, hardware: Hardware,
    rotated: bool = True,
) -> Schedule:  # fmt: skip
    """The schedule of a matmul fused with a collective."""
    columns = shape["n"] // ranks if op == "all_gather_matmul" else shape["n"]
    tiles = math.ceil(shape["m"] / plan.tile[0]) * math.ceil(columns / plan.tile[1])
    slices = slices_of(math.ceil(tiles / (sms - plan.comm_sms)), ranks)
    slice_us = (cost.product_us - hardware.launch_us) / slices
    link_us = cost.communicate_us - hardware.launch_us
    if op == "all_gather_matmul":  # the term has the last tiles in it
        link_us = max(link_us - slice_us, 0.0)
    messages = slices * (ranks - 1) / ranks * (2 if op == "matmul_all_reduce" else 1)
    return Schedule(
        KINDS[op], ranks, slices, max(slice_us, 0.0), max(link_us, 0.0) / messages, hardware.launch_us,
        hardware.sync_us, rotated,
    )  # fmt: skip


def _terms(cost: Cost) -> tuple[float, tuple[Event, ...]]:
    product = cost.total_us - cost.exposed_us - cost.sync_us
    events = [Event("SMs", 0.0, max(cost.compute_us, cost.memory_us), "the product")]
    if cost.communicate_us:
        events.append(Event("link", 0.0, cost.communicate_us, "transfers beside it"))
    if cost.exposed_us:
        events.append(Event("link", product, product + cost.exposed_us, "transfers and sums that nothing hides"))
    if cost.sync_us:
        events.append(Event("waits", product + cost.exposed_us, cost.total_us, "for flags"))
    return cost.total_us, tuple(events)
