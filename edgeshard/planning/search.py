"""The joint choice of cuts and load: which (b, m) to solve, and what the others could at most reach. Pure.

For a load the least time per token max(R, m B) is one solve, and it only grows with b and with m: a step takes no less
time for more sequences, and more KV memory leaves fewer cuts. The same holds of the least B alone. So a solved load
bounds the rate of every larger one,

    rate(b, m) = b m / max(R, m B) <= b m / [least max(R, m0 B) at (b0, m0)]   and   <= b / [least B at (b0, m0)],

and loads whose bound is below the best rate found need no solve. What is left unsolved gives the certified gap.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.planning.costs import Costs, Load
from edgeshard.planning.instance import Solution
from edgeshard.planning.solvers import solve_throughput

MAX_SOLVES = 24
"""With 4 classes of boxes and 80 layers a solve takes up to half a second, and a plan is to take less than 20 s."""
MOST_IN_FLIGHT = 64
"""Micro-batches when nothing else limits them; beyond saturation more of them only wait."""
TOLERANCE = 5e-3
"""Loads that could be better by no more than this part are left; the gap says so."""
_WORTH_A_BOUND = 6
"""Open loads of one b from which the least B is worth its solve, which is a slow one."""
_STATION_ONLY = 1_000_000
"""So many micro-batches that max(R, m B) is m B: its least value gives the least B."""


@dataclass(frozen=True, slots=True)
class LoadSearch:
    """The loads solved that keep max_time_per_token; a bound of the steady rate of all; the least time of any."""

    candidates: tuple[tuple[Load, Solution], ...]
    rate_bound: float
    fastest_s: float | None


class _Search:
    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.limit = costs.problem.max_time_per_token_s
        self.kept: list[tuple[Load, Solution]] = []
        self.fastest_s: float | None = None
        self.best = 0.0
        self.solves = 0
        self.open: dict[Load, float] = dict.fromkeys(loads(costs), float("inf"))
        self._stations: set[int] = set()

    def run(self) -> LoadSearch:
        # The smallest first: when it has no plan, no load has.
        self._solve(next(iter(self.open)))
        while self.open and self.solves < MAX_SOLVES:
            load = max(self.open, key=lambda item: (self.open[item], item.batch, -item.micro_batches))
            if self.open[load] <= self.best * (1 + TOLERANCE):
                break
            smallest = Load(load.batch)
            if smallest in self.open:
                self._solve(smallest)
            elif load.batch not in self._stations and self._promising(load.batch) > _WORTH_A_BOUND:
                self._stations.add(load.batch)
                self._bound_stations(smallest)
            else:
                self._solve(load)
        reached = [load.requests / solution.bound_s for load, solution in self.kept]
        return LoadSearch(tuple(self.kept), max([*self.open.values(), *reached], default=0.0), self.fastest_s)

    def _promising(self, batch: int) -> int:
        least = self.best * (1 + TOLERANCE)
        return sum(rate > least for load, rate in self.open.items() if load.batch == batch)

    def _solve(self, load: Load) -> None:
        solution = solve_throughput(self.costs.decode(load), load.micro_batches)
        self.solves += 1
        del self.open[load]
        if solution is None:
            self.open = {other: rate for other, rate in self.open.items() if not _covers(load, other)}
            return
        if self.fastest_s is None or solution.value_s < self.fastest_s:
            self.fastest_s = solution.value_s
        if self.limit is None or solution.value_s <= self.limit:
            self.kept.append((load, solution))
            self.best = max(self.best, load.requests / solution.value_s)
        for other in [other for other in self.open if _covers(load, other)]:
            if self.limit is not None and solution.bound_s > self.limit:
                del self.open[other]
            else:
                self.open[other] = min(self.open[other], other.requests / solution.bound_s)

    def _bound_stations(self, load: Load) -> None:
        solution = solve_throughput(self.costs.decode(load), _STATION_ONLY)
        self.solves += 1
        if solution is not None:
            least = solution.bound_s / _STATION_ONLY
            for other in self.open:
                if _covers(load, other):
                    self.open[other] = min(self.open[other], other.batch / least)


def search_loads(costs: Costs) -> LoadSearch:
    """Solve loads, the most promising first, until none left can be better or the solves are spent."""
    return _Search(costs).run()


def loads(costs: Costs) -> list[Load]:
    """The loads considered, the smallest first: b as powers of two and the limit itself, m in steps that grow."""
    limit = costs.problem.request_limit
    sizes, size = {costs.problem.batch_limit}, 1
    while size <= costs.problem.batch_limit:
        sizes.add(size)
        size *= 2
    result = []
    for batch in sorted(sizes):
        most = MOST_IN_FLIGHT if limit is None else min(limit // batch, MOST_IN_FLIGHT)
        m = 1
        while m < most:
            result.append(Load(batch, m))
            m += max(1, m // 4)
        if most >= 1:
            result.append(Load(batch, most))
    return result


def _covers(small: Load, large: Load) -> bool:
    return small.batch <= large.batch and small.micro_batches <= large.micro_batches
