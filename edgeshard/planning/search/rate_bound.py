"""Cuts that may have the highest rate, and an upper bound of all rates, for more cuts than can be
counted out. Pure.

P and Q are the busiest stations of a prompt and of a token. Then the denominator of a cut's rate
(`rate_scoring`) is

    D = max( R + (m - 1) P,  R_pre + (m - 1) P + (G - 1) m Q )         R = R_pre + (G - 1) R_dec

R is a round of one phase that has the seconds of the prompt and of the whole answer. So a solver
finds the least R and the least R_pre of the cuts whose stations keep given thresholds in both
phases. A *rectangle* holds the cuts with P and Q in two ranges. Its least R and R_pre under the
upper ends, with the lower ends put into D, bound the D of all of them.

A *region* is a range of b and of m with its rectangles. The least values at its smallest b and m
are least for all of it: larger loads only take longer and leave fewer cuts. The search takes the
region of the highest bound and queries whether it has a cut better than the best known. Then it
splits the region or its rectangle, until none can be better or the queries are spent.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil, sqrt

import numpy as np

from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.search.rate_scoring import most_micro_batches
from edgeshard.planning.search.rate_search import Pool
from edgeshard.planning.solvers import classes, general
from edgeshard.planning.solvers.all_cuts import Cuts
from edgeshard.planning.solvers.bounded_search import Effort, Oracle
from edgeshard.planning.solvers.instance import Cut, Floats, Instance, with_tokens
from edgeshard.planning.solvers.scoring import SLACK, score
from edgeshard.planning.solvers.walks import INFINITY, Kinds, Problem, single_kinds

TOLERANCE = 1e-3
"""Cuts that could be better by no more than this part are left; the gap includes it."""
QUESTIONS = (30, 400)
"""The fewest and the most; in between as many as make WORK."""
WORK = 2_200_000
"""Questions times kinds ** 2.5 times layers. With 12 kinds and 80 layers one takes 0.1 s, with 5
kinds 5 ms."""
_STEPS = 5000
"""Questions and splits in all."""
_OF_A_RANGE = 4
"""Questions about a range of b before it is split."""
_NARROWING = 10
"""Questions for the least station of a phase."""
_NEAR = 0.005
"""A least station is computed to within this part of itself, or to within the change that makes
this part of the time needed."""
_NEAR_OF_SINGLE_NODES = 0.02
_THIN = 0.1
"""A rectangle that matters by less than this part of the tolerance is not split."""


def whole_answer(prefill: Instance, decode: Instance, new_tokens: int) -> Instance:
    """The seconds of a prompt and its whole answer as one phase, under the memory of `decode`."""
    return with_tokens(prefill, decode, new_tokens - 1) if new_tokens > 1 else prefill


def asking(instance: Instance, kinds: Kinds | None) -> tuple[Kinds, bool, Effort, int]:
    """The kinds of nodes for the solvers, whether they are few, the effort for a query, and the
    number of queries."""
    few = kinds is not None and len(kinds.members) <= classes.MOST_KINDS + 1
    node_kinds = kinds if few and kinds is not None else single_kinds(instance)
    one = len(node_kinds.members) ** 2.5 * instance.layers
    effort = classes.EFFORT if few else general.EFFORT_PER_THRESHOLD
    return node_kinds, few, effort, min(QUESTIONS[1], max(QUESTIONS[0], int(WORK / one)))


@dataclass(slots=True)
class _Rectangle:
    """The cuts with P in (p_low, p_high] and Q in (q_low, q_high]: what their R and R_pre are at
    the least.

    `is_solved` and `known_prefill` mean that another query would find no more; `cut` has the least
    R, with its own P and Q.
    """

    p_low: float = 0.0
    p_high: float = INFINITY
    q_low: float = 0.0
    q_high: float = INFINITY
    round_s: float = 0.0
    prefill_s: float = 0.0
    is_solved: bool = False
    known_prefill: bool = False
    cut: Cut | None = None
    p: float = INFINITY
    q: float = INFINITY

    def split(self, p: float = INFINITY, q: float = INFINITY) -> _Rectangle:
        """Cut it at P = p or Q = q; this is the lower part then, the upper one is returned."""
        upper = replace(self)
        if p < self.p_high:
            self.p_high, upper.p_low = p, p
        else:
            self.q_high, upper.q_low = q, q
        # The least R of all is the least of the part that contains it.
        self.is_solved = self.is_solved and (
            self.cut is None or (self.p <= self.p_high and self.q <= self.q_high)
        )
        self.known_prefill = False
        return upper


@dataclass(slots=True)
class _Region:
    """Loads from (low_b, low_m) to (high_b, high_m); rectangles of (low_b, low_m) or less."""

    low_b: int
    high_b: int
    low_m: int
    high_m: int
    rectangles: list[_Rectangle] = field(default_factory=lambda: [_Rectangle()])
    queries: int = 0
    raised: bool = False
    closed: bool = False

    def copies(self) -> list[_Rectangle]:
        """The rectangles for larger loads, whose lower bounds may be higher."""
        return [replace(one, is_solved=False, known_prefill=False) for one in self.rectangles]


@dataclass(frozen=True, slots=True)
class _Phases:
    """The instances of one (b, m): prompt and whole answer as one phase, the prompt, a token."""

    whole: Instance
    prefill: Instance
    decode: Instance
    whole_oracle: Oracle
    prefill_oracle: Oracle


class RateBound:
    """One search; `bound` afterwards is a rate that no cut exceeds at any load."""

    def __init__(self, costs: Costs, pool: Pool, kinds: Kinds | None) -> None:
        self._costs, self._pool = costs, pool
        self._kinds, self._few, self._effort, self._left = asking(pool.rates.least, kinds)
        self._near = _NEAR if self._few else _NEAR_OF_SINGLE_NODES
        self._more = costs.problem.new_tokens - 1
        self._limit = costs.problem.request_limit
        self._limit_s = costs.problem.max_time_per_token_s
        self._phases: dict[tuple[int, int], _Phases] = {}
        self._regions: list[_Region] = []
        self.bound = INFINITY

    def run(self, target: float | None = None) -> None:
        """Search to the end; with a target, until it is known whether a cut has a higher rate."""
        high = self._costs.problem.batch_limit
        while high:
            low = high if not self._regions else max(1, (high + 1) // 2)
            self._regions.append(_Region(low, high, 1, most_micro_batches(self._costs, low)))
            high = low - 1
        for region in self._regions:
            self._ask(region, region.rectangles[0], INFINITY)
            self._keep_time(region)
        self._pool.climb()
        for _ in range(_STEPS):
            if self._left <= 0:
                break
            region = max(self._regions, key=lambda one: self._most(one)[0])
            most, m, rectangle = self._most(region)
            if not self._goal or most <= self._goal or region.closed:
                break
            if target is not None and (most <= target or self._pool.best.rate > target):
                break
            before = self._pool.best.rate
            self._narrow(region, m, rectangle)
            if self._pool.best.rate > before:
                self._pool.climb()
        self._pool.climb()
        self.bound = max(self._pool.best.rate, *(self._most(region)[0] for region in self._regions))

    @property
    def _goal(self) -> float:
        return self._pool.best.rate * (1 + TOLERANCE)

    def _requests(self, region: _Region, m: Floats) -> Floats:
        most = region.high_b * m
        return most if self._limit is None else np.minimum(most, self._limit)

    def _most(self, region: _Region) -> tuple[float, int, _Rectangle]:
        """An upper bound of a region's rates, and the m and the rectangle that it is of."""
        if region.high_m < region.low_m:
            return 0.0, region.low_m, region.rectangles[0]
        m = np.arange(region.low_m, region.high_m + 1, dtype=np.float64)
        names = ("p_low", "q_low", "round_s", "prefill_s")
        p, q, round_s, prefill_s = (
            np.array([getattr(one, name) for one in region.rectangles])[:, None] for name in names
        )
        seconds = np.maximum(round_s, prefill_s + self._more * m * q) + (m - 1) * p
        if self._limit_s is not None:
            seconds[m * q > self._limit_s * (1 + SLACK)] = INFINITY
        least = seconds.min(axis=0)
        rates = self._requests(region, m) * (self._more + 1) / least
        index = int(np.argmax(rates))
        return (
            float(rates[index]),
            region.low_m + index,
            region.rectangles[int(np.argmin(seconds[:, index]))],
        )

    def _at(self, region: _Region) -> _Phases:
        key = region.low_b, region.low_m
        if key not in self._phases:
            prefill, decode = self._costs.prefill(Load(*key)), self._costs.decode(Load(*key))
            whole = whole_answer(prefill, decode, self._more + 1)
            oracles = (Oracle(instance, self._kinds, self._effort) for instance in (whole, prefill))
            self._phases[key] = _Phases(whole, prefill, decode, *oracles)
        return self._phases[key]

    def _ask(self, region: _Region, rectangle: _Rectangle, ceiling_s: float) -> None:
        """Learn the least R of a rectangle's cuts, as far as it is below the ceiling; offer the
        cut."""
        phases = self._at(region)
        problem = self._restricted(phases, phases.whole, rectangle)
        answer = phases.whole_oracle.answer(problem, ceiling_s)
        self._count(region)
        rectangle.round_s = max(rectangle.round_s, answer.bound_s)
        rectangle.is_solved = (
            answer.cut is not None
            or answer.bound_s < ceiling_s * (1 - SLACK)
            or ceiling_s == INFINITY
        )
        rectangle.cut = answer.cut
        if answer.cut is not None:
            self._pool.offer(answer.cut)
            rectangle.p = score(phases.prefill, answer.cut).bottleneck_s
            rectangle.q = score(phases.decode, answer.cut).bottleneck_s

    def _ask_prefill(self, region: _Region, rectangle: _Rectangle, ceiling_s: float) -> None:
        """The same for R_pre."""
        phases = self._at(region)
        problem = self._restricted(phases, phases.prefill, rectangle)
        answer = phases.prefill_oracle.answer(problem, ceiling_s)
        self._count(region)
        rectangle.prefill_s = max(rectangle.prefill_s, answer.bound_s)
        rectangle.known_prefill = True
        self._pool.offer(answer.cut)

    def _raise(self, region: _Region, m: int, needed: float) -> None:
        """The least P and the least Q of any cut, as far as it matters to a D of `needed` seconds
        at m."""
        region.raised = True
        phases = self._at(region)
        p = min(one.p_low for one in region.rectangles)
        q = min(one.q_low for one in region.rectangles)
        if m > 1:
            p = self._least_station(region, phases.prefill, p, self._near * needed / (m - 1))
        if self._more:
            q = self._least_station(
                region, phases.decode, q, self._near * needed / (self._more * m)
            )
        for rectangle in region.rectangles:
            rectangle.p_low, rectangle.q_low = max(rectangle.p_low, p), max(rectangle.q_low, q)

    def _least_station(self, region: _Region, phase: Instance, low: float, near: float) -> float:
        """A proven lower bound of one phase's busiest station, to about `near`; the cuts found are
        offered."""
        best = self._pool.best.cut
        if best is None:
            return low
        oracle = Oracle(phase, self._kinds, self._effort)
        high = score(phase, best).bottleneck_s
        near = max(near, self._near * high)
        threshold = high - near
        for _ in range(_NARROWING):
            if high - low <= near:
                break
            answer = oracle(threshold, INFINITY)
            self._count(region)
            if answer.cut is not None:
                self._pool.offer(answer.cut)
                high = score(phase, answer.cut).bottleneck_s
            elif answer.bound_s == INFINITY:
                low = threshold
            else:  # none was found, but there may be one
                high = threshold
            threshold = (low + high) / 2
        return low

    def _count(self, region: _Region) -> None:
        self._left -= 1
        region.queries += 1

    def _restricted(self, phases: _Phases, instance: Instance, rectangle: _Rectangle) -> Problem:
        problem = Problem(instance, self._kinds, INFINITY)
        for phase, threshold in (
            (phases.prefill, rectangle.p_high),
            (phases.decode, rectangle.q_high),
        ):
            if threshold < INFINITY:
                problem.restrict(Problem(phase, self._kinds, threshold))
        return problem

    def _narrow(self, region: _Region, m: int, rectangle: _Rectangle) -> None:
        """Remove the part of a rectangle that cannot be better at m, query the rest, and split the
        part that stays open."""
        needed = float(self._requests(region, np.array([float(m)]))[0]) * (self._more + 1)
        needed /= self._goal
        steady = self._more * m
        p = q = INFINITY
        if m > 1:
            p = (
                needed - max(rectangle.round_s, rectangle.prefill_s + steady * rectangle.q_low)
            ) / (m - 1)
        if steady:
            q = (needed - rectangle.prefill_s - (m - 1) * rectangle.p_low) / steady
        if region.high_b > region.low_b and region.queries >= _OF_A_RANGE:
            self._split_batches(region)
        elif not self._few and rectangle.is_solved and self._split_memory(region, m, rectangle):
            pass  # of many kinds a question is dear: first the loads that are too large
        elif not region.raised:
            self._raise(region, m, needed)
        elif p < rectangle.p_high * (1 - SLACK):
            region.rectangles.append(rectangle.split(p=p))
        elif q < rectangle.q_high * (1 - SLACK):
            region.rectangles.append(rectangle.split(q=q))
        elif not rectangle.is_solved:
            self._ask(region, rectangle, needed - (m - 1) * rectangle.p_low)
        elif not rectangle.known_prefill and steady:
            self._ask_prefill(
                region, rectangle, needed - (m - 1) * rectangle.p_low - steady * rectangle.q_low
            )
        elif not (rectangle.is_solved and self._split_memory(region, m, rectangle)):
            self._bisect(region, m, rectangle, needed)

    def _bisect(self, region: _Region, m: int, rectangle: _Rectangle, needed: float) -> None:
        """Halve the rectangle along the side that matters most to D; if neither matters, the region
        is done."""
        by_p = (m - 1) * (rectangle.p_high - rectangle.p_low) if m > 1 else 0.0
        by_q = self._more * m * (rectangle.q_high - rectangle.q_low) if self._more else 0.0
        if max(by_p, by_q) <= _THIN * TOLERANCE * needed:
            if region.high_b > region.low_b:
                self._split_batches(region)
            else:
                region.closed = True
        elif by_p >= by_q:
            region.rectangles.append(rectangle.split(p=(rectangle.p_low + rectangle.p_high) / 2))
        else:
            region.rectangles.append(rectangle.split(q=(rectangle.q_low + rectangle.q_high) / 2))

    def _split_batches(self, region: _Region) -> None:
        middle = (region.low_b + region.high_b + 1) // 2
        most = min(region.high_m, most_micro_batches(self._costs, middle))
        self._regions.append(_Region(middle, region.high_b, region.low_m, most, region.copies()))
        region.high_b, region.queries = middle - 1, 0

    def _split_memory(self, region: _Region, m: int, rectangle: _Rectangle) -> bool:
        """If the cut that keeps the bound up does not fit at m: the loads for which it does, and
        the others."""
        if rectangle.cut is None:
            return False
        rates = self._pool.rates
        figures = rates.figures(rates.places(Cuts.of([rectangle.cut])), region.low_b)
        most = max(region.low_m, int(figures.micro_batches[0]))
        if most >= m:
            return False
        # Between loads that it fits and loads that it does not, so that few regions end where
        # memory binds.
        middle = max(most + 1, ceil(sqrt((most + 1) * m)))
        self._regions.append(
            _Region(
                region.low_b,
                region.high_b,
                middle,
                region.high_m,
                region.copies(),
                raised=self._few,
            )
        )
        region.high_m = middle - 1
        return True

    def _keep_time(self, region: _Region) -> None:
        """With `max_time_per_token_s`: the most m for which any cut keeps it, by bisecting; 0 when
        none does."""
        if self._limit_s is None:
            return
        decode = self._at(region).decode
        oracle = Oracle(decode, self._kinds, self._effort)
        # the part that is kept, and the part that may be
        low = region.low_m - 1
        high = region.high_m
        m = region.low_m
        while low < high:
            self._left -= 1
            answer = oracle(self._limit_s / m, self._limit_s * (1 + 2 * SLACK))
            self._pool.offer(answer.cut)
            if answer.cut is None and answer.bound_s > self._limit_s:
                high = m - 1
            else:
                low = m
            m = (low + high + 1) // 2
        region.high_m = high
