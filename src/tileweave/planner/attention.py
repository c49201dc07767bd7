"""Plans of the attention ops: a tile for each head dimension, and how many SMs communicate.

`Plan.tile` is (query rows, keys, head dimension) of a CTA's step; `stages` counts blocks of keys and of values.
"""

import math
from dataclasses import dataclass, replace

from tileweave.planner.cost import Cost, collective_us, push_rate
from tileweave.planner.hardware import H200, Hardware
from tileweave.planner.plan import Plan, first, roomless
from tileweave.planner.tiling import BARRIER_BYTES

ROWS = {"wgmma": 64, "tcgen05": 128}  # query rows of a consumer, a warp group, by core
DIMS = {"wgmma": (64, 128, 256), "tcgen05": (64, 128)}  # of a tile: a head's dimension is padded to the next of them
TILES = {  # of each: tile and stages
    "wgmma": {64: ((128, 128, 64), 8), 128: ((128, 128, 128), 5), 256: ((128, 32, 256), 8)},
    "tcgen05": {64: ((256, 128, 64), 8), 128: ((256, 128, 128), 3)},
}
TWO_BLOCKS = "two_blocks"  # a schedule of ring_attention
GATHERED_BYTES = 16 << 30  # of keys and values of all peers, both slots: what ring_attention keeps of them at most
COMM_SMS = (1, 2, 4, 6, 8, 12, 16)
TFLOPS = {64: 450.0, 128: 620.0, 256: 450.0}  # of all SMs of an H200, by head dimension


@dataclass(frozen=True)
class Problem:
    """One call of an attention op as the planner sees it, on the rank that has most to do.

    name: of the op; dim: of a head, padded; rows: of a run of queries, which no tile leaves; sms: that the kernel may
    use; flops: of this rank; sent: bytes that it pushes to peers; linked: whether peers are behind a link (False for
    virtual and emulated ranks); gathered: bytes of workspace if ring_attention keeps the keys and values of all peers;
    cores: see `Plan.core`, those that there are, of which the planner takes the first.
    """

    name: str
    dim: int
    rows: int
    world: int
    sms: int
    flops: float
    sent: int
    linked: bool = True
    gathered: int = 0
    cores: tuple[str, ...] = ("wgmma",)


def padded_dim(dim: int) -> int:
    """A tile's columns for heads of dimension `dim`; 0 for what is too large."""
    return next((each for each in DIMS["wgmma"] if each >= dim), 0)


def query_bufs(dim: int) -> int:
    """Query tiles that a CTA holds: the next one comes early where there is room."""
    return 2 if dim < 256 else 1


def shared_bytes(plan: Plan) -> int:
    """Shared memory of a CTA: query buffers, the ring of keys and values, barriers."""
    rows, keys, dim = plan.tile
    return 2 * dim * (query_bufs(dim) * rows + plan.stages * keys) + BARRIER_BYTES


def unsupported(problem: Problem, plan: Plan, hardware: Hardware = H200) -> str | None:
    """Why `plan` cannot run `problem`, naming the legal values; None if it can. Planner and launch both ask here."""
    name, dim = problem.name, problem.dim
    if plan.mechanism != "tma":
        return f"plan.mechanism={plan.mechanism!r}: {name} has 'tma'"
    if plan.core not in problem.cores:
        return f"plan.core={plan.core!r}: {name} has {' and '.join(map(repr, problem.cores))} here"
    if dim not in DIMS[plan.core]:
        return f"plan.core={plan.core!r}: by it heads have dimensions up to {DIMS[plan.core][-1]}, not {dim}"
    schedules = ("inter_sm", TWO_BLOCKS) if problem.gathered else ("inter_sm",)
    if plan.schedule not in schedules:
        return f"plan.schedule={plan.schedule!r}: {name} has {' and '.join(map(repr, schedules))}"
    if plan.split != 1:
        return f"plan.split={plan.split}: {name} has 1"
    most = problem.sms - 1
    if problem.world == 1:
        if plan.comm_sms != 0:
            return f"plan.comm_sms={plan.comm_sms}: a world of one has 0, as there is nobody to send to"
    elif not 1 <= plan.comm_sms <= most:
        return f"plan.comm_sms={plan.comm_sms}: {name} has 1 to {most} with {problem.sms} SMs"
    rows = ROWS[plan.core]
    if plan.tile not in {(consumers * rows, keys, dim) for consumers in (1, 2) for keys in (16, 32, 64, 128)}:
        legal = f"query rows are {rows} or {2 * rows}, keys 16, 32, 64 or 128, the head dimension {dim}"
        return f"plan.tile={plan.tile}: {legal}"
    if plan.stages < 3:
        return f"plan.stages={plan.stages}: the ring of keys and values needs at least 3"
    if shared_bytes(plan) > hardware.shared_bytes:
        return (
            f"plan.tile={plan.tile} with plan.stages={plan.stages} needs {shared_bytes(plan)} bytes of shared memory, "
            f"a CTA has {hardware.shared_bytes}"
        )
    return roomless(workspace_bytes(problem, plan), hardware)


def workspace_bytes(problem: Problem, plan: Plan) -> int:
    """Bytes of a rank's slots: a ring's keys and values of all peers, or by blocks of heads about those of one; of
    Ulysses all that the rank attends to, and what it sends back."""
    if problem.world == 1:
        return 0
    if problem.gathered:
        return problem.gathered // (problem.world - 1 if plan.schedule == TWO_BLOCKS else 1)
    return 2 * problem.sent * problem.world // (problem.world - 1)


def cost_of(problem: Problem, plan: Plan, hardware: Hardware = H200) -> Cost:
    """What a call takes: the product on the SMs that compute, beside what travels."""
    sms = problem.sms - plan.comm_sms
    faster = hardware.attention_tflops / H200.attention_tflops
    compute = hardware.launch_us + problem.flops / (TFLOPS[problem.dim] * faster * 1e6 * sms / hardware.sms)
    if problem.world == 1:
        return Cost(compute, 0.0)
    send = hardware.launch_us + problem.sent / push_rate("tma", plan.comm_sms, hardware, problem.linked)
    return Cost(compute, 0.0, send, 0.0, hardware.sync_us)


def plain(problem: Problem, hardware: Hardware = H200) -> Cost | None:
    """What NCCL, bringing keys and values to all ranks or heads to theirs, and attention then take; None if the profile
    does not say."""
    collective = collective_us("all_gather", problem.world, problem.sent, hardware)
    if collective is None:
        return None
    alone = cost_of(replace(problem, world=1), Plan(), hardware)
    return replace(alone, exposed_us=collective)


def candidates(problem: Problem, hardware: Hardware = H200) -> list[tuple[float, Plan]]:
    """All plans that can run `problem`, each with its predicted microseconds, the fastest first."""
    core = problem.cores[0]
    tile, stages = TILES[core][problem.dim]
    if problem.rows <= ROWS[core]:
        tile = (ROWS[core], *tile[1:])
    schedule = TWO_BLOCKS if problem.gathered > GATHERED_BYTES else "inter_sm"
    plans = [
        Plan("tma", schedule, tile, stages, 1, comm_sms, core=core)
        for comm_sms in (COMM_SMS if problem.world > 1 else (0,))
    ]
    found = [
        (cost_of(problem, plan, hardware).total_us, plan) for plan in plans if not unsupported(problem, plan, hardware)
    ]
    return sorted(found, key=lambda each: each[0])


def plan_for(problem: Problem, hardware: Hardware = H200) -> Plan:
    """The fastest supported plan by the cost model; NoRoom if there is none. At least two SMs, unless the world is of
    one."""
    cost, plan = first(candidates(problem, hardware), hardware)
    if problem.world == 1:
        way = "one rank, so nothing travels: plain attention"
    else:
        way = (
            "what arrives is read by many tiles, so SMs that only communicate bring it once "
            f"(inter-SM, TMA push by {plan.comm_sms} of {problem.sms} SMs)"
        )
    if plan.schedule == TWO_BLOCKS:
        way += (
            f"; as the keys of all peers would take {problem.gathered >> 20} MiB, two blocks of heads are held of each"
        )
    reason = f"{way}; tiles of {plan.tile[0]} queries x {plan.tile[1]} keys"
    return replace(plan, predicted_us=round(cost, 1), reason=reason)


def block_heads(heads: int, most: int, tiles: int, comm_sms: int) -> int:
    """Heads in a block, about which peers are told at once: of `heads` in at most `most` blocks, each of at least four
    tiles for each communicator, of the `tiles` that a head has, lest counting and telling take longer than pushing."""
    return max(math.ceil(heads / most), min(heads, math.ceil(4 * comm_sms / max(tiles, 1))), 1)
