"""The actions that the state calls for. Asking twice gives the same answer until an action is issued."""

from __future__ import annotations

from collections.abc import Iterator

from edgeshard.domain.commands import ActivateHead, CommandKey, CommandKind, PrepareStage, ReleaseStage, StageCommand
from edgeshard.domain.deployment import DeploymentPhase as Phase
from edgeshard.domain.ids import NodeId
from edgeshard_coordinator.core import measuring
from edgeshard_coordinator.core.actions import (
    Action,
    DropConnection,
    EndService,
    ForgetDeployment,
    Replan,
    SaveDeployment,
    SaveMeasurements,
    SaveNode,
    SendCommand,
)
from edgeshard_coordinator.core.deployments import wants_replan
from edgeshard_coordinator.core.state import DeploymentRecord, KnownNode, Progress, State, is_left_over


def reconcile(state: State, now: float) -> list[Action]:
    """The actions due at `now` (monotonic seconds): of boxes, of deployments, of measurements."""
    actions: list[Action] = []
    for node in state.nodes.values():
        actions += _node_actions(state, node, now)
    for record in state.deployments.values():
        actions += _deployment_actions(state, record, now)
    actions += measuring.actions(state)
    return actions


def command_key(record: DeploymentRecord, kind: CommandKind, stage: int = 0) -> CommandKey:
    """The key of a command for the deployment's current epoch."""
    return CommandKey(record.uid, record.epoch, kind, stage)


def _node_actions(state: State, node: KnownNode, now: float) -> Iterator[Action]:
    if not node.saved:
        yield SaveNode(node)
    measurements = state.measured.get(node.node_id)
    if measurements is not None and not measurements.saved:
        yield SaveMeasurements(node.node_id, measurements)
    if not node.connected:
        return
    if now - node.heard_at > state.timings.heartbeat_timeout_s:
        yield DropConnection(node.node_id, node.connection)
        return
    for stage in node.stages:
        held = (stage.deployment, stage.epoch)
        # A stage of a deployment that is gone, as after a delete that the box did not hear of, or that went on without.
        gone = stage.deployment not in state.deployments or is_left_over(state, node, stage)
        if gone and held not in node.released:
            uid = f"{state.instance}-{node.connection}-{stage.deployment}"
            key = CommandKey(uid, stage.epoch, CommandKind.RELEASE, 0)
            yield SendCommand(node.node_id, node.connection, key, ReleaseStage(*held))


def _deployment_actions(state: State, record: DeploymentRecord, now: float) -> Iterator[Action]:
    if record.ended is not None:
        final = record.phase in (Phase.FAILED, Phase.DELETING)
        yield EndService(record.name, record.ended.epoch, record.ended.failure, final)
    if record.saving < record.revision and now >= record.save_after and not record.forgetting:
        yield SaveDeployment(record)
    # A box must never hold an epoch that a restarted coordinator could hand out again.
    if record.phase is Phase.LOADING and record.saved_epoch == record.epoch:
        yield from _prepare(state, record)
    elif record.phase is Phase.ACTIVATING:
        yield from _activate(state, record)
    elif record.phase is Phase.WAITING:
        if record.planned_for != state.version and wants_replan(state, record, now):
            yield Replan(record.name, record.uid, state.version)
    elif record.phase is Phase.FAILED:
        yield from _release(state, record)
    elif record.phase is Phase.DELETING and not record.forgetting:
        yield from _release(state, record)
        if record.durable and now >= record.save_after and is_released(state, record):
            yield ForgetDeployment(record)


def is_released(state: State, record: DeploymentRecord) -> bool:
    """Whether no connected box still has to release a stage."""
    pairs = zip(record.placement.stages, record.released, strict=True)
    return all(progress.done or not state.is_connected(placed.node_id) for placed, progress in pairs)


def _prepare(state: State, record: DeploymentRecord) -> Iterator[Action]:
    for index, progress in enumerate(record.prepared):
        command = PrepareStage(record.spec, record.placement, index, record.epoch, record.manifest_digest)
        key = command_key(record, CommandKind.PREPARE, index)
        yield from _send(state, record.placement.stages[index].node_id, key, command, progress)


def _activate(state: State, record: DeploymentRecord) -> Iterator[Action]:
    command = ActivateHead(record.name, record.epoch)
    yield from _send(state, record.head.node_id, command_key(record, CommandKind.ACTIVATE), command, record.activated)


def _release(state: State, record: DeploymentRecord) -> Iterator[Action]:
    for index, progress in enumerate(record.released):
        command = ReleaseStage(record.name, record.epoch)
        key = command_key(record, CommandKind.RELEASE, index)
        yield from _send(state, record.placement.stages[index].node_id, key, command, progress)


def _send(
    state: State, node_id: NodeId, key: CommandKey, command: StageCommand, progress: Progress
) -> Iterator[Action]:
    """Send unless answered, or already on its way over the connection there is now."""
    node = state.nodes.get(node_id)
    if node is not None and node.connected and not progress.done and progress.sent_on != node.connection:
        yield SendCommand(node_id, node.connection, key, command)
