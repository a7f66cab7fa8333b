"""The state of nodes as they register, connect, send heartbeats and go away."""

from __future__ import annotations

from dataclasses import replace

from edgeshard.domain.control.commands import Heartbeat, Registration
from edgeshard.domain.errors import AlreadyExistsError, NotFoundError, UnavailableError
from edgeshard.domain.ids import NodeId
from edgeshard.domain.nodes.device import DeviceFacts, StagePhase, StageStatus
from edgeshard.profiles.profile_quality import OTHERS
from edgeshard_coordinator.core.deployments import deployments
from edgeshard_coordinator.core.nodes import lost_nodes, suspicion, unconnected_nodes
from edgeshard_coordinator.core.profiling import measuring
from edgeshard_coordinator.core.values import authority, events
from edgeshard_coordinator.core.values.actions import ReleaseOrphans
from edgeshard_coordinator.core.values.measurements import Measurements, same_device
from edgeshard_coordinator.core.values.state import DeploymentRecord, KnownNode, State

IDENTITY_IN_USE = "IDENTITY_IN_USE"
LATE_S = 0.3
"""A heartbeat that is later than this is from a process in trouble."""


def with_measurements(state: State, node_id: NodeId, measurements: Measurements) -> State:
    return replace(state, measured={**state.measured, node_id: measurements})


def on_registered(state: State, event: events.NodeRegistered) -> State:
    new = event.registration
    namesakes = [n for n in state.nodes.values() if n.name == new.name and n.node_id != new.node_id]
    if any(node.connected for node in namesakes):
        raise AlreadyExistsError(
            f"name: another node is connected as {new.name}; give this one another --name",
            field="name",
        )
    state = unconnected_nodes.without(state, {node.node_id for node in namesakes})
    state = unconnected_nodes.with_room(state, new.node_id)
    former_node = state.nodes.get(new.node_id)
    # While a node starts, its former facts are more accurate than its reports.
    facts = former_node.facts if new.starting and former_node is not None else new.facts
    node = KnownNode(
        node_id=new.node_id,
        name=new.name,
        address=new.address,
        wire_version=new.wire_version,
        facts=facts,
        incarnation=new.incarnation,
        starting=new.starting,
        joined=former_node is not None and former_node.joined,
        own_labels=new.labels,
        # A node whose agent lost its state directory is still that node.
        set_labels=(former_node or namesakes[0]).set_labels if former_node or namesakes else {},
    )
    if former_node is not None and former_node.incarnation == new.incarnation:
        state, node = _registered_again(state, former_node, node, event.now)
    elif former_node is not None:
        if former_node.incarnation:
            state = lost_nodes.died(state, new.node_id)
        state = away(state, former_node)
        state = measuring.forget_tries(state, new.node_id)
    return _checked_device(state.with_node(replace(node, heard_at=event.now)), former_node, facts)


def check_is_alone(node: KnownNode, new: Registration, now: float) -> None:
    """Refuse a second process with the identity of a node that is alive. Raises UnavailableError
    IDENTITY_IN_USE.

    The stream of a process that was killed ends at once. After a power cut it stays open, and its
    heartbeats are missing: the next process returns as soon as one is late. The error lets an agent
    try again.
    """
    is_silent = now - node.heard_at > lost_nodes.heartbeat_interval_s(node) + LATE_S
    if not node.connected or node.incarnation == new.incarnation or is_silent:
        return
    raise UnavailableError(
        f"another agent with the identity of node {node.name} is connected, from {node.address}: "
        "its state directory "
        "was copied to this machine; stop one of the two, or remove --state-dir here and join this "
        "machine as a new "
        "node",
        field="node_id",
        reason=IDENTITY_IN_USE,
        retry_after_s=1.0,
    )


def _registered_again(
    state: State, former_node: KnownNode, node: KnownNode, now: float
) -> tuple[State, KnownNode]:
    """The state and node after the same process registered again. Its stages and its stream
    continue, and a started node does not start again."""
    node = replace(
        node,
        starting=former_node.starting and node.starting,
        connection=former_node.connection,
        stages=former_node.stages,
        released=former_node.released,
        huge_pages=former_node.huge_pages,
        packed=former_node.packed,
        reported=former_node.reported,
        others_at=former_node.others_at,
        unknown_stages_told=former_node.unknown_stages_told,
        saved=_same_identity(former_node, node),
    )
    # Links are not probed in the moment after a start, as after a connection.
    return (
        replace(state, busy_at=now) if former_node.starting and not node.starting else state
    ), node


def _checked_device(state: State, former_node: KnownNode | None, facts: DeviceFacts) -> State:
    """Drop the node's times when it is another device than before."""
    if (
        former_node is None
        or former_node.node_id not in state.measured
        or same_device(former_node.facts, facts)
    ):
        return state
    return with_measurements(
        state, former_node.node_id, state.measured[former_node.node_id].of_new_device()
    )


def _same_identity(old: KnownNode, new: KnownNode) -> bool:
    return old.saved and _identity(old) == _identity(new)


def _identity(node: KnownNode) -> object:
    return node.name, node.address, node.facts, node.own_labels, node.set_labels


def on_connected(state: State, event: events.NodeConnected) -> State:
    node = state.nodes.get(event.node_id)
    if node is None or node.incarnation != event.incarnation:
        raise NotFoundError(
            "node_id: this node is not registered; register, then connect again", field="node_id"
        )
    if any(
        n.connected and n.name == node.name and n.node_id != node.node_id
        for n in state.nodes.values()
    ):
        raise AlreadyExistsError(f"name: another node is connected as {node.name}", field="name")
    fresh = replace(
        node,
        connection=event.connection,
        joined=True,
        heard_at=event.now,
        others_at=event.now,
        released=frozenset(),
        excused=False,
        unknown_stages_told=False,
        reported=False,
    )
    state = suspicion.reconnected(lost_nodes.not_awaited(state, (node.node_id,)), node.node_id)
    return replace(state.with_node(fresh), busy_at=event.now)


def on_disconnected(state: State, event: events.NodeDisconnected) -> State:
    node = state.nodes.get(event.node_id)
    if node is None or not node.connected or node.connection != event.connection:
        return state  # A stream that a newer one has replaced.
    return lost_nodes.on_stream_ended(away(state, node), node.node_id, event.now)


def on_removed(state: State, event: events.NodeRemoved) -> State:
    """The state without a node that an operator took out: nothing waits for it."""
    node = state.nodes.get(event.node_id)
    if node is None:
        return state
    return unconnected_nodes.without(
        lost_nodes.died(away(state, node), node.node_id), {node.node_id}
    )


def on_labelled(state: State, event: events.NodeLabelled) -> State:
    node = state.nodes.get(event.node_id)
    if node is None:
        raise NotFoundError(
            "node: this node was removed from the site; join again with a token of edgectl token "
            "create",
            field="node",
        )
    return state.with_node(node.relabelled(event.labels, event.removed))


def away(state: State, node: KnownNode) -> State:
    return state.with_node(replace(node, connection=0, stages=(), huge_pages=None))


def on_heartbeats(state: State, event: events.HeartbeatsReceived) -> State:
    nodes = dict(state.nodes)
    failed: list[tuple[KnownNode, StageStatus]] = []
    for heartbeat in event.heartbeats:
        node = nodes.get(heartbeat.node_id)
        if node is None or not node.connected or node.incarnation != heartbeat.incarnation:
            continue  # From a stream that ended meanwhile.
        nodes[heartbeat.node_id] = _heard(node, heartbeat, event.now)
        failed += [(node, stage) for stage in heartbeat.stages if stage.phase is StagePhase.FAILED]
    state = replace(state, nodes=nodes)
    for node, stage in failed:
        state = _stage_failed(state, node, stage, event.now)
    return state


def _heard(node: KnownNode, heartbeat: Heartbeat, now: float) -> KnownNode:
    released = node.released
    if released and heartbeat.stages is not node.stages:
        released &= {(stage.deployment, stage.epoch) for stage in heartbeat.stages}
    return replace(
        node,
        heard_at=now,
        others_at=now if heartbeat.others_share > OTHERS else node.others_at,
        stages=heartbeat.stages,
        huge_pages=heartbeat.huge_pages,
        packed=heartbeat.packed,
        released=released,
        excused=False,
        reported=True,
    )


def _stage_failed(state: State, node: KnownNode, stage: StageStatus, now: float) -> State:
    record = state.deployments.get(stage.deployment)
    if (
        record is None
        or not record.is_live
        or not authority.speaks_for_stage(record, node.node_id, stage)
    ):
        return state
    failure = UnavailableError(
        f"stage {stage.stage} of {stage.deployment} failed on node {node.name}; see the node's log",
        reason=stage.failure_reason or "STAGE_FAILED",
        retry_after_s=1.0,
    )
    return state.with_record(deployments.broke(state, record, failure, now))


def on_measured(state: State, event: events.ProfileReported) -> State:
    report = event.report
    node = state.nodes.get(report.node_id)
    if node is None:
        raise NotFoundError("node_id: this node is not registered; register first", field="node_id")
    stranger = next(
        (link.receiver for link in report.links if link.receiver not in state.nodes), None
    )
    if stranger is not None:
        raise NotFoundError(
            f"links: there is no node {stranger}; request the nodes again", field="links"
        )
    if report.facts is not None:
        state = _checked_device(state, node, report.facts)
        state = state.with_node(replace(node, facts=report.facts, saved=False))
    if report.compute or report.links:
        measurements = state.measured.get(report.node_id, Measurements())
        state = with_measurements(state, report.node_id, measurements.reported(report, event.now))
    return state


def with_reported_stage(state: State, node_id: NodeId, status: StageStatus) -> State:
    node = state.nodes.get(node_id)
    if node is None:
        return state
    others: tuple[StageStatus, ...] = tuple(
        stage
        for stage in node.stages
        if (stage.deployment, stage.stage) != (status.deployment, status.stage)
    )
    return state.with_node(replace(node, stages=(*others, status)))


def without_stage(state: State, node_id: NodeId, record: DeploymentRecord) -> State:
    node = state.nodes.get(node_id)
    if node is None:
        return state
    stages = tuple(
        stage
        for stage in node.stages
        if stage.deployment != record.name or stage.epoch > record.epoch
    )
    return state.with_node(
        replace(node, stages=stages, released=node.released | {(record.name, record.epoch)})
    )


def told_to_release(state: State, action: ReleaseOrphans) -> State:
    node = state.nodes[action.node_id]
    return state.with_node(replace(node, released=node.released.union(action.stages)))
