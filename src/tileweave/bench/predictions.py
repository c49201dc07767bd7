"""The cost model beside what was measured: `python -m tileweave.bench.predictions`.

Reads docs/figures and prints, for each file, how far predictions are from the medians measured: in the median, at worst
and where it is. Nothing is run.
"""

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tileweave.planner import H200, Plan
from tileweave.planner import all_gather_matmul as gathering
from tileweave.planner import matmul_all_reduce as reducing
from tileweave.planner import plan as scattering
from tileweave.planner.tiling import tiling_of

FIGURES = Path(__file__).parents[3] / "docs/figures"
PLANNERS: dict[str, ModuleType] = {
    "matmul_reduce_scatter": scattering, "all_gather_matmul": gathering, "matmul_all_reduce": reducing,
}  # fmt: skip
FILES = ("between_2xH200", "scopes_2xH200", *(f"{op}_virtual_1xH200" for op in PLANNERS))


@dataclass(frozen=True)
class Point:
    """One measured median beside its prediction, in microseconds. shape: M x N x K as the file has it; problem: of the
    op's planner; plan: None for the plain way; chosen: whether the planner chose it."""

    file: str
    op: str
    world: int
    shape: str
    problem: Any
    plan: Plan | None
    measured_us: float
    chosen: bool

    @property
    def way(self) -> str:
        """Mechanism, schedule and communicators, or the plain way."""
        plan = self.plan
        return f"{plan.mechanism} {plan.schedule} {plan.comm_sms}" if plan else "torch.mm + NCCL"

    @property
    def predicted_us(self) -> float:
        """By the cost model as it is now."""
        planner = PLANNERS[self.op]
        if self.plan is None:
            return planner.plain(self.problem).total_us
        return planner.cost_of(self.problem, self.plan, tiling_of(self.plan.tile, self.plan.stages)).total_us

    @property
    def error(self) -> float:
        """By how much the prediction is off, as a part of what was measured; above 0: too long."""
        return self.predicted_us / self.measured_us - 1


def problem_of(op: str, m: int, n: int, k: int, world: int, linked: bool = True, sms: int = H200.sms) -> Any:
    """The planner's problem of one call: m, n, k of a rank's product."""
    if op == "all_gather_matmul":
        return gathering.Problem(m // world, (n,), k, world, sms, linked)
    if op == "matmul_all_reduce":
        return reducing.Problem(m, n, k, world, sms, linked=linked)
    return scattering.Problem(m, n, k, world, 2, sms, deterministic=world == 2, linked=linked)


def whole_problem(op: str, m: int, n: int, k: int, world: int) -> Any:
    """The same from the sizes of the whole product, of which a rank has its columns or its part of K."""
    return (
        problem_of(op, m, n // world, k, world)
        if op == "all_gather_matmul"
        else problem_of(op, m, n, k // world, world)
    )


def points() -> list[Point]:
    """All measured medians of matmuls fused with a collective, and of the plain way beside them."""
    return [*_between(), *_scopes(), *_virtual()]


def _rows(file: str) -> list[dict]:
    return json.loads((FIGURES / f"{file}.json").read_text())["rows"]


def _between() -> Iterator[Point]:
    for row in _rows("between_2xH200"):
        op, sizes = row["op"], (row["m"], row["n"], row["k"])
        problem = whole_problem(op, *sizes, row["world"])
        of = "between_2xH200", op, row["world"], " x ".join(map(str, sizes)), problem
        yield Point(*of, PLANNERS[op].candidates(problem)[0][1], row["us"]["tileweave"][0], True)
        yield Point(*of, None, row["us"]["nccl"][0], False)


def _scopes() -> Iterator[Point]:
    for row in _rows("scopes_2xH200"):
        op, size = row["op"], row["size"]
        problem = whole_problem(op, size, size, size, row["world"])
        for name, us in row["us"].items():
            plan = Plan(**row["plans"][name])
            yield Point("scopes_2xH200", op, row["world"], f"{size}^3", problem, plan, us[0], False)


def _virtual() -> Iterator[Point]:
    for op in PLANNERS:
        file = f"{op}_virtual_1xH200"
        for row in _rows(file):
            world, sizes = row["world"], (row["m"], row["n"], row["k_local"])
            problem = problem_of(op, *sizes, world, linked=False, sms=H200.sms // world)
            measured = row["us"]["fused"][0] if "us" in row else 1e3 * row["ms"]["fused"][0]
            yield Point(file, op, world, " x ".join(map(str, sizes)), problem, Plan(**row["plan"]), measured, True)


def summary(of: list[Point]) -> str:
    """Median and worst error of some points, in words."""
    worst = max(of, key=lambda each: abs(each.error))
    middle = statistics.median(abs(each.error) for each in of)
    where = f"{worst.op} {worst.shape}, {worst.way}, {worst.world} ranks"
    return f"{len(of)} points: {100 * middle:.1f}% in the median, {100 * worst.error:+.1f}% at worst ({where})"


if __name__ == "__main__":
    every = points()
    for name in FILES:
        print(f"{name}: {summary([each for each in every if each.file == name])}")
    print(f"all: {summary(every)}")
