"""Plans that use the parts that nodes keep packed on their disks: nearly as good, and ready sooner.
Pure.

The candidates are cuts that cost at most `LOCALITY_MARGIN` more than the best one, and have no more
stages. The search takes the one for which the fewest bytes of weights must be fetched and packed.
It starts at the best cut and at the cut that the retained blocks suggest, and takes steps of
`neighbours` from these, all under the load of the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from edgeshard.domain.models.packed_units import NOTHING_HELD
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.neighbours import neighbours
from edgeshard.planning.solvers.scoring import stages, violations
from edgeshard.planning.solvers.walks import Kinds

LOCALITY_MARGIN = 0.05
"""Largest extra cost of a plan that needs less fetching and packing, as a part of the best one's
cost."""
MOST_WEIGHED = 200
"""Cuts whose figures are computed; milliseconds each."""


Cost = Callable[[Cut], float]
"""Cost in the objective of a cut that breaks no rule of the instance; infinite for one that may not
be used."""


def is_near(cost: float, least: float) -> bool:
    """Whether a cost is within `LOCALITY_MARGIN` of the least. Rates, for which more is better, are
    both negative."""
    return cost <= (
        least * (1.0 + LOCALITY_MARGIN) if least >= 0 else least / (1.0 + LOCALITY_MARGIN)
    )


@dataclass(frozen=True, slots=True)
class Locality:
    """Records that a plan was chosen for the parts its nodes hold: the best plan's placement, and
    the extra cost.

    `slower` is how much more the plan costs in its objective, as a part of the best one's cost.
    `saved_bytes` of weights need not be fetched and packed, in contrast to the best one;
    `lacking_bytes` must be all the same.
    """

    best: str
    slower: float
    saved_bytes: int
    lacking_bytes: int


class Lacking:
    """Bytes of weights that the nodes of a cut would have to fetch and pack."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        problem = costs.problem
        self._held = [problem.packed_parts.get(name, NOTHING_HELD) for name in costs.names]
        sizes = costs.block_bytes()
        self._upto = {
            node: list(
                accumulate(
                    (0 if i in parts.layers else size for i, size in enumerate(sizes)), initial=0
                )
            )
            for node, parts in enumerate(self._held)
            if parts.layers
        }
        self._all = list(accumulate(sizes, initial=0))

    def of(self, cut: Cut) -> int:
        problem, total = self._costs.problem, 0
        model, formats = problem.model, problem.formats
        for index, (node, first, end) in enumerate(stages(cut)):
            upto, parts = self._upto.get(node, self._all), self._held[node]
            total += upto[end] - upto[first]
            has_head = self._costs.has_head(cut, index)
            total += model.head_bytes(*formats) * (has_head and not parts.head)
            # with the head it is one tensor, if that is kept once
            if index == 0 and not parts.embedding:
                total += model.embedding_bytes(*formats) - model.shared_bytes(*formats) * has_head
        return total


def nearest_cut(costs: Costs, load: Load, best: Cut, cost: Cost) -> Cut:
    """The cut that lacks the fewest bytes, among those found that cost little more than `best`,
    which breaks no rule."""
    packed_parts = costs.problem.packed_parts
    holders = [
        node
        for node, name in enumerate(costs.names)
        if packed_parts.get(name, NOTHING_HELD) != NOTHING_HELD
    ]
    if not holders:
        return best
    lacking, instance = Lacking(costs), costs.decode(load)
    limit = cost(best) * (1.0 + LOCALITY_MARGIN)
    # Each node that holds something is a kind: which one takes a stage matters.
    kinds = Kinds(((costs.source,), *((node,) for node in holders if node != costs.source)))
    weighed: dict[Cut, tuple[int, float] | None] = {}

    def rank(cut: Cut) -> tuple[int, float] | None:
        """The bytes that it lacks, then its cost; None if it may not be used, or if enough was
        weighed."""
        if cut not in weighed:
            if len(weighed) >= MOST_WEIGHED:
                return None
            refused = len(cut.nodes) > len(best.nodes) or violations(instance, cut)
            cut_cost = float("inf") if refused else cost(cut)
            weighed[cut] = (lacking.of(cut), cut_cost) if cut_cost <= limit else None
        return weighed[cut]

    choice, least = best, (lacking.of(best), cost(best))
    for begin in (best, *_suggested(costs, best)):
        at, here = begin, rank(begin)
        while here is not None:
            if here < least:
                choice, least = at, here
            steps = (
                step
                for step in dict.fromkeys(neighbours(at, kinds))
                if len(step.nodes) <= len(best.nodes)
            )
            ranks = (
                (step, rank(step))
                for step in sorted(steps, key=lacking.of)
                if lacking.of(step) <= here[0]
            )
            at, here = next(
                (
                    (step, step_rank)
                    for step, step_rank in ranks
                    if step_rank is not None and step_rank < here
                ),
                (at, None),
            )
    return choice


def _suggested(costs: Costs, best: Cut) -> Iterator[Cut]:
    """The cut of an earlier placement, inferred from the held blocks: each node gets as many layers
    as it holds in a row."""
    packed_layers = [
        costs.problem.packed_parts.get(name, NOTHING_HELD).layers for name in costs.names
    ]
    layer_count = costs.problem.model.layer_count

    def run(node: int, first: int) -> int:
        end = first
        while end in packed_layers[node]:
            end += 1
        return end

    nodes, ends = [costs.source], [max(run(costs.source, 0), 1)]
    while ends[-1] < layer_count:
        others = [
            node
            for node in range(len(packed_layers))
            if node not in nodes and run(node, ends[-1]) > ends[-1]
        ]
        if not others:
            return
        nodes.append(max(others, key=lambda node: (run(node, ends[-1]), node in best.nodes, -node)))
        ends.append(run(nodes[-1], ends[-1]))
    yield Cut(tuple(nodes), tuple(ends))
