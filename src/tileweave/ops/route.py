"""What a call will do, decided before anything is launched: the answer of `explain`."""

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tileweave.ops.contract import Site
from tileweave.planner import H200, Hardware, Plan
from tileweave.planner.decision import PLAIN, faster_plain
from tileweave.planner.plan import NoRoom

_OURS = tuple(f"{folder}/" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))


@dataclass(frozen=True)
class Route:
    """Path of one call.

    backend: emulated, virtual, processes, fallback or nodes; reason: why this path; plan: if fused; plain_us: what the
    cost model says of the plain way, torch's product and NCCL, where that is taken; measured_us: what `tileweave.tune`
    measured of the way that is taken, None where it was not asked; inside: the route of each call inside a node, where
    the ranks are on several and the op is composed of such calls: then `fused` says whether these are.
    """

    op: str
    backend: str
    fused: bool
    reason: str
    plan: Plan | None = None
    plain_us: float | None = None
    measured_us: float | None = None
    inside: "Route | None" = None

    @property
    def verdict(self) -> str:
        """ "fused"; "plain" where a kernel could do it, and torch and NCCL are predicted, or were measured, to be
        faster; "composed" of calls inside nodes; "fallback" where no kernel can, or there is nothing to compute."""
        if self.inside is not None:
            return "composed"
        return "fused" if self.fused else "fallback" if self.plain_us is None else "plain"

    @property
    def predicted_us(self) -> float | None:
        """Microseconds by the cost model; None in a fallback, over nodes, or where the plan was made by hand."""
        return self.plan.predicted_us if self.plan else self.plain_us

    @property
    def error(self) -> float | None:
        """By how much the prediction is off, as a part of what was measured; above 0: too long. None where nothing was
        measured."""
        if self.measured_us is None or self.predicted_us is None:
            return None
        return self.predicted_us / self.measured_us - 1

    def to_dict(self) -> dict:
        """The route as plain values, for JSON."""
        return {
            "op": self.op, "backend": self.backend, "fused": self.fused, "reason": self.reason,
            "plan": self.plan.to_dict() if self.plan else None, "predicted_us": self.predicted_us,
            "measured_us": self.measured_us, "error": self.error,
            "inside": self.inside.to_dict() if self.inside else None,
        }  # fmt: skip


def fallback(op: str, refusal: str, way: str, plan: Plan | None = None, backend: str = "fallback") -> Route:
    """The route of a call that no fused kernel serves, because of `refusal`: the `way` that it goes instead.

    A plan that the caller gave has no part in it; the route says so, and a UserWarning.
    """
    reason = f"{refusal}: {way}"
    if plan is not None:
        reason += "; the plan is not used, it is one of the fused kernel"
        warnings.warn(f"{op}: plan is not used: {refusal}", stacklevel=_users_level())
    return Route(op, backend, False, reason)


def by_plan(
    op: str, site: Site, problem: Any, planner: ModuleType, plan: Plan | None, way: str | None,
    hardware: Hardware = H200,
) -> Route:  # fmt: skip
    """The route of a call that kernels can serve: by `plan`, or by that of the `planner`, a module with `plan_for` and
    `plain`, for its `problem`.

    way: what the plain way is; None for calls that never go it, as it does not give them what they ask for. Without a
    plan that which was measured to be the fastest is taken. Where nothing was measured it is the plain way where the
    group's collectives are NCCL's, each rank has a GPU of its own, and it is predicted to be faster by more than the
    model can tell. All ranks come to the same.
    """
    found = site.measured(op, problem) if plan is None else None
    if found is not None and (way or found.plan.mechanism != PLAIN):
        fused, us = found.plan.mechanism != PLAIN, found.plan.predicted_us
        reason = found.plan.reason if fused else f"{found.plan.reason}: {way}"
        made, plain_us = (found.plan, None) if fused else (None, us)
        return Route(op, site.backend, fused, reason, made, plain_us, found.measured_us)
    try:
        made = plan or planner.plan_for(problem, hardware)
    except NoRoom as error:
        return fallback(op, str(error), way or "torch and the group's own collectives")
    plain = planner.plain(problem, hardware) if way and plan is None and site.nccl else None
    if why := faster_plain(made.predicted_us or 0.0, plain):
        return Route(op, site.backend, False, f"{why}: {way}", plain_us=round(plain.total_us, 1) if plain else None)
    return Route(op, site.backend, True, made.reason, made)


def over_nodes(op: str, site: Site, how: str, inside: Route, calls: int) -> Route:
    """The route of a call that is composed of calls inside nodes, so many on each, of this route, and transfers."""
    assert site.inside is not None
    reason = f"{site.nodes} nodes of {site.inside.world}: {how}; inside a node: {inside.reason}"
    if inside.predicted_us:
        reason += f"; of its {calls} calls the first is predicted to take {inside.predicted_us} us"
    return Route(op, "nodes", inside.fused, reason, inside=inside)


def _users_level() -> int:
    """The `stacklevel` by which a warning of the caller names the line that has called the library, or called PyTorch,
    through which operators and modules come to it."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    return level
