"""The joint choice of cuts and load by the printed rate, prompts included, and a bound that covers
every load. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.search.rate_bound import RateBound
from edgeshard.planning.search.rate_scoring import Best, CutRates, most_micro_batches
from edgeshard.planning.search.rate_search import Pool, count_out
from edgeshard.planning.search.spare import kinds_of, without_spare
from edgeshard.planning.search.steady_search import search_steady
from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.solve import solve_latency
from edgeshard.planning.solvers.walks import Kinds

EVERY_BATCH = 8
"""Micro-batch sizes up to this one are all tried; beyond, sizes in steps that grow."""


@dataclass(frozen=True, slots=True)
class RateSearch:
    """The best cut and its load; `rate_bound` tokens a second are not exceeded by any cut at any
    load allowed.

    Without a cut, `fastest_s` is the least time per token of a single request, None if nothing
    fits.
    """

    cut: Cut | None
    load: Load
    rate_bound: float
    fastest_s: float | None = None


def search_rate(costs: Costs, target: float | None = None) -> RateSearch:
    """Examine all cuts if they are few; else search, with a bound.

    With a target the search ends once it knows whether a cut exceeds it, at a cut and a bound that
    may not be the best.
    """
    some, kinds, index = without_spare(costs, kinds_of(costs))
    if costs.problem.is_steady:
        best, bound = search_steady(some, kinds, target)
    else:
        best, bound = _search_together(some, kinds, target)
    if best.cut is None:
        alone = solve_latency(costs.decode(Load()))
        return RateSearch(None, Load(), 0.0, None if alone is None else alone.value_s)
    return RateSearch(
        Cut(tuple(index[node] for node in best.cut.nodes), best.cut.ends), best.load, bound
    )


def _search_together(costs: Costs, kinds: Kinds | None, target: float | None) -> tuple[Best, float]:
    rates = CutRates(costs)
    best = count_out(rates, kinds)
    if best is not None:
        return best, best.rate
    pool = Pool(rates, kinds)
    search = RateBound(costs, pool, kinds)
    search.run(target)
    return pool.best, search.bound


def loads(costs: Costs) -> list[Load]:
    """Loads to try with a cut that is given, the smallest first: every b up to 8, then b and m in
    steps that grow."""
    batches = sizes(costs.problem.batch_limit)
    return [Load(batch, m) for batch in batches for m in _steps(most_micro_batches(costs, batch))]


def sizes(limit: int) -> list[int]:
    """Micro-batch sizes: every one up to 8, then in steps that grow, and the limit itself."""
    batches = [*range(1, min(limit, EVERY_BATCH) + 1)]
    while batches[-1] < limit:
        batches.append(min(limit, batches[-1] + batches[-1] // 4))
    return batches


def _steps(most: int) -> list[int]:
    counts, m = [], 1
    while m < most:
        counts.append(m)
        m += max(1, m // 4)
    return [*counts, most] if most >= 1 else counts
