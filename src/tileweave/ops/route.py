"""What a call will do, decided before anything is launched: the answer of `explain`."""

import warnings
from dataclasses import asdict, dataclass

from tileweave.planner import Plan


@dataclass(frozen=True)
class Route:
    """Path of one call. backend: emulated, virtual, processes or fallback; reason: why this path; plan: if fused."""

    op: str
    backend: str
    fused: bool
    reason: str
    plan: Plan | None = None

    @property
    def predicted_us(self) -> float | None:
        """Microseconds by the cost model; None where nothing is fused or the plan was made by hand."""
        return self.plan.predicted_us if self.plan else None

    def to_dict(self) -> dict:
        """The route as plain values, for JSON."""
        plan = self.plan.to_dict() if self.plan else None
        return {**asdict(self), "plan": plan, "predicted_us": self.predicted_us}


def fallback(op: str, refusal: str, way: str, plan: Plan | None = None, backend: str = "fallback") -> Route:
    """The route of a call that no fused kernel serves, because of `refusal`: the `way` that it goes instead.

    A plan that the caller gave has no part in it; the route says so, and a UserWarning.
    """
    reason = f"{refusal}: {way}"
    if plan is not None:
        reason += "; the plan is not used, it is one of the fused kernel"
        warnings.warn(f"{op}: plan is not used: {refusal}", stacklevel=2)
    return Route(op, backend, False, reason)
