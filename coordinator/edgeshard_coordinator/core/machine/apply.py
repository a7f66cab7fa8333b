"""The changes of the state: one pure step for every event, then the transitions that follow for
each deployment.

`apply` raises a typed error for a request that cannot be granted; the state is then the one before.
`machine` is the step for dumps, with the JSON of state and events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar, assert_never

from edgeshard.debugging.codec import Codec
from edgeshard.debugging.dump import StateMachine
from edgeshard.domain.control.commands import CommandKey, CommandKind, MeasureCompute, ProbeLinks
from edgeshard.domain.deployments.deployment import DeploymentPhase, DeploymentSpec
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.errors import AbortedError, AlreadyExistsError, NotFoundError
from edgeshard.domain.nodes.profile import config_hash
from edgeshard.domain.requests.head import HeadHello
from edgeshard_coordinator.core.deployments import deployments, standby
from edgeshard_coordinator.core.nodes import lost_nodes, node_events, suspicion, unconnected_nodes
from edgeshard_coordinator.core.nodes.node_events import with_measurements
from edgeshard_coordinator.core.profiling import measuring
from edgeshard_coordinator.core.values import actions, authority, events
from edgeshard_coordinator.core.values.events import Event
from edgeshard_coordinator.core.values.state import (
    DeploymentRecord,
    KnownNode,
    RefusedOperation,
    ServedOperation,
    State,
)

REFUSED_KEPT = 64
"""Operations that the disk refused; a call learns of it within a moment."""
KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


def apply(state: State, event: events.Event) -> State:
    """The state after `event`."""
    if isinstance(event, events.ActionIssued):
        after = _dispatch(state, event)
    else:
        after = _dispatch(lost_nodes.noticed(state, event.now), event)
        if not _was_routine(state, event, after):
            after = _settled(after, event.now)
    return _versioned(state, after)


def _was_routine(before: State, event: events.Event, after: State) -> bool:
    """Whether the event was heartbeats that broke nothing: ticks check all that is due with
    time."""
    if not isinstance(event, events.HeartbeatsReceived):
        return False
    nodes = [before.nodes.get(heartbeat.node_id) for heartbeat in event.heartbeats]
    # A node's first report may let an epoch be adopted.
    unbroken = before.deployments is after.deployments and before.awaited is after.awaited
    return unbroken and all(node is None or node.reported for node in nodes)


def _settled(state: State, now: float) -> State:
    state = suspicion.settle(state, now)
    return measuring.settle(suspicion.forget_stale(deployments.settle(state, now)), now)


def _dispatch(state: State, event: events.Event) -> State:
    return _STEPS[type(event)](state, event)


def _versioned(before: State, after: State) -> State:
    """The state with another version if a search in `before` might have found another placement:
    other nodes, or other free memory on them. Each node has the version in which it changed so that
    its part of a placement is wrong.

    New measurements do not count: the best placement of a moment ago is good enough.
    """
    changed = [] if before.nodes is after.nodes else _changed(before.nodes, after.nodes)
    other = [
        node
        for node_id, node in changed
        if _node_view(node) != _node_view(before.nodes.get(node_id))
    ]
    removed_ids = before.nodes.keys() - after.nodes.keys()
    if not other and not removed_ids and not _memory_changed(before, after):
        return after
    version = before.version + 1
    moved = [
        node.node_id
        for node in other
        if _place_view(node) != _place_view(before.nodes.get(node.node_id))
    ]
    versions = {**after.node_versions, **dict.fromkeys(moved, version)}
    node_versions = {node_id: at for node_id, at in versions.items() if node_id in after.nodes}
    return replace(after, version=version, node_versions=node_versions)


def _memory_changed(before: State, after: State) -> bool:
    if before.deployments.keys() != after.deployments.keys():
        return True
    changed = _changed(before.deployments, after.deployments)
    return any(
        _memory_view(record) != _memory_view(before.deployments[name]) for name, record in changed
    )


def _changed(
    before: Mapping[KeyT, ValueT], after: Mapping[KeyT, ValueT]
) -> list[tuple[KeyT, ValueT]]:
    return [(key, value) for key, value in after.items() if value is not before.get(key)]


def _node_view(node: KnownNode | None) -> object:
    """What a search depends on."""
    return None if node is None else (_place_view(node), node.facts)


def _place_view(node: KnownNode | None) -> object:
    """What a placement depends on, besides the node's free memory."""
    return (
        None
        if node is None
        else (node.name, node.address, node.connected, node.starting, node.labels)
    )


def _memory_view(record: DeploymentRecord) -> object:
    standbys = [(entry.node_id, entry.reserved_bytes) for entry in record.standbys]
    return record.placement, record.phase is DeploymentPhase.FAILED, standbys, record.move


# Requests of operators


def _deploy(state: State, event: events.DeployRequested) -> State:
    records = (*event.others, replace(event.record, operations=(event.operation,)))
    joins = len(records) < event.record.spec.replicas
    if joins and not any(
        other.phase is not DeploymentPhase.DELETING
        for other in state.siblings_of(event.record.spec)
    ):
        raise NotFoundError(
            f"name: deployment {event.record.served_name} no longer exists", field="name"
        )
    for record in records:
        if namesakes := state.replicas_of(record.name) or (
            () if joins else state.replicas_of(record.served_name)
        ):
            raise AlreadyExistsError(
                f"name: there is a deployment {namesakes[0].name} already; delete it first or "
                "choose another name",
                field="name",
            )
    for record in records:
        _check_fresh(state, record.spec, record.placement, event.snapshot_version)
    shape = "" if event.config is None else config_hash(event.config)
    if event.config is not None:
        state = replace(state, configs={**state.configs, shape: event.config})
    for record in records:
        state = state.with_record(replace(record, shape=shape or record.shape))
    return replace(state, refused=_without(state.refused, event.operation))


def _check_fresh(state: State, spec: DeploymentSpec, placement: Placement, version: int) -> None:
    """Raise AbortedError for a placement found in the state of `version` that is not right any
    more."""
    if not state.holds_still(spec, placement, version):
        raise AbortedError(
            "a node of the placement changed while it was computed; try again",
            reason="STALE_PLACEMENT",
        )


def _replan(state: State, event: events.ReplanRequested) -> State:
    record = state.deployments.get(event.deployment)
    if record is None or record.uid != event.uid:
        raise NotFoundError(f"name: deployment {event.deployment} no longer exists", field="name")
    deployments.check_movable(record)
    _check_fresh(state, record.spec, event.placement, event.snapshot_version)
    state = replace(state, refused=_without(state.refused, event.operation))
    new_record = deployments.asked_to_move(state, record, event.placement)
    return state.with_record(replace(new_record, operations=(*record.operations, event.operation)))


def _without(
    refused: tuple[RefusedOperation, ...], operation: ServedOperation
) -> tuple[RefusedOperation, ...]:
    """The refusals without the one of a call that is made again."""
    return tuple(item for item in refused if item.operation_id != operation.operation_id)


def _delete(state: State, event: events.DeleteRequested) -> State:
    records = state.replicas_of(event.deployment)
    if not records:
        raise NotFoundError(f"name: there is no deployment {event.deployment}", field="name")
    state = replace(state, refused=_without(state.refused, event.operation))
    for record in records:
        state = _delete_one(state, record, event)
    return state


def _delete_one(state: State, record: DeploymentRecord, event: events.DeleteRequested) -> State:
    # A new revision, so that the operation reaches the disk; also for a repeat under another
    # operation id.
    operations = (*record.operations, event.operation)
    forced = record.forced or event.force
    new_record = replace(record, operations=operations, revision=record.revision + 1, forced=forced)
    if record.phase is not DeploymentPhase.DELETING:
        new_record = replace(
            new_record, delete_revision=record.delete_revision or new_record.revision
        )
    return state.with_record(new_record)


# Nodes' answers


def _answered(state: State, event: events.CommandAnswered) -> State:
    """Raises InvalidArgumentError for an operation id that is no command's."""
    key, failure = CommandKey.parse(event.result.operation_id), event.result.failure
    measured = measuring.on_answered(state, event.node_id, key, failure, event.now)
    if measured is not state:
        return measured
    record = _record_of(state, key)
    if record is None or not authority.may_answer(record, event.node_id, key):
        # The deployment is gone, its epoch is an earlier one, or the release is of an orphan.
        return state
    if key.kind is CommandKind.STANDBY:
        return state.with_record(standby.answered(record, key.stage, failed=failure is not None))
    stages = record.placement.stages
    status = event.result.stage
    if status is not None and authority.speaks_for_stage(record, event.node_id, status):
        state = node_events.with_reported_stage(state, event.node_id, status)
    if key.kind is CommandKind.RELEASE:
        state = node_events.without_stage(state, event.node_id, record)
    if failure is not None:
        failure = deployments.at_node(failure, stages[key.stage].node_name)
    return state.with_record(deployments.answered(state, record, key, failure, event.now))


def _record_of(state: State, key: CommandKey) -> DeploymentRecord | None:
    return next((record for record in state.deployments.values() if record.uid == key.uid), None)


def _attached(state: State, event: events.HeadAttached) -> State:
    record = state.deployments.get(event.deployment)
    if record is None or record.epoch != event.epoch:
        return state  # For an earlier epoch.
    if not authority.may_set(HeadHello, "held", record, event.node_id):
        return state
    if record.phase not in (DeploymentPhase.ACTIVATING, DeploymentPhase.READY):
        return state
    return state.with_record(replace(record, attachment=event.attachment))


def _detached(state: State, event: events.HeadDetached) -> State:
    record = state.deployments.get(event.deployment)
    if record is None or record.attachment != event.attachment:
        return state  # A stream that a newer one has replaced.
    return state.with_record(replace(record, attachment=0))


# The disk's answers


def _saved(state: State, event: events.DeploymentSaved) -> State:
    record = state.deployments.get(event.deployment)
    if record is None or record.uid != event.uid or event.revision <= record.saved:
        return state
    operations = () if event.revision == record.revision else record.operations
    saving = max(record.saving, event.revision)
    saved = replace(record, saved=event.revision, saving=saving, operations=operations)
    if 0 < record.delete_revision <= event.revision:
        saved = deployments.deleted(saved)
    if event.revision < saving:
        # A newer save is pending, and may put an earlier epoch there: the epoch of a move that is
        # cancelled meanwhile.
        return state.with_record(saved)
    if saved.move is not None and saved.move.revision <= event.revision:
        saved = deployments.moved(state, saved, event.now)
    # The disk is ahead if it has the epoch of a move that is cancelled meanwhile.
    return state.with_record(replace(saved, saved_epoch=min(event.epoch, saved.epoch)))


def _save_failed(state: State, event: events.SaveFailed) -> State:
    record = state.deployments.get(event.deployment)
    if record is None or record.uid != event.uid or event.revision < record.saving:
        return state  # A newer write with all of this one is under way: its outcome counts.
    refused = tuple(
        RefusedOperation(operation.operation_id, event.failure) for operation in record.operations
    )
    state = replace(state, refused=(*state.refused, *refused)[-REFUSED_KEPT:])
    if not record.saved:
        # Nothing of it is on disk, so no node was notified of it.
        other_records = {
            name: other for name, other in state.deployments.items() if name != record.name
        }
        return replace(state, deployments=other_records)
    retry = replace(
        record,
        saving=record.saved,
        forgetting=False,
        save_after=event.now + event.retry_after_s,
        operations=(),
        delete_revision=0,
        forced=False,
        move=None,
    )
    return state.with_record(retry)


def _forgotten(state: State, event: events.DeploymentForgotten) -> State:
    record = state.deployments.get(event.deployment)
    if record is None or record.uid != event.uid:
        return state
    remaining = {name: other for name, other in state.deployments.items() if name != record.name}
    return replace(
        state, deployments=remaining, retired={**state.retired, record.name: record.epoch}
    )


def _replanned(state: State, event: events.Replanned) -> State:
    record = state.deployments.get(event.deployment)
    return (
        state if record is None else state.with_record(deployments.replanned(state, record, event))
    )


# Actions that were issued


def _issued(state: State, event: events.ActionIssued) -> State:  # noqa: C901 - one line for each action
    action = event.action
    match action:
        case actions.SendCommand():
            return _sent(state, action, event.now)
        case actions.SaveDeployment():
            for record in action.records:
                state = state.with_record(
                    replace(state.deployments[record.name], saving=record.revision)
                )
            return state
        case actions.ForgetDeployment():
            return state.with_record(
                replace(state.deployments[action.record.name], forgetting=True)
            )
        case actions.SaveNode():
            return state.with_node(replace(state.nodes[action.node.node_id], saved=True))
        case actions.SaveMeasurements():
            return with_measurements(
                state, action.node_id, replace(action.measurements, saved=True)
            )
        case actions.TellMeasured():
            return measuring.told(state, action)
        case actions.EndService():
            return state.with_record(replace(state.deployments[action.deployment], ended=None))
        case actions.Replan():
            record = state.deployments[action.deployment]
            return state.with_record(replace(record, planned_for=action.version, searching=True))
        case actions.PlanStandby():
            record = state.deployments[action.deployment]
            searches = record.standby_searches.charged(1.0, event.now)
            begun = replace(
                record, standby_for=action.version, searching=True, standby_searches=searches
            )
            return state.with_record(begun)
        case actions.ReleaseOrphans():
            return node_events.told_to_release(state, action)
        case actions.TellUnknownStages():
            return state.with_node(replace(state.nodes[action.node_id], unknown_stages_told=True))
        case actions.DropConnection():
            # It is lost from now on, whenever the stream's end is noticed.
            return _settled(node_events.away(state, state.nodes[action.node_id]), event.now)
        case _:
            assert_never(action)


def _sent(state: State, action: actions.SendCommand, now: float) -> State:
    command = action.command
    if isinstance(command, MeasureCompute | ProbeLinks):
        return measuring.on_sent(state, action, now)
    record = _record_of(state, action.command_key)
    assert record is not None  # an action requested in a state is issued in that state
    if action.command_key.kind is CommandKind.STANDBY:
        return state.with_record(standby.sent(record, action.command_key.stage, action.connection))
    return state.with_record(deployments.sent(record, action.command_key, action.connection))


# What each event does


def _model_deleted(state: State, event: events.ModelDeleted) -> State:
    return replace(
        state,
        configs={shape: config for shape, config in state.configs.items() if shape != event.shape},
    )


def _standby_planned(state: State, event: events.StandbyPlanned) -> State:
    record = state.deployments.get(event.deployment)
    return state if record is None else state.with_record(standby.planned(state, record, event))


def _ticked(state: State, event: events.Ticked) -> State:
    after = unconnected_nodes.forgotten(lost_nodes.on_ticked(state, event.now), event.now)
    return measuring.on_ticked(after, event.active_requests, event.now)


_STEPS: Mapping[type, Callable[[State, Any], State]] = {
    events.NodeRegistered: node_events.on_registered,
    events.NodeConnected: node_events.on_connected,
    events.NodeDisconnected: node_events.on_disconnected,
    events.NodeRemoved: node_events.on_removed,
    events.NodeLabelled: node_events.on_labelled,
    events.HeartbeatsReceived: node_events.on_heartbeats,
    events.LinkReported: suspicion.on_link_reported,
    events.HeadReported: suspicion.on_head_reported,
    events.ProfileReported: node_events.on_measured,
    events.MeasureRequested: measuring.on_requested,
    events.DeployRequested: _deploy,
    events.ReplanRequested: _replan,
    events.DeleteRequested: _delete,
    events.ModelDeleted: _model_deleted,
    events.CommandAnswered: _answered,
    events.HeadAttached: _attached,
    events.HeadDetached: _detached,
    events.DeploymentSaved: _saved,
    events.SaveFailed: _save_failed,
    events.DeploymentForgotten: _forgotten,
    events.Replanned: _replanned,
    events.StandbyPlanned: _standby_planned,
    events.ActionIssued: _issued,
    events.Ticked: _ticked,
}
"""The pure step of each event; a test holds it to all there are."""


@cache
def machine() -> StateMachine[State, Event]:
    """Made at the first dump; nothing else needs it."""
    return StateMachine(Codec(State), Codec(Event), apply)
