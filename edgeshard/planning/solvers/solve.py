"""One interface to the solvers: the exact one that suits the instance, or the one that certifies a
gap. Pure.

Few kinds of equal nodes: `classes`, exact. Few nodes: `subset`, exact. Otherwise `general`, with a
gap in the answer.
"""

from __future__ import annotations

from edgeshard.planning.solvers import classes, general, subset, thresholds
from edgeshard.planning.solvers.bounded_search import Oracle
from edgeshard.planning.solvers.instance import Instance, Solution
from edgeshard.planning.solvers.walks import single_kinds

SUBSET_WORK = 3_000_000


def solve_latency(instance: Instance) -> Solution | None:
    """The plan of least R; None when no plan keeps every memory limit."""
    return solve_round(instance)


def solve_round(instance: Instance, threshold_s: float = float("inf")) -> Solution | None:
    """The plan of least R with every station <= `threshold_s`; None when there is none."""
    if (kinds := classes.kinds_of(instance)) is not None:
        return classes.solve_round(instance, threshold_s, kinds)
    if _is_small(instance):
        return subset.solve_round(instance, threshold_s)
    return general.solve_round(instance, threshold_s)


def round_oracle(instance: Instance) -> thresholds.Oracle:
    """Answers `solve_round`'s question for one threshold after another, each quicker for the
    last."""
    if (kinds := classes.kinds_of(instance)) is not None:
        return classes.oracle(instance, kinds)
    if not _is_small(instance):
        return Oracle(instance, single_kinds(instance), general.EFFORT)

    def exact(threshold_s: float, ceiling_s: float) -> thresholds.ThresholdAnswer:
        solution = subset.solve_round(instance, threshold_s)
        if solution is None or solution.value_s >= ceiling_s:
            return thresholds.ThresholdAnswer(None, ceiling_s)
        return thresholds.ThresholdAnswer(solution.cut, solution.bound_s)

    return exact


def solve_throughput(instance: Instance, micro_batches: int) -> Solution | None:
    """The plan of least max(R, m B), the steady time between two rounds of m micro-batches."""
    if (kinds := classes.kinds_of(instance)) is not None:
        return classes.solve_throughput(instance, micro_batches, kinds)
    if _is_small(instance):
        return subset.solve_throughput(instance, micro_batches)
    return general.solve_throughput(instance, micro_batches)


def _is_small(instance: Instance) -> bool:
    return (1 << instance.nodes) * instance.nodes * instance.layers <= SUBSET_WORK
