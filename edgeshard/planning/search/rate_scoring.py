"""The rate of many cuts at once, by the two phases of a batch, each at the best load it can have.
Pure.

    rate = m b G / [R_pre + (m - 1) B_pre + (G - 1) max(R_dec, m B_dec)]     tokens a second

For one cut and one b the rate never falls with m. Below R_dec / B_dec the denominator grows by
B_pre for each m, above it by B_pre + (G - 1) B_dec, from a part that does not grow. So the best m
is the largest allowed. With b the rate may rise or fall, but no time shrinks as b grows, so the
times at one b bound the rates of all larger ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.inputs.problem import PlanProblem
from edgeshard.planning.solvers.all_cuts import Cuts
from edgeshard.planning.solvers.instance import Cut, Floats, Instance
from edgeshard.planning.solvers.scoring import SLACK
from edgeshard.planning.solvers.walks import Booleans, Integers

MOST_IN_FLIGHT = 64
"""Micro-batches when nothing else limits them; beyond saturation more of them only wait."""
SAME = 1e-12
"""Rates that differ by at most this part are one rate, computed in another order."""


def most_micro_batches(costs: Costs, batch: int) -> int:
    """The most m that the number of requests allows at this b; memory may allow fewer."""
    limit = costs.problem.request_limit
    return MOST_IN_FLIGHT if limit is None else min(limit // batch, MOST_IN_FLIGHT)


class CutTable:
    """Cuts of one number of stages with the positions of their summands in flat tables; arrays are
    [S, K]."""

    def __init__(self, cuts: Cuts, instance: Instance) -> None:
        self.cuts = cuts
        self.nodes = np.ascontiguousarray(cuts.nodes.T)
        row = self.nodes * (instance.layers + 1)
        starts, ends = cuts.starts.T, cuts.ends.T
        self.start_at, self.end_at = row + starts, row + ends
        self.hop_at = self.nodes * instance.nodes + cuts.receivers.T
        if len(self.nodes) > 1:
            self.delay_s: Floats = instance.latency_s.ravel().take(self.hop_at).sum(axis=0)
        else:
            self.delay_s = np.zeros(len(cuts))

    def __len__(self) -> int:
        return len(self.cuts)

    def take(self, index: Integers | Booleans) -> CutTable:
        table = object.__new__(CutTable)
        table.cuts = self.cuts.take(index)
        for name in ("nodes", "start_at", "end_at", "hop_at"):
            setattr(table, name, np.ascontiguousarray(getattr(self, name)[:, index]))
        table.delay_s = self.delay_s[index]
        return table

    def stages(self, table: Table) -> Floats:
        """[S, K] seconds that each stage computes."""
        stage, instance = table.done.take(self.end_at), table.instance
        stage -= table.done.take(self.start_at)
        stage += instance.overhead_s.take(self.nodes)
        head = 0 if instance.head_on_source else len(stage) - 1
        stage[0] += instance.embed_s.take(self.nodes[0])
        stage[head] += instance.head_s.take(self.nodes[head])
        return stage

    def times(self, table: Table) -> tuple[Floats, Floats]:
        """[K] R and [K] B."""
        round_s, station_s = self.stations(table)
        return round_s, station_s.max(axis=0)

    def stations(self, table: Table) -> tuple[Floats, Floats]:
        """[K] R, and [stations, K] seconds at each station: nodes and links, or nodes with their
        outgoing links."""
        stage = self.stages(table)
        if len(stage) == 1:
            return stage[0], stage
        hop = table.hop_s.take(self.hop_at)
        hop[-1] = table.return_s.take(self.hop_at[-1])
        round_s = stage.sum(axis=0) + hop.sum(axis=0) + self.delay_s
        return round_s, np.concatenate([stage, hop]) if table.instance.asynchronous else stage + hop


@dataclass(frozen=True, slots=True)
class Table:
    """One phase at one b, flat: `done` [M (N + 1)] seconds of a node's first blocks, links [M
    M]."""

    instance: Instance
    done: Floats
    hop_s: Floats
    return_s: Floats

    @classmethod
    def of(cls, instance: Instance) -> Table:
        done = np.zeros((instance.nodes, instance.layers + 1))
        np.cumsum(instance.compute_s, axis=1, out=done[:, 1:])
        return cls(instance, done.ravel(), instance.hop_s.ravel(), instance.return_s.ravel())


@dataclass(frozen=True, slots=True)
class Figures:
    """[K] R and B of prompt and token at one b, and the most micro-batches allowed, 0 for none."""

    batch: int
    new_tokens: int
    limit: int | None
    prefill_round_s: Floats
    prefill_busiest_s: Floats
    decode_round_s: Floats
    decode_busiest_s: Floats
    micro_batches: Integers

    def _seconds(self, m: Integers) -> Floats:
        steady = np.maximum(self.decode_round_s, m * self.decode_busiest_s)
        first = self.prefill_round_s + (m - 1) * self.prefill_busiest_s
        return np.asarray(first + (self.new_tokens - 1) * steady)

    def _rate(self, requests: Integers, m: Integers) -> Floats:
        with np.errstate(invalid="ignore"):
            rate = requests * self.new_tokens / self._seconds(m)
        return np.where(m >= 1, rate, 0.0)

    def rates(self) -> Floats:
        """[K] tokens a second at the most micro-batches."""
        return self._rate(self.batch * self.micro_batches, self.micro_batches)

    def first(self, rates: Floats) -> int:
        """Index of the highest rate to take: the one whose stations are least busy."""
        same = np.flatnonzero(rates >= rates.max() * (1 - SAME))
        busy = self.prefill_busiest_s[same] + (self.new_tokens - 1) * self.decode_busiest_s[same]
        return int(same[np.argmin(busy)])

    def fewest(self, index: int) -> int:
        """The fewest micro-batches with the rate of the most: more of them would only wait."""
        most = int(self.micro_batches[index])
        one: dict[str, Any] = {name: np.repeat(getattr(self, name)[index], most) for name in _TIMES}
        rates = replace(self, **one, micro_batches=np.arange(1, most + 1)).rates()
        return int(np.argmax(rates >= rates[-1] * (1 - SAME))) + 1

    def at_most(self, batch: int) -> Floats:
        """[K] an upper bound for any b from this one to `batch`."""
        most = self.micro_batches
        if self.limit is None:
            return self._rate(batch * most, most)
        # Requests grow with m up to the limit, and from there on only the time does.
        below = np.minimum(most, self.limit // batch)
        above = np.minimum(most, below + 1)
        reached = self._rate(np.minimum(batch * above, self.limit), above)
        return np.maximum(self._rate(batch * below, below), reached)


class Scored(Protocol):
    """[K] the yield of cuts at one b, the more the better; `Figures` has it in tokens a second."""

    @property
    def micro_batches(self) -> Integers: ...

    def rates(self) -> Floats: ...

    def first(self, rates: Floats) -> int: ...

    def fewest(self, index: int) -> int: ...

    def at_most(self, batch: int) -> Floats: ...


class Scorer(Protocol):
    """Yields of one problem's cuts; `CutRates` is one."""

    @property
    def problem(self) -> PlanProblem: ...

    @property
    def least(self) -> Instance: ...

    def places(self, cuts: Cuts) -> CutTable: ...

    def figures(self, places: CutTable, batch: int) -> Scored: ...


class CutRates:
    """The rates of one problem's cuts."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.problem = costs.problem
        self.least = costs.decode(Load())
        """The smallest load, which every cut has to keep."""
        self._tables: dict[int, tuple[Table, Table]] = {}

    def places(self, cuts: Cuts) -> CutTable:
        return CutTable(cuts, self.least)

    def tables(self, batch: int) -> tuple[Table, Table]:
        """The prompt's and a token's."""
        if batch not in self._tables:
            load = Load(batch)
            self._tables[batch] = (
                Table.of(self.costs.prefill(load)),
                Table.of(self.costs.decode(load)),
            )
        return self._tables[batch]

    def figures(self, places: CutTable, batch: int) -> Figures:
        """Times and the most micro-batches at one b."""
        prompt, token = (places.times(table) for table in self.tables(batch))
        round_s, busiest_s = token
        most = np.minimum(self.fitting(places, batch), most_micro_batches(self.costs, batch))
        limit_s = self.problem.max_time_per_token_s
        if limit_s is not None:
            in_time = np.floor(limit_s / busiest_s * (1 + SAME))
            in_time -= in_time * busiest_s > limit_s
            most = np.where(round_s <= limit_s, np.minimum(most, in_time), 0)
        micro_batches = np.maximum(most, 0).astype(np.int64)
        return Figures(
            batch,
            self.problem.new_tokens,
            self.problem.request_limit,
            *prompt,
            *token,
            micro_batches,
        )

    def fitting(self, places: CutTable, batch: int) -> Floats:
        """[K] the most micro-batches that memory holds; below 1 if it holds none."""
        one, two = self.costs.decode(Load(batch)), self.costs.decode(Load(batch, 2))
        layer_sums = np.concatenate([[0.0], np.cumsum(one.layer_bytes)])
        starts, ends = places.cuts.starts.T, places.cuts.ends.T
        need = one.stage_bytes + layer_sums.take(ends) - layer_sums.take(starts)
        head = 0 if one.head_on_source else len(need) - 1
        need[0] += one.embed_bytes
        need[head] += one.head_bytes
        if head == 0:
            need[0] -= one.tied_bytes
        room = one.capacity_bytes.take(places.nodes) * (1 + SLACK) - need
        # Each micro-batch more takes as much again, of every block and of every stage.
        each = np.concatenate([[0.0], np.cumsum(two.layer_bytes - one.layer_bytes)])
        more = two.stage_bytes - one.stage_bytes + each.take(ends) - each.take(starts)
        return np.asarray((1.0 + np.floor(room / more)).min(axis=0))


@dataclass(slots=True)
class Best:
    """The best of all examined cuts: its yield (tokens a second), cut, b and m."""

    rate: float = 0.0
    cut: Cut | None = None
    batch: int = 1
    micro_batches: int = 1

    @property
    def load(self) -> Load:
        return Load(self.batch, self.micro_batches)

    def look(self, rates: Scorer, groups: list[CutTable]) -> bool:
        """Every cut at every b and m allowed; whether one was better. Cuts and ranges of b that
        cannot be are left."""
        before = self.rate
        high = rates.problem.batch_limit
        self._range(rates, groups, high, high)
        while high > 1:
            low = max(1, high // 2)
            self._range(rates, groups, low, high - 1)
            high = low
        return self.rate > before

    def _range(self, rates: Scorer, groups: list[CutTable], low: int, high: int) -> None:
        """Every b from `low` to `high`."""
        left = []
        for places in groups:
            if not len(places):
                continue
            figures = rates.figures(places, low)
            cut_rates = figures.rates()
            index = figures.first(cut_rates)
            if cut_rates[index] > self.rate * (1 + SAME):
                self.rate, self.cut = float(cut_rates[index]), places.cuts.cut(index)
                self.batch, self.micro_batches = low, figures.fewest(index)
            if high > low:
                left.append((places, figures.at_most(high)))
        if high == low:
            return
        survivors = [
            places.take(np.flatnonzero(most > self.rate * (1 + SAME))) for places, most in left
        ]
        if any(len(places) for places in survivors):
            middle = (low + 2 + high) // 2
            self._range(rates, survivors, middle, high)
            if middle > low + 1:
                self._range(rates, survivors, low + 1, middle - 1)


_TIMES = ("prefill_round_s", "prefill_busiest_s", "decode_round_s", "decode_busiest_s")
