"""Label DP with a Lagrangian bound: any link matrix, about a hundred nodes, and a certified gap in
the answer. Pure.

Every node is its own kind. A search keeps only the most promising labels of every (layers done,
node), so the plan may miss the optimum, by at most what the answer states. The problem is strongly
NP-hard. (docs/papers.md#label-search-with-a-lagrangian-bound)
"""

from __future__ import annotations

from edgeshard.planning.solvers.bounded_search import Oracle, Round
from edgeshard.planning.solvers.instance import Instance, Solution
from edgeshard.planning.solvers.thresholds import least_round, least_value
from edgeshard.planning.solvers.walks import single_kinds

# For one query; a throughput is a dozen queries, whose prices start at the last one's end.
EFFORT = (Round(20, 2), Round(40, 4), Round(60, 4), Round(80, 8), Round(100, 16), Round(150, 24))
EFFORT_PER_THRESHOLD = (Round(15, 2), Round(25, 4), Round(30, 8))
PROOF = (Round(60, 0),)


def solve_round(instance: Instance, threshold_s: float = float("inf")) -> Solution | None:
    """The plan of least R with every station <= `threshold_s` found, with its bound; None when none
    was found."""
    return least_round(instance, Oracle(instance, single_kinds(instance), EFFORT), threshold_s)


def solve_throughput(instance: Instance, micro_batches: int) -> Solution | None:
    """The plan of least max(R, m B) found, with its bound."""
    kinds = single_kinds(instance)
    search, prove = Oracle(instance, kinds, EFFORT_PER_THRESHOLD), Oracle(instance, kinds, PROOF)
    return least_value(instance, search, micro_batches, prove)
