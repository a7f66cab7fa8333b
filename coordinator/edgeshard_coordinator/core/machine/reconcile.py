"""The actions that the state requires. A second call returns the same until an action is issued."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from edgeshard.domain.control import commands
from edgeshard.domain.control.commands import CommandKey, CommandKind
from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from edgeshard_coordinator.core.deployments import standby
from edgeshard_coordinator.core.deployments.deployments import IN_VAIN, wants_replan
from edgeshard_coordinator.core.nodes import suspicion
from edgeshard_coordinator.core.nodes.lost_nodes import is_evicted
from edgeshard_coordinator.core.profiling import measuring
from edgeshard_coordinator.core.values import actions
from edgeshard_coordinator.core.values.state import (
    NO_EPOCH,
    DeploymentRecord,
    HeldStage,
    KnownNode,
    Progress,
    State,
    is_left_over,
)


def reconcile(state: State, now: float, rested: State | None = None) -> list[actions.Action]:
    """The actions due at `now` (monotonic seconds): of nodes, of deployments, of measurements.

    Nothing was due in the earlier state `rested`, if there is one, so only nodes that changed since
    are checked.
    """
    due: list[actions.Action] = []
    for node in _changed_nodes(state, rested):
        due += _node_actions(state, node)
    for node_id in suspicion.lost(state, now):
        if (
            (lost_node := state.nodes.get(node_id)) is not None
            and lost_node.connected
            and not is_evicted(state, lost_node)
        ):
            due.append(actions.DropConnection(node_id, lost_node.connection))
    for record in state.deployments.values():
        due += _deployment_actions(state, record, now)
    return [*due, *measuring.actions(state)]


def command_key(record: DeploymentRecord, kind: CommandKind, stage: int = 0) -> CommandKey:
    """The key of a command for the deployment's current epoch."""
    return CommandKey(record.uid, record.epoch, kind, stage)


def _changed_nodes(state: State, rested: State | None) -> Iterable[KnownNode]:
    """The nodes for which `_node_actions` may return other actions than in `rested`."""
    # A tick may show a silence, and a deployment that is gone leaves orphans anywhere.
    if rested is None or rested.ticked_at != state.ticked_at or rested.retired is not state.retired:
        return state.nodes.values()
    if rested.nodes is state.nodes and rested.measured is state.measured:
        return ()
    nodes, measured = rested.nodes, rested.measured
    return [
        node
        for node_id, node in state.nodes.items()
        if nodes.get(node_id) is not node
        or measured.get(node_id) is not state.measured.get(node_id)
    ]


def _node_actions(state: State, node: KnownNode) -> Iterator[actions.Action]:
    if not node.joined:
        return
    if not node.saved:
        yield actions.SaveNode(node)
    measurements = state.measured.get(node.node_id)
    if measurements is not None and not measurements.saved:
        yield actions.SaveMeasurements(node.node_id, measurements)
    if not node.connected:
        return
    if is_evicted(state, node):
        yield actions.DropConnection(node.node_id, node.connection)
        return
    orphans, unknown_stages = _unclaimed(state, node)
    if orphans:
        yield actions.ReleaseOrphans(state.instance, node.node_id, node.connection, orphans)
    if unknown_stages and not node.unknown_stages_told:
        yield actions.TellUnknownStages(node.node_id, node.name, node.connection, unknown_stages)


def _unclaimed(
    state: State, node: KnownNode
) -> tuple[tuple[HeldStage, ...], tuple[HeldStage, ...]]:
    """The stages of deployments that are not in the state: of deleted ones that the node is to
    release, and of others.

    A node is also to release a stage of a deployment that continues without it. A deployment was
    deleted if the disk has it as deleted, as after a delete that the node missed. Otherwise this
    coordinator lacks something, such as the newest part of its disk, and the stage may be serving.
    """
    orphans: list[HeldStage] = []
    unknown_stages: list[HeldStage] = []
    for stage in node.stages:
        stage_key = (stage.deployment, stage.epoch)
        if stage.deployment in state.deployments:
            if is_left_over(state, node, stage) and stage_key not in node.released:
                orphans.append(stage_key)
        elif stage.epoch > state.retired.get(stage.deployment, NO_EPOCH):
            unknown_stages.append(stage_key)
        elif stage_key not in node.released:
            orphans.append(stage_key)
    return tuple(orphans), tuple(unknown_stages)


def _deployment_actions(
    state: State, record: DeploymentRecord, now: float
) -> Iterator[actions.Action]:
    if record.ended is not None:
        final = record.phase in (Phase.FAILED, Phase.DELETING)
        yield actions.EndService(record.name, record.ended.epoch, record.ended.failure, final)
    if _is_save_due(record, now):
        # Replicas that are due are written together: a call on all of them takes effect on all or
        # on none.
        others = tuple(
            other for other in state.siblings_of(record.spec) if _is_save_due(other, now)
        )
        if all(other.spec.replica < record.spec.replica for other in others):
            yield actions.SaveDeployment(record, others)
    # A node must never hold an epoch that a restarted coordinator could hand out again.
    if record.phase is Phase.LOADING and record.saved_epoch == record.epoch:
        yield from _prepare(state, record)
    elif record.phase is Phase.ACTIVATING:
        yield from _activate(state, record)
    elif record.phase is Phase.WAITING:
        may_search = not record.searching and now >= record.search_after
        if (
            may_search
            and record.planned_for not in (state.version, IN_VAIN)
            and wants_replan(state, record)
        ):
            yield actions.Replan(record.name, record.uid, state.version)
    elif record.phase is Phase.READY:
        yield from _keep_standbys(state, record, now)
    elif record.phase is Phase.FAILED:
        yield from _release(state, record)
    elif record.phase is Phase.DELETING and not record.forgetting:
        yield from _release(state, record)
        may_go = record.forced or is_released(state, record)
        if record.durable and now >= record.save_after and may_go:
            yield actions.ForgetDeployment(record)


def _is_save_due(record: DeploymentRecord, now: float) -> bool:
    return record.saving < record.revision and now >= record.save_after and not record.forgetting


def _keep_standbys(state: State, record: DeploymentRecord, now: float) -> Iterator[actions.Action]:
    may_search = (
        not record.searching
        and now >= record.search_after
        and not record.standby_searches.debt_s(now)
    )
    if may_search and standby.wants_plan(state, record):
        yield actions.PlanStandby(record.name, record.uid, state.version)
    for entry in standby.due(state, record):
        node = state.nodes[entry.node_id]
        command = commands.KeepStandby(
            record.spec, record.epoch, record.manifest_digest, node.name, entry.layers
        )
        key = command_key(record, CommandKind.STANDBY, entry.number)
        yield actions.SendCommand(entry.node_id, node.connection, key, command)


def is_released(state: State, record: DeploymentRecord) -> bool:
    """Whether no connected node still has to release a stage."""
    pairs = zip(record.placement.stages, record.released, strict=True)
    return all(
        progress.done or not state.is_connected(placed.node_id) for placed, progress in pairs
    )


def _prepare(state: State, record: DeploymentRecord) -> Iterator[actions.Action]:
    # Agents of earlier versions take 0 for a limit. No request is longer than the KV pool.
    pool_tokens = record.placement.kv_blocks * record.placement.kv_block_tokens
    spec = replace(record.spec, max_new_tokens=record.spec.most_new_tokens(pool_tokens))
    for index, progress in enumerate(record.prepared):
        command = commands.PrepareStage(
            spec, record.placement, index, record.epoch, record.manifest_digest
        )
        yield from _send(
            state, record, command_key(record, CommandKind.PREPARE, index), command, progress
        )


def _activate(state: State, record: DeploymentRecord) -> Iterator[actions.Action]:
    command = commands.ActivateHead(record.name, record.epoch)
    yield from _send(
        state, record, command_key(record, CommandKind.ACTIVATE), command, record.activated
    )


def _release(state: State, record: DeploymentRecord) -> Iterator[actions.Action]:
    command = commands.ReleaseStage(record.name, record.epoch)
    for index, progress in enumerate(record.released):
        yield from _send(
            state, record, command_key(record, CommandKind.RELEASE, index), command, progress
        )


def _send(
    state: State,
    record: DeploymentRecord,
    key: CommandKey,
    command: commands.StageCommand,
    progress: Progress,
) -> Iterator[actions.Action]:
    """Send to the node of the key's stage unless answered, or already sent over the present
    connection."""
    node = state.nodes.get(record.placement.stages[key.stage].node_id)
    if (
        node is not None
        and node.connected
        and not progress.done
        and progress.sent_on != node.connection
    ):
        yield actions.SendCommand(node.node_id, node.connection, key, command)
