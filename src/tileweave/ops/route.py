"""What a call will do, decided before anything is launched: the answer of `explain`."""

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
