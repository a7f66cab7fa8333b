"""Check a plan by another method than the one that found it: a `Prover` solves the same problem.
Pure.

It shares the times and memory of cuts with the planner (`planning.costs`) and, for the steady rate,
the loads to query. It shares none of the planner's solvers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgeshard.domain.errors import invalid
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.inputs.problem import Objective
from edgeshard.planning.search.plan import CutPrediction, PlanResult, predict, result_of
from edgeshard.planning.search.ruled_search import Ruled, any_plan, search_rate, search_request
from edgeshard.planning.solvers.instance import gap_of
from edgeshard.planning.solvers.linear import ROUNDING, Prover

SAME = 2 * ROUNDING
"""Equal costs may differ by up to this part."""


@dataclass(frozen=True, slots=True)
class Verified:
    """The result for a plan. `better` is a placement that costs less, `cheaper` by that part of the
    plan's cost; "" and 0 if none was found. No plan costs less than `gap` below the plan, as a part
    of it; None if there is no plan and that is proven."""

    better: str = ""
    cheaper: float = 0.0
    gap: float | None = None
    proven: bool = True
    """Whether nothing is left open."""

    @property
    def text(self) -> str:
        if self.better and not self.cheaper:
            return f"there is a plan: {self.better}"
        if self.better:
            return f"not the best: {self.better} is better by {100 * self.cheaper:.2g} %"
        if self.gap is None:
            return (
                "CP-SAT proved that there is no plan"
                if self.proven
                else "CP-SAT found no plan in its time either"
            )
        if not self.gap:
            return "CP-SAT proved that no plan is better"
        return f"CP-SAT found no better plan; bound, gap {100 * self.gap:.2g} %"


def verify(result: PlanResult, prover: Prover) -> Verified:
    """Whether a plan is the best, or there is none. Raises InvalidArgumentError for one that cannot
    be checked."""
    problem = replace(result.problem, rules=(), packed_parts={})
    if problem.allow_streaming:
        raise invalid("verify", "is not for plans with allow_streaming; leave one of them out")
    if problem.objective is Objective.ENERGY:
        raise invalid(
            "verify", "is not for the objective energy; leave it out, or use another objective"
        )
    costs = Costs(problem)
    ruled = Ruled(costs, result.problem.rules, prover)
    if result.prediction is None:
        cut, load, proven = any_plan(ruled)
        if cut is None:
            return Verified(proven=proven)
        return Verified(better=result_of(costs, predict(costs, load, cut)).placement)
    best, bound = _best(ruled, result.prediction)
    # A plan chosen for the parts that its nodes hold must be as good as the best one, minus the
    # price of that choice.
    plan_cost = result.prediction.cost(problem.goal) / (
        1.0 + (result.locality.slower if result.locality else 0.0)
    )
    cost = best.cost(problem.goal)
    if cost < plan_cost * (1 - SAME):
        return Verified(
            result_of(costs, best).placement, 1.0 - cost / plan_cost, gap_of(bound, plan_cost)
        )
    return Verified(gap=gap_of(bound, plan_cost, SAME), proven=bound >= plan_cost * (1 - SAME))


def _best(ruled: Ruled, prediction: CutPrediction) -> tuple[CutPrediction, float]:
    """The best plan found, and a lower bound of the cost of all."""
    costs, goal = ruled.costs, ruled.costs.problem.goal
    if goal is Objective.THROUGHPUT:
        rated, most = search_rate(ruled, prediction.cut, alone=True)
        # A plan that was given may be one that has no load in time.
        return (
            prediction if rated.cut is None else predict(costs, rated.load, rated.cut)
        ), 1.0 / most
    if goal is Objective.LATENCY:
        answer = ruled.quickest()
        return (
            prediction if answer.cut is None else predict(costs, Load(), answer.cut)
        ), answer.bound_s
    best = search_request(ruled, goal, prediction.cut)
    return predict(costs, Load(), best.cut), best.bound
