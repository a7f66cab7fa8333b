"""Nodes that no load distinguishes, and how many of them a plan can use at all. Pure."""

from __future__ import annotations

from dataclasses import replace

from edgeshard.planning.costs.costs import Costs, Load, Roofline
from edgeshard.planning.inputs.problem import ComputeTimes
from edgeshard.planning.solvers.classes import MOST_KINDS
from edgeshard.planning.solvers.walks import Kinds, equal_kinds

_FEW_NODES = 64
"""With more nodes, kinds are searched only as far as the class solver can use them."""


def kinds_of(costs: Costs) -> Kinds | None:
    """Nodes that are equal at every load, as kinds; None when there are too many kinds."""
    instance = costs.decode(Load())
    groups = equal_kinds(instance, MOST_KINDS if instance.nodes > _FEW_NODES else instance.nodes)
    if groups is None:
        return None
    # Links that are equal for one size are for all; times that are equal at one load may be so by
    # chance.
    distinct: list[ComputeTimes] = []

    def number(node: int) -> int:
        times = costs.times[node]
        for index, other in enumerate(distinct):
            if times is other or (isinstance(times, Roofline) and times == other):
                return index
        distinct.append(times)
        return len(distinct) - 1

    kinds = groups.split(number)
    return kinds if instance.nodes <= _FEW_NODES or len(kinds.members) <= MOST_KINDS + 1 else None


def without_spare(costs: Costs, kinds: Kinds | None) -> tuple[Costs, Kinds | None, tuple[int, ...]]:
    """The problem with no more nodes of a kind than a plan has stages, its kinds, and each node's
    index in `costs`."""
    most = costs.problem.model.layer_count
    if kinds is None or max(map(len, kinds.members)) <= most:
        return costs, kinds, tuple(range(len(costs.nodes)))
    used_nodes = sorted(node for members in kinds.members for node in members[:most])
    spare = set(range(len(costs.nodes))) - set(used_nodes)
    exclude = (*costs.problem.exclude, *(costs.names[node] for node in sorted(spare)))
    index = {node: position for position, node in enumerate(used_nodes)}
    fewer = Kinds(tuple(tuple(index[node] for node in members[:most]) for members in kinds.members))
    return Costs(replace(costs.problem, exclude=exclude)), fewer, tuple(used_nodes)
