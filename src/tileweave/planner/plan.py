"""Problem -> Plan: which mechanism, schedule and tile a call gets, what it should cost, and why."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import product
from typing import Any

from tileweave.planner.cost import Cost, collective_us, push_rate
from tileweave.planner.hardware import H200, Hardware
from tileweave.planner.tiling import (
    BARRIER_BYTES,
    CORE_ROWS,
    GROUP_ROWS,
    PART_BYTES,
    SM_FETCH_GBS,
    STEP_BYTES,
    TENSOR_COLUMNS,
    Tiling,
    operand_bytes,
    part_buffers,
    part_rows,
    ring_bytes,
    ring_says,
    rings_of,
    tensor_columns,
    tiles_of,
    tiling_of,
    tilings_of,
    whole_tiles,
)

SCALED_TILE = 128 * 128  # elements of an accumulator of 8-bit operands beside which epilogues between ranks fit
SIDES = (64, 128, 256)  # of a tile
MAX_SPLIT = 16  # CTAs that may share a tile
SHARING_SMS = 160  # CTAs that have flags for it
SPLITS = (1, 2, 3, 4)  # of these, what the planner considers
Way = tuple[str, str, int]  # mechanism, schedule, communicators
AGREED = ("mechanism", "schedule", "tile", "stages", "split", "comm_sms", "core")  # of a plan on all ranks
COMM_SMS = (4, 8, 16, 24)  # communicators that are tried inter-SM
SCHEDULES = ("intra_sm", "inter_sm", "one_shot", "none")  # of matmul + reduce-scatter
TAIL = 0.71  # of what a wave of tiles sends: of the last one, which nothing hides; between two H200s
WAVE_TILE = 128 * 256  # elements of a tile of such a wave; of smaller tiles several are done at about the same time
INTER_SHARE = 0.84  # of what communicators can push, those of inter-SM, which read what was just stored; measured
SLOTS = 2  # that calls take in turn
ALIKE = 1.01  # costs that are taken for the same
OWN_FLAGS, OWN_WORDS = 128, 126  # of a rank's flags and state: those that an op may use as it likes


@dataclass(frozen=True)
class Problem:
    """One call of matmul + reduce-scatter as every rank sees it.

    m, n: the full product; k: this rank's share of the inner dimension; message_bytes: size of an element of the
    result, which is also what travels; sms: SMs the kernel may use on this rank; linked: whether peers are behind a
    link (False for virtual and emulated ranks); operand_bytes: size of an element of a and b; cores: see `Plan.core`,
    those that there are, of which the planner takes the first; scales: of each row in a K step, 0 if it has none of
    blocks along K.
    """

    m: int
    n: int
    k: int
    world: int
    message_bytes: int
    sms: int
    deterministic: bool = False
    linked: bool = True
    operand_bytes: int = 2
    cores: tuple[str, ...] = ("wgmma",)
    scales: int = 0


@dataclass(frozen=True)
class Plan:
    """How a fused call runs. TypeError for a field of another type.

    mechanism: "tma", "register", "copy_engine" or "multimem"; schedule: both as the op has them, see its docstring;
    tile: (rows, columns, K step) of a CTA; stages: depth of the operand ring; split: CTAs that share a tile of the last
    wave; comm_sms: SMs that only communicate, as inter-SM schedules need; predicted_us: microseconds by the cost
    model, None for a plan made by hand; core: the tensor cores' instruction, "wgmma" (Hopper) or "tcgen05" (Blackwell).
    """

    mechanism: str = "tma"
    schedule: str = "intra_sm"
    tile: tuple[int, int, int] = (128, 256, 64)
    stages: int = 4
    split: int = 1
    comm_sms: int = 0
    predicted_us: float | None = None
    reason: str = "given by the caller"
    core: str = "wgmma"
    _json: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        legal = {str: "a string", int: "an int"}
        for name, kind in (
            ("mechanism", str), ("schedule", str), ("stages", int), ("split", int), ("comm_sms", int),
            ("reason", str), ("core", str),
        ):  # fmt: skip
            if type(value := getattr(self, name)) is not kind:  # a bool is no number here
                raise TypeError(f"plan.{name} must be {legal[kind]}, got {value!r}")
        if not isinstance(self.tile, tuple | list) or any(type(size) is not int for size in self.tile):
            raise TypeError(f"plan.tile must be three ints, rows, columns and K step, got {self.tile!r}")
        if self.predicted_us is not None and type(self.predicted_us) not in (int, float):
            raise TypeError(f"plan.predicted_us must be a number of microseconds or None, got {self.predicted_us!r}")
        object.__setattr__(self, "tile", tuple(self.tile))
        # Written here once, as torch.compile cannot trace the encoder, but it can read, and guard, a string.
        object.__setattr__(self, "_json", json.dumps(self.to_dict()))

    def to_dict(self) -> dict:
        """The plan as plain values, for JSON."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        return {**values, "tile": list(self.tile)}

    def to_json(self) -> str:
        """The plan as text, from which `from_json` makes it again."""
        return self._json

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that `to_json` wrote. ValueError if `text` is no JSON object of a plan's fields."""
        try:
            values = json.loads(text)
            return cls(**{**values, "tile": values["tile"]})  # which a text that is a plan's surely has
        except (ValueError, TypeError, KeyError) as error:
            names = ", ".join(each.name for each in fields(cls) if each.init)
            raise ValueError(f"plan: expected a JSON object with {names}, got {text!r}: {error}") from error


def unsupported(problem: Problem, plan: Plan, hardware: Hardware = H200) -> str | None:
    """Why `plan` cannot run `problem`, naming the legal values; None if it can. Planner and launch both ask here."""
    if plan.mechanism != "tma":
        return f"plan.mechanism={plan.mechanism!r}: matmul_reduce_scatter has 'tma'"
    if plan.schedule not in SCHEDULES:
        return f"plan.schedule={plan.schedule!r}: matmul_reduce_scatter has {', '.join(map(repr, SCHEDULES))}"
    if problem.world == 1 and plan.schedule in ("inter_sm", "one_shot"):
        return (
            f"plan.schedule={plan.schedule!r}: a world of one has 'intra_sm' and 'none', as there is nobody to send to"
        )
    if plan.schedule != "inter_sm":
        if plan.comm_sms != 0:
            return f"plan.comm_sms={plan.comm_sms}: the {plan.schedule} schedule has 0"
    elif most_blocks(problem.world) < 1:
        return f"plan.schedule='inter_sm' has too few flags for {problem.world} ranks; 'intra_sm' and 'none' would do"
    elif problem.sms < 2:
        return "plan.schedule='inter_sm' needs an SM to communicate and one to multiply; 'intra_sm' would do with 1"
    elif not 1 <= plan.comm_sms < problem.sms:
        return f"plan.comm_sms={plan.comm_sms}: the inter_sm schedule has 1 to {problem.sms - 1} of {problem.sms} SMs"
    if problem.operand_bytes == 1 and problem.world > 1 and plan.tile[0] * plan.tile[1] > SCALED_TILE:
        return (
            f"plan.tile={plan.tile}: between ranks 8-bit operands have tiles of up to {SCALED_TILE} elements, "
            "beside which there are registers for scales"
        )
    alone = matmul_of(problem, plan)
    of = problem.operand_bytes, problem.cores, problem.scales
    tileless = untileable(plan, problem.message_bytes, hardware, *of) or unscalable(problem, plan)
    return tileless or unshareable(alone, plan) or roomless(workspace_bytes(problem, plan), hardware)


def workspace_bytes(problem: Problem, plan: Plan) -> int:
    """Bytes of a rank's slots: where sources are kept apart a place for each, else one to which they are added."""
    if problem.world == 1:
        return 0
    above = problem.world * part_rows(plan.tile, plan.core) if plan.schedule == "one_shot" else 0
    apart = problem.deterministic or plan.schedule in ("one_shot", "none")
    rows = problem.m + above if apart else problem.m // problem.world
    return SLOTS * rows * problem.n * problem.message_bytes


def roomless(nbytes: int, hardware: Hardware) -> str | None:
    """Why no plan can have so many bytes of workspace on each rank; None if it can."""
    if nbytes <= hardware.memory_bytes:
        return None
    return f"the plan's workspace takes {nbytes} bytes on each rank, and the GPU has {hardware.memory_bytes} in all"


def shares_gpu(problem: Any) -> bool:
    """Whether ranks share a GPU, as virtual ones do: a problem's `world` and `linked` say so."""
    return problem.world > 1 and not problem.linked


class NoRoom(LookupError):
    """No plan's workspace fits into the GPU."""


def first(
    found: list[tuple[float, Plan]], hardware: Hardware, shared: tuple[int, int] | None = None
) -> tuple[float, Plan]:
    """The fastest of the candidates or, where ranks that share a GPU cut rows and columns as `shared` into tiles, of
    those that the model does not tell from it the one whose tiles read least from L2. NoRoom if there are none:
    `unsupported` leaves some out for no other reason."""
    if not found:
        raise NoRoom(f"the workspace of every plan is larger than the {hardware.memory_bytes} bytes of the GPU")
    if shared is None:
        return found[0]
    alike = [each for each in found if each[0] <= ALIKE * found[0][0]]

    def read(plan: Plan) -> float:
        return sum(1 / max(min(side, whole), 1) for side, whole in zip(plan.tile[:2], shared, strict=True))

    return min(alike, key=lambda each: read(each[1]))


def unscalable(problem: Problem, plan: Plan) -> str | None:
    """Why a rank's tiles cannot begin at rows of A whose scales of blocks lie together, CORE_ROWS of them; None if they
    can."""
    rows = problem.m // problem.world
    if problem.scales and problem.world > 1 and plan.schedule in ("intra_sm", "inter_sm") and rows % CORE_ROWS:
        return (
            f"plan.schedule={plan.schedule!r}: with scales in blocks a rank's {rows} rows must be a multiple of "
            f"{CORE_ROWS}; 'one_shot' and 'none' would do"
        )
    return None


def matmul_of(problem: Problem, plan: Plan) -> Problem:
    """The problem of the CTAs that multiply, on SMs that do not communicate: as one rank if no tile is an owner's."""
    if plan.schedule in ("one_shot", "none"):
        return replace(problem, world=1, deterministic=True)
    return replace(problem, sms=problem.sms - plan.comm_sms)


def count_tiles(problem: Problem, plan: Plan) -> int:
    """Output tiles that one rank computes."""
    alone = matmul_of(problem, plan)
    return tiles_of(alone.m // alone.world, alone.n, alone.world, plan.tile)


def most_blocks(world: int) -> int:
    """Blocks that an owner's tiles may go in, inter-SM, each of which has two flags and counters for each rank."""
    return min(OWN_FLAGS // (2 * world), OWN_WORDS // (2 * world - 1))


def blocks_of(problem: Problem, plan: Plan) -> tuple[int, int]:
    """Tiles of an owner in a block, a wave of them if there are as many, and how many blocks."""
    per = tiles_of(problem.m // problem.world, problem.n, 1, plan.tile)
    tiles = max(min(problem.sms - plan.comm_sms, per), math.ceil(per / most_blocks(problem.world)))
    return tiles, math.ceil(per / tiles)


def untileable(
    plan: Plan, message_bytes: int, hardware: Hardware = H200, operand_bytes: int = 2,
    cores: tuple[str, ...] = ("wgmma",), scales: int = 0,
) -> str | None:  # fmt: skip
    """Why no CTA can have the tile and ring of `plan`, naming the legal values; None if it can."""
    if plan.core not in cores:
        return f"plan.core={plan.core!r}: the kernel has {' or '.join(map(repr, cores))} here"
    step = STEP_BYTES // operand_bytes
    legal = f"rows and columns are 64, 128 or 256, the K step {step}"
    if len(plan.tile) != 3:
        return f"plan.tile={plan.tile}: {legal}"
    if plan.core == "tcgen05" and plan.tile[0] != CORE_ROWS:
        return f"plan.tile[0]={plan.tile[0]}: tcgen05 has tiles of {CORE_ROWS} rows"
    for i, sizes in enumerate((SIDES, SIDES, (step,))):
        if plan.tile[i] not in sizes:
            return f"plan.tile[{i}]={plan.tile[i]}: {legal}"
    if plan.tile[0] * plan.tile[1] > 128 * 256:
        return f"plan.tile={plan.tile}: the accumulator holds at most {128 * 256} elements"
    if scales and plan.tile[1] % CORE_ROWS:
        return (
            f"plan.tile[1]={plan.tile[1]}: with scales in blocks, which lie together for {CORE_ROWS} columns, a tile "
            f"has {CORE_ROWS} columns"
        )
    if scales and (columns := tensor_columns(plan.tile, scales)) > TENSOR_COLUMNS:
        return (
            f"plan.tile[1]={plan.tile[1]}: with scales in blocks so wide a tile needs {columns} columns of tensor "
            f"memory, an SM has {TENSOR_COLUMNS}; {CORE_ROWS} would do"
        )
    if plan.stages < 2:
        return f"plan.stages={plan.stages}: the ring needs at least 2"
    if part_buffers(plan.tile, plan.stages, message_bytes, hardware, plan.core, scales) < 1:
        need = ring_bytes(plan.tile, plan.stages, plan.core, scales) + plan.tile[0] * PART_BYTES + BARRIER_BYTES
        stage = ring_bytes(plan.tile, 1, plan.core, scales) - ring_bytes(plan.tile, 0, plan.core, scales)
        fits = plan.stages - math.ceil((need - hardware.shared_bytes) / stage)
        return (
            f"plan.tile={plan.tile} with plan.stages={plan.stages} needs {need} bytes of shared memory, "
            f"a CTA has {hardware.shared_bytes}" + (f"; {fits} stages would do" if fits >= 2 else "")
        )
    return None


def unshareable(problem: Problem, plan: Plan) -> str | None:
    """Why `plan.split` CTAs cannot share the tiles of the last wave, naming the legal values; None if they can."""
    tiles = tiles_of(problem.m // problem.world, problem.n, problem.world, plan.tile)
    k_steps = max(-(-problem.k // plan.tile[2]), 1)  # a share has one at least
    if plan.split > 1 and problem.sms > SHARING_SMS:
        return f"plan.split={plan.split}: expected 1 with {problem.sms} SMs; {SHARING_SMS} have flags to share tiles"
    last = tiles % problem.sms
    most = min(MAX_SPLIT, k_steps, problem.sms // last if last else MAX_SPLIT)
    if 1 <= plan.split <= most:
        return None
    return (
        f"plan.split={plan.split}: expected 1 to {most}, as the last wave has {last} of {tiles} tiles, "
        f"there are {problem.sms} SMs, and a tile has {k_steps} K steps"
    )


def cost_of(problem: Problem, plan: Plan, tiling: Tiling, hardware: Hardware = H200) -> Cost:
    """What a call takes, compute in whole waves of tiles. Intra-SM, tiles travel while others are computed, but
    those of the last wave. Inter-SM they do too, but those of the last block. One shot, the sums of all come behind the
    tiles; in the schedule "none" so does what travels."""
    tiles, rows = count_tiles(problem, plan), problem.m // problem.world
    sms = problem.sms - plan.comm_sms
    k_steps = max(1, -(-problem.k // plan.tile[2]))
    tiling = tiling.on(hardware).among(shares_gpu(problem), tiles / sms)
    compute = tiling.compute_us(tiles, k_steps, plan.split, sms)
    moved = operand_bytes(problem.m, problem.n, problem.k, plan.tile, sms, hardware)
    if plan.schedule in ("intra_sm", "inter_sm") and few(problem, plan):
        each = operand_bytes(rows, problem.n, problem.k, plan.tile, sms, hardware)
        moved = max(moved, problem.world * each)
    moved *= problem.operand_bytes / 2
    moved += problem.m * problem.n * problem.message_bytes
    memory_rate = hardware.memory_gb_per_s * 1e3 * problem.sms / hardware.sms
    memory = hardware.launch_us + moved / memory_rate
    sent = problem.m * problem.n * problem.message_bytes * (problem.world - 1) / problem.world
    link = hardware.launch_us + sent / (hardware.link_gb_per_s * 1e3) if problem.linked and problem.world > 1 else 0.0
    exposed = tiling.exchange_us(tiles, plan.split, sms)
    if plan.schedule in ("intra_sm", "one_shot") and link:
        waves = math.ceil(problem.m * problem.n / (WAVE_TILE * sms))
        exposed += TAIL * (link - hardware.launch_us) / waves
    if plan.schedule == "inter_sm":
        link = hardware.launch_us + sent / (INTER_SHARE * push_rate(plan.mechanism, plan.comm_sms, hardware))
        exposed += link / (blocks_of(problem, plan)[1] * problem.world)
    if plan.schedule in ("one_shot", "none") and problem.world > 1:
        summed = rows * problem.n * problem.message_bytes * (problem.world + 1)
        exposed += summed / min(memory_rate, SM_FETCH_GBS * problem.sms * 1e3)
        if plan.schedule == "none":
            exposed, link = exposed + link, 0.0
    return Cost(compute, memory, link, exposed, hardware.sync_us if problem.world > 1 else 0.0)


def plain(problem: Problem, hardware: Hardware = H200) -> Cost | None:
    """What torch.mm and NCCL's reduce-scatter take, one after the other; None if the profile does not say."""
    sent = problem.m * problem.n * problem.message_bytes * (problem.world - 1) / problem.world
    return plain_way("reduce_scatter", replace(problem, world=1, linked=False), problem.world, sent, hardware)


def plain_way(kind: str, alone: Problem, world: int, sent: float, hardware: Hardware) -> Cost | None:
    """What the product `alone` on one GPU and a collective of NCCL in which a rank sends `sent` bytes take, one after
    the other; None if the profile does not say. The product is taken to be as fast as ours is."""
    collective = collective_us(kind, world, sent, hardware)
    if collective is None:
        return None
    _, plan = candidates(alone, hardware)[0]
    product = cost_of(alone, plan, tiling_of(plan.tile, plan.stages, alone.operand_bytes), hardware)
    return replace(product, exposed_us=product.exposed_us + collective)


def few(problem: Problem, plan: Plan) -> bool:
    """Whether an owner has fewer rows than go together in a wave: for the next one's tiles all of b is read again."""
    return problem.world > 1 and problem.m // problem.world < GROUP_ROWS * plan.tile[0]


def in_each_ring(
    plan: Plan, tiling: Tiling, hardware: Hardware, cost: Callable[[Tiling], Cost], scales: int = 0
) -> list[tuple[float, Plan]]:
    """A plan with its predicted microseconds, then the same in rings of other depths."""
    (us, _), *others = costs_of_rings(tiling, hardware, plan.core, cost, scales)
    return [(us, plan), *((us, replace(plan, stages=ring.stages)) for us, ring in others)]


def costs_of_rings(
    tiling: Tiling, hardware: Hardware, core: str, cost: Callable[[Tiling], Cost], scales: int = 0
) -> list[tuple[float, Tiling]]:
    """Predicted microseconds of a tile in the ring that it was swept with, then in others. They differ by their pace
    only: where all hide a load they take the same, and the swept one is ahead."""
    us, pace = cost(tiling).total_us, tiling.on(hardware).pace_us
    found = [(us, tiling)]
    for ring in rings_of(tiling, hardware.shared_bytes, core, scales):
        found.append((us if ring.on(hardware).pace_us == pace else cost(ring).total_us, ring))
    return found


def in_one_ring(found: Iterable[tuple[float, Plan]]) -> list[tuple[float, Plan]]:
    """Of predictions, the fastest first, each plan in the first of its rings."""
    seen: dict[tuple, tuple[float, Plan]] = {}
    for us, plan in found:
        seen.setdefault(_but_its_ring(plan), (us, plan))
    return list(seen.values())


def in_other_rings(found: list[tuple[float, Plan]]) -> list[tuple[float, Plan]]:
    """Of predictions, the fastest first, those of the first plan in its other rings."""
    return [each for each in found[1:] if _but_its_ring(each[1]) == _but_its_ring(found[0][1])]


def _but_its_ring(plan: Plan) -> tuple:
    return plan.mechanism, plan.schedule, plan.tile, plan.split, plan.comm_sms


def ways(problem: Problem) -> list[Way]:
    """What the planner tries."""
    return [("tma", "intra_sm", 0), ("tma", "one_shot", 0)]


def further_ways(problem: Problem) -> list[Way]:
    """What the op has besides, which was never seen to be faster by more than 1%."""
    return [] if problem.world == 1 else [*(("tma", "inter_sm", sms) for sms in COMM_SMS), ("tma", "none", 0)]


def candidates(
    problem: Problem, hardware: Hardware = H200, tried: Iterable[Way] | None = None
) -> list[tuple[float, Plan]]:
    """All plans of the table that can run `problem`, each with its predicted microseconds, the fastest first: in the
    ways that are tried, by default `ways`; one shot only where rows are few."""
    found: list[tuple[float, Plan]] = []
    core = problem.cores[0]
    for (mechanism, schedule, comm_sms), tiling, split in product(
        ways(problem) if tried is None else tried, tilings_of(problem.operand_bytes, core, problem.scales), SPLITS
    ):
        plan = Plan(mechanism, schedule, tiling.tile, tiling.stages, split, comm_sms, core=core)
        if comm_sms >= problem.sms:
            continue
        tiles, sms = count_tiles(problem, plan), problem.sms - comm_sms
        idle = split > 1 and (whole_tiles(tiles, sms, split) == tiles or problem.k < 128 * split)
        fits = schedule != "one_shot" or few(problem, plan) or unscalable(problem, replace(plan, schedule="intra_sm"))
        if fits and not idle and not unsupported(problem, plan, hardware):
            cost = partial(cost_of, problem, plan, hardware=hardware)
            found += in_each_ring(plan, tiling, hardware, cost, problem.scales)
    return sorted(found, key=lambda each: each[0])


def plan_for(problem: Problem, hardware: Hardware = H200) -> Plan:
    """The fastest supported plan by the cost model; NoRoom if there is none."""
    shared = (problem.m // problem.world, problem.n) if shares_gpu(problem) else None
    cost, plan = first(candidates(problem, hardware), hardware, shared)
    tiles = count_tiles(problem, plan)
    by = "store to a place per source" if problem.deterministic else "add"
    way = (
        f"an output tile is the message, so the CTA that made it sends it (intra-SM, TMA {by})"
        if problem.world > 1
        else "one rank, so every tile stays: a plain matmul"
    )
    if plan.schedule == "one_shot":
        way = (
            "a rank owns few rows, so tiles are those of the whole product, and a tile goes to all ranks that own rows "
            "of it, which sum what has come (one shot, TMA store to a place per source)"
        )
    count = "1 tile" if tiles == 1 else f"{tiles} tiles"
    last = f", those of the last wave shared by {plan.split} each," if plan.split > 1 else ""
    reason = f"{way}; {count} of {plan.tile[0]} x {plan.tile[1]}{last} on {problem.sms} SMs is the cheapest tiling"
    reason += f"; {ring_says(tiling_of(plan.tile, plan.stages, problem.operand_bytes).on(hardware))}"
    return replace(plan, predicted_us=round(cost, 1), reason=reason)
