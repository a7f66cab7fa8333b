"""The paper's own Algorithms 1 and 2 (EdgeShard, IEEE IoT-J 2025), to compare with the exact
solvers. Pure.

Algorithm 1 chooses for every layer its node: DP(i, j) = min_k DP(i-1, k) + t_comm(i-1, k, j) +
t_comp(i, j), and the return after the last layer. Its state forgets how much memory the path to it
has used. Read literally, a node's memory shrinks for good whenever a value of its column improves.
*Tracked* keeps for every state the memory that its own path has used. It is still not optimal: the
quickest path to (i, j) may have used up the memory that the rest needs. The 4-layer case of the
tests gives 32 instead of 27, and 40 if read literally. Both may return to a node. *Distinct* is
tracked without such returns, so that the plan can be deployed.

The embedding counts as part of layer 0, norm and head as part of the last layer, a stage's fixed
costs as part of the layer it begins with. Algorithm 2 minimises the bottleneck and leaves out the
return and the round. (docs/papers.md#the-papers-own-algorithms)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from edgeshard.planning.solvers import thresholds
from edgeshard.planning.solvers.instance import Cut, Floats, Instance
from edgeshard.planning.solvers.scoring import violations, within
from edgeshard.planning.solvers.solve import round_oracle


class MemoryModel(StrEnum):
    """How Algorithm 1 accounts for memory."""

    LITERAL = "literal"
    TRACKED = "tracked"
    DISTINCT = "distinct"


@dataclass(frozen=True, slots=True)
class Assignment:
    """A node per layer, and the algorithm's own time for it. `cut` is None if it returns to a
    node."""

    nodes: tuple[int, ...]
    value_s: float

    @property
    def cut(self) -> Cut | None:
        nodes, ends = [self.nodes[0]], []
        for layer, (before, node) in enumerate(
            zip(self.nodes[:-1], self.nodes[1:], strict=True), start=1
        ):
            if node != before:
                nodes.append(node)
                ends.append(layer)
        ends.append(len(self.nodes))
        return Cut(tuple(nodes), tuple(ends)) if len(set(nodes)) == len(nodes) else None


def algorithm_1(instance: Instance, memory: MemoryModel = MemoryModel.LITERAL) -> Assignment | None:
    """The paper's latency DP; None when it finds nothing. Time N M^2."""
    costs = _Costs(instance)
    return (
        _literal(costs)
        if memory is MemoryModel.LITERAL
        else _tracked(costs, memory is MemoryModel.DISTINCT)
    )


def algorithm_2(instance: Instance, start_cut: Cut | None = None) -> Cut | None:
    """The paper's throughput DP: the cut of least bottleneck, the return left out; None when
    nothing fits.

    The paper's table over sets of nodes costs N^2 2^M M^2. Bisecting the bottleneck T with "least R
    with every station <= T" finds the same optimum. Of the plans of that bottleneck it is one of
    least R, which the paper leaves open. `start_cut`, a cut of a similar instance, saves some of
    that if it is allowed here.
    """
    nothing = np.zeros_like(instance.hop_s)
    open_ring = replace(instance, return_s=nothing, latency_s=nothing, asynchronous=True)
    if start_cut is not None and violations(open_ring, start_cut):
        start_cut = None
    return thresholds.least_bottleneck(open_ring, round_oracle(open_ring), start_cut)


class _Costs:
    """t_comp, t_comm and Req of the paper from the instance."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.layers = instance.layers
        self.nodes = instance.nodes
        self.source = instance.source
        seconds: Floats = instance.compute_s.copy()
        seconds[:, 0] += instance.embed_s
        head_at_end = 0.0 if instance.head_on_source else 1.0
        seconds[:, -1] += instance.head_s * head_at_end
        seconds[self.source, 0] += instance.head_s[self.source] * (1.0 - head_at_end)
        self.compute = seconds
        need: Floats = instance.layer_bytes.copy()
        need[0] += instance.embed_bytes + instance.head_bytes * (1.0 - head_at_end)
        need[-1] += instance.head_bytes * head_at_end
        self.need = need
        self.enter = instance.overhead_s
        self.hop = instance.hop_s + instance.latency_s + self.enter[None, :]
        np.fill_diagonal(self.hop, 0.0)
        self.back = instance.return_s[:, self.source] + instance.latency_s[:, self.source]
        self.back[self.source] = 0.0
        self.room = instance.capacity_bytes - instance.stage_bytes

    def first(self) -> float:
        return float(self.compute[self.source, 0] + self.enter[self.source])


def _literal(costs: _Costs) -> Assignment | None:
    """One memory budget per node for the whole table, taken from whenever a value is improved."""
    layers = costs.layers
    nodes = costs.nodes
    source = costs.source
    value = np.full((layers, nodes), np.inf)
    choice = np.full((layers, nodes), -1, dtype=np.int64)
    room = costs.room.copy()
    if not within(costs.need[0], room[source]):
        return None
    value[0, source] = costs.first()
    room[source] -= costs.need[0]
    for layer in range(1, layers):
        for node in range(nodes):
            for before in range(nodes):
                total = (
                    value[layer - 1, before] + costs.hop[before, node] + costs.compute[node, layer]
                )
                if layer == layers - 1:
                    total += costs.back[node]
                if total < value[layer, node] and within(costs.need[layer], room[node]):
                    value[layer, node], choice[layer, node] = total, before
                    room[node] -= costs.need[layer]
    last = int(np.argmin(value[-1]))
    if not np.isfinite(value[-1, last]):
        return None
    path = [last]
    for layer in range(layers - 1, 0, -1):
        path.append(int(choice[layer, path[-1]]))
    return Assignment(tuple(reversed(path)), float(value[-1, last]))


def _tracked(costs: _Costs, distinct: bool) -> Assignment | None:
    """Every state keeps the way that led to it and the memory that this way has used on every
    node."""
    layers = costs.layers
    nodes = costs.nodes
    source = costs.source
    most = costs.instance.max_layers
    if not within(costs.need[0], costs.room[source]) or most[source] < 1:
        return None
    value = np.full(nodes, np.inf)
    used = np.zeros((nodes, nodes))
    count = np.zeros((nodes, nodes), dtype=np.int64)
    way = np.full((nodes, layers), -1, dtype=np.int64)
    value[source] = costs.first()
    used[source, source] = costs.need[0]
    count[source, source] = 1
    way[source, 0] = source
    for layer in range(1, layers):
        total = value[:, None] + costs.hop + costs.compute[:, layer][None, :]
        if layer == layers - 1:
            total = total + costs.back[None, :]
        need = used + costs.need[layer]
        fits = (need <= costs.room[None] * (1 + 1e-9)) & (count < most[None])
        if distinct:
            fits &= (count == 0) | np.eye(nodes, dtype=bool)
        total = np.where(fits, total, np.inf)
        before = np.argmin(total, axis=0)
        everyone = np.arange(nodes)
        value = total[before, everyone]
        used = used[before].copy()
        count = count[before].copy()
        way = way[before].copy()
        used[everyone, everyone] += costs.need[layer]
        count[everyone, everyone] += 1
        way[:, layer] = everyone
    last = int(np.argmin(value))
    return (
        Assignment(tuple(way[last].tolist()), float(value[last]))
        if np.isfinite(value[last])
        else None
    )
