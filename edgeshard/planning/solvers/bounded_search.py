"""Bound and search together: one `Oracle` answers "least R with every station <= T" for a set of
kinds. Pure.

Prices rise on kinds that the relaxed walk uses too often (subgradient steps towards the best plan's
R). Between rounds of steps a label search steered by those prices looks for a better plan. It ends
when bound and plan meet, or when the `Effort` is spent; then the distance between them is the
answer's certified gap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgeshard.planning.solvers.beam_search import Search
from edgeshard.planning.solvers.instance import Cut, Floats, Instance
from edgeshard.planning.solvers.lagrangian_bound import Relaxed, relax
from edgeshard.planning.solvers.scoring import SLACK, score, violations
from edgeshard.planning.solvers.thresholds import ThresholdAnswer
from edgeshard.planning.solvers.walks import INFINITY, Kinds, Problem


@dataclass(frozen=True, slots=True)
class Round:
    """Subgradient steps, then a search: all that may still win if `width` is None, up to `labels`;
    none if it is 0."""

    steps: int
    width: int | None
    labels: int = 4_000_000


Effort = tuple[Round, ...]


class Oracle:
    """Answers for one instance; keeps the prices from one threshold to the next, which are close to
    each other."""

    def __init__(self, instance: Instance, kinds: Kinds, effort: Effort) -> None:
        self._instance = instance
        self._kinds = kinds
        self._effort = effort
        self._prices: Floats = np.zeros(len(kinds.members))
        self._stage_price = 0.0

    def __call__(self, threshold_s: float, ceiling_s: float) -> ThresholdAnswer:
        """The plan of least R < `ceiling_s` with every station <= `threshold_s`."""
        return self.answer(Problem(self._instance, self._kinds, threshold_s), ceiling_s)

    def answer(self, problem: Problem, ceiling_s: float) -> ThresholdAnswer:
        """The same for a problem made from this instance and these kinds, whatever its limits."""
        question = _Question(problem, ceiling_s, self._prices, self._stage_price)
        question.solve(self._effort)
        self._prices, self._stage_price = question.prices, question.stage_price
        return ThresholdAnswer(question.cut, min(question.bound, question.value))


class _Question:
    """One threshold: the best plan so far and the best bound so far, brought together."""

    def __init__(
        self, problem: Problem, ceiling_s: float, prices: Floats, stage_price: float
    ) -> None:
        instance = problem.instance
        self._instance = instance
        self._kinds = problem.kinds
        self._problem = problem
        self.cut: Cut | None = None
        self.value = ceiling_s
        self.bound = -INFINITY
        self.prices, self.stage_price = prices, stage_price
        self._best: Relaxed | None = None
        self._scale = 1.0
        if self._problem.alone < ceiling_s:
            self.cut, self.value = Cut((instance.source,), (instance.layers,)), self._problem.alone

    @property
    def _closed(self) -> bool:
        return self.bound >= self.value * (1 - SLACK)

    def solve(self, effort: Effort) -> None:
        if self._instance.max_nodes == 1 or not self._problem.has_room:
            self.bound = INFINITY
            return
        for number, round_ in enumerate(effort):
            self._price(round_.steps, fresh=number == 0)
            if self._closed:
                break
            if round_.width == 0:
                continue
            assert self._best is not None
            answer = Search(
                self._problem, self._best, self.value, round_.width, round_.labels
            ).run()
            if answer.stages:
                self._offer(self._expand(answer.stages))
            # A plan not found yet costs at least the bound of the dropped labels, or the search's
            # ceiling.
            self.bound = max(self.bound, min(answer.dropped_s, self.value))
            if self._closed:
                break

    def _offer(self, cut: Cut) -> None:
        """Keep the plan if it is allowed and the best: scored as every plan is, never by the
        solver's own sums."""
        if violations(self._instance, cut):
            return
        result = score(self._instance, cut)
        if result.round_s < self.value and result.bottleneck_s <= self._problem.limit:
            self.cut, self.value = cut, result.round_s

    def _expand(self, stages: tuple[tuple[int, int], ...]) -> Cut:
        """Nodes for kinds, in the order of the kind's members."""
        used = [0] * len(self._kinds.members)
        nodes = []
        for kind, _ in stages:
            members = self._kinds.members[kind]
            nodes.append(members[used[kind] % len(members)])
            used[kind] += 1
        return Cut(tuple(nodes), tuple(end for _, end in stages))

    def _price(self, steps: int, fresh: bool) -> None:
        """Subgradient steps on the prices; every relaxed walk that is a plan is offered."""
        sizes = self._problem.sizes.astype(np.float64)
        prices, stage_price = self.prices, self.stage_price
        most = self._instance.max_nodes - 1
        idle = 0
        for step in range(steps):
            relaxed = relax(self._problem, prices, stage_price)
            if relaxed.bound > self.bound or self._best is None:
                improvement = relaxed.bound - self.bound
                self.bound = max(self.bound, relaxed.bound)
                idle = 0 if improvement > 1e-4 * abs(self.bound) else idle + 1
                self._best = relaxed
                self.prices = prices
                self.stage_price = stage_price
            else:
                idle += 1
            if not relaxed.walk or self._closed:
                return
            over = relaxed.visits - sizes
            too_many = float(relaxed.visits.sum() - most)
            if (over <= 0).all() and too_many <= 0:
                middle = ((kind, end) for kind, _, end in relaxed.walk)
                self._offer(self._expand(((0, relaxed.walk[0][1]), *middle)))
                if self._closed or (fresh and step == 0 and not prices.any() and not stage_price):
                    return
            if idle >= 8:
                self._scale, idle = max(self._scale / 2, 1e-3), 0
                prices, stage_price = self.prices, self.stage_price
            target = (
                self.value
                if np.isfinite(self.value)
                else max(relaxed.bound * 1.5, self.bound * 1.2)
            )
            direction = np.where((over > 0) | (prices > 0), over, 0.0)
            direction[0] = 0.0
            stage_direction = too_many if too_many > 0 or stage_price > 0 else 0.0
            length = float(direction @ direction) + stage_direction**2
            if length == 0:
                return
            size = self._scale * max(target - relaxed.bound, 1e-3 * target) / length
            prices = np.maximum(0.0, prices + size * direction)
            stage_price = max(0.0, stage_price + size * stage_direction)
