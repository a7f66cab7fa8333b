"""The label search: plans in the making, extended layer by layer, pruned by the relaxation's bound.
Pure.

A label is (layers done, last kind, how often each kind was used, seconds so far). If labels agree
in the first three, the quickest is kept, which loses nothing. A label whose priced time plus the
least remaining time reaches the ceiling is dropped, which loses nothing either. With a `width`,
only the most promising labels of every (layers, kind) are kept; the least bound of the dropped
labels is then part of the answer's proof.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeshard.planning.solvers.instance import Floats
from edgeshard.planning.solvers.lagrangian_bound import Relaxed
from edgeshard.planning.solvers.scoring import SLACK
from edgeshard.planning.solvers.walks import INFINITY, Booleans, Integers, Problem

Words = npt.NDArray[np.uint64]


class Counters:
    """How often each kind was used, packed into 64-bit words; kinds that can never run out take no
    bits.

    The last field counts stages, when their number is limited.
    """

    def __init__(self, problem: Problem) -> None:
        instance = problem.instance
        # Every stage holds a layer, so no kind is used more often than there are layers.
        most = [0 if size >= problem.layers else int(size) for size in problem.sizes]
        most[0] = 0
        self.limited = instance.min_nodes > 1 or instance.max_nodes < min(
            problem.layers, instance.nodes
        )
        fields = [*most, min(instance.nodes, instance.max_nodes - 1) if self.limited else 0]
        places: list[tuple[int, int, int, int]] = []
        word, used = 0, 0
        for limit in fields:
            bits = limit.bit_length()
            if used + bits > 64:
                word, used = word + 1, 0
            places.append((word, min(used, 63), (1 << bits) - 1, (1 << used) if bits else 0))
            used += bits
        self.words = word + 1
        words, shifts, masks, units = zip(*places, strict=True)
        self.limits = np.array([limit or 1 for limit in fields], dtype=np.uint64)
        self._word = np.array(words)
        self._shift = np.array(shifts, dtype=np.uint64)
        self._mask = np.array(masks, dtype=np.uint64)
        self.units = np.zeros((len(fields), self.words), dtype=np.uint64)
        self.units[np.arange(len(fields)), self._word] = np.array(units, dtype=np.uint64)

    def free(self, keys: Words) -> Booleans:
        """[labels, C] whether one more stage of every kind is left."""
        fields = (keys[:, self._word] >> self._shift) & self._mask
        left = np.asarray(fields < self.limits)
        return np.asarray(left[:, :-1] & left[:, -1:])

    def add(self, keys: Words, kinds: Integers) -> Words:
        return np.asarray(keys + self.units[kinds] + self.units[-1])

    def stages(self, keys: Words) -> Integers:
        """Stages after the source's; meaningful only when `limited`."""
        return np.asarray((keys[:, self._word[-1]] >> self._shift[-1]) & self._mask[-1]).astype(
            np.int64
        )

    def used(self, keys: Words, kind: int) -> Floats:
        """How often every label used this kind; 0 for a kind that cannot run out."""
        return np.asarray(
            (keys[:, self._word[kind]] >> self._shift[kind]) & self._mask[kind]
        ).astype(np.float64)


@dataclass(slots=True)
class Labels:
    """Arrays over labels: seconds so far, prices paid, the last stage's own time, kind, counters,
    origin."""

    cost: Floats
    price: Floats
    station: Floats
    kind: Integers
    keys: Words
    parent: Integers

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self.cost, self.price, self.station, self.kind, self.keys, self.parent

    def take(self, index: Integers | Booleans) -> Labels:
        return Labels(*(array[index] for array in self.arrays))

    def __len__(self) -> int:
        return len(self.cost)


class Fill:
    """Least time for the remaining layers, by the remaining nodes of every kind: quickest nodes
    first, full, links at their best.

    It ignores which link leads where, but not which nodes were used; the relaxation does the
    reverse. Only for few kinds.
    """

    MOST_KINDS = 16

    def __init__(self, problem: Problem, counters: Counters) -> None:
        self._problem, self._counters = problem, counters
        self._room = problem.most_layers.astype(np.float64)
        compute = problem.instance.compute_s[problem.representative]
        self._layer = np.minimum.accumulate(compute[:, ::-1], axis=1)[:, ::-1]
        self._enter = problem.hop.min(axis=0)
        self._visit = problem.overhead + self._enter
        work = problem.overhead[:, None] + problem.done[:, -1:] - problem.done
        tail = np.where(np.isfinite(problem.finish), problem.finish - work, INFINITY)
        self._tail = float(tail.min())

    def to_go(self, labels: Labels, start: int, arrived: bool) -> Floats:
        """[labels] certain remaining seconds after `start` layers; infinite if the remaining nodes
        cannot hold the rest.

        A node that has just `arrived` still has its own room, its hop is paid.
        """
        keys = labels.keys - self._counters.units[labels.kind] if arrived else labels.keys
        need = np.full(len(keys), float(self._problem.layers - start))
        seconds = np.full(len(keys), self._tail)
        usable = np.flatnonzero((self._room > 0) & np.isfinite(self._visit))
        rate = self._layer[usable, start] + self._visit[usable] / self._room[usable]
        for index in np.argsort(rate):
            kind = int(usable[index])
            left = self._problem.sizes[kind] - self._counters.used(keys, kind)
            portion = np.minimum(need, left * self._room[kind])
            seconds += portion * rate[index]
            need -= portion
        seconds[need > 0] = INFINITY
        return seconds - self._enter[labels.kind] if arrived else seconds


def join(parts: list[Labels]) -> Labels:
    if len(parts) == 1:
        return parts[0]
    return Labels(*map(np.concatenate, zip(*(part.arrays for part in parts), strict=True)))


@dataclass(frozen=True, slots=True)
class BeamResult:
    """`stages` = (kind, end) from the source on, empty when nothing was found below the ceiling.

    `dropped_s` is the least bound of what a width or the effort dropped: nothing undiscovered is
    below min(value, dropped).
    """

    stages: tuple[tuple[int, int], ...]
    value_s: float
    dropped_s: float


class Search:
    """One search. `ceiling_s`: only plans of R below it count. `effort`: most labels extended in
    all."""

    def __init__(
        self,
        problem: Problem,
        relaxed: Relaxed,
        ceiling_s: float,
        width: int | None,
        effort: int = 4_000_000,
    ) -> None:
        self._problem = problem
        self._relaxed = relaxed
        self._width = width
        self._left = effort
        self._ceiling = ceiling_s
        self._counters = Counters(problem)
        self._fill = Fill(problem, self._counters) if problem.count <= Fill.MOST_KINDS else None
        # If sending is in the station, a slower last stage may forbid the next link: the quickest
        # label is not enough.
        self._stations_count = not problem.instance.asynchronous and np.isfinite(problem.limit)
        self._waiting: list[list[Labels]] = [[] for _ in range(problem.layers + 1)]
        self._dropped = INFINITY
        self._origins: list[tuple[int, Integers, Integers, int]] = []
        self._numbers: list[int] = []
        self._next = 0
        self._best: tuple[tuple[tuple[int, int], ...], float] | None = None

    def run(self) -> BeamResult:
        self._begin()
        for start in range(1, self._problem.layers):
            if not self._waiting[start]:
                continue
            self._advance(start)
            self._waiting[start] = []
        if self._best is None:
            return BeamResult((), INFINITY, self._dropped)
        return BeamResult(*self._best, self._dropped)

    def _begin(self) -> None:
        problem = self._problem
        for end in np.flatnonzero(np.isfinite(problem.first)):
            cost = problem.first[[end]]
            zero, kind = np.zeros(1), np.zeros(1, dtype=np.int64)
            keys = np.zeros((1, self._counters.words), dtype=np.uint64)
            self._waiting[end].append(
                Labels(cost, zero, cost, kind, keys, np.full(1, -1, dtype=np.int64))
            )

    def _bound(self, labels: Labels, to_go: Floats) -> Floats:
        return np.asarray(labels.cost + labels.price + to_go[labels.kind] - self._relaxed.paid)

    def _advance(self, start: int) -> None:
        """Extend all labels that have `start` layers done: hop on, then work."""
        worked = self._keep(join(self._waiting[start]), start, arrived=False)
        if not len(worked):
            return
        self._number(worked, start)
        arrived = self._keep(self._hop(worked, start), start, arrived=True)
        self._finish(arrived, start)
        self._work(arrived, start)

    def _keep(self, labels: Labels, start: int, arrived: bool) -> Labels:
        """The labels without hopeless ones, doubles, and those beyond the width."""
        bound = self._bound(
            labels, self._relaxed.arrived[start] if arrived else self._relaxed.worked[start]
        )
        alive = np.flatnonzero(bound < self._ceiling)
        labels, bound = labels.take(alive), bound[alive]
        if len(labels):
            indices = self._distinct(labels)
            labels, bound = labels.take(indices), bound[indices]
            if self._fill is not None:
                bound = np.maximum(bound, labels.cost + self._fill.to_go(labels, start, arrived))
                alive = np.flatnonzero(bound < self._ceiling)
                labels, bound = labels.take(alive), bound[alive]
            labels = labels.take(self._promising(labels.kind, bound))
        self._left -= len(labels)
        return labels

    def _number(self, worked: Labels, start: int) -> None:
        """Number every finished stage; its successors find it by that number."""
        self._numbers.append(self._next)
        self._origins.append((self._next, worked.parent, worked.kind, start))
        worked.parent = np.arange(self._next, self._next + len(worked))
        self._next += len(worked)

    def _distinct(self, labels: Labels) -> Integers:
        """The quickest of the labels that agree in kind and counters; also those whose last stage
        is shorter."""
        keys = [labels.keys[:, word] for word in range(self._counters.words)]
        order = np.lexsort((labels.station, labels.cost, *keys, labels.kind))
        kind, words = labels.kind[order], labels.keys[order]
        fresh = np.ones(len(order), dtype=bool)
        fresh[1:] = (kind[1:] != kind[:-1]) | (words[1:] != words[:-1]).any(axis=1)
        if not self._stations_count:
            return np.asarray(order[fresh])
        group = np.cumsum(fresh)
        rank = np.argsort(np.argsort(labels.station[order], kind="stable"), kind="stable")
        # Groups get ever smaller ranges, so that a running minimum starts again with each of them.
        value = rank - group * (len(order) + 1)
        fresh[1:] |= value[1:] < np.minimum.accumulate(value)[:-1]
        return np.asarray(order[fresh])

    def _promising(self, kind: Integers, bound: Floats) -> Integers:
        width = self._width
        if width is None and self._left >= len(kind):
            return np.arange(len(kind))
        width = (
            width if width is not None else max(1, self._left // max(1, len(self._problem.sizes)))
        )
        order = np.lexsort((bound, kind))
        ordered = kind[order]
        first = np.searchsorted(ordered, ordered)
        inside = np.arange(len(order)) - first < width
        if not inside.all():
            self._dropped = min(self._dropped, float(bound[order[~inside]].min()))
        return np.asarray(order[inside])

    def _hop(self, labels: Labels, start: int) -> Labels:
        problem, prices = self._problem, self._relaxed.prices
        cost = labels.cost[:, None] + problem.hop[labels.kind]
        bound = cost + (
            labels.price[:, None]
            + (prices + self._relaxed.arrived[start] - self._relaxed.paid)[None]
        )
        ok = (bound < self._ceiling) & self._counters.free(labels.keys)
        if self._stations_count:
            ok &= labels.station[:, None] + problem.occupied[labels.kind] <= problem.limit
        if self._width is not None and len(labels) > 4 * self._width:
            self._thin(ok, bound)
        row, kind = np.nonzero(ok)
        return Labels(
            cost[row, kind],
            labels.price[row] + prices[kind],
            np.zeros(len(row)),
            kind,
            self._counters.add(labels.keys[row], kind),
            labels.parent[row],
        )

    def _thin(self, ok: Booleans, bound: Floats) -> None:
        """Before doubles are sought, keep four widths per kind: sorting all of them is most of the
        work otherwise."""
        assert self._width is not None
        masked = np.where(ok, bound, INFINITY)
        limit = np.partition(masked, 4 * self._width, axis=0)[4 * self._width]
        late = ok & (masked >= limit)
        if late.any():
            self._dropped = min(self._dropped, float(masked[late].min()))
            ok &= ~late

    def _finish(self, arrived: Labels, start: int) -> None:
        """The last stage from here: a plan. It lowers the ceiling when it is the best so far."""
        total = arrived.cost + self._problem.finish[arrived.kind, start]
        if self._counters.limited:
            enough = self._counters.stages(arrived.keys) + 1 >= self._problem.instance.min_nodes
            total = np.where(enough, total, INFINITY)
        if not len(total):
            return
        index = int(np.argmin(total))
        if total[index] < self._ceiling:
            self._ceiling = float(total[index]) * (1 - SLACK)
            stages = (
                *self._trace(int(arrived.parent[index])),
                (int(arrived.kind[index]), self._problem.layers),
            )
            self._best = (stages, float(total[index]))

    def _work(self, arrived: Labels, start: int) -> None:
        problem = self._problem
        left = problem.reach[arrived.kind, start] - start
        for width in range(1, int(left.max(initial=0)) + 1):
            reaching_labels = arrived.take(np.flatnonzero(left >= width))
            station = problem.windows[start, width - 1, reaching_labels.kind]
            worked = Labels(
                reaching_labels.cost + station,
                reaching_labels.price,
                station,
                reaching_labels.kind,
                reaching_labels.keys,
                reaching_labels.parent,
            )
            alive = self._bound(worked, self._relaxed.worked[start + width]) < self._ceiling
            if alive.any():
                self._waiting[start + width].append(worked.take(np.flatnonzero(alive)))

    def _trace(self, number: int) -> tuple[tuple[int, int], ...]:
        """(kind, end) of the finished stages that led to this one."""
        chain: list[tuple[int, int]] = []
        while number >= 0:
            index = bisect_right(self._numbers, number) - 1
            first, parents, kinds, start = self._origins[index]
            chain.append((int(kinds[number - first]), start))
            number = int(parents[number - first])
        return tuple(reversed(chain))
