"""The cost model's constants that no probe measures: `python -m tileweave.bench.fit_between`, a minute or two.

Starts from those in the code and moves one after the other, as long as predictions come nearer to what was measured:
the sum over all points of `predictions` of the logarithm of the ratio, either way, so that a few points that the model
cannot know count little. A step that would change a plan where plans were measured between GPUs is not taken: only a
measurement of another plan is a reason for it. Prints what to write into the code, and the errors before and after.
"""

import math
from types import ModuleType

from tileweave.bench.predictions import FILES, PLANNERS, Point, points, summary
from tileweave.planner import all_gather_matmul, matmul_all_reduce, plan, tiling

CONSTANTS: dict[str, ModuleType] = {
    "BURST": tiling,
    "BURST_US": tiling,
    "WAITING": tiling,
    "TAIL": plan,
    "INTER_SHARE": plan,
    "BESIDE": all_gather_matmul,
    "LAST_SHARE": all_gather_matmul,
    "OWN_SHARE": matmul_all_reduce,
    "BACK_US": matmul_all_reduce,
    "COMM_SM_GBS": matmul_all_reduce,
}  # each with its module
STEPS = (0.8, 0.9, 0.95, 0.98, 1.02, 1.05, 1.1, 1.25)
ENOUGH = 1e-3  # of the loss, below which a round is the last


def value(name: str) -> float:
    """A constant's."""
    return getattr(CONSTANTS[name], name)


def put(name: str, number: float) -> None:
    """Let the model compute with it."""
    setattr(CONSTANTS[name], name, number)


def loss(of: list[Point]) -> float:
    """How far predictions are from what was measured."""
    return sum(abs(math.log(each.predicted_us / each.measured_us)) for each in of)


def choices(of: list[Point]) -> list[tuple]:
    """The plans of the planner where they were measured between GPUs."""
    there = (each for each in of if each.file == FILES[0] and each.plan)
    found = (PLANNERS[each.op].candidates(each.problem)[0][1] for each in there)
    return [(each.mechanism, each.schedule, each.tile, each.stages, each.split, each.comm_sms) for each in found]


def improve(name: str, of: list[Point], kept: list[tuple], steps: tuple[float, ...] = STEPS) -> float:
    """Move a constant to the best of the steps from it that keeps the plans; the loss then."""
    began, best = value(name), (loss(of), value(name))
    for step in steps:
        put(name, began * step)
        if (now := loss(of)) < best[0] and choices(of) == kept:
            best = now, began * step
    put(name, best[1])
    return best[0]


def fit(of: list[Point]) -> None:
    """All of them, in rounds."""
    kept, before, after = choices(of), math.inf, loss(of)
    while after < (1 - ENOUGH) * before:
        before = after
        for name in CONSTANTS:
            after = improve(name, of, kept)
        print(f"loss {after:.3f}: " + ", ".join(f"{name} = {value(name):.3g}" for name in CONSTANTS), flush=True)


if __name__ == "__main__":
    every = points()
    print("before:", summary(every))
    fit(every)
    print("after:", summary(every))
