"""The steady rate of many cuts at once, each at the best load it can have (`costs.steady`). Pure.

For one cut and one b the rate never falls with m, so the best m is the largest allowed. The times
at one b, with the requests of a larger one, bound the rates at all between them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from edgeshard.domain.requests.step import STEP_TOKENS
from edgeshard.planning.costs.costs import KV_BLOCK_TOKENS, Costs, Load
from edgeshard.planning.costs.steady import (
    MOST_TOGETHER,
    Most,
    PromptChunks,
    Steady,
    SteadyTimes,
    steady,
)
from edgeshard.planning.costs.step_budget import chunk_room, link_tokens
from edgeshard.planning.search.rate_scoring import (
    SAME,
    CutRates,
    CutTable,
    Table,
    most_micro_batches,
)
from edgeshard.planning.solvers.all_cuts import Cuts
from edgeshard.planning.solvers.instance import Cut, Floats
from edgeshard.planning.solvers.walks import Integers

NEARLY = 1e-3
"""Fewer micro-batches are taken if that costs no more than this part of the rate: more of them hold
memory."""


@dataclass(frozen=True, slots=True)
class SteadyFigures:
    """[K] times at one b, the room that a step has for a prompt, and the most micro-batches
    allowed, 0 for none."""

    costs: Costs
    places: CutTable
    batch: int
    budget: Floats
    times: SteadyTimes
    decode_s: Floats
    full_s: Floats
    rest_s: Floats
    """[stations, K] of a step without a chunk, with a full one, and with the rest of a prompt."""
    micro_batches: Integers

    def steady(
        self,
        micro_batches: Floats,
        most: Most | None = None,
        high: int | None = None,
        sharing: int | None = None,
    ) -> Steady:
        """[K] the steady state; with `most` and `high`, a bound for all b from this one to `high`
        that share steps between prompts as b = `sharing` does."""
        problem, batch = self.costs.problem, high or self.batch
        limit, rounds = problem.request_limit, problem.new_tokens - 1
        requests = batch * micro_batches
        if limit is not None:
            requests = np.minimum(requests, limit)
        chunks = PromptChunks.of(
            problem.prompt_tokens, chunk_room(self.budget, self.batch), rounds, sharing or batch
        )
        decodes = np.maximum(0.0, rounds / batch - chunks.full - chunks.rest)
        with np.errstate(invalid="ignore"):  # without a link
            station_s = (
                chunks.full * self.full_s + chunks.rest * self.rest_s + decodes * self.decode_s
            )
            together_s = (
                self.times.together_s
                if most is not None
                else self._together_s(micro_batches, chunks)
            )
        times = replace(self.times, station_s=station_s.max(axis=0), together_s=together_s)
        return steady(times, requests, micro_batches, len(self.places.nodes), chunks, rounds, most)

    def _together_s(self, micro_batches: Floats, chunks: PromptChunks) -> Floats:
        """[J, K] seconds that k rounds with 1 to J prompts take the busiest station; J is 1 if no
        prompt is one chunk."""
        steps = micro_batches * (
            1 + (chunks.count - 1) / np.maximum(micro_batches, len(self.places.nodes))
        )
        prompt_s = chunks.full * self.full_s + chunks.rest * self.rest_s
        parts = chunks.full + chunks.rest
        numbers = range(1, (MOST_TOGETHER if chunks.single.any() else 1) + 1)
        seconds = [
            number * prompt_s + np.maximum(0.0, steps - number * parts) * self.decode_s
            for number in numbers
        ]
        return np.stack([one.max(axis=0) for one in seconds])

    def _rates(
        self,
        micro_batches: Floats,
        most: Most | None = None,
        high: int | None = None,
        sharing: int | None = None,
    ) -> Floats:
        with np.errstate(invalid="ignore", divide="ignore"):
            rates = (
                self.costs.problem.new_tokens
                / self.steady(micro_batches, most, high, sharing).between_s
            )
        return np.where((micro_batches >= 1) & np.isfinite(rates), rates, 0.0)

    def rates(self) -> Floats:
        """[K] tokens a second at the most micro-batches."""
        return self._rates(self.micro_batches.astype(np.float64))

    def first(self, rates: Floats) -> int:
        """Index of the highest rate to take: the one whose rounds are shortest."""
        same = np.flatnonzero(rates >= rates.max() * (1 - SAME))
        busy = self.times.rest_round_s[same] + self.times.round_s[same]
        return int(same[np.argmin(busy)])

    def fewest(self, index: int) -> int:
        """The fewest micro-batches with nearly the rate of the most."""
        most = int(self.micro_batches[index])
        one = self.take(np.repeat(index, most))
        rates = one._rates(np.arange(1.0, most + 1))
        return int(np.argmax(rates >= rates[-1] * (1 - NEARLY))) + 1

    def take(self, index: Integers) -> SteadyFigures:
        times = SteadyTimes(
            *(getattr(self.times, field.name)[..., index] for field in fields(SteadyTimes))
        )
        stations = {
            name: getattr(self, name)[:, index] for name in ("decode_s", "full_s", "rest_s")
        }
        places = self.places.take(index)
        budget = self.budget[index]
        most = self.micro_batches[index]
        return replace(
            self, places=places, budget=budget, times=times, micro_batches=most, **stations
        )

    def at_most(self, batch: int) -> Floats:
        """[K] an upper bound for any b from this one to `batch`."""
        m, limit = self.micro_batches.astype(np.float64), self.costs.problem.request_limit
        most = Most(np.ceil(self.costs.problem.prompt_tokens / chunk_room(self.budget, batch)), m)
        # Requests grow with m up to the limit, and from there on only a round does.
        below = m if limit is None else np.minimum(m, limit // batch)
        above = m if limit is None else np.minimum(m, below + 1)
        tries = [(some, sharing) for some in (below, above) for sharing in (self.batch, batch)]
        bounds = np.max(
            [self._rates(some, most, batch, sharing) for some, sharing in tries], axis=0
        )
        # Over the slowest links a larger b may leave more room to a chunk: nothing is known then.
        grows = chunk_room(self.budget, batch) > chunk_room(self.budget, self.batch)
        return np.where(grows | (self.budget < batch + KV_BLOCK_TOKENS), np.inf, bounds)


class SteadyRates:
    """The steady rates of one problem's cuts."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self.problem = costs, costs.problem
        self._memory = CutRates(costs)
        self.least = self._memory.least
        self._tables: dict[tuple[int, int], Table] = {}
        self._link_tokens = link_tokens(costs).ravel()

    def places(self, cuts: Cuts) -> CutTable:
        return CutTable(cuts, self.least)

    def figures(self, places: CutTable, batch: int) -> SteadyFigures:
        """Times and the most micro-batches at one b."""
        hops = self._link_tokens.take(places.hop_at[:-1])
        budget = np.min(hops, axis=0, initial=STEP_TOKENS)
        prompt, rooms = self.problem.prompt_tokens, chunk_room(budget, batch).astype(np.int64)
        decode = _Stations.of(places, self._table(batch, 0))
        full, rest = decode.copy(), decode.copy()
        for room in np.unique(rooms).tolist():
            index = np.flatnonzero(rooms == room)
            some = places if len(index) == len(places) else places.take(index)
            full.put(index, _Stations.of(some, self._table(batch, room)))
            rest.put(index, _Stations.of(some, self._table(batch, (prompt - 1) % room + 1)))
        times = SteadyTimes(
            decode.round_s,
            decode.station_s.max(axis=0),
            full.round_s,
            full.station_s.max(axis=0),
            rest.round_s,
            rest.station_s.max(axis=0),
            np.zeros(len(places)),
            np.zeros((1, len(places))),
        )
        most = np.minimum(
            self._memory.fitting(places, batch), most_micro_batches(self.costs, batch)
        )
        micro_batches = np.maximum(most, 0).astype(np.int64)
        return self._in_time(
            SteadyFigures(
                self.costs,
                places,
                batch,
                budget,
                times,
                decode.station_s,
                full.station_s,
                rest.station_s,
                micro_batches,
            )
        )

    def _in_time(self, figures: SteadyFigures) -> SteadyFigures:
        """With as many micro-batches as keep the time per token."""
        limit_s = self.problem.max_time_per_token_s
        if limit_s is None:
            return figures
        micro_batches = figures.micro_batches.copy()
        late = np.flatnonzero(micro_batches > 0)
        while len(late):
            steady_figures = figures.take(late).steady(micro_batches[late].astype(np.float64))
            late = late[steady_figures.time_per_token_s > limit_s]
            micro_batches[late] -= 1
            late = late[micro_batches[late] > 0]
        return replace(figures, micro_batches=micro_batches)

    def _table(self, batch: int, chunk: int) -> Table:
        if (batch, chunk) not in self._tables:
            instance = self.costs.mixed(batch, chunk) if chunk else self.costs.decode(Load(batch))
            self._tables[batch, chunk] = Table.of(instance)
        return self._tables[batch, chunk]


@dataclass(slots=True)
class _Stations:
    """[K] R, and [stations, K] seconds of a step at each station."""

    round_s: Floats
    station_s: Floats

    @classmethod
    def of(cls, places: CutTable, table: Table) -> _Stations:
        return cls(*places.stations(table))

    def copy(self) -> _Stations:
        return _Stations(self.round_s.copy(), self.station_s.copy())

    def put(self, index: Integers, some: _Stations) -> None:
        self.round_s[index] = some.round_s
        self.station_s[:, index] = some.station_s


def steady_of(costs: Costs, load: Load, cut: Cut) -> Steady:
    """The steady state of one cut under a load, as arrays of one."""
    rates = SteadyRates(costs)
    figures = rates.figures(rates.places(Cuts.of([cut])), load.batch)
    return figures.steady(np.array([float(load.micro_batches)]))
