"""How the state changes: one pure step for every event, then the transitions that follow for each deployment.

`apply` raises a typed error for a request that cannot be granted; the state is then the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar, assert_never

from edgeshard.domain.commands import CommandKey, CommandKind, CommandResult, MeasureCompute, ProbeLinks
from edgeshard.domain.deployment import DeploymentPhase
from edgeshard.domain.device import DeviceFacts, StagePhase, StageStatus
from edgeshard.domain.errors import AbortedError, AlreadyExistsError, NotFoundError, UnavailableError
from edgeshard.domain.ids import NodeId
from edgeshard.profiles.doubts import OTHERS
from edgeshard_coordinator.core import deployments, measuring
from edgeshard_coordinator.core.actions import (
    DropConnection,
    FailRequests,
    ForgetDeployment,
    SaveDeployment,
    SaveMeasurements,
    SaveNode,
    SendCommand,
    TellMeasured,
)
from edgeshard_coordinator.core.events import (
    ActionIssued,
    CommandAnswered,
    DeleteRequested,
    DeploymentForgotten,
    DeploymentSaved,
    DeployRequested,
    Event,
    HeadAttached,
    HeadDetached,
    HeartbeatReceived,
    MeasureRequested,
    NodeConnected,
    NodeDisconnected,
    NodeRegistered,
    ProfileReported,
    SaveFailed,
    Ticked,
)
from edgeshard_coordinator.core.measurements import Measurements, same_device, without_nodes
from edgeshard_coordinator.core.state import DeploymentRecord, KnownNode, RefusedOperation, ServedOperation, State

REFUSED_KEPT = 64
"""Operations that the disk refused; a call is told within a moment."""
KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


def apply(state: State, event: Event) -> State:
    """The state after `event`."""
    after = _dispatch(state, event)
    if not isinstance(event, ActionIssued):
        after = _settled(after, event.now)
    return replace(after, version=state.version + 1) if _outdates_placements(state, after) else after


def _settled(state: State, now: float) -> State:
    return measuring.settle(deployments.settle(state, now), now)


def _dispatch(state: State, event: Event) -> State:  # noqa: C901 - one line for each event
    match event:
        case NodeRegistered():
            return _registered(state, event)
        case NodeConnected():
            return _connected(state, event)
        case NodeDisconnected():
            return _disconnected(state, event.node_id, event.connection)
        case HeartbeatReceived():
            return _heartbeat(state, event)
        case ProfileReported():
            return _profile(state, event)
        case MeasureRequested():
            return measuring.requested(state, event)
        case DeployRequested():
            return _deploy(state, event)
        case DeleteRequested():
            return _delete(state, event)
        case CommandAnswered():
            return _answered(_with_reported_stage(state, event.node_id, event.result), event)
        case HeadAttached():
            return _attached(state, event)
        case HeadDetached():
            return _detached(state, event)
        case DeploymentSaved():
            return _saved(state, event)
        case SaveFailed():
            return _save_failed(state, event)
        case DeploymentForgotten():
            return _forgotten(state, event)
        case ActionIssued():
            return _issued(state, event)
        case Ticked():
            return measuring.ticked(state, event.active_requests, event.now)
        case _:
            assert_never(event)


def _outdates_placements(before: State, after: State) -> bool:
    """Whether a placement still being computed from `before` may be wrong: other boxes, or other free memory on them.

    New measurements do not count: the best placement of a moment ago is good enough.
    """
    if before.nodes.keys() != after.nodes.keys() or before.deployments.keys() != after.deployments.keys():
        return True
    if any(
        _node_view(node) != _node_view(before.nodes[node_id]) for node_id, node in _changed(before.nodes, after.nodes)
    ):
        return True
    changed = _changed(before.deployments, after.deployments)
    return any(_memory_view(record) != _memory_view(before.deployments[name]) for name, record in changed)


def _changed(before: Mapping[KeyT, ValueT], after: Mapping[KeyT, ValueT]) -> list[tuple[KeyT, ValueT]]:
    return [(key, value) for key, value in after.items() if value is not before[key]]


def _node_view(node: KnownNode) -> object:
    return node.name, node.address, node.facts, node.connected, node.starting


def _memory_view(record: DeploymentRecord) -> object:
    return record.placement, record.phase is DeploymentPhase.FAILED


def _with(mapping: Mapping[KeyT, ValueT], key: KeyT, value: ValueT) -> dict[KeyT, ValueT]:
    return {**mapping, key: value}


def _with_node(state: State, node: KnownNode) -> State:
    return replace(state, nodes=_with(state.nodes, node.node_id, node))


def _with_measurements(state: State, node_id: NodeId, measurements: Measurements) -> State:
    return replace(state, measured=_with(state.measured, node_id, measurements))


def _with_record(state: State, record: DeploymentRecord) -> State:
    return replace(state, deployments=_with(state.deployments, record.name, record))


# Boxes


def _registered(state: State, event: NodeRegistered) -> State:
    new = event.registration
    namesakes = [n for n in state.nodes.values() if n.name == new.name and n.node_id != new.node_id]
    if any(node.connected for node in namesakes):
        raise AlreadyExistsError(
            f"name: another box is connected as {new.name}; give this one another --name", field="name"
        )
    gone = {node.node_id for node in namesakes}
    nodes = {node_id: node for node_id, node in state.nodes.items() if node_id not in gone}
    known = nodes.get(new.node_id)
    retakes = tuple(item for item in state.retakes if item.node_id not in gone)
    state = replace(state, measured=without_nodes(state.measured, gone), retakes=retakes)
    # While a box starts, what it was before is nearer the truth than what it can say of itself.
    facts = known.facts if new.starting and known is not None else new.facts
    node = KnownNode(new.node_id, new.name, new.address, new.wire_version, facts, new.incarnation, new.starting)
    if known is not None and known.incarnation == new.incarnation:
        state, node = _registered_again(state, known, node, event.now)
    elif known is not None:
        state = _settled(_disconnected(state, new.node_id, known.connection), event.now)
        state = measuring.forget_tries(state, new.node_id)
    nodes[new.node_id] = replace(node, heard_at=event.now)
    return _checked_device(replace(state, nodes=nodes), known, facts)


def _registered_again(state: State, known: KnownNode, node: KnownNode, now: float) -> tuple[State, KnownNode]:
    """The same process: what it holds and its stream go on, and what has started does not start again."""
    node = replace(
        node,
        starting=known.starting and node.starting,
        connection=known.connection,
        stages=known.stages,
        released=known.released,
        huge_pages=known.huge_pages,
        others_at=known.others_at,
        saved=_same_identity(known, node),
    )
    # Links are not probed in the moment after a start, as after a connection.
    return (replace(state, busy_at=now) if known.starting and not node.starting else state), node


def _checked_device(state: State, known: KnownNode | None, facts: DeviceFacts) -> State:
    """Drop the box's times when it is another device than before."""
    if known is None or known.node_id not in state.measured or same_device(known.facts, facts):
        return state
    return _with_measurements(state, known.node_id, state.measured[known.node_id].of_new_device())


def _same_identity(old: KnownNode, new: KnownNode) -> bool:
    return old.saved and (old.name, old.address, old.facts) == (new.name, new.address, new.facts)


def _connected(state: State, event: NodeConnected) -> State:
    node = state.nodes.get(event.node_id)
    if node is None or node.incarnation != event.incarnation:
        raise NotFoundError("node_id: this box is not registered; register, then connect again", field="node_id")
    if any(n.connected and n.name == node.name and n.node_id != node.node_id for n in state.nodes.values()):
        raise AlreadyExistsError(f"name: another box is connected as {node.name}", field="name")
    fresh = replace(node, connection=event.connection, heard_at=event.now, others_at=event.now, released=frozenset())
    return replace(_with_node(state, fresh), busy_at=event.now)


def _disconnected(state: State, node_id: NodeId, connection: int) -> State:
    node = state.nodes.get(node_id)
    if node is None or node.connection != connection:
        return state  # A stream that a newer one has replaced.
    return _with_node(state, replace(node, connection=0, stages=(), huge_pages=None))


def _heartbeat(state: State, event: HeartbeatReceived) -> State:
    node = state.nodes.get(event.heartbeat.node_id)
    if node is None or node.incarnation != event.heartbeat.incarnation:
        raise NotFoundError("node_id: this box is not registered; register again", field="node_id")
    heard = event.heartbeat
    others_at = event.now if heard.others_share > OTHERS else node.others_at
    fresh = replace(node, heard_at=event.now, others_at=others_at, stages=heard.stages, huge_pages=heard.huge_pages)
    state = _with_node(state, fresh)
    for stage in heard.stages:
        record = state.deployments.get(stage.deployment)
        if stage.phase is StagePhase.FAILED and record is not None and record.epoch == stage.epoch and record.is_live:
            failure = UnavailableError(
                f"stage {stage.stage} of {stage.deployment} failed on box {node.name}; the box's log says why",
                reason="STAGE_FAILED",
                retry_after_s=1.0,
            )
            state = _with_record(state, deployments.broke(state, record, failure, event.now))
    return state


def _profile(state: State, event: ProfileReported) -> State:
    report = event.report
    node = state.nodes.get(report.node_id)
    if node is None:
        raise NotFoundError("node_id: this box is not registered; register first", field="node_id")
    stranger = next((link.receiver for link in report.links if link.receiver not in state.nodes), None)
    if stranger is not None:
        raise NotFoundError(f"links: there is no box {stranger}; ask for the boxes again", field="links")
    if report.facts is not None:
        state = _checked_device(state, node, report.facts)
        state = _with_node(state, replace(node, facts=report.facts, saved=False))
    if report.compute or report.links:
        known = state.measured.get(report.node_id, Measurements())
        state = _with_measurements(state, report.node_id, known.reported(report, event.now))
    return state


def _with_reported_stage(state: State, node_id: NodeId, result: CommandResult) -> State:
    node, status = state.nodes.get(node_id), result.stage
    if node is None or status is None:
        return state
    others: tuple[StageStatus, ...] = tuple(
        stage for stage in node.stages if (stage.deployment, stage.stage) != (status.deployment, status.stage)
    )
    return _with_node(state, replace(node, stages=(*others, status)))


# Requests of operators


def _deploy(state: State, event: DeployRequested) -> State:
    record = event.record
    if record.name in state.deployments:
        raise AlreadyExistsError(
            f"name: there is a deployment {record.name} already; delete it first or choose another name", field="name"
        )
    if event.snapshot_version != state.version:
        raise AbortedError(
            "boxes or deployments changed while the placement was computed; ask again", reason="STALE_PLACEMENT"
        )
    state = _with_record(state, replace(record, operations=(event.operation,)))
    return replace(state, refused=_without(state.refused, event.operation))


def _without(refused: tuple[RefusedOperation, ...], operation: ServedOperation) -> tuple[RefusedOperation, ...]:
    """The call is made again."""
    return tuple(item for item in refused if item.operation_id != operation.operation_id)


def _delete(state: State, event: DeleteRequested) -> State:
    record = state.deployments.get(event.deployment)
    if record is None:
        raise NotFoundError(f"name: there is no deployment {event.deployment}", field="name")
    state = replace(state, refused=_without(state.refused, event.operation))
    # A new revision, so that the operation reaches the disk; also for a repeat under another operation id.
    asked = replace(record, operations=(*record.operations, event.operation), revision=record.revision + 1)
    if record.phase is not DeploymentPhase.DELETING:
        asked = replace(asked, delete_revision=record.delete_revision or asked.revision)
    return _with_record(state, asked)


# Boxes' answers


def _answered(state: State, event: CommandAnswered) -> State:
    """Raises InvalidArgumentError for an operation id that is no command's."""
    key, failure = CommandKey.parse(event.result.operation_id), event.result.failure
    measured = measuring.answered(state, event.node_id, key, failure, event.now)
    if measured is not state:
        return measured
    record = _record_of(state, key)
    if record is None:
        return state  # Of a deployment that is gone, or the release of an orphan.
    stages = record.placement.stages
    if key.epoch != record.epoch or key.stage >= len(stages) or stages[key.stage].node_id != event.node_id:
        return state  # Of an earlier epoch.
    if key.kind is CommandKind.RELEASE:
        state = _without_stage(state, event.node_id, record)
    if failure is not None:
        failure = deployments.at_node(failure, stages[key.stage].node_name)
    return _with_record(state, deployments.answered(state, record, key, failure, event.now))


def _record_of(state: State, key: CommandKey) -> DeploymentRecord | None:
    return next((record for record in state.deployments.values() if record.uid == key.uid), None)


def _without_stage(state: State, node_id: NodeId, record: DeploymentRecord) -> State:
    node = state.nodes.get(node_id)
    if node is None:
        return state
    stages = tuple(stage for stage in node.stages if stage.deployment != record.name or stage.epoch > record.epoch)
    return _with_node(state, replace(node, stages=stages, released=node.released | {(record.name, record.epoch)}))


def _attached(state: State, event: HeadAttached) -> State:
    record = state.deployments.get(event.deployment)
    if record is None or record.epoch != event.epoch or record.head.node_id != event.node_id:
        return state  # Of an earlier epoch.
    if record.phase not in (DeploymentPhase.ACTIVATING, DeploymentPhase.READY):
        return state
    return _with_record(state, replace(record, attachment=event.attachment))


def _detached(state: State, event: HeadDetached) -> State:
    record = state.deployments.get(event.deployment)
    if record is None or record.attachment != event.attachment:
        return state  # A stream that a newer one has replaced.
    return _with_record(state, replace(record, attachment=0))


# The disk's answers


def _saved(state: State, event: DeploymentSaved) -> State:
    record = state.deployments.get(event.deployment)
    if record is None or record.uid != event.uid or event.revision <= record.saved:
        return state
    operations = () if event.revision == record.revision else record.operations
    saving = max(record.saving, event.revision)
    saved = replace(record, saved=event.revision, saved_epoch=event.epoch, saving=saving, operations=operations)
    if 0 < record.delete_revision <= event.revision:
        saved = deployments.deleted(saved)
    return _with_record(state, saved)


def _save_failed(state: State, event: SaveFailed) -> State:
    record = state.deployments.get(event.deployment)
    if record is None or record.uid != event.uid or event.revision < record.saving:
        return state  # A newer write with all of this one is under way: its outcome counts.
    refused = tuple(RefusedOperation(operation.operation_id, event.failure) for operation in record.operations)
    state = replace(state, refused=(*state.refused, *refused)[-REFUSED_KEPT:])
    if not record.saved:
        # Nothing of it is on disk, so no box was told of it.
        return replace(state, deployments={name: r for name, r in state.deployments.items() if name != record.name})
    retry = replace(
        record,
        saving=record.saved,
        forgetting=False,
        save_after=event.now + event.retry_after_s,
        operations=(),
        delete_revision=0,
    )
    return _with_record(state, retry)


def _forgotten(state: State, event: DeploymentForgotten) -> State:
    record = state.deployments.get(event.deployment)
    if record is None or record.uid != event.uid:
        return state
    remaining = {name: other for name, other in state.deployments.items() if name != record.name}
    return replace(state, deployments=remaining, retired=_with(state.retired, record.name, record.epoch))


# Actions that were issued


def _issued(state: State, event: ActionIssued) -> State:
    action = event.action
    match action:
        case SendCommand():
            return _sent(state, action, event.now)
        case SaveDeployment():
            record = state.deployments[action.record.name]
            return _with_record(state, replace(record, saving=action.record.revision))
        case ForgetDeployment():
            return _with_record(state, replace(state.deployments[action.record.name], forgetting=True))
        case SaveNode():
            return _with_node(state, replace(state.nodes[action.node.node_id], saved=True))
        case SaveMeasurements():
            return _with_measurements(state, action.node_id, replace(action.measurements, saved=True))
        case TellMeasured():
            return measuring.told(state, action)
        case FailRequests():
            return _with_record(state, replace(state.deployments[action.deployment], ended=None))
        case DropConnection():
            # It is lost from now on, whenever the stream's end is noticed.
            return _settled(_disconnected(state, action.node_id, action.connection), event.now)
        case _:
            assert_never(action)


def _sent(state: State, action: SendCommand, now: float) -> State:
    command = action.command
    if isinstance(command, MeasureCompute | ProbeLinks):
        return measuring.sent(state, action, now)
    record = _record_of(state, action.command_key)
    if record is None:
        node, held = state.nodes[action.node_id], (command.deployment, command.epoch)
        return _with_node(state, replace(node, released=node.released | {held}))
    return _with_record(state, deployments.sent(record, action.command_key, action.connection))
