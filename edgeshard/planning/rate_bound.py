"""Cuts that may have the highest rate, and what no cut exceeds, for more cuts than can be counted out. Pure.

The solvers know one phase: "least R with every station <= T". Prompt and answer together make such a phase, with the
seconds of the whole answer in one,

    R = R_pre + (G - 1) R_dec            B <= B_pre + (G - 1) B_dec

so for the denominator D of the rate (`rate_scoring`) of any cut at m micro-batches

    D >= R + (m - 1) beta                where beta is the least B_pre of any cut
    D >= m B                             D >= r + (m - 1) B, where r is the least R_pre of any cut

A *fact* (T, f) says that every cut with B <= T has R >= f. Facts of one b and one m hold for all larger ones, which
only take longer and leave fewer cuts. A region is a range of b and of m with its facts; the region of the highest bound
is asked whether a cut better than the best known exists, is split when its facts cannot tell, until none can be better
or the questions are spent. What is left is the certified bound.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field, replace

import numpy as np

from edgeshard.planning.all_cuts import Cuts
from edgeshard.planning.costs import Costs, Load
from edgeshard.planning.instance import Cut, Floats, Instance
from edgeshard.planning.rate_scoring import most_micro_batches
from edgeshard.planning.rate_search import Pool
from edgeshard.planning.scoring import SLACK, score
from edgeshard.planning.solvers import classes, general
from edgeshard.planning.solvers.bounded_search import Oracle
from edgeshard.planning.solvers.problem import Kinds, single_kinds
from edgeshard.planning.solvers.thresholds import STRICTLY

TOLERANCE = 1e-3
"""Cuts that could be better by no more than this part are left; the gap says so."""
QUESTIONS = 120
"""With 4 classes of boxes and 80 layers one takes 40 ms."""
QUESTIONS_OF_SINGLE_BOXES = 30
_NARROWING = 6
"""Questions for the least B_pre."""
_INFINITY = float("inf")


def whole_answer(costs: Costs, load: Load) -> Instance:
    """The seconds of a prompt and its whole answer as one phase, under the memory of this load."""
    prefill, decode, more = costs.prefill(load), costs.decode(load), costs.problem.new_tokens - 1
    if not more:
        return prefill
    names = ("compute_s", "embed_s", "head_s", "overhead_s", "hop_s", "return_s", "latency_s")
    return replace(decode, **{name: getattr(prefill, name) + more * getattr(decode, name) for name in names})


@dataclass(slots=True)
class _Region:
    """Loads from (low_b, low_m) to (high_b, high_m) with facts of (low_b, low_m) or less, T rising."""

    low_b: int
    high_b: int
    low_m: int
    high_m: int
    oracle: Oracle
    facts: list[tuple[float, float]] = field(default_factory=list)
    beta: float = 0.0
    least_prefill_s: float = 0.0
    tightened: bool = False
    closed: bool = False
    witness: Cut | None = None

    def learn(self, threshold_s: float, least_s: float) -> None:
        insort(self.facts, (threshold_s, least_s))
        for index in range(len(self.facts) - 2, -1, -1):  # what holds up to a larger T holds up to this one
            threshold, least = self.facts[index]
            self.facts[index] = (threshold, max(least, self.facts[index + 1][1]))

    def seconds(self, m: Floats) -> Floats:
        """[len(m)] the least D of any cut at (low_b, m)."""
        least = np.full(len(m), _INFINITY)
        low = 0.0
        for threshold, round_s in [*self.facts, (_INFINITY, 0.0)]:
            corner = np.maximum(round_s + (m - 1) * self.beta, m * low)
            corner = np.maximum(corner, self.least_prefill_s + (m - 1) * low)
            least = np.minimum(least, corner)
            low = threshold
            if threshold == _INFINITY:
                break
        return least


class RateBound:
    """One search; `bound` afterwards is a rate that no cut exceeds at any load."""

    def __init__(self, costs: Costs, pool: Pool, kinds: Kinds | None) -> None:
        self._costs, self._pool = costs, pool
        few = kinds is not None and len(kinds.members) <= classes.MOST_KINDS + 1
        self._kinds = kinds if few and kinds is not None else single_kinds(pool.rates.least)
        self._effort = classes.EFFORT if few else general.EFFORT_PER_THRESHOLD
        self._left = QUESTIONS if few else QUESTIONS_OF_SINGLE_BOXES
        self._new = costs.problem.new_tokens
        self._limit = costs.problem.request_limit
        self.bound = _INFINITY

    def run(self) -> None:
        high = self._costs.problem.batch_limit
        regions = []
        while high:
            low = high if high == self._costs.problem.batch_limit else max(1, (high + 1) // 2)
            regions.append(self._region(low, high, 1, most_micro_batches(self._costs, low)))
            high = low - 1
        for region in regions:
            self._ask(region, _INFINITY, _INFINITY)
            self._keep_time(region)
        self._pool.climb()
        while self._left > 0:
            region = max(regions, key=lambda one: self._most(one)[0])
            most, m = self._most(region)
            if most <= self._goal or region.closed:
                break
            self._narrow(region, m, regions)
        self._pool.climb()
        self.bound = max(self._pool.best.rate, *(self._most(region)[0] for region in regions))

    def _keep_time(self, region: _Region) -> None:
        """With `max_time_per_token_s`: the most m for which any cut keeps it, by bisecting; 0 when none does."""
        limit_s = self._costs.problem.max_time_per_token_s
        if limit_s is None:
            return
        oracle = Oracle(self._costs.decode(Load(region.low_b, region.low_m)), self._kinds, self._effort)
        low, high = region.low_m - 1, region.high_m  # what is kept, and what may be
        m = region.low_m
        while low < high:
            self._left -= 1
            answer = oracle(limit_s / m, limit_s * (1 + 2 * SLACK))
            self._pool.offer(answer.cut)
            if answer.cut is None and answer.bound_s > limit_s:
                high = m - 1
            else:
                low = m
            m = (low + high + 1) // 2
        region.high_m = high

    @property
    def _goal(self) -> float:
        return self._pool.best.rate * (1 + TOLERANCE)

    def _region(self, low_b: int, high_b: int, low_m: int, high_m: int, parent: _Region | None = None) -> _Region:
        instance = whole_answer(self._costs, Load(low_b, low_m))
        made = _Region(low_b, high_b, low_m, high_m, Oracle(instance, self._kinds, self._effort))
        if parent is not None:
            made.facts = list(parent.facts)
            made.beta, made.least_prefill_s = parent.beta, parent.least_prefill_s
        return made

    def _most(self, region: _Region) -> tuple[float, int]:
        """What no load of a region exceeds, and the m at which that is."""
        m = np.arange(region.low_m, region.high_m + 1, dtype=np.float64)
        if not len(m):
            return 0.0, region.low_m
        requests = region.high_b * m if self._limit is None else np.minimum(region.high_b * m, self._limit)
        seconds = region.seconds(m)
        with np.errstate(divide="ignore"):
            rates = requests * self._new / seconds
        index = int(np.argmax(rates))
        return float(rates[index]), region.low_m + index

    def _ask(self, region: _Region, threshold_s: float, ceiling_s: float) -> None:
        """Learn the least R with every station <= T, as far as it is below the ceiling; offer the cut."""
        self._left -= 1
        answer = region.oracle(threshold_s, ceiling_s)
        region.learn(threshold_s, answer.bound_s)
        if answer.cut is not None:
            region.witness = answer.cut
            self._pool.offer(answer.cut)

    def _narrow(self, region: _Region, m: int, regions: list[_Region]) -> None:
        """Ask whether a cut beats the best at m; where that is known and does not help, split or tighten."""
        requests = region.high_b * m if self._limit is None else min(region.high_b * m, self._limit)
        needed = requests * self._new / self._goal if self._goal else _INFINITY
        threshold = needed / m
        if m > 1:
            threshold = min(threshold, (needed - region.least_prefill_s) / (m - 1))
        ceiling = needed - (m - 1) * region.beta
        known = next((least for limit, least in region.facts if limit >= threshold * STRICTLY), 0.0)
        if known < ceiling * STRICTLY:
            before = self._most(region)[0], self._pool.best.rate
            self._ask(region, threshold, ceiling)
            if (self._most(region)[0], self._pool.best.rate) != before:
                return
        self._divide(region, m, regions)

    def _divide(self, region: _Region, m: int, regions: list[_Region]) -> None:
        if region.high_b > region.low_b:
            middle = (region.low_b + region.high_b + 1) // 2
            most = min(region.high_m, most_micro_batches(self._costs, middle))
            regions.append(self._region(middle, region.high_b, region.low_m, most, region))
            region.high_b = middle - 1
        elif not region.tightened and m > 1:
            self._tighten(region)
        elif m > region.low_m and not self._fits(region, m):
            middle = region.low_m + max(1, (m - region.low_m + 1) // 2)
            regions.append(self._region(region.low_b, region.high_b, middle, region.high_m, region))
            regions[-1].tightened = True
            region.high_m = middle - 1
        else:
            region.closed = True

    def _fits(self, region: _Region, m: int) -> bool:
        """Whether the cut that the facts leave keeps its memory at m: then less memory would not tell more."""
        if region.witness is None:
            return False
        rates = self._pool.rates
        figures = rates.figures(rates.places(Cuts.of([region.witness])), region.low_b)
        return bool(figures.micro_batches[0] >= m)

    def _tighten(self, region: _Region) -> None:
        """The least R_pre and, as far as a few questions tell, the least B_pre at this b."""
        region.tightened = True
        load = Load(region.low_b, region.low_m)
        oracle = Oracle(self._costs.prefill(load), self._kinds, self._effort)
        answer = oracle(_INFINITY, _INFINITY)
        self._left -= 1
        region.least_prefill_s = max(region.least_prefill_s, answer.bound_s)
        if answer.cut is None:
            return
        low, high = region.beta, self._busiest(region.low_b)
        for _ in range(_NARROWING):
            threshold = (low + high) / 2
            answer = oracle(threshold, _INFINITY)
            self._left -= 1
            self._pool.offer(answer.cut)
            if answer.cut is None and answer.bound_s == _INFINITY:
                low = threshold
            elif answer.cut is not None:
                high = threshold
            else:
                break
        region.beta = low

    def _busiest(self, batch: int) -> float:
        """B_pre of the best cut."""
        best = self._pool.best
        if best.cut is None:
            return _INFINITY
        return score(self._costs.prefill(Load(batch)), best.cut).bottleneck_s
