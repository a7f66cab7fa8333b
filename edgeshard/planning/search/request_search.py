"""The cut that serves one request soonest: its first token (`ttft`), or its whole answer
(`request`). Pure.

    request = time to first token + (G - 1) time per token

A prompt goes in the slices that the head would cut for that placement. So the first token's time is
no sum over stages, and no DP finds the best cut. If the cuts are few, all of them are bounded at
once (`PromptFloor`) and scored in the order of their bounds until none left can win: exact.
Otherwise candidates come from solvers of sums (the prompt unsliced, slices one after the other,
only decoding) and are improved step by step. Solvers of the bound's sums certify how much better
any cut could be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.prompt_floor import CutFloor, PromptFloor, StepTables
from edgeshard.planning.costs.prompt_time import PromptTimes
from edgeshard.planning.costs.step_budget import slice_unit
from edgeshard.planning.inputs.problem import Objective
from edgeshard.planning.search.prompt_bound import PromptBound
from edgeshard.planning.search.spare import kinds_of, without_spare
from edgeshard.planning.solvers.all_cuts import Cuts, count_cuts, every_cut, kinds_of_all, scores
from edgeshard.planning.solvers.instance import Cut, Floats, Instance, gap_of, with_tokens
from edgeshard.planning.solvers.neighbours import neighbours
from edgeshard.planning.solvers.scoring import score, violations
from edgeshard.planning.solvers.solve import solve_latency, solve_throughput
from edgeshard.planning.solvers.walks import INFINITY, Kinds

MOST_CUTS = 200_000
"""Up to this many cuts, all are examined."""
MOST_SCORED = 400
"""Cuts whose slices are searched, a few milliseconds each, before the rest keeps its bound."""
MOST_CLOSER = 10_000
"""Cuts whose bound is made closer, a tenth of a millisecond each."""
MOST_STEPS = 60
"""The same for improving candidates if there are too many cuts to examine all."""
_MANY = 1_000_000
"""So many micro-batches that max(R, m B) is m B."""
_SLICES = (4, 16)
_FEW_STAGES = (2, 3)
"""Good cuts of few stages are far from good cuts of many: no change of one step leads from the one
to the other."""
_NEAR_ENOUGH = 0.01
"""With a smaller gap the search ends without looking for them."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class BestCut:
    """The best cut found; `value` is its cost in the objective, and `bound` a lower bound of
    all."""

    cut: Cut
    value: float
    bound: float

    @property
    def gap(self) -> float:
        return gap_of(self.bound, self.value, _ROUNDING)


def search_request(costs: Costs, objective: Objective) -> BestCut | None:
    """The best cut of all nodes, without those that a plan cannot use. None if no cut keeps every
    limit."""
    some, _, index = without_spare(costs, kinds_of(costs))
    best = RequestSearch(some, objective).run()
    if best is None:
        return None
    return replace(best, cut=Cut(tuple(index[node] for node in best.cut.nodes), best.cut.ends))


class RequestSearch:
    """For a single request; `max_time_per_token` leaves out cuts whose time per token is longer.

    `energy_alone` implements another objective of a single request by its values of a cut and of a
    bound.
    """

    def __init__(self, costs: Costs, objective: Objective) -> None:
        self._costs, self._times = costs, PromptTimes(costs)
        self._tokens = 0 if objective is Objective.TTFT else costs.problem.new_tokens - 1
        self._limit_s = costs.problem.max_time_per_token_s
        self._prompt_tokens = costs.problem.prompt_tokens
        self._closer: CutFloor | None = None
        self._prefill, self._decode = costs.prefill(Load()), costs.decode(Load())

    def value(self, cut: Cut) -> float:
        """The objective of a cut; infinite beyond `max_time_per_token`."""
        per_token_s = score(self._decode, cut).round_s
        if self._limit_s is not None and per_token_s > self._limit_s:
            return INFINITY
        return self._value(cut, self._times.first_token(cut).seconds + self._tokens * per_token_s)

    def _value(self, cut: Cut, request_s: float) -> float:
        """The objective of a cut whose request takes `request_s` seconds."""
        return request_s

    def _floors(self, floor: PromptFloor, cuts: Cuts, request_s: Floats) -> Floats:
        """[K] a lower bound of each cut's objective, if its request takes at least this long."""
        return request_s

    def _instances(self, floor: PromptFloor) -> list[Instance]:
        """Instances that distinguish nodes."""
        return [self._prefill, self._decode, floor.first, floor.last, floor.whole]

    def run(self) -> BestCut | None:
        """The best cut; None if no cut keeps every limit."""
        floor = self._floor()
        kinds = kinds_of_all(self._instances(floor))
        if count_cuts(self._decode, kinds) <= MOST_CUTS:
            return self._among(floor, every_cut(self._decode, kinds))
        return self._improved(floor, kinds)

    def _floor(self) -> PromptFloor:
        """The bounds of a prompt, including the closer ones if it goes in slices."""
        tables = StepTables(self._costs)
        if (
            self._costs.problem.sliced
            and slice_unit(self._prompt_tokens) * 2 <= self._prompt_tokens
        ):
            self._closer = CutFloor(tables)
        return PromptFloor.of(tables)

    def _among(self, floor: PromptFloor, parts: Iterable[Cuts]) -> BestCut | None:
        """The best of all cuts, examined in the order of their bounds."""
        cut_groups, bounds = list[Cuts](), list[Floats]()
        for part in parts:
            per_token_s, _ = scores(self._decode, part)
            bound = self._floors(floor, part, floor.seconds(part) + self._tokens * per_token_s)
            if self._limit_s is not None:
                bound = np.where(per_token_s <= self._limit_s, bound, INFINITY)
            cut_groups.append(part)
            bounds.append(bound)
        if not cut_groups:
            return None
        firsts = np.cumsum([0, *map(len, cut_groups)])
        bound = np.concatenate(bounds)
        best: Cut | None = None
        value = INFINITY

        def rising() -> Iterator[tuple[float, Cut]]:
            for place in np.argsort(bound, kind="stable").tolist():
                number = int(np.searchsorted(firsts, place, side="right")) - 1
                yield float(bound[place]), cut_groups[number].cut(place - int(firsts[number]))

        for number, (low, cut) in enumerate(self._by_closer_bounds(floor, rising())):
            if low >= value * (1 - _ROUNDING) or number == MOST_SCORED:
                return None if best is None else BestCut(best, value, min(value, low))
            if (own := self.value(cut)) < value:
                best, value = cut, own
        return None if best is None else BestCut(best, value, value)

    def _by_closer_bounds(
        self, floor: PromptFloor, rising: Iterable[tuple[float, Cut]]
    ) -> Iterator[tuple[float, Cut]]:
        """Cuts in the order of closer bounds, each made when no cut left over can have a lower
        one."""
        waiting: list[tuple[float, int, Cut]] = []
        for number, (low, cut) in enumerate(rising):
            while waiting and waiting[0][0] <= low:
                yield waiting[0][0], heappop(waiting)[2]
            if self._closer is not None and low < INFINITY and number < MOST_CLOSER:
                request_s = (
                    self._closer.seconds(cut) + self._tokens * score(self._decode, cut).round_s
                )
                low = max(low, float(self._floors(floor, Cuts.of([cut]), np.array([request_s]))[0]))
            heappush(waiting, (low, number, cut))
        while waiting:
            yield waiting[0][0], heappop(waiting)[2]

    def _improved(self, floor: PromptFloor, kinds: Kinds) -> BestCut | None:
        """The best of the solvers' candidates and of their changed forms, with a certified
        bound."""
        bound = self._bound(floor)
        candidates = dict.fromkeys(self._candidates(floor))
        values = {cut: self.value(cut) for cut in candidates}
        values = {cut: value for cut, value in values.items() if value < INFINITY}
        if not values:
            return None
        if self._closer is not None:
            bound = max(bound, self._closer_bound(floor, kinds, values))
        best = self._climb(floor, kinds, min(values, key=values.__getitem__), values)
        if self._closer is not None and bound < values[best] * (1 - _NEAR_ENOUGH):
            few = {cut: self.value(cut) for cut in dict.fromkeys(self._of_few_stages())}
            values |= few
            others = [cut for cut in values if len(cut.nodes) != len(best.nodes)]
            start = min(others, key=values.__getitem__, default=best)
            best = min(best, self._climb(floor, kinds, start, values), key=values.__getitem__)
        return BestCut(best, values[best], min(bound, values[best]))

    def _climb(self, floor: PromptFloor, kinds: Kinds, start: Cut, values: dict[Cut, float]) -> Cut:
        """The cut after changes step by step for the better; each cut on the way is added to
        `values`."""
        best = start
        steps = 0
        improved = True
        while improved and steps < MOST_STEPS:
            improved = False
            for cut in self._near(floor, kinds, best, values[best]):
                if cut not in values:
                    steps += 1
                    values[cut] = self.value(cut)
                if values[cut] < values[best] * (1 - _ROUNDING):
                    best, improved = cut, True
                    break
                if steps >= MOST_STEPS:
                    break
        return best

    def _closer_bound(self, floor: PromptFloor, kinds: Kinds, values: dict[Cut, float]) -> float:
        """A bound below the best value known; cuts found on the way are added."""
        closer = PromptBound(floor, self._decode, self._tokens, kinds)
        closer.run(min(values.values()))
        for cut in closer.cuts:
            if cut not in values and not violations(self._decode, cut):
                values[cut] = self.value(cut)
        return closer.bound_s

    def _bound(self, floor: PromptFloor) -> float:
        """No cut is better: the slices' and the tokens' ways, or all slices on the busiest
        station."""
        both = solve_latency(with_tokens(floor.way, self._decode, self._tokens))
        stations = solve_throughput(floor.whole, _MANY)
        tokens = solve_latency(self._decode) if self._tokens else None
        if both is None or stations is None:
            return INFINITY
        tokens_s = self._tokens * tokens.bound_s if tokens is not None else 0.0
        return max(both.bound_s, stations.bound_s / _MANY + tokens_s)

    def _candidates(self, floor: PromptFloor) -> Iterator[Cut]:
        whole = with_tokens(
            floor.whole if floor.apart else self._prefill, self._decode, self._tokens
        )
        for instance in (whole, self._decode):
            solution = solve_latency(instance)
            if solution is not None:
                yield solution.cut
            if self._closer is None and self._limit_s is None:
                return  # the sum is the objective
        yield from self._in_slices(whole.max_nodes)

    def _of_few_stages(self) -> Iterator[Cut]:
        for most in _FEW_STAGES:
            if self._decode.min_nodes <= most < self._decode.max_nodes:
                yield from self._in_slices(most)

    def _in_slices(self, max_nodes: int) -> Iterator[Cut]:
        """The best for a prompt in equal slices that do not grow with what is before them."""
        for count in _SLICES:
            part = replace(
                self._prefill,
                compute_s=self._prefill.compute_s / count,
                hop_s=self._prefill.hop_s / count,
            )
            sliced = with_tokens(part, self._decode, self._tokens / count)
            solution = solve_throughput(replace(sliced, max_nodes=max_nodes), count)
            if solution is not None:
                yield solution.cut

    def _near(self, floor: PromptFloor, kinds: Kinds, cut: Cut, value: float) -> Iterator[Cut]:
        """Cuts one change away that may be used and whose bound is below the value, the lowest
        bound first."""
        cuts_by_length: dict[int, list[Cut]] = {}
        for other in dict.fromkeys(neighbours(cut, kinds)):
            if not violations(self._decode, other):
                cuts_by_length.setdefault(len(other.nodes), []).append(other)
        bounded = []
        for same in cuts_by_length.values():
            cuts = Cuts.of(same)
            request_s = floor.seconds(cuts) + self._tokens * scores(self._decode, cuts)[0]
            bound = self._floors(floor, cuts, request_s)
            bounded += [
                (float(low), index, other)
                for index, (low, other) in enumerate(zip(bound, same, strict=True))
            ]
        bounded.sort(key=lambda item: item[:2])
        rising = self._by_closer_bounds(
            floor, ((low, other) for low, _, other in bounded if low < value)
        )
        return (other for low, other in rising if low < value)
