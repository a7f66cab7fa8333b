"""Every cut of a small instance, as arrays: ordered distinct nodes from the source on, and where
each stage ends. Pure.

    for cuts in every_cut(instance):        # in parts, those that break a rule left out
        round_s, bottleneck_s = scores(instance, cuts)

`count_cuts` returns their number beforehand. Of indistinguishable nodes, only the first ones are
tried: any other choice costs the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, islice
from math import comb

import numpy as np

from edgeshard.planning.solvers.instance import Cut, Floats, Instance
from edgeshard.planning.solvers.scoring import SLACK
from edgeshard.planning.solvers.walks import Booleans, Integers, Kinds, equal_kinds

PART = 1 << 16
"""Cuts in one part, about: enough for numpy, few enough for the cache."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """K cuts of S stages each: node `nodes[k, s]` ([K, S]) holds blocks up to `ends[k, s]` ([K,
    S])."""

    nodes: Integers
    ends: Integers

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def starts(self) -> Integers:
        """[K, S] the first block of each stage."""
        return np.concatenate([np.zeros((len(self), 1), dtype=np.int64), self.ends[:, :-1]], axis=1)

    @property
    def receivers(self) -> Integers:
        """[K, S] the node each stage sends to; the last one returns to the source."""
        return np.roll(self.nodes, -1, axis=1)

    def take(self, index: Integers | Booleans) -> Cuts:
        return Cuts(self.nodes[index], self.ends[index])

    def cut(self, index: int) -> Cut:
        return Cut(tuple(self.nodes[index].tolist()), tuple(self.ends[index].tolist()))

    @classmethod
    def of(cls, cuts: Sequence[Cut]) -> Cuts:
        """Cuts of one number of stages as arrays."""
        nodes = np.array([cut.nodes for cut in cuts], dtype=np.int64)
        return cls(nodes, np.array([cut.ends for cut in cuts], dtype=np.int64))


def kinds_of_all(instances: Sequence[Instance]) -> Kinds:
    """Nodes that may be swapped without changing any of these instances, as kinds; kind 0 is only
    the source."""
    marks: list[tuple[int, ...]] = [()] * instances[0].nodes
    for instance in instances:
        kinds = equal_kinds(instance, instance.nodes)
        assert kinds is not None  # there are at most as many kinds as nodes
        for kind, members in enumerate(kinds.members):
            for node in members:
                marks[node] = (*marks[node], kind)
    groups: dict[tuple[int, ...], list[int]] = {marks[instances[0].source]: []}
    for node, mark in enumerate(marks):
        groups.setdefault(mark, []).append(node)
    return Kinds(tuple(tuple(nodes) for nodes in groups.values()))


def count_cuts(instance: Instance, kinds: Kinds | None = None) -> int:
    """The number of cuts that `every_cut` examines, including those that break a limit of memory,
    layers or links."""
    sizes = [len(members) for members in _others(instance, kinds)]
    counts = _stage_counts(instance, sum(sizes))
    orders = _order_counts(sizes, counts.stop - 1)
    return sum(orders[stages - 1] * comb(instance.layers - 1, stages - 1) for stages in counts)


def every_cut(instance: Instance, kinds: Kinds | None = None, part: int = PART) -> Iterator[Cuts]:
    """All cuts that break no rule of the instance, in parts of about `part` before the filter.

    `kinds` are the nodes to take as equal; they are computed if None. If the cuts serve several
    instances, pass the kinds of all.
    """
    members = _others(instance, kinds)
    for stages in _stage_counts(instance, sum(map(len, members))):
        splits = _splits(instance.layers, stages)
        if not len(splits):
            continue
        many = max(1, part // len(splits))
        every = ((instance.source, *order) for order in _orders(members, stages - 1))
        while orders := list(islice(every, many)):
            yield from _crossed(instance, orders, splits)


def allowed(instance: Instance, cuts: Cuts) -> Booleans:
    """[K] whether a cut keeps the limits of memory, layers, links and stages; order and ends are
    taken as sound."""
    nodes = cuts.nodes
    starts = cuts.starts
    ends = cuts.ends
    if instance.stage_s is not None:
        room = np.isfinite(instance.stage_s[nodes, starts, ends])
    else:
        layer_sums = np.concatenate([[0.0], np.cumsum(instance.layer_bytes)])
        need = instance.stage_bytes + layer_sums[ends] - layer_sums[starts]
        head = 0 if instance.head_on_source else nodes.shape[1] - 1
        need[:, 0] += instance.embed_bytes
        need[:, head] += instance.head_bytes
        if head == 0:
            need[:, 0] -= instance.tied_bytes
        room = need <= instance.capacity_bytes[nodes] * (1 + SLACK)
    fits = np.asarray((room & (ends - starts <= instance.max_layers[nodes])).all(axis=1))
    if nodes.shape[1] > 1:
        fits &= np.isfinite(instance.hop_s[nodes[:, :-1], nodes[:, 1:]]).all(axis=1)
        fits &= np.isfinite(instance.return_s[nodes[:, -1], instance.source])
    return np.asarray(fits & (instance.min_nodes <= nodes.shape[1] <= instance.max_nodes))


def scores(instance: Instance, cuts: Cuts) -> tuple[Floats, Floats]:
    """[K] R and [K] B of every cut, as `scoring.score` has them."""
    nodes, receivers = cuts.nodes, cuts.receivers
    if instance.stage_s is not None:
        stage = instance.stage_s[nodes, cuts.starts, cuts.ends]
    else:
        done = np.concatenate(
            [np.zeros((instance.nodes, 1)), np.cumsum(instance.compute_s, axis=1)], axis=1
        )
        stage = instance.overhead_s[nodes] + (done[nodes, cuts.ends] - done[nodes, cuts.starts])
        head = 0 if instance.head_on_source else nodes.shape[1] - 1
        stage[:, 0] += instance.embed_s[nodes[:, 0]]
        stage[:, head] += instance.head_s[nodes[:, head]]
    if nodes.shape[1] == 1:
        return stage[:, 0], stage[:, 0]
    hop = instance.hop_s[nodes, receivers]
    hop[:, -1] = instance.return_s[nodes[:, -1], instance.source]
    round_s = stage.sum(axis=1) + hop.sum(axis=1) + instance.latency_s[nodes, receivers].sum(axis=1)
    station = np.maximum(stage, hop) if instance.asynchronous else stage + hop
    return round_s, station.max(axis=1)


def _others(instance: Instance, kinds: Kinds | None) -> list[tuple[int, ...]]:
    """The kinds but the source, of nodes that can be a stage at all."""
    if kinds is None:
        kinds = kinds_of_all([instance])
    least = float(instance.layer_bytes.min(initial=np.inf))
    room = instance.capacity_bytes * (1 + SLACK) - instance.stage_bytes
    usable = (room >= least) & (instance.max_layers >= 1)
    return [members for members in kinds.members[1:] if usable[members[0]]]


def _stage_counts(instance: Instance, others: int) -> range:
    most = min(others + 1, instance.max_nodes, instance.layers)
    return range(max(1, instance.min_nodes), most + 1)


def _order_counts(sizes: Sequence[int], most: int) -> list[int]:
    """Numbers of orders of 0, 1, 2, ... and at most `most` nodes out of kinds of these sizes."""
    counts = [1]
    for size in sizes:
        longer = [0] * min(len(counts) + size, most + 1)
        for old, ways in enumerate(counts):
            for new in range(min(size, most - old) + 1):
                longer[old + new] += ways * comb(old + new, new)
        counts = longer
    return counts


def _orders(members: Sequence[tuple[int, ...]], count: int) -> Iterator[tuple[int, ...]]:
    """Every order of `count` nodes, of each kind its first ones only."""
    used = [0] * len(members)
    order: list[int] = []

    def extend() -> Iterator[tuple[int, ...]]:
        if len(order) == count:
            yield tuple(order)
            return
        for kind, nodes in enumerate(members):
            if used[kind] < len(nodes):
                order.append(nodes[used[kind]])
                used[kind] += 1
                yield from extend()
                used[kind] -= 1
                order.pop()

    return extend()


@lru_cache(maxsize=64)
def _splits(layers: int, stages: int) -> Integers:
    """[splits, stages] of ends; every stage has a layer."""
    rows = [(*ends, layers) for ends in combinations(range(1, layers), stages - 1)]
    return np.array(rows, dtype=np.int64).reshape(-1, stages)


def _crossed(
    instance: Instance, orders: Sequence[tuple[int, ...]], splits: Integers
) -> Iterator[Cuts]:
    """Every order with every split, without those that break a limit."""
    nodes = np.repeat(np.array(orders, dtype=np.int64), len(splits), axis=0)
    cuts = Cuts(nodes, np.tile(splits, (len(orders), 1)))
    cuts = cuts.take(allowed(instance, cuts))
    if len(cuts):
        yield cuts
