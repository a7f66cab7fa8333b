"""Subset DP: exact for any instance of up to about a dozen nodes; the reference of the other
solvers. Pure.

g[S, j, n] is the least time until n layers are done and node j, the last of the set S, is about to
start. The state holds what was used, so no memory is forgotten, as the paper's Algorithm 1 does.
Time 2^M M^2 N^2, memory 2^M M N, both spent inside numpy. (docs/papers.md#subset-dp)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgeshard.planning.solvers.instance import Cut, Floats, Instance, Solution
from edgeshard.planning.solvers.scoring import SLACK, score, violations
from edgeshard.planning.solvers.thresholds import solution, value_of


def solve_round(instance: Instance, threshold_s: float = float("inf")) -> Solution | None:
    """The plan of least R with every station <= `threshold_s`; None when there is none."""
    cut = _Search(instance, threshold_s).best()
    if cut is None:
        return None
    value = score(instance, cut).round_s
    return solution(instance, cut, value, value)


def solve_throughput(instance: Instance, micro_batches: int) -> Solution | None:
    """The plan of least max(R, m B): bisects the finite list of values a station can have."""
    best = solve_round(instance, float("inf"))
    if best is None:
        return None
    values = _station_values(instance)
    cut, value = best.cut, value_of(instance, best.cut, micro_batches)
    low, high = 0, int(np.searchsorted(values, value / micro_batches, side="right"))
    # Below `low` no plan has R <= the best value; from `high` on, m B is no better than the best
    # value.
    while low < high:
        middle = (low + high) // 2
        answer = solve_round(instance, float(values[middle]))
        if answer is None or answer.value_s > micro_batches * values[middle]:
            low = middle + 1
        else:
            high = middle
        if (
            answer is not None
            and (challenger := value_of(instance, answer.cut, micro_batches)) < value
        ):
            cut, value = answer.cut, challenger
    return solution(instance, cut, value, value)


def _station_values(instance: Instance) -> Floats:
    """Every value a station can have, rising: all stages by node, start and end, and all hops."""
    tables = _Tables(instance)
    stages = [tables.middle, tables.last]
    hops = [instance.hop_s, instance.return_s]
    values = [tables.first.ravel(), np.array([tables.single])]
    if instance.asynchronous:
        values += [table.ravel() for table in stages + hops]
    else:
        values.append((tables.first[:, None] + instance.hop_s[instance.source][None, :]).ravel())
        values += [(tables.middle[:, :, :, None] + instance.hop_s[:, None, None, :]).ravel()]
        values += [(tables.last + instance.return_s[:, instance.source][:, None]).ravel()]
    flat = np.concatenate(values)
    return np.unique(flat[np.isfinite(flat)])


class _Tables:
    """Seconds per possible stage, infinite if memory forbids it.

    first [N+1] by end, for the source; middle [M, N+1, N+1] by start and end; last [M, N+1] by
    start; single: a number.
    """

    def __init__(self, instance: Instance) -> None:
        layers, source = instance.layers, instance.source
        start, end = np.arange(layers + 1)[:, None], np.arange(layers + 1)[None, :]
        few = (end - start)[None] <= instance.max_layers[:, None, None]
        if instance.stage_s is not None:  # of whole stages, memory and all
            middle = np.where(few, instance.stage_s, np.inf)
            first = middle[source, 0].copy()
            last = middle[:, :, layers].copy()
            single = middle[source, 0, layers]
        else:
            done = np.concatenate(
                [np.zeros((instance.nodes, 1)), np.cumsum(instance.compute_s, axis=1)], axis=1
            )
            layer_sums = np.concatenate([[0.0], np.cumsum(instance.layer_bytes)])
            seconds = instance.overhead_s[:, None, None] + done[:, None, :] - done[:, :, None]
            need = instance.stage_bytes + layer_sums[None, :] - layer_sums[:, None]
            limit = (instance.capacity_bytes * (1 + SLACK))[:, None, None]

            def fitting(extra: float) -> Floats:
                return np.where((need[None] + extra <= limit) & few, seconds, np.inf)

            embed, head = instance.embed_bytes, instance.head_bytes
            both = embed + head - instance.tied_bytes
            embed_s = instance.embed_s[source]
            head_s = instance.head_s
            at_source = instance.head_on_source
            middle = fitting(0.0)
            first = (
                fitting(both if at_source else embed)[source, 0]
                + embed_s
                + (head_s[source] if at_source else 0.0)
            )
            last = fitting(0.0 if at_source else head)[:, :, layers] + (
                0.0 if at_source else head_s[:, None]
            )
            single = fitting(both)[source, 0, layers] + embed_s + head_s[source]
        inner = (end > start) & (start >= 1) & (end < layers)
        self.first = first
        self.last = last
        self.single = float(single)
        self.middle: Floats = np.where(inner, middle, np.inf)
        self.first[[0, layers]] = np.inf
        self.last[:, [0, layers]] = np.inf
        self.middle[source], self.last[source] = np.inf, np.inf


@dataclass(frozen=True, slots=True)
class _End:
    value: float
    members: int
    node: int
    start: int


class _Search:
    """One pass over all sets of nodes, by the number of their members."""

    def __init__(self, instance: Instance, threshold_s: float) -> None:
        self._instance = instance
        self._source, self._layers = instance.source, instance.layers
        self._limit = threshold_s * (1 + SLACK)
        tables = _Tables(instance)
        self._tables = tables
        self._others = instance.others
        self._arrive = np.full(
            (1 << len(self._others), instance.nodes, instance.layers + 1), np.inf
        )
        hop = instance.hop_s + instance.latency_s
        allowed = instance.hop_s <= self._limit
        self._hop = np.where(allowed & ~np.eye(instance.nodes, dtype=bool), hop, np.inf)
        self._steps: dict[tuple[int, int], Floats] = {}

    def best(self) -> Cut | None:
        candidates: list[tuple[float, _End | None]] = []
        instance, tables = self._instance, self._tables
        if instance.min_nodes <= 1 <= instance.max_nodes and tables.single <= self._limit:
            candidates.append((tables.single, None))
        self._start()
        by_size = self._sets_by_size()
        for size in range(1, min(len(self._others), instance.max_nodes - 1) + 1):
            if size > 1:
                self._grow(by_size[size - 1])
            if size + 1 >= instance.min_nodes:
                end = self._finish(by_size[size])
                candidates.append((end.value, end))
        candidates = [one for one in candidates if np.isfinite(one[0])]
        if not candidates:
            return None
        end_of_best = min(candidates, key=lambda one: one[0])[1]
        cut = (
            Cut((self._source,), (self._layers,))
            if end_of_best is None
            else self._trace(end_of_best)
        )
        assert not violations(instance, cut), violations(instance, cut)
        return cut

    def _sets_by_size(self) -> list[npt.NDArray[np.int64]]:
        sets = np.arange(1 << len(self._others))
        sizes = np.zeros_like(sets)
        for bit in range(len(self._others)):
            sizes += (sets >> bit) & 1
        return [sets[sizes == size] for size in range(len(self._others) + 1)]

    def _start(self) -> None:
        first = self._tables.first
        for bit, node in enumerate(self._others):
            station = (
                first
                if self._instance.asynchronous
                else first + self._instance.hop_s[self._source, node]
            )
            ok = station <= self._limit
            self._arrive[1 << bit, node] = np.where(
                ok, first + self._hop[self._source, node], np.inf
            )

    def _step(self, node: int, following: int) -> Floats:
        """[N+1, N+1] seconds of a stage of `node` and its hop to `following`, by start and end."""
        if (node, following) not in self._steps:
            stage = self._tables.middle[node]
            station = (
                stage
                if self._instance.asynchronous
                else stage + self._instance.hop_s[node, following]
            )
            self._steps[node, following] = np.where(
                station <= self._limit, stage + self._hop[node, following], np.inf
            )
        return self._steps[node, following]

    def _grow(self, sets: npt.NDArray[np.int64]) -> None:
        """From every set to every set with one node more."""
        for bit, node in enumerate(self._others):
            inside = sets[(sets >> bit) & 1 == 1]
            if self._instance.asynchronous:
                stage = self._tables.middle[node]
                alone = np.where(stage <= self._limit, stage, np.inf)
                worked = self._least(self._arrive[inside, node], alone)
            for next_bit, following in enumerate(self._others):
                free = (inside >> next_bit) & 1 == 0
                if following == node or not free.any():
                    continue
                if self._instance.asynchronous:
                    value = worked[free] + self._hop[node, following]
                else:
                    value = self._least(
                        self._arrive[inside[free], node], self._step(node, following)
                    )
                grown = inside[free] | (1 << next_bit)
                self._arrive[grown, following] = np.minimum(self._arrive[grown, following], value)

    @staticmethod
    def _least(arrive: Floats, step: Floats) -> Floats:
        """min over the start n of arrive[set, n] + step[n, end], for every end; [sets, N+1]."""
        result = np.full_like(arrive, np.inf)
        for start in range(arrive.shape[1]):
            row = step[start]
            ends = np.flatnonzero(np.isfinite(row))
            if ends.size:
                low, high = ends[0], ends[-1] + 1
                candidate = arrive[:, start, None] + row[None, low:high]
                np.minimum(result[:, low:high], candidate, out=result[:, low:high])
        return result

    def _finish(self, sets: npt.NDArray[np.int64]) -> _End:
        """The best end over these sets: the last stage, and the return to the source."""
        instance = self._instance
        back = instance.return_s[:, self._source]
        station = self._tables.last + (0.0 if instance.asynchronous else back[:, None])
        ok = (station <= self._limit) & (back <= self._limit)[:, None]
        finish = np.where(
            ok, self._tables.last + (back + instance.latency_s[:, self._source])[:, None], np.inf
        )
        total = self._arrive[sets] + finish[None]
        index = int(np.argmin(total))
        row, node, start = np.unravel_index(index, total.shape)
        return _End(float(total[row, node, start]), int(sets[row]), int(node), int(start))

    def _trace(self, end: _End) -> Cut:
        """Walk back from the last stage, finding again which step gave each value."""
        nodes, ends = [end.node], [self._layers]
        members = end.members
        node = end.node
        start = end.start
        while True:
            ends.append(start)
            value = self._arrive[members, node, start]
            rest = members & ~(1 << self._others.index(node))
            if not rest:
                break
            previous = [one for bit, one in enumerate(self._others) if rest >> bit & 1]
            table = [self._arrive[rest, one] + self._step(one, node)[:, start] for one in previous]
            rows = np.array(table)
            row, before = np.unravel_index(int(np.argmin(np.abs(rows - value))), rows.shape)
            members = rest
            node = previous[int(row)]
            start = int(before)
            nodes.append(node)
        nodes.append(self._source)
        return Cut(tuple(reversed(nodes)), tuple(reversed(ends)))
