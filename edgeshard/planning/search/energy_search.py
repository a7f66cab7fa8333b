"""The cut and load of the fewest joules per token, and what no cut takes less than at any load.
Pure.

Many cuts are scored at once, each at the best load it can have. With I the idle watts of a cut's
nodes, and C the joules above idle that one micro-batch's prompts and answers take,

    joules per token = I / rate + C / (b G)

For one cut and one b only the rate depends on m, and it never falls with m (`rate_scoring`). So the
best m is the largest allowed, and what bounds the rates of larger b bounds the energy: no C shrinks
as b grows.

A single request has a search of its own (`energy_alone`). More requests use throughput's method. If
there are few cuts, all are examined, each at every b and m. Otherwise solvers of sums and the plan
of the highest rate propose some, which are improved step by step. The lower bound then comes from
the bound on the rate, r, and from sums. With I the idle watts of a cut's nodes and C the joules
above idle of a micro-batch's computing,

    joules per token  >=  C / (b G) + I / r
    joules per token  >=  (C + idle_w computing) / (b G)

since a node stands at least as long as it computes. The first term may use the way around the ring
instead, for the nodes that every cut has. All are sums over stages, for which the solvers find the
least of all cuts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.energy import watts
from edgeshard.planning.search.energy_alone import EnergyAlone, bounded, standing, weighted
from edgeshard.planning.search.load_search import RateSearch, search_rate, sizes
from edgeshard.planning.search.rate_scoring import (
    Best,
    CutRates,
    CutTable,
    Figures,
    most_micro_batches,
)
from edgeshard.planning.search.rate_search import Pool, count_out
from edgeshard.planning.search.spare import kinds_of, without_spare
from edgeshard.planning.solvers.all_cuts import Cuts
from edgeshard.planning.solvers.classes import MOST_KINDS
from edgeshard.planning.solvers.instance import Cut, Floats, Instance, with_tokens
from edgeshard.planning.solvers.solve import solve_latency
from edgeshard.planning.solvers.walks import INFINITY, Integers, Kinds


@dataclass(frozen=True, slots=True)
class EnergyFigures:
    """[K] tokens per joule at one b. A single request, b = m = 1, is left out: its prompt goes in
    slices."""

    figures: Figures
    idle_w: Floats
    computing_j: Floats

    @property
    def micro_batches(self) -> Integers:
        return self.figures.micro_batches

    def rates(self) -> Floats:
        tokens_per_s = np.where(self.micro_batches >= self._least, self.figures.rates(), 0.0)
        return self._per_joule(tokens_per_s, self.figures.batch)

    def first(self, rates: Floats) -> int:
        return self.figures.first(rates)

    def fewest(self, index: int) -> int:
        return max(self._least, self.figures.fewest(index))

    def at_most(self, batch: int) -> Floats:
        return self._per_joule(self.figures.at_most(batch), batch)

    @property
    def _least(self) -> int:
        return 2 if self.figures.batch == 1 else 1

    def _per_joule(self, tokens_per_s: Floats, batch: int) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            joules = self.idle_w / tokens_per_s + self.computing_j / (
                batch * self.figures.new_tokens
            )
            return np.where(tokens_per_s > 0, 1.0 / joules, 0.0)


class EnergyRates:
    """The tokens per joule of one problem's cuts."""

    def __init__(self, costs: Costs) -> None:
        self.rates = CutRates(costs)
        self.problem, self.least = costs.problem, self.rates.least
        self._idle_w, self._more_w = watts(costs)

    def places(self, cuts: Cuts) -> CutTable:
        return self.rates.places(cuts)

    def figures(self, places: CutTable, batch: int) -> EnergyFigures:
        prompt, token = (places.stages(table) for table in self.rates.tables(batch))
        seconds = prompt + (self.problem.new_tokens - 1) * token
        computing_j = (self._more_w.take(places.nodes) * seconds).sum(axis=0)
        idle_w = self._idle_w.take(places.nodes).sum(axis=0)
        return EnergyFigures(self.rates.figures(places, batch), idle_w, computing_j)


_OWN = (0.5, 0.0, 1.0)
"""Parts of a node's idle time that are bounded by its own computing instead of the rate; the first
one suits most."""


@dataclass(frozen=True, slots=True)
class EnergySearch:
    """The best cut and its load; no cut takes less than `bound_j` joules per token at any load
    allowed."""

    cut: Cut
    load: Load
    bound_j: float


def search_energy(costs: Costs) -> EnergySearch | None:
    """The best cut; None if no cut keeps every limit. The watts of all nodes are known."""
    some, kinds, index = without_spare(costs, split_by_watts(costs, kinds_of(costs)))
    tokens = costs.problem.new_tokens
    alone = EnergyAlone(some).run()
    bounds_j = [] if alone is None else [alone.bound / tokens]
    best = Best()
    if costs.problem.request_limit != 1:
        best, bound_j = _search_loads(some, kinds, None if alone is None else alone.cut)
        bounds_j.append(bound_j)
    cut, load = best.cut, best.load
    if alone is not None and best.rate * alone.value <= tokens:
        cut, load = alone.cut, Load()
    if cut is None:
        return None
    return EnergySearch(
        Cut(tuple(index[node] for node in cut.nodes), cut.ends), load, min(bounds_j)
    )


def _search_loads(costs: Costs, kinds: Kinds | None, alone: Cut | None) -> tuple[Best, float]:
    """The best of two requests and more, and joules per token that none is below."""
    rates = EnergyRates(costs)
    best = count_out(rates, kinds)
    if best is not None:
        return best, 1.0 / best.rate if best.rate > 0 else INFINITY
    fastest = search_rate(costs)
    pool = Pool(rates, kinds)
    pool.offer(alone)
    pool.offer(fastest.cut)
    bound_j = _Sums(costs, kinds, fastest).offer_to(pool)
    pool.climb()
    return pool.best, min(bound_j, 1.0 / pool.best.rate) if pool.best.rate > 0 else bound_j


def split_by_watts(costs: Costs, kinds: Kinds | None) -> Kinds | None:
    """Kinds whose nodes have the same watts too."""
    devices = [node.device for node in costs.nodes]
    return (
        None
        if kinds is None
        else kinds.split(lambda node: (devices[node].idle_w, devices[node].busy_w))
    )


class _Sums:
    """Instances that solvers of sums find good cuts of, and bounds, one for each range of b."""

    def __init__(self, costs: Costs, kinds: Kinds | None, fastest: RateSearch) -> None:
        self._costs, self._rate = costs, fastest.rate_bound
        self._idle_w, self._more_w = watts(costs)
        self._limit_s = costs.problem.max_time_per_token_s
        self._few = kinds is not None and len(kinds.members) <= MOST_KINDS + 1

    def offer_to(self, pool: Pool) -> float:
        """Offer the cuts; joules per token that no cut is below at any load."""
        if self._rate <= 0:
            return INFINITY
        bound_j = INFINITY
        for low, high in self._ranges():
            floor_j = self._least_computing(low, high)
            # as of small b, which read the weights for few requests
            if floor_j * pool.best.rate >= 1:
                continue
            bounds = [floor_j]
            for number, instance in enumerate(self._instances(low, high)):
                answer = bounded(instance, self._costs.decode(Load(low)), self._limit_s)
                bounds.append(answer.bound)
                for cut in answer.cuts:
                    pool.offer(cut)
                if number == 0 and (self._few or high == self._costs.problem.batch_limit):
                    self._offer_with_room(instance, low, pool)
            bound_j = min(bound_j, max(bounds))
        return bound_j

    def _ranges(self) -> list[tuple[int, int]]:
        """Ranges of b, the largest first: narrow ones, or halves if each query is expensive."""
        limit = self._costs.problem.batch_limit
        if self._few:
            batches = sizes(limit)
            return [(low, after - 1) for low, after in pairwise([*batches, limit + 1])][::-1]
        ranges, high = list[tuple[int, int]](), limit
        while high:
            low = high if not ranges else high // 2 + 1
            ranges.append((low, high))
            high = low - 1
        return ranges

    def _offer_with_room(self, instance: Instance, batch: int, pool: Pool) -> None:
        """Offer cuts whose nodes hold many micro-batches: a token's part of the idle time is less
        then."""
        most = most_micro_batches(self._costs, batch)
        for micro_batches in {most, most // 2, most // 4} - {0, 1}:
            room = self._costs.decode(Load(batch, micro_batches))
            variant = replace(instance, layer_bytes=room.layer_bytes, stage_bytes=room.stage_bytes)
            solution = solve_latency(variant)
            pool.offer(None if solution is None else solution.cut)

    def _least_computing(self, low: int, high: int) -> float:
        """Joules per token that every block takes at the least on any node, of b from `low` to
        `high`."""
        busy_w = self._more_w + self._idle_w
        busy = weighted(self._answer(low), busy_w / (high * self._costs.problem.new_tokens))
        head_s = busy.head_s[busy.source] if busy.head_on_source else busy.head_s.min()
        return float(busy.compute_s.min(axis=0).sum() + busy.embed_s[busy.source] + head_s)

    def _answer(self, batch: int) -> Instance:
        """Prompts and whole answers of a micro-batch."""
        prefill, decode = self._costs.prefill(Load(batch)), self._costs.decode(Load(batch))
        return with_tokens(prefill, decode, self._costs.problem.new_tokens - 1)

    def _instances(self, low: int, high: int) -> Iterator[Instance]:
        """Joules per token of any b from `low` to `high`, at the least."""
        costs, new = self._costs, self._costs.problem.new_tokens
        answer, tokens = self._answer(low), high * new
        for own in _OWN if self._few else _OWN[:1]:
            busy = weighted(answer, (self._more_w + own * self._idle_w) / tokens)
            yield standing(busy, (1 - own) * self._idle_w / self._rate)
        source_w = np.where(np.arange(len(costs.nodes)) == costs.source, self._idle_w, 0.0)
        around = float(source_w.sum()) / (tokens * max(1, most_micro_batches(costs, low)))
        busy = with_tokens(weighted(answer, self._more_w / tokens), answer, around)
        yield standing(busy, (self._idle_w - source_w) / self._rate)
