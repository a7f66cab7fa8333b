"""The best cut whose nodes keep an operator's rules, by queries with a linear goal to a `Prover`.
Pure.

Single request: the goal is the time per token, or a lower bound of the whole (`prompt_floor`). Its
cuts are valued exactly one after the other until no other can be better. Rate: the search uses
*regions* of b and m. The rate of one cut and one b never falls with m (`rate_scoring`), and the
requests are at most C, so for m in [low, high] and b in [first, last]

    rate <= n G / D(first, n / last)      n = min(last high, C)      at least n / last >= low

D(b, m) is the seconds of a batch: linear in the rounds and stations of one cut. A region has the
memory and time limits of its smallest load. The search queries the region of the highest bound for
a cut better than the best known. It splits the region if the bound is not reached.

The cut is improved by steps of `neighbours`, while these keep the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import count, pairwise
from math import inf

import numpy as np

from edgeshard.domain.deployments.rules import ConditionKind, RuleCondition
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.prompt_floor import PromptFloor
from edgeshard.planning.inputs.problem import Objective
from edgeshard.planning.search.prompt_bound import PromptBound
from edgeshard.planning.search.rate_bound import TOLERANCE
from edgeshard.planning.search.rate_scoring import (
    Best,
    CutRates,
    CutTable,
    Scored,
    Scorer,
    most_micro_batches,
)
from edgeshard.planning.search.rate_search import Pool, count_out
from edgeshard.planning.search.request_search import BestCut, RequestSearch
from edgeshard.planning.search.spare import kinds_of
from edgeshard.planning.search.steady_scoring import SteadyRates
from edgeshard.planning.search.steady_search import SteadyBound, Walks
from edgeshard.planning.solvers.all_cuts import Cuts
from edgeshard.planning.solvers.instance import Cut, Instance, with_tokens
from edgeshard.planning.solvers.linear import (
    ROUNDING,
    GoalTerm,
    Linear,
    LinearAnswer,
    Prover,
    Question,
    Side,
    ones,
)
from edgeshard.planning.solvers.scoring import score
from edgeshard.planning.solvers.thresholds import STRICTLY, ThresholdAnswer
from edgeshard.planning.solvers.walks import Kinds, single_kinds

MOST_ASKED = 60
"""Questions about one plan, whose seconds the `Prover` limits besides."""
_MOST_STEADY = 400
"""The same for steady rates, for which a region takes at least three queries."""
_EVERY_BATCH = 8
"""Sizes of a micro-batch up to this one are regions of their own at once."""


class Ruled:
    """The conditions on the nodes of one problem, as its searches and its `Prover` need them."""

    def __init__(self, costs: Costs, conditions: Sequence[RuleCondition], prover: Prover) -> None:
        self.costs = costs
        self.conditions = tuple(conditions)
        self.prover = prover
        self.linear = tuple(one for condition in conditions for one in linear_of(condition, costs))
        self._known: dict[frozenset[int], bool] = {}

    def keeps(self, nodes: Sequence[int]) -> bool:
        """Whether these nodes of a cut keep all conditions."""
        used = frozenset(nodes)
        if used not in self._known:
            names = [self.costs.names[node] for node in used]
            self._known[used] = all(condition.holds(names) for condition in self.conditions)
        return self._known[used]

    def quickest(self, any_will_do: bool = False) -> LinearAnswer:
        """The cut of the least time per token of a single request, or any cut that keeps all
        limits; or the answer that there is none."""
        decode = self.costs.decode(Load())
        most_s = self.costs.problem.max_time_per_token_s
        without = list[Cut]()
        while True:
            answer = self.ask(
                Load(), ((GoalTerm(decode),),), without=without, any_will_do=any_will_do
            )
            # A limit of time is kept there except for rounding.
            if answer.cut is None or most_s is None or score(decode, answer.cut).round_s <= most_s:
                return answer
            without.append(answer.cut)

    def ask(
        self,
        load: Load,
        sides: tuple[Side, ...],
        below: float = inf,
        without: Sequence[Cut] = (),
        *,
        any_will_do: bool = False,
    ) -> LinearAnswer:
        """The cut of the least goal that a load of at least this one may use."""
        decode, most_s = self.costs.decode(load), self.costs.problem.max_time_per_token_s
        limits = []
        if most_s is not None:
            limits = [
                (GoalTerm(decode), most_s),
                (GoalTerm(decode, load.micro_batches, busiest=True), most_s),
            ]
        question = Question(
            decode, sides, tuple(limits), self.linear, tuple(without), below, any_will_do
        )
        return self.prover.ask(question)

    @cached_property
    def kinds(self) -> Kinds | None:
        """Groups of nodes that neither figures nor rules distinguish; None if there are too many
        groups."""
        groups = kinds_of(self.costs)
        weights = tuple(zip(*(linear.weights for linear in self.linear), strict=True))
        return groups if groups is None or not weights else groups.split(lambda node: weights[node])


def linear_of(condition: RuleCondition, costs: Costs) -> list[Linear]:
    """A condition by weights of the nodes that may be used. The groups of one have no node in
    common."""
    names, nodes_count = costs.names, len(costs.names)
    place = {name: node for node, name in enumerate(names)}
    match condition.kind:
        case ConditionKind.AT_MOST:
            weights = tuple(float(condition.weights.get(name, 0.0)) for name in names)
            return [Linear(weights, most=condition.limit)]
        case ConditionKind.AT_LEAST:
            nodes = [place[name] for name in condition.nodes if name in place]
            return [Linear(ones(nodes, nodes_count), least=condition.limit)]
        case ConditionKind.ALL_OR_NONE:
            nodes = sorted(place[name] for name in condition.nodes if name in place)
            if len(nodes) < len(condition.nodes):
                return [Linear(ones(nodes, nodes_count), most=0.0)]
            equations = []
            for first, second in pairwise(nodes):
                difference = [0.0] * nodes_count
                difference[first] = 1.0
                difference[second] = -1.0
                equations.append(Linear(tuple(difference), 0.0, 0.0))
            return equations
        case ConditionKind.ONE_GROUP:
            own = [group for group in condition.groups if names[costs.source] in group]
            allowed = own[0] if own else frozenset()
            return [
                Linear(
                    ones([place[name] for name in names if name not in allowed], nodes_count),
                    most=0.0,
                )
            ]


def unusable(costs: Costs, conditions: Sequence[RuleCondition]) -> tuple[str, ...]:
    """The nodes, except the source, that no cut can use under these conditions."""
    source, strict = costs.names[costs.source], [one for one in conditions if one.is_monotone]
    others = [name for name in costs.names if name != source]
    return tuple(
        name for name in others if any(not condition.holds((source, name)) for condition in strict)
    )


def _up_to(bound: float, value: float) -> float:
    """A bound as far as it is useful: no more than the value, and equal to it if only rounding
    separates them."""
    return value if bound >= value * (1 - ROUNDING) else bound


class _RequestSearch(RequestSearch):
    """`RequestSearch` for cuts that keep the rules."""

    def __init__(self, ruled: Ruled, objective: Objective) -> None:
        super().__init__(ruled.costs, objective)
        self._ruled = ruled

    def value(self, cut: Cut) -> float:
        return super().value(cut) if self._ruled.keeps(cut.nodes) else inf

    def under_rules(self, start: Cut) -> BestCut:
        """The best cut found, with a bound of all that keep the rules."""
        floor, kinds = self._floor(), single_kinds(self._decode)
        sides = self._sides(floor)
        values = {start: self.value(start)}
        best = self._climb(floor, kinds, start, values)
        without, bound = list[Cut](), 0.0
        while True:
            answer = self._ruled.ask(Load(), sides, values[best], without)
            bound = max(bound, _up_to(answer.bound_s, values[best]))
            if answer.cut is None:
                break
            without.append(answer.cut)
            if answer.cut not in values:
                values[answer.cut] = self.value(answer.cut)
                if len(without) <= 2 or values[answer.cut] < values[best]:
                    best = min(
                        best, self._climb(floor, kinds, answer.cut, values), key=values.__getitem__
                    )
            if (
                bound >= values[best] * (1 - ROUNDING)
                or len(without) == MOST_ASKED
                or answer.is_out_of_time
            ):
                break
        return BestCut(best, values[best], _up_to(bound, values[best]))

    def _sides(self, floor: PromptFloor) -> tuple[Side, ...]:
        """Lower bounds of the objective of every cut."""
        way = (GoalTerm(with_tokens(floor.way, self._decode, self._tokens)),)
        if self._closer is None:
            return (way,)
        bound = PromptBound(floor, self._decode, self._tokens, single_kinds(self._decode))
        return way, (GoalTerm(bound.rounds), GoalTerm(bound.stations, busiest=True))


def search_request(ruled: Ruled, objective: Objective, start: Cut) -> BestCut:
    """The cut of the least time of a single request, or of its first token."""
    return _RequestSearch(ruled, objective).under_rules(start)


class _Kept:
    """The yields of the cuts that keep the rules."""

    def __init__(self, ruled: Ruled, rates: Scorer) -> None:
        self._ruled, self._rates = ruled, rates
        self.problem, self.least = rates.problem, rates.least

    def places(self, cuts: Cuts) -> CutTable:
        mask = np.fromiter(
            (self._ruled.keeps(nodes) for nodes in cuts.nodes.tolist()),
            dtype=np.bool_,
            count=len(cuts),
        )
        return self._rates.places(cuts.take(mask))

    def figures(self, places: CutTable, batch: int) -> Scored:
        return self._rates.figures(places, batch)


def search_rate(
    ruled: Ruled, start: Cut, most_rate: float = inf, *, alone: bool = False
) -> tuple[Best, float]:
    """The cut and load of the highest rate, and tokens a second that no other exceeds; `most_rate`
    is an upper limit from elsewhere. With `alone` only the prover is queried, and few cuts are not
    enumerated.

    If no cut with a load in time keeps the rules, there is none; it is proven if nothing exceeds 0.
    """
    costs = ruled.costs
    rates = _Kept(ruled, SteadyRates(costs) if costs.problem.is_steady else CutRates(costs))
    best = None if alone else count_out(rates, ruled.kinds)
    if best is not None:
        return best, best.rate
    pool = Pool(rates, None)
    pool.offer(start)
    pool.climb()
    if not costs.problem.is_steady:
        return _RateSearch(ruled, pool, most_rate).run()
    least = _RuledLeast(ruled, pool, None if alone else Walks(rates.least, None))
    tolerance = ROUNDING if alone else TOLERANCE
    bound = SteadyBound(costs, pool, least, most_rate=most_rate, tolerance=tolerance).run()
    return pool.best, max(bound, pool.best.rate)


def any_plan(ruled: Ruled) -> tuple[Cut | None, Load, bool]:
    """A cut and a load that keep rules and limits; or None, and whether it is proven that there are
    none."""
    problem = ruled.costs.problem
    answer = ruled.quickest(any_will_do=True)
    if answer.cut is None or not problem.is_steady or problem.max_time_per_token_s is None:
        return answer.cut, Load(), answer.impossible
    # The prompts of other requests make the mean gap longer than a single request's token.
    best, most = search_rate(ruled, answer.cut)
    return best.cut, best.load, not most


class _RuledLeast:
    """The prover answers, about the cuts that keep the rules and are not in the pool, if walks of
    all cuts (None to skip them) give too weak a bound."""

    leaves_out = True

    def __init__(self, ruled: Ruled, pool: Pool, walks: Walks | None) -> None:
        self._ruled = ruled
        self._pool = pool
        self._walks = walks
        self._asked, self._spent = 0, False

    @property
    def is_spent(self) -> bool:
        return self._spent or self._asked >= _MOST_STEADY

    def ask(
        self, instance: Instance, station_limits: Sequence[tuple[Instance, float]], ceiling_s: float
    ) -> ThresholdAnswer:
        """As described at `Least`."""
        low_s = 0.0
        if self._walks is not None:
            walk_answer = self._walks.ask(instance, station_limits, ceiling_s)
            is_new = (
                walk_answer.cut is not None
                and walk_answer.cut not in self._pool.known
                and self._ruled.keeps(walk_answer.cut.nodes)
            )
            if is_new or walk_answer.bound_s >= ceiling_s * STRICTLY:
                return walk_answer
            low_s = walk_answer.bound_s
        self._asked += 1
        limits = tuple(
            (GoalTerm(other, busiest=True), most_s)
            for other, most_s in station_limits
            if most_s < inf
        )
        known_cuts, linear = tuple(self._pool.known), self._ruled.linear
        question = Question(
            instance, ((GoalTerm(instance),),), limits, linear, known_cuts, ceiling_s
        )
        answer = self._ruled.prover.ask(question)
        self._spent = answer.is_out_of_time
        return ThresholdAnswer(answer.cut, min(ceiling_s, max(low_s, answer.bound_s)))


def batch_sides(costs: Costs, batch: int, micro_batches: float) -> tuple[Side, ...]:
    """The seconds of a batch of m micro-batches of b requests, from its prompts to its last
    tokens."""
    prefill = costs.prefill(Load(batch))
    decode = costs.decode(Load(batch))
    tokens = costs.problem.new_tokens - 1
    prompts = (GoalTerm(prefill), GoalTerm(prefill, micro_batches - 1, busiest=True))
    waits = (
        (*prompts, GoalTerm(decode, tokens)),
        (*prompts, GoalTerm(decode, tokens * micro_batches, busiest=True)),
    )
    return tuple(tuple(part for part in side if part.weight) for side in waits)


@dataclass(frozen=True, slots=True)
class _Region:
    """Loads of b in [first, last] and m in [low, high]."""

    first: int
    last: int
    low: int
    high: int

    def parts(self, fitting: int) -> list[_Region]:
        """Two regions of half the loads; m is divided at the largest m of a cut that was found, if
        that is inside."""
        if self.first < self.last:
            middle = (self.first + self.last) // 2
            return [
                _Region(self.first, middle, self.low, self.high),
                _Region(middle + 1, self.last, self.low, self.high),
            ]
        if self.low == self.high:
            return []
        middle = fitting if self.low <= fitting < self.high else (self.low + self.high) // 2
        return [
            _Region(self.first, self.last, self.low, middle),
            _Region(self.first, self.last, middle + 1, self.high),
        ]


class _RateSearch:
    def __init__(self, ruled: Ruled, pool: Pool, most_rate: float) -> None:
        self._ruled = ruled
        self._costs = ruled.costs
        self._most_rate = most_rate
        self._limit = ruled.costs.problem.request_limit
        self._pool, self._spent = pool, False

    def run(self) -> tuple[Best, float]:
        number = count()
        queries = 0
        bound = 0.0
        waiting = [(-self._most_rate, next(number), region) for region in self._first()]
        while waiting:
            most, _, region = heappop(waiting)
            if -most <= self._best_rate * (1 + ROUNDING):
                break
            if queries == MOST_ASKED or self._spent:
                bound = max(bound, -most)
                break
            queries += 1
            region_bound, fitting = self._ask(region)
            region_bound = min(region_bound, -most)
            if region_bound <= self._best_rate * (1 + ROUNDING):
                continue
            parts = self._allowed(region.parts(fitting))
            if not parts:
                bound = max(bound, region_bound)
            for part in parts:
                heappush(waiting, (-region_bound, next(number), part))
        return self._pool.best, max(bound, self._best_rate)

    @property
    def _best_rate(self) -> float:
        return self._pool.best.rate

    def _first(self) -> list[_Region]:
        """The largest b first: most often it is the best."""
        limit = self._costs.problem.batch_limit
        ends = list(range(1, min(limit, _EVERY_BATCH) + 1))
        while ends[-1] < limit:
            ends.append(min(limit, 2 * ends[-1]))
        regions = [
            _Region(before + 1, end, 1, 1 << 30)
            for before, end in zip([0, *ends[:-1]], ends, strict=True)
        ]
        return self._allowed(regions[::-1])

    def _allowed(self, regions: Sequence[_Region]) -> list[_Region]:
        """Regions without the m that the number of requests does not allow."""
        cut = [
            _Region(
                one.first,
                one.last,
                one.low,
                min(one.high, most_micro_batches(self._costs, one.first)),
            )
            for one in regions
        ]
        return [one for one in cut if one.low <= one.high]

    def _ask(self, region: _Region) -> tuple[float, int]:
        """An upper bound of the region's rates above the best one, and the most m that the cut
        found may have."""
        most = region.last * region.high
        requests = most if self._limit is None else min(most, self._limit)
        m = min(max(requests / region.last, region.low), region.high)
        tokens = requests * self._costs.problem.new_tokens
        below = tokens / self._best_rate if self._best_rate > 0 else inf
        answer = self._ruled.ask(
            Load(region.first, region.low), batch_sides(self._costs, region.first, m), below
        )
        fitting, self._spent = region.high, answer.is_out_of_time
        if answer.cut is not None:
            self._pool.offer(answer.cut)
            self._pool.climb()
            places = self._pool.rates.places(Cuts.of([answer.cut]))
            fitting = int(self._pool.rates.figures(places, region.first).micro_batches[0])
        return tokens / answer.bound_s if answer.bound_s > 0 else inf, fitting
