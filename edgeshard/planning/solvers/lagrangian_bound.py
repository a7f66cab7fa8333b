"""The walk relaxation: a plan that may visit a node again, at a price. Its optimum is a certified lower bound. Pure.

With a price mu_c >= 0 for every visit of kind c, L(mu) = (cheapest priced walk) - sum mu_c size_c is at most the best R
for every mu: a plan visits kind c at most size_c times. Prices per visit imply prices per layer, since one visit holds
at most what the node's memory holds, so this bound is at least as high. The maximum of L is found by subgradient steps;
what is left to go from every (layers done, kind) steers and prunes the label search.
(docs/papers.md#label-search-with-a-lagrangian-bound)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgeshard.planning.solvers.instance import Floats
from edgeshard.planning.solvers.walks import INFINITY, Integers, Problem


@dataclass(frozen=True, slots=True)
class Relaxed:
    """One priced walk problem, solved backwards.

    arrived [N+1, C] the least priced time to go for a node about to start at n layers (its own visit already paid);
    entered [N+1, C] the same when it may also pass everything on as a relay; worked [N+1, C] for one that has just
    finished at n; `bound` = L(mu); `walk` = (kind, start, end) of the stages after the source's; `walk_s` its unpriced
    time; `visits` how often each kind is in it. `prices` are what a visit costs in all, `paid` what the bound
    subtracts.
    """

    prices: Floats
    paid: float
    arrived: Floats
    entered: Floats
    worked: Floats
    bound: float
    walk: tuple[tuple[int, int, int], ...]
    walk_s: float
    visits: Integers


def relax(problem: Problem, prices: Floats, stage_price: float = 0.0) -> Relaxed:
    """Solve the priced walk problem.

    prices [C] are per visit of a kind; `stage_price` is for any stage but the first, and holds the walk to max_nodes.
    """
    layers, count = problem.layers, problem.count
    arrived = np.full((layers + 1, count), INFINITY)
    worked = np.full((layers + 1, count), INFINITY)
    charged = prices + stage_price
    priced, follow = _priced_hops(problem, charged)
    windows, widest, finish = problem.windows, problem.widest, problem.finish
    for start in range(layers - 1, 0, -1):
        best = finish[:, start].copy()
        width = min(widest, layers - 1 - start)
        if width > 0:
            inner = windows[start, :width] + worked[start + 1 : start + 1 + width]
            np.minimum(best, inner.min(axis=0), out=best)
        arrived[start] = best
        worked[start] = (priced + best).min(axis=1)
    entered = np.where(problem.relay, np.minimum(arrived, problem.overhead + worked), arrived)
    totals = problem.first + worked[:, 0]
    end = int(np.argmin(totals))
    paid = float(prices @ problem.sizes) + stage_price * (problem.instance.max_nodes - 1)
    if not np.isfinite(totals[end]):
        return Relaxed(charged, paid, arrived, entered, worked, INFINITY, (), INFINITY, np.zeros(count, dtype=np.int64))
    walk, visits = _trace(problem, arrived, worked, priced, follow, end)
    bound = float(totals[end]) - paid
    return Relaxed(charged, paid, arrived, entered, worked, bound, walk, float(totals[end] - charged @ visits), visits)


def _priced_hops(problem: Problem, prices: Floats) -> tuple[Floats, Integers | None]:
    """[C, C] cheapest way from node to node, directly or over relays, with the visits' prices; and the next stop."""
    priced = problem.hop + prices[None, :]
    if not problem.relay.any():
        return priced, None
    priced, follow = priced.copy(), np.tile(np.arange(problem.count), (problem.count, 1))
    for relay in np.flatnonzero(problem.relay):
        over = priced[:, relay, None] + problem.overhead[relay] + priced[None, relay, :]
        better = over < priced
        priced = np.where(better, over, priced)
        follow = np.where(better, follow[:, relay, None], follow)
    return priced, follow


def _trace(
    problem: Problem, arrived: Floats, worked: Floats, priced: Floats, follow: Integers | None, end: int
) -> tuple[tuple[tuple[int, int, int], ...], Integers]:
    """The cheapest walk after the source's stage, and how often it visits each kind."""
    walk: list[tuple[int, int, int]] = []
    visits = np.zeros(problem.count, dtype=np.int64)
    kind = 0
    while True:
        following = int(np.argmin(priced[kind] + arrived[end]))
        while follow is not None and follow[kind, following] != following:
            kind = int(follow[kind, following])
            walk.append((kind, end, end))
            visits[kind] += 1
        kind, start = following, end
        visits[kind] += 1
        width = min(problem.widest, problem.layers - 1 - start)
        inner = problem.windows[start, :width, kind] + worked[start + 1 : start + 1 + width, kind]
        if width <= 0 or problem.finish[kind, start] <= inner.min():
            walk.append((kind, start, problem.layers))
            return tuple(walk), visits
        end = start + 1 + int(np.argmin(inner))
        walk.append((kind, start, end))
