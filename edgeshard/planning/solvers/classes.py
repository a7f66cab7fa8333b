"""Class DP: exact when the nodes form few kinds of equal nodes, however many nodes there are. Pure.

The state is (layers done, last kind, how many of every kind were used), with two savings that lose
nothing. A kind with more nodes than a plan can have stages needs no counter. A state that provably
ends above the best plan is dropped, by a bound that is exact if no counter binds. Blocks may
differ. (docs/papers.md#class-dp)
"""

from __future__ import annotations

from edgeshard.planning.solvers.bounded_search import Oracle, Round
from edgeshard.planning.solvers.instance import Instance, Solution
from edgeshard.planning.solvers.thresholds import least_round, least_value
from edgeshard.planning.solvers.walks import Kinds, equal_kinds

MOST_KINDS = 12
EFFORT = (Round(30, 8), Round(60, 32), Round(100, None), Round(100, 64))


def kinds_of(instance: Instance) -> Kinds | None:
    """The classes, None when there are more than `MOST_KINDS`."""
    return equal_kinds(instance, MOST_KINDS)


def solve_round(
    instance: Instance, threshold_s: float = float("inf"), kinds: Kinds | None = None
) -> Solution | None:
    """The plan of least R with every station <= `threshold_s`; None when there is none."""
    return least_round(instance, oracle(instance, kinds), threshold_s)


def solve_throughput(
    instance: Instance, micro_batches: int, kinds: Kinds | None = None
) -> Solution | None:
    """The plan of least max(R, m B)."""
    return least_value(instance, oracle(instance, kinds), micro_batches)


def oracle(instance: Instance, kinds: Kinds | None = None) -> Oracle:
    """Answers for any threshold; the prices of one are where the next begins."""
    kinds = kinds if kinds is not None else equal_kinds(instance, instance.nodes)
    assert kinds is not None  # there are at most as many kinds as nodes
    return Oracle(instance, kinds, EFFORT)
