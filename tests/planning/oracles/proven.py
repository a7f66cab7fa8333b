"""The least values of an instance as CP-SAT proves them, which shares nothing with the planner's
own solvers."""

from __future__ import annotations

from edgeshard.cpsat.program import SolveLimits, answer
from edgeshard.planning.solvers.instance import Instance
from edgeshard.planning.solvers.linear import ROUNDING, GoalTerm, Question

EFFORT = SolveLimits(60.0, 60.0)


def least(instance: Instance, micro_batches: int | None = None) -> float | None:
    """The least R, or the least max(R, m B) with `micro_batches`, in seconds; None when
    infeasible."""
    sides = [(GoalTerm(instance),)]
    if micro_batches is not None:
        sides.append((GoalTerm(instance, micro_batches, busiest=True),))
    question = Question(instance, tuple(sides))
    found = answer(question, EFFORT)
    if found.cut is None:
        assert found.impossible, "CP-SAT proved nothing"
        return None
    value = question.seconds(found.cut)
    assert value * (1 - ROUNDING) <= found.bound_s <= value * (1 + 1e-12)
    return value
