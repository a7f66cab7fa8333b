"""From "least R with every station <= T" to the least max(R, m B), exactly. Pure.

The plan of least B is not always the best: a plan's rate is m / max(R, m B). A value V can be
reached if and only if some plan keeps every station <= V / m and has R <= V.
(docs/papers.md#from-least-round-to-highest-rate)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgeshard.planning.solvers.instance import Cut, Instance, Solution
from edgeshard.planning.solvers.scoring import SLACK, score


@dataclass(frozen=True, slots=True)
class ThresholdAnswer:
    """One question "least R with every station <= T and R <= `ceiling`".

    `cut` is the best plan found, None if none; `bound_s` a proven lower bound of R over the plans
    that keep T: above the ceiling when none was found and the search was complete.
    """

    cut: Cut | None
    bound_s: float


# "Strictly below" a value: further than SLACK, by which a station may pass a threshold, and nearer
# than any other plan.
STRICTLY = 1 - 5 * SLACK

# Each halves what bisecting may leave of a gap.
NARROWING_STEPS = 5

_NEAR = 0.02
"""If a plan's bottleneck is within this part of the least one, the search queries for a better
plan."""

Oracle = Callable[[float, float], ThresholdAnswer]


def value_of(instance: Instance, cut: Cut, micro_batches: int) -> float:
    """max(R, m B): the steady time between two rounds of m micro-batches."""
    cut_score = score(instance, cut)
    return max(cut_score.round_s, micro_batches * cut_score.bottleneck_s)


def solution(instance: Instance, cut: Cut, value_s: float, bound_s: float) -> Solution:
    """A bound that rounding lifted to the value or just above, or left just below, is the value."""
    bound_s = value_s if bound_s >= value_s * STRICTLY * STRICTLY else bound_s
    return Solution(cut, score(instance, cut), value_s, bound_s)


def least_value(
    instance: Instance, oracle: Oracle, micro_batches: int, prove: Oracle | None = None
) -> Solution | None:
    """The plan of least max(R, m B), by bisecting V with `oracle(threshold_s, ceiling_s)`. None: no
    plan at all.

    After halving finds a plan, it queries strictly below that plan's value. The values are finite,
    so "none" proves the optimum, and bisecting needs no tolerance. An oracle that stops early
    leaves a gap, kept in `bound_s`; `prove`, an oracle that only bounds, then narrows it.
    """
    infinity = float("inf")
    free = oracle(infinity, infinity)
    if free.cut is None:
        return None
    best, high = free.cut, value_of(instance, free.cut, micro_batches)
    low, bound = free.bound_s, free.bound_s
    strict = False
    while low < high * STRICTLY:
        target = high * STRICTLY if strict else (low + high) / 2
        answer = oracle(target / micro_batches, target)
        value = infinity if answer.cut is None else value_of(instance, answer.cut, micro_batches)
        if value < high:
            best = answer.cut or best
            high = value
            strict = not strict
            continue
        low = target
        # A plan above the threshold costs more than the target anyway, one that keeps it at least
        # the answer's bound.
        bound = max(bound, min(target, answer.bound_s))
        strict = not strict
    if prove is not None and bound < high * STRICTLY:
        bound = _narrowed(prove, micro_batches, bound, high)
    return solution(instance, best, high, min(bound, high))


def _narrowed(prove: Oracle, micro_batches: int, bound: float, value: float) -> float:
    """A better lower bound of max(R, m B), between `bound` and `value`: the V that equals the bound
    of R at T = V / m."""
    low, high = bound, value
    for _ in range(NARROWING_STEPS):
        target = (low + high) / 2
        proven = min(target, prove(target / micro_batches, target).bound_s)
        bound = max(bound, proven)
        if proven >= target * STRICTLY:
            low = target
        else:
            high = target
    return bound


def least_round(instance: Instance, oracle: Oracle, threshold_s: float) -> Solution | None:
    """The plan of least R with every station <= `threshold_s`. None: no such plan."""
    answer = oracle(threshold_s, float("inf"))
    if answer.cut is None:
        return None
    return solution(instance, answer.cut, score(instance, answer.cut).round_s, answer.bound_s)


def least_bottleneck(
    instance: Instance, oracle: Oracle, start_cut: Cut | None = None
) -> Cut | None:
    """The plan of least B, and among those one of least R: below this value no threshold leaves a
    plan. None: no plan at all. A plan that is `start_cut` already saves queries."""
    infinity = float("inf")
    best, was_queried = start_cut, start_cut is None
    if best is None:
        best = oracle(infinity, infinity).cut
    if best is None:
        return None
    low, high = 0.0, score(instance, best).bottleneck_s
    while low < high * STRICTLY:
        # The absence of a plan shows quickly if stages have no memory for all layers, so thresholds
        # are low ones.
        target = low + (high - low) / 4 if high - low > _NEAR * high else high * STRICTLY
        cut = oracle(target, infinity).cut
        if cut is None:
            low = target
        else:
            best = cut
            was_queried = True
            high = min(target, score(instance, cut).bottleneck_s)
    if not was_queried:
        best = oracle(high, score(instance, best).round_s).cut or best
    return best
