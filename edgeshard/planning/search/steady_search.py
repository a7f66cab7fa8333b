"""The cut and load of the highest steady rate, and a bound that covers every load. Pure.

If there are few cuts, all are examined. Otherwise a *region* is a range of b, of m and of the
budgets that links leave to a step. The search queries it for a cut with W < V, the seconds between
two requests of the best known. Such a cut keeps every station within V. T0 is the least T of the
cuts that do, so at most v = C - T0 / V of its requests decode, and

    W >= T + (g / v - k) c0

A solver finds the least value of this, with the times of the smallest load and the requests of the
largest. If it is above V, the region is done; otherwise its cut is examined and the region split.
(docs/papers.md#the-steady-rate)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, isqrt
from typing import Any, Protocol

import numpy as np

from edgeshard.domain.requests.step import STEP_TOKENS
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.step_budget import chunk_room, link_tokens
from edgeshard.planning.search.rate_bound import TOLERANCE, asking
from edgeshard.planning.search.rate_scoring import Best, most_micro_batches
from edgeshard.planning.search.rate_search import Pool, count_out
from edgeshard.planning.search.steady_scoring import SteadyRates
from edgeshard.planning.solvers.bounded_search import Oracle
from edgeshard.planning.solvers.instance import STEP_TIMES, Instance, with_tokens
from edgeshard.planning.solvers.scoring import score, within
from edgeshard.planning.solvers.thresholds import ThresholdAnswer
from edgeshard.planning.solvers.walks import INFINITY, Booleans, Kinds, Problem

_NARROWING = (0.005, 0.02, 0.06, 0.15, 0.4)
"""A single load that may have better cuts is queried for cuts that are better by these parts."""


def search_steady(
    costs: Costs, kinds: Kinds | None, target: float | None = None
) -> tuple[Best, float]:
    """The best, and tokens a second that no cut exceeds; with a target, once it is known whether a
    cut exceeds it."""
    rates = SteadyRates(costs)
    best = count_out(rates, kinds)
    if best is not None:
        return best, best.rate
    pool = Pool(rates, kinds)
    bound = SteadyBound(costs, pool, Walks(rates.least, kinds), target=target).run()
    return pool.best, max(bound, pool.best.rate)


class Least(Protocol):
    """Answers the queries of a search, up to a limit."""

    @property
    def is_spent(self) -> bool:
        """Whether more questions are of no use."""
        ...

    @property
    def leaves_out(self) -> bool:
        """Whether cuts that the pool has are left out, so that asking again brings another one."""
        ...

    def ask(
        self, instance: Instance, station_limits: Sequence[tuple[Instance, float]], ceiling_s: float
    ) -> ThresholdAnswer:
        """The least R below the ceiling of an instance, of the cuts whose stations keep the
        thresholds of others."""
        ...


class Walks:
    """The solvers of walks answer, about all cuts."""

    leaves_out = False

    def __init__(self, instance: Instance, kinds: Kinds | None) -> None:
        self._kinds, _, self._effort, self._left = asking(instance, kinds)

    @property
    def is_spent(self) -> bool:
        return self._left <= 0

    def ask(
        self, instance: Instance, station_limits: Sequence[tuple[Instance, float]], ceiling_s: float
    ) -> ThresholdAnswer:
        """As described at `Least`."""
        self._left -= 1
        problem = Problem(instance, self._kinds, INFINITY)
        for stations, threshold_s in station_limits:
            if threshold_s < INFINITY:
                problem.restrict(Problem(stations, self._kinds, threshold_s))
        return Oracle(instance, self._kinds, self._effort).answer(problem, ceiling_s)


@dataclass(slots=True)
class _Region:
    """Loads from (low_b, low_m) to (high_b, high_m), and links that carry `budgets` tokens in a
    step; no cut of it has a higher rate than `most`."""

    low_b: int
    high_b: int
    low_m: int
    high_m: int
    budgets: tuple[float, ...]
    most: float
    closed: bool = False

    @property
    def is_single(self) -> bool:
        """Whether it is one load."""
        return self.low_b == self.high_b and self.low_m == self.high_m


class SteadyBound:
    """Looks for cuts by the answers of `least`, and bounds the rates of all: `most_rate` is a known
    upper limit. Cuts that could be better by no more than the tolerance, as a part, are left."""

    def __init__(
        self,
        costs: Costs,
        pool: Pool,
        least: Least,
        *,
        target: float | None = None,
        most_rate: float = INFINITY,
        tolerance: float = TOLERANCE,
    ) -> None:
        self._costs = costs
        self._pool = pool
        self._asked = least
        self._target = target
        self._most_rate, self._tolerance = most_rate, tolerance
        self._rounds = costs.problem.new_tokens - 1
        self._most_stages = min(
            len(costs.nodes), pool.rates.least.layers, pool.rates.least.max_nodes
        )
        self._link_tokens = link_tokens(costs)
        self._others = ~np.eye(len(costs.nodes), dtype=bool)

    def run(self) -> float:
        """Tokens a second that no cut exceeds at any load."""
        regions = self._first()
        # if any cut is in time, the quickest of a request is
        if self._costs.problem.max_time_per_token_s is not None:
            self._answer(self._costs.decode(Load()), (), INFINITY)
        while not self._asked.is_spent:
            region = max(regions, key=lambda one: one.most)
            if region.closed or region.most <= self._goal or self._is_exceeded:
                break
            before, cut_count = self._pool.best.rate, len(self._pool.known)
            self._ask(region)
            if self._pool.best.rate > before:
                self._pool.climb()
            if region.most > self._goal:
                again = self._asked.leaves_out and len(self._pool.known) > cut_count
                regions += self._split(region, again)
        most = max(region.most for region in regions)
        if self._target is None or self._pool.best.rate <= self._target < most:
            self._pool.climb()
        return most

    @property
    def _is_exceeded(self) -> bool:
        return self._target is not None and self._pool.best.rate > self._target

    @property
    def _goal(self) -> float:
        """Cuts of no higher rate than this are of no interest."""
        return max(self._pool.best.rate * (1 + self._tolerance), self._target or 0.0)

    def _first(self) -> list[_Region]:
        """The largest b on its own, and below it ranges in which it doubles."""
        # A cut of one node has no link, and the budget of the quickest.
        budgets = tuple(np.unique([*self._link_tokens.ravel(), STEP_TOKENS]).tolist())
        regions, high = list[_Region](), self._costs.problem.batch_limit
        while high:
            low = high if not regions else max(1, (high + 1) // 2)
            most = most_micro_batches(self._costs, low)
            if most:
                regions.append(_Region(low, high, 1, most, budgets, self._most_rate))
            high = low - 1
        return regions

    def _ask(self, region: _Region) -> None:
        """Lower the region's bound, and offer the cuts that are found."""
        tokens = self._costs.problem.new_tokens
        high_s = tokens / self._goal if self._goal else INFINITY
        low_s = max(tokens / region.most, self._between_s(region, high_s))
        for step in _NARROWING if high_s < INFINITY and region.is_single else ():
            if low_s >= high_s * (1 - step):
                break
            low_s = max(low_s, self._between_s(region, high_s * (1 - step)))
        region.most = tokens / low_s if low_s > 0 else INFINITY

    def _between_s(self, region: _Region, threshold_s: float) -> float:
        """The least W of the region's cuts, as far as it is below V, the threshold."""
        rooms = self._rooms(region)
        problem = self._costs.problem
        slow = self._slow(region)
        many = ceil(problem.prompt_tokens / min(rooms))
        decodes = self._rounds / region.high_b - many
        decode = self._costs.decode(Load(region.low_b, region.low_m))
        prompt = self._prompt(region, rooms, decode, alone=True)
        prompt_instance = (
            prompt if decodes >= 0 else self._prompt(region, rooms, decode, alone=False)
        )
        stations = with_tokens(prompt_instance, decode, max(0.0, decodes))
        # T >= the rounds of all chunks together (1 / n + (1 - 1 / n) / w), since the full ones are
        # the longest. And T >= the time all chunks take a slow link, plus one round. Either is a
        # sum, and a part of the rounds.
        slow_s = 0.0 if slow is None else _quickest_s(prompt, slow)
        if slow_s == INFINITY:
            return threshold_s
        parts: tuple[tuple[float, float], ...] = (
            (0.0, 1 / many + (1 - 1 / many) / max(region.high_m, self._most_stages)),
        )
        parts += ((slow_s * (1 - 1 / many), 1 / many),) if slow_s else ()
        beside = 1.0 + (many - 1) / max(region.low_m, problem.min_nodes)
        requests = float(min(problem.request_limit or INFINITY, region.high_b * region.high_m))
        station_limits = [(stations, threshold_s)]
        more = 0.0
        most_s = threshold_s * requests
        ceiling_s = min((most_s - beyond_s) / part for beyond_s, part in parts)
        for _ in range(2):  # the second time with the bound on a decode's stations from the first
            answer = self._least(slow, prompt, station_limits, ceiling_s)
            prompt_s, beyond_s, part = max(
                (beyond + share * answer.bound_s, beyond, share) for beyond, share in parts
            )
            decoding = requests - prompt_s / threshold_s if prompt_s < INFINITY else 0.0
            if decoding <= 0:
                return threshold_s
            more = self._rounds / decoding - beside
            if more <= 0:
                return min(threshold_s, prompt_s * min(1.0, (self._rounds / beside + 1) / requests))
            busiest_s = (threshold_s - prompt_s) / (more * region.low_m)
            if busiest_s <= 0:
                return threshold_s
            station_limits = [(stations, threshold_s), (decode, busiest_s)]
            if answer.cut is not None and within(score(decode, answer.cut).bottleneck_s, busiest_s):
                break  # it would be found again
        joint = self._least(
            slow,
            with_tokens(prompt, decode, more / part),
            station_limits,
            (threshold_s - beyond_s) / part,
        )
        return min(threshold_s, beyond_s + part * joint.bound_s)

    def _slow(self, region: _Region) -> Booleans | None:
        """[M, M] links of which every cut in the region has one; None if it may have none."""
        if region.budgets[-1] == STEP_TOKENS:
            return None
        return (self._link_tokens >= region.budgets[0]) & (self._link_tokens <= region.budgets[-1])

    def _least(
        self,
        slow: Booleans | None,
        instance: Instance,
        station_limits: Sequence[tuple[Instance, float]],
        ceiling_s: float,
    ) -> ThresholdAnswer:
        """The least R of an instance, of the cuts with one of the slow links whose stations keep
        the thresholds of others. The cut of the answer is offered, and may have none of these
        links."""
        if slow is None:
            return self._answer(instance, station_limits, ceiling_s)
        if any(_quickest_s(other, slow) > threshold_s for other, threshold_s in station_limits):
            return ThresholdAnswer(None, ceiling_s)
        # The least extra cost of one of these links over all others is paid here, and by no link
        # again.
        paid_s = _quickest_s(instance, slow) - _quickest_s(instance, self._others & ~slow)
        if not 0 < paid_s < INFINITY:
            return self._answer(instance, station_limits, ceiling_s)
        if paid_s >= ceiling_s:
            return ThresholdAnswer(None, ceiling_s)
        freed = replace(instance, hop_s=np.where(slow, instance.hop_s - paid_s, instance.hop_s))
        answer = self._answer(freed, station_limits, ceiling_s - paid_s)
        return ThresholdAnswer(answer.cut, answer.bound_s + paid_s)

    def _answer(
        self, instance: Instance, station_limits: Sequence[tuple[Instance, float]], ceiling_s: float
    ) -> ThresholdAnswer:
        """The answer to a question; its cut is offered."""
        answer = self._asked.ask(instance, station_limits, ceiling_s)
        self._pool.offer(answer.cut)
        return answer

    def _rooms(self, region: _Region) -> list[int]:
        """The token budgets that a step of this region may have besides its decodes."""
        budgets = np.array(region.budgets)
        rooms = [chunk_room(budgets, batch) for batch in range(region.low_b, region.high_b + 1)]
        return [int(room) for room in np.unique(np.concatenate(rooms))]

    def _prompt(
        self, region: _Region, rooms: Sequence[int], decode: Instance, *, alone: bool
    ) -> Instance:
        """The least time of the steps of a whole prompt together, with any of these budgets and
        without links slower than the region's. Unless `alone`, its rest may go with another
        prompt."""
        costs = self._costs
        tokens = self._costs.problem.prompt_tokens
        batch = region.low_b
        times: dict[str, Any] = {}
        for room in rooms:
            count = ceil(tokens / room)
            full, rest = costs.mixed(batch, room), costs.mixed(batch, tokens - (count - 1) * room)
            for name in STEP_TIMES:
                one = getattr(full, name)
                # A missing link takes for ever, and no full chunk over it would be no number.
                value = (
                    getattr(rest, name) + (count - 1) * one if count > 1 else getattr(rest, name)
                )
                value = value if alone else np.minimum(value, tokens / room * one)
                times[name] = np.minimum(times.get(name, value), value)
        times["hop_s"] = np.where(self._link_tokens < region.budgets[0], INFINITY, times["hop_s"])
        return replace(decode, **times)

    def _split(self, region: _Region, again: bool) -> list[_Region]:
        """Halve the region by links, by b or by m; a region that is a single load is done unless it
        is to be queried `again`. Returns the new half."""
        if len(region.budgets) > 1:
            middle = len(region.budgets) // 2
            upper = replace(region, budgets=region.budgets[middle:])
            region.budgets = region.budgets[:middle]
            return [upper]
        if region.high_b > region.low_b:
            middle = (region.low_b + region.high_b + 1) // 2
            upper = replace(
                region,
                low_b=middle,
                high_m=min(region.high_m, most_micro_batches(self._costs, middle)),
            )
            region.high_b = middle - 1
            return [upper] if upper.high_m >= upper.low_m else []
        if region.high_m > region.low_m:
            middle = max(region.low_m + 1, isqrt(region.low_m * region.high_m) + 1)
            upper = replace(region, low_m=middle)
            region.high_m = middle - 1
            return [upper]
        region.closed = not again
        return []


def _quickest_s(instance: Instance, links: Booleans) -> float:
    """Seconds of the quickest hop over these links."""
    return float(instance.hop_s[links].min(initial=INFINITY))
