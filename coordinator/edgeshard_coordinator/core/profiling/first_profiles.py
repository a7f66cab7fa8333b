"""Measurements that a deployment is worth waiting for: those that its plan needs and that are missing. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from edgeshard.domain.control.commands import MeasureCompute
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.ids import NodeId
from edgeshard.domain.nodes.profile import Effort, config_hash
from edgeshard_coordinator.core.profiling.missing_profiles import can_keep, serving
from edgeshard_coordinator.core.values.state import State


def usable(state: State, spec: DeploymentSpec) -> tuple[NodeId, ...]:
    """The nodes that a deployment may have stages on."""
    named = {stage.node for stage in spec.layers}
    return tuple(
        node.node_id
        for node in sorted(state.nodes.values(), key=lambda node: node.name)
        if node.placeable and node.name not in spec.exclude and (not named or node.name in named)
    )


def first_jobs(
    state: State, spec: DeploymentSpec, config: Mapping[str, Any], active_requests: int = 0
) -> list[tuple[MeasureCompute | None, tuple[NodeId, ...]]]:
    """The nodes that are to measure, and their layers; None if only links of a node are unknown.

    Nodes that measure already are not asked. Layers of a node that serves are not measured while
    requests are active, since it would wait for their end. No layers are measured if nodes store
    their weights in different ways, since such a site is not planned.
    """
    nodes = usable(state, spec)
    ways = {spec.quantisation_of(state.nodes[node_id].name) for node_id in nodes}
    busy = serving(state) if active_requests else frozenset()
    at_it = still_measuring(state, nodes)
    layers: list[NodeId] = []
    links: list[NodeId] = []
    if len(ways) != 1:
        return []
    (way,) = ways
    key = (config_hash(config), spec.dtype, way)
    for node_id in nodes:
        measurements = state.measured.get(node_id)
        lacks = measurements is None or key not in measurements.profiles
        if node_id in at_it:
            continue
        if lacks and node_id not in busy and can_keep(state.nodes[node_id], way is not None):
            layers.append(node_id)
        elif set(nodes).difference(state.links_from(node_id), (node_id,)):
            links.append(node_id)
    # Disks and power are not of the first effort.
    effort = Effort.QUICK if spec.allow_streaming or spec.objective == "energy" else Effort.FIRST
    compute = MeasureCompute(config, spec.dtype, effort, False, way)
    return [(what, tuple(ids)) for what, ids in ((compute, layers), (None, links)) if ids]


def still_measuring(state: State, nodes: Collection[NodeId]) -> frozenset[NodeId]:
    """Those of the nodes that measure themselves or their links, or are about to."""
    return frozenset(job.node_id for job in state.jobs if job.node_id in nodes)
