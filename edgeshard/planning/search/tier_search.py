"""The best plan if nodes may stream: nodes, cuts, load and sweep, chosen together with the
streaming nodes. Pure.

A stage stays in memory whenever it fits, because streaming the same stage is never quicker; so the
cuts decide which nodes stream. A sweep of k micro-batches is one step of the pipeline, and m / k
sweeps are in flight. If there are few cuts, all are examined, under every load that is tried.
Otherwise solvers propose some and neighbours are tried. The bound is then the best plan of nodes
with infinite memory. It holds because more memory makes no stage slower, and sweeps are no quicker
than the same micro-batches one by one. (docs/papers.md#nodes-that-stream)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.tier_costs import StreamTables
from edgeshard.planning.inputs.problem import Objective
from edgeshard.planning.search.load_search import search_rate, sizes
from edgeshard.planning.search.rate_scoring import MOST_IN_FLIGHT, SAME
from edgeshard.planning.search.rate_search import cuts_by_stages
from edgeshard.planning.search.spare import kinds_of
from edgeshard.planning.solvers import subset
from edgeshard.planning.solvers.all_cuts import Cuts, count_cuts, scores
from edgeshard.planning.solvers.instance import Cut, Floats, Instance, with_tokens
from edgeshard.planning.solvers.neighbours import neighbours
from edgeshard.planning.solvers.scoring import violations
from edgeshard.planning.solvers.solve import solve_latency
from edgeshard.planning.solvers.walks import Kinds, single_kinds

MOST_COUNTED = 30_000
"""Most cuts that are all examined under each load."""
MOST_LOADS = 256
"""Up to this many loads, all are tried; if there are more, micro-batches and sweeps grow in
steps."""
_FEW_NODES = 8
"""Up to this many nodes, the DP over subsets proposes cuts."""
_CLIMBS = 40


@dataclass(frozen=True, slots=True)
class StreamedLoad:
    """b and m of a plan, and the micro-batches of a sweep, which divide m."""

    load: Load
    sweep: int = 1

    @property
    def in_flight(self) -> int:
        """Sweeps under way at once."""
        return self.load.micro_batches // self.sweep


@dataclass(frozen=True, slots=True)
class StreamedCut:
    """The best cut, and under what load; `cost` as the goal minimises it, and a lower bound of all
    cuts."""

    cut: Cut
    load: StreamedLoad
    cost: float
    bound: float


class StreamSearch:
    """The search over one problem's cuts. `run` may be called once."""

    def __init__(self, costs: Costs) -> None:
        self._costs, self._problem = costs, costs.problem
        self._tables = StreamTables(costs)
        self._least = self._tables.instance(Load(), 1, prefill=False)
        self._kinds = _kinds_of(costs, self._least)
        self._best: tuple[float, Cut, StreamedLoad] | None = None

    def run(self) -> StreamedCut | None:
        """The best plan; None if no cut keeps all limits."""
        loads = stream_loads(self._costs)
        exact = count_cuts(self._least, self._kinds) <= MOST_COUNTED
        if exact:
            for cuts in cuts_by_stages(self._least, self._kinds):
                self._look(cuts, loads)
        else:
            self._climb(list(_loads(self._costs, every=False)))
        if self._best is None:
            return None
        cost, cut, load = self._best
        all_loads = (
            self._problem.request_limit is not None
            and len(list(_loads(self._costs, every=True))) <= MOST_LOADS
        )
        bound = cost if exact and all_loads else min(cost, self._bound())
        return StreamedCut(cut, load, cost, bound)

    def _look(self, cuts: Cuts, loads: Sequence[StreamedLoad]) -> None:
        for load in loads:
            if len(cuts):
                values = self.values(cuts, load)
                index = int(np.argmin(values))
                if np.isfinite(values[index]) and (
                    self._best is None or values[index] < self._best[0] * (1 - SAME)
                ):
                    self._best = float(values[index]), cuts.cut(index), load

    def values(self, cuts: Cuts, load: StreamedLoad) -> Floats:
        """[K] costs in the goal, infinite if a cut is impossible: seconds, or seconds for each
        token."""
        prefill, decode = (
            self._tables.instance(load.load, load.sweep, prefill=phase) for phase in (True, False)
        )
        with np.errstate(invalid="ignore"):
            prompt_round, prompt_busiest = scores(prefill, cuts)
            round_s, busiest_s = scores(decode, cuts)
            flight, more = load.in_flight, self._problem.new_tokens - 1
            first = prompt_round + (flight - 1) * prompt_busiest
            token = np.maximum(round_s, flight * busiest_s)
            match self._problem.goal:
                case Objective.LATENCY:
                    value = token
                case Objective.TTFT:
                    value = first
                case Objective.REQUEST:
                    value = first + more * token
                case _:
                    value = (first + more * token) / (load.load.requests * self._problem.new_tokens)
        limit = self._problem.max_time_per_token_s
        allowed = np.isfinite(value) & (token <= (np.inf if limit is None else limit))
        return np.where(allowed, value, np.inf)

    def _climb(self, loads: Sequence[StreamedLoad]) -> None:
        tried_cuts: set[Cut] = set()
        for cut in self._proposals(loads):
            self._offer([cut], loads, tried_cuts)
        for _ in range(_CLIMBS):
            if self._best is None:
                return
            before, cut = self._best[0], self._best[1]
            # Neighbours under the best load so far, then the best of them under all.
            self._offer(neighbours(cut, self._kinds), [self._best[2]], tried_cuts)
            if self._best[1] != cut:
                self._look(Cuts.of([self._best[1]]), loads)
            if self._best[0] >= before:
                return

    def _offer(
        self, cuts: Sequence[Cut], loads: Sequence[StreamedLoad], tried_cuts: set[Cut]
    ) -> None:
        new = [
            cut
            for cut in dict.fromkeys(cuts)
            if cut not in tried_cuts and not violations(self._least, cut)
        ]
        tried_cuts.update(new)
        for count in sorted({len(cut.nodes) for cut in new}):
            self._look(Cuts.of([cut for cut in new if len(cut.nodes) == count]), loads)

    def _proposals(self, loads: Sequence[StreamedLoad]) -> Iterator[Cut]:
        layers, source = self._least.layers, self._least.source
        if self._least.min_nodes <= 1:
            yield Cut((source,), (layers,))
        others = sorted(
            self._least.others, key=lambda node: -float(self._least.capacity_bytes[node])
        )
        for count in range(1, min(len(others), layers - 1, self._least.max_nodes - 1) + 1):
            nodes = (source, *others[:count])
            room = np.cumsum([max(1.0, float(self._least.capacity_bytes[node])) for node in nodes])
            ends = np.maximum.accumulate(
                np.maximum(np.arange(1, count + 2), np.rint(layers * room / room[-1]))
            )
            ends = np.minimum(ends, layers - np.arange(count, -1, -1)).astype(int)
            yield Cut(nodes, tuple(ends.tolist()))
        if self._least.nodes <= _FEW_NODES:
            for load in {loads[0], loads[-1]}:
                phases = (
                    self._tables.instance(load.load, load.sweep, prefill=phase)
                    for phase in (True, False)
                )
                solution = subset.solve_throughput(self._sum(*phases), load.in_flight)
                if solution is not None:
                    yield solution.cut

    def _sum(self, prefill: Instance, decode: Instance) -> Instance:
        """The instance whose round is what the goal is about: a token's, a prompt's, or a prompt's
        and its answer's."""
        match self._problem.goal:
            case Objective.LATENCY:
                return decode
            case Objective.TTFT:
                return prefill
            case _:
                return with_tokens(prefill, decode, self._problem.new_tokens - 1)

    def _bound(self) -> float:
        """A lower bound of all plans, as if memory had no end."""
        costs = _without_limits(self._costs)
        if self._problem.goal.is_single:
            solution = solve_latency(self._sum(costs.prefill(Load()), costs.decode(Load())))
            return 0.0 if solution is None else solution.bound_s
        # It need not be close: without limits of memory the best plan is another one.
        assert self._best is not None
        rate = search_rate(costs, 1.0 / self._best[0]).rate_bound
        return 1.0 / rate if rate > 0 else 0.0


def stream_loads(costs: Costs) -> list[StreamedLoad]:
    """The loads that are tried, the smallest first: all of them, or growing in steps."""
    every = list(_loads(costs, every=True))
    return every if len(every) <= MOST_LOADS else list(_loads(costs, every=False))


def _loads(costs: Costs, every: bool) -> Iterator[StreamedLoad]:
    limit = costs.problem.request_limit
    if costs.problem.goal is not Objective.THROUGHPUT:
        yield StreamedLoad(Load())
        return
    batches = range(1, costs.problem.batch_limit + 1) if every else sizes(costs.problem.batch_limit)
    for batch in batches:
        most = MOST_IN_FLIGHT if limit is None else min(MOST_IN_FLIGHT, limit // batch)
        for sweep in _counts(most, every):
            for flight in _counts(most // sweep, every):
                yield StreamedLoad(Load(batch, sweep * flight), sweep)


def _counts(most: int, every: bool) -> list[int]:
    """Numbers up to the most: all, or powers of two and the most itself."""
    if every:
        return list(range(1, most + 1))
    powers = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return sorted({*powers, most}) if most else []


def _kinds_of(costs: Costs, least: Instance) -> Kinds:
    """Groups of indistinguishable nodes, compared by their disks, too."""
    kinds = kinds_of(costs)
    disks = [(node.device.disk_bytes_per_s, node.device.disk_bytes) for node in costs.nodes]
    return single_kinds(least) if kinds is None else kinds.split(disks.__getitem__)


def _without_limits(costs: Costs) -> Costs:
    """The same nodes with memory without end."""
    problem = costs.problem
    nodes = tuple(
        replace(node, device=replace(node.device, memory_bytes=1e18, system_bytes=0.0))
        for node in problem.cluster.nodes
    )
    free = replace(
        problem,
        cluster=replace(problem.cluster, nodes=nodes),
        max_time_per_token_s=None,
        reserve={},
    )
    return Costs(free)
