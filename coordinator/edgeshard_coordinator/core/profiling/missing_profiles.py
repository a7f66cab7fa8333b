"""Missing profiles and links of a node, and the coordinator's own measuring of layers. Pure.

A model and its storage of weights count as wanted if another node was measured for it or a
deployment runs it. A node that lacks a wanted profile is measured when the site is quiet, nodes
that serve after all others. It does not matter whether others use it, nor whether it serves:
doubtful figures are better than none, and are taken again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from edgeshard.domain.control.commands import MeasureCompute
from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.ids import NodeId
from edgeshard.domain.nodes.profile import Effort, at_least, config_hash
from edgeshard_coordinator.core.values.jobs import Job, ProbeTry
from edgeshard_coordinator.core.values.measurements import ProfileKey, key_asked
from edgeshard_coordinator.core.values.state import DeploymentRecord, KnownNode, State


class Unknown:
    """The unknown figures of the nodes of one state; made once for all of them."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._placeable = frozenset(node.node_id for node in state.nodes.values() if node.placeable)
        self._deployed = [record for record in _lasting(state) if record.shape in state.configs]
        self._efforts: dict[ProfileKey, Effort] = {}
        """The profiles that nodes have, each with the most effort that one took."""
        for measurements in state.measured.values():
            for key, profile in measurements.profiles.items():
                if key[0] in state.configs:
                    self._efforts[key] = at_least(
                        self._efforts.get(key, Effort.QUICK), profile.value.effort
                    )

    def profiles(self, node: KnownNode) -> list[MeasureCompute]:
        """The measurements to request from the node, deployed models first; in full if another node
        was measured in full."""
        measurements = self._state.measured.get(node.node_id)
        keys = dict.fromkeys(self._keys_deployed(node)) | dict.fromkeys(self._efforts)
        return [
            MeasureCompute(
                self._state.configs[shape],
                dtype,
                self._efforts.get((shape, dtype, quantisation), Effort.QUICK),
                False,
                quantisation,
            )
            for shape, dtype, quantisation in keys
            if (measurements is None or (shape, dtype, quantisation) not in measurements.profiles)
            and can_keep(node, quantisation is not None)
        ]

    def links(self, node: KnownNode) -> frozenset[NodeId]:
        """The nodes to which layers can be placed and the way from this one is not measured."""
        return self._placeable.difference(self._state.links_from(node.node_id), (node.node_id,))

    def link_count(self, node: KnownNode) -> int:
        """The number of `links`; cheap also for thousands of nodes that know few links."""
        there = self._placeable.intersection(self._state.links_from(node.node_id))
        return len(self._placeable) - len(there) - (node.node_id in self._placeable)

    def _keys_deployed(self, node: KnownNode) -> Iterator[ProfileKey]:
        for record in self._deployed:
            if node.name not in record.spec.exclude:
                yield record.shape, record.spec.dtype, record.spec.quantisation_of(node.name)


def is_whole(state: State, nodes: Iterable[KnownNode]) -> bool:
    """Whether nothing is left to measure of these nodes: their links, and the layers of nodes that
    do not serve. The site may never be quiet enough to measure nodes that serve."""
    unknown, serving_nodes = Unknown(state), serving(state)

    def lacks(node: KnownNode) -> bool:
        return unknown.link_count(node) > 0 or (
            node.node_id not in serving_nodes and bool(unknown.profiles(node))
        )

    return not any(node.placeable and lacks(node) for node in nodes)


def serving(state: State) -> frozenset[NodeId]:
    """The nodes that a deployment has a place on, or that hold a stage: measuring their layers
    yields to steps."""
    placed = {stage.node_id for record in _holding(state) for stage in record.placement.stages}
    return frozenset(placed | {node.node_id for node in state.nodes.values() if node.stages})


def begun(state: State, now: float) -> State:
    """The state that begins to measure the first node that lacks a wanted profile and may be
    measured now: one that does not serve, if there is one.

    The same state object if there is none. Each attempt counts when it begins.
    """
    if not state.configs:
        return state
    unknown, serving_nodes = Unknown(state), serving(state)
    for node_id in sorted(state.nodes, key=lambda node_id: (node_id in serving_nodes, node_id)):
        node = state.nodes[node_id]
        if not node.placeable:
            continue
        tries = state.profile_tries.get(node_id, {})
        for command in unknown.profiles(node):
            tried = tries.get(key_asked(command), ProbeTry(0, 0.0))
            if tried.attempts < state.timings.retake_attempts and now >= tried.not_before:
                return _asked(state, node, command, tried.attempts, now)
    return state


def ended(state: State, job: Job, command: MeasureCompute, interrupted: bool) -> State:
    """The state after a measurement of layers: one that gave a profile is over, and one that was
    `interrupted` was no attempt."""
    tries = state.profile_tries.get(job.node_id, {})
    key = key_asked(command)
    measurements = state.measured.get(job.node_id)
    tried = tries.get(key)
    if tried is None:
        return state
    others = {other: item for other, item in tries.items() if other != key}
    if measurements is not None and key in measurements.profiles:
        return _with_tries(state, job.node_id, others)
    if job.own and interrupted:
        tried = replace(tried, attempts=tried.attempts - 1)
    return _with_tries(state, job.node_id, {**others, key: tried})


def forgotten(state: State, node_id: NodeId) -> State:
    """The state without a node's tries: it is another process now, and may do what failed
    before."""
    return _with_tries(state, node_id, {})


def _asked(
    state: State, node: KnownNode, command: MeasureCompute, attempts: int, now: float
) -> State:
    delay = retake_delay(state, attempts)
    tries = {
        **state.profile_tries.get(node.node_id, {}),
        key_asked(command): ProbeTry(attempts + 1, now + delay),
    }
    return _with_tries(with_own_job(state, node.node_id, command), node.node_id, tries)


def with_own_job(
    state: State,
    node_id: NodeId,
    compute: MeasureCompute | None = None,
    peers: tuple[NodeId, ...] = (),
) -> State:
    """The state in which a node is to measure something that no caller waits for."""
    count = state.probe_count + 1
    connection = state.nodes[node_id].connection
    job = Job(f"{state.instance}-{count}", node_id, connection, compute, peers, own=True)
    return replace(state, jobs=(job,), probe_count=count)


def retake_delay(state: State, attempts: int) -> float:
    """Seconds until layers are measured again that were measured so often before."""
    return min(state.timings.retake_limit_s, state.timings.retake_first_s * 2.0**attempts)


def _with_tries(state: State, node_id: NodeId, tries: dict[ProfileKey, ProbeTry]) -> State:
    others = {
        other: node_tries for other, node_tries in state.profile_tries.items() if other != node_id
    }
    return replace(state, profile_tries={**others, node_id: tries} if tries else others)


def can_keep(node: KnownNode, small_integers: bool) -> bool:
    """Weights of small integers run on processors only."""
    return not small_integers or node.facts.kind == "cpu"


def _holding(state: State) -> Iterator[DeploymentRecord]:
    return (record for record in state.deployments.values() if record.phase is not Phase.FAILED)


def _lasting(state: State) -> Iterator[DeploymentRecord]:
    return (record for record in _holding(state) if record.phase is not Phase.DELETING)


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
