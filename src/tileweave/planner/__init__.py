"""From a problem to a plan: hardware figures, cost model, tile configurations."""

from tileweave.planner.hardware import H200, Hardware, profile
from tileweave.planner.plan import Plan, Problem, candidates, plan_for, unsupported

__all__ = ["H200", "Hardware", "Plan", "Problem", "candidates", "plan_for", "profile", "unsupported"]
