"""Problems with other nodes: some added, or one taken away. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from types import MappingProxyType

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.planning.inputs.catalogue import DeviceSpec
from edgeshard.planning.inputs.devices import (
    NO_NEIGHBOUR_BPS,
    Cluster,
    ClusterNode,
    Link,
    node_like,
    with_figures,
    with_nodes,
    without_nodes,
)
from edgeshard.planning.inputs.problem import PlanProblem

MOST_ADDED = 10_000
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_FIGURE = re.compile(
    r"(?:(?P<node>[^\s=]+)\s+)?(?:(?P<disk>disk)=|memory=\+)(?P<number>\d{1,15}(?:\.\d{1,9})?)(?P<unit>[kmgt]?)b?"
    r"(?(disk)(?:/s)?)",
    re.IGNORECASE,
)
"""`NODE disk=2.1GB/s` and `NODE memory=+8GB`; without a node they are for all."""


def changed(problem: PlanProblem, changes: Sequence[str]) -> PlanProblem:
    """The problem after changes such as `+2 orin-nx`, `-agx-3`, `disk=2.1GB/s` and
    `agx-1 memory=+8GB`, one after the other.

    Raises InvalidArgumentError for one that is no change, or that names an unknown node.
    """
    for change in changes:
        text = change.strip()
        if text.startswith("-"):
            problem = _without(problem, text[1:].strip())
            continue
        if (figure := _FIGURE.fullmatch(text)) is not None:
            problem = _with_figure(problem, figure)
            continue
        number, _, kind = text.removeprefix("+").strip().partition(" ")
        if not kind:
            number, kind = "1", number
        if not (
            text.startswith("+")
            and re.fullmatch("[0-9]+", number)
            and 0 < int(number) <= MOST_ADDED
        ):
            raise InvalidArgumentError(
                f'--what-if {change!r} is not a change: give "+2 orin-nx", "-NODE" to remove one, '
                '"disk=2.1GB/s" or "NODE memory=+8GB"',
                field="what_if",
            )
        problem = _with_nodes(problem, kind.strip(), int(number))
    return problem


def typical_link(cluster: Cluster) -> Link:
    """The median of a site's links, which a node that is not there yet is taken to have."""
    rates = [link for link in cluster.links.values() if link.bandwidth_bps]
    if not rates:
        return Link(NO_NEIGHBOUR_BPS)
    return Link(
        statistics.median(link.bandwidth_bps for link in rates),
        statistics.median(link.latency_s for link in rates),
    )


def _with_figure(problem: PlanProblem, figure: re.Match[str]) -> PlanProblem:
    """The problem with another rate of disks, or with more memory, on the named nodes or on all."""
    value = float(figure["number"]) * _UNITS[figure["unit"].lower()]

    def change(device: DeviceSpec) -> DeviceSpec:
        if figure["disk"]:
            return replace(device, disk_bytes_per_s=value or None)
        return replace(device, memory_bytes=device.memory_bytes + value)

    return replace(
        problem, cluster=with_figures(problem.cluster, figure["node"] or "", change, "what_if")
    )


def _with_nodes(problem: PlanProblem, kind: str, count: int) -> PlanProblem:
    """A node like a measured one takes the same times."""
    before, like = problem.cluster, node_like(problem.cluster, kind)
    described = before.default_link.bandwidth_bps > 0
    after = with_nodes(before if described else _open(before), kind, count, "what_if")
    added = [node.name for node in after.nodes[len(before.nodes) :]]
    if like is not None and described:
        after = _linked_like(after, like, added)
    if like is None or like.name not in problem.times:
        return replace(problem, cluster=after)
    times = dict.fromkeys(added, problem.times[like.name])
    return replace(problem, cluster=after, times=MappingProxyType({**problem.times, **times}))


def _linked_like(cluster: Cluster, like: ClusterNode, added: Sequence[str]) -> Cluster:
    """The added nodes with the links of `like`; among themselves and with it they have the links of
    its group."""
    links = dict(cluster.links)
    for (sender, receiver), link in cluster.links.items():
        if sender == like.name:
            links |= {(name, receiver): link for name in added}
        elif receiver == like.name:
            links |= {(sender, name): link for name in added}
    mate = next(
        (node for node in cluster.nodes if node.group == like.group and node is not like), None
    )
    within = cluster.links.get((like.name, mate.name)) if mate is not None else None
    if within is not None:
        links |= dict.fromkeys(permutations((like.name, *added), 2), within)
    return replace(cluster, links=MappingProxyType(links))


def _without(problem: PlanProblem, name: str) -> PlanProblem:
    """The problem without a node, and without the limits that were set for it."""
    cluster = without_nodes(problem.cluster, name, "what_if")
    return replace(
        problem,
        cluster=cluster,
        exclude=tuple(other for other in problem.exclude if other != name),
        reserve={other: size for other, size in problem.reserve.items() if other != name},
        max_share={other: share for other, share in problem.max_share.items() if other != name},
    )


def _open(cluster: Cluster) -> Cluster:
    """A site's cluster with a link for nodes to come; the pairs it has keep theirs, or keep having
    none."""
    pairs = [(x, y) for x in cluster.nodes for y in cluster.nodes if x is not y]
    links = {(x.name, y.name): cluster.link(x, y) for x, y in pairs}
    return replace(cluster, default_link=typical_link(cluster), links=MappingProxyType(links))
