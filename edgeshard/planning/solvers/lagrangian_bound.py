"""The walk relaxation: a plan that may visit a node again, at a price. Its optimum is a certified
lower bound. Pure.

With a price mu_c >= 0 for every visit of kind c, L(mu) = (cheapest priced walk) - sum mu_c size_c
is at most the best R for every mu: a plan visits kind c at most size_c times. Prices per visit
imply prices per layer, since one visit holds at most what the node's memory holds. So this bound is
at least as high. Subgradient steps find the maximum of L. The least cost that remains from every
(layers done, kind) steers and prunes the label search.
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

    arrived [N+1, C] is the least priced remaining time if a node is about to start at n layers (its
    own visit already paid). worked [N+1, C] is the same if it has just finished at n. `bound` =
    L(mu). `walk` = (kind, start, end) of the stages after the source's, and `visits` counts each
    kind in it. `prices` are the full costs of a visit, `paid` the part that the bound subtracts.
    """

    prices: Floats
    paid: float
    arrived: Floats
    worked: Floats
    bound: float
    walk: tuple[tuple[int, int, int], ...]
    visits: Integers


def relax(problem: Problem, prices: Floats, stage_price: float = 0.0) -> Relaxed:
    """Solve the priced walk problem.

    prices [C] are per visit of a kind; `stage_price` is for any stage but the first, and holds the
    walk to max_nodes.
    """
    layers, count = problem.layers, problem.count
    arrived = np.full((layers + 1, count), INFINITY)
    worked = np.full((layers + 1, count), INFINITY)
    charged = prices + stage_price
    priced = problem.hop + charged[None, :]
    windows = problem.windows
    widest = problem.widest
    finish = problem.finish
    for start in range(layers - 1, 0, -1):
        best = finish[:, start].copy()
        width = min(widest, layers - 1 - start)
        if width > 0:
            inner = windows[start, :width] + worked[start + 1 : start + 1 + width]
            np.minimum(best, inner.min(axis=0), out=best)
        arrived[start] = best
        worked[start] = (priced + best).min(axis=1)
    totals = problem.first + worked[:, 0]
    end = int(np.argmin(totals))
    paid = float(prices @ problem.sizes) + stage_price * (problem.instance.max_nodes - 1)
    if not np.isfinite(totals[end]):
        return Relaxed(
            charged, paid, arrived, worked, INFINITY, (), np.zeros(count, dtype=np.int64)
        )
    walk, visits = _trace(problem, arrived, worked, priced, end)
    return Relaxed(charged, paid, arrived, worked, float(totals[end]) - paid, walk, visits)


def _trace(
    problem: Problem, arrived: Floats, worked: Floats, priced: Floats, end: int
) -> tuple[tuple[tuple[int, int, int], ...], Integers]:
    """The cheapest walk after the source's stage, and how often it visits each kind."""
    walk: list[tuple[int, int, int]] = []
    visits = np.zeros(problem.count, dtype=np.int64)
    kind = 0
    while True:
        kind, start = int(np.argmin(priced[kind] + arrived[end])), end
        visits[kind] += 1
        width = min(problem.widest, problem.layers - 1 - start)
        inner = problem.windows[start, :width, kind] + worked[start + 1 : start + 1 + width, kind]
        if width <= 0 or problem.finish[kind, start] <= inner.min():
            walk.append((kind, start, problem.layers))
            return tuple(walk), visits
        end = start + 1 + int(np.argmin(inner))
        walk.append((kind, start, end))
