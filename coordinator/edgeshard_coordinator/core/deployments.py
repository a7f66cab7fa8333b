"""One deployment's life: what an answer changes, and the transitions that follow from the state of its boxes."""

from __future__ import annotations

from dataclasses import replace

from edgeshard.domain.commands import CommandKey, CommandKind
from edgeshard.domain.deployment import DeploymentPhase as Phase
from edgeshard.domain.errors import DeadlineError, EdgeShardError, InternalError, UnavailableError
from edgeshard.domain.ids import Epoch, NodeName
from edgeshard_coordinator.core.state import (
    DeploymentRecord,
    EndedService,
    Progress,
    State,
    fresh_progress,
    missing_nodes,
)
from edgeshard_coordinator.core.transitions import Trigger, next_phase


def new_record(state: State, record: DeploymentRecord) -> DeploymentRecord:
    """`record` at the start of its life, at an epoch that no box has seen for its name."""
    fresh = fresh_progress(record.placement)
    return replace(record, epoch=state.first_epoch(record.name), phase=Phase.LOADING, prepared=fresh, released=fresh)


def restored_record(record: DeploymentRecord) -> DeploymentRecord:
    """A record from disk after a restart: whatever was under way is forgotten, and its boxes are awaited."""
    fresh = fresh_progress(record.placement)
    return DeploymentRecord(
        uid=record.uid,
        spec=record.spec,
        manifest_digest=record.manifest_digest,
        placement=record.placement,
        epoch=record.epoch,
        phase=record.phase if record.phase in (Phase.FAILED, Phase.DELETING) else Phase.WAITING,
        ever_ready=record.ever_ready,
        failure=record.failure,
        prepared=fresh,
        released=fresh,
        saving=1,
        saved=1,
        saved_epoch=record.epoch,
    )


def settle(state: State, now: float) -> State:
    """Follow transitions until none applies. Each epoch is entered at most once for a given state of the boxes."""
    settled = {name: _settle_one(state, record, now) for name, record in state.deployments.items()}
    return replace(state, deployments=settled)


def _settle_one(state: State, record: DeploymentRecord, now: float) -> DeploymentRecord:
    for _ in range(len(Phase)):
        following = _step(state, record, now)
        if following is record:
            return record
        record = following
    raise InternalError(f"deployment {record.name} does not settle", reason="INVARIANT")


def _step(state: State, record: DeploymentRecord, now: float) -> DeploymentRecord:
    """The next transition, or the very same record when none applies."""
    if record.phase not in (Phase.LOADING, Phase.ACTIVATING, Phase.READY, Phase.WAITING):
        return record
    away = missing_nodes(state, record)
    if record.phase is Phase.WAITING:
        return record if away or now < record.not_before else _load_again(state, record)
    if away:
        return broke(state, record, _node_lost(record, away[0]), now)
    if record.phase is Phase.LOADING and all(progress.done for progress in record.prepared):
        return _activating(_moved(record, Trigger.ALL_PREPARED), now + state.timings.activate_timeout_s)
    if record.phase is Phase.ACTIVATING:
        return _step_activating(state, record, now)
    if record.phase is Phase.READY and record.attachment == 0:
        detached = _ended(record, _head_lost(record))
        return _activating(_moved(detached, Trigger.HEAD_DETACHED), now + state.timings.reattach_timeout_s)
    return record


def _step_activating(state: State, record: DeploymentRecord, now: float) -> DeploymentRecord:
    if record.activated.done and record.attachment:
        ready = replace(record, ever_ready=True, failure=None, failed_attempts=0, deadline=None)
        return _moved(ready, Trigger.HEAD_READY)
    if record.deadline is not None and now >= record.deadline:
        late = DeadlineError(
            f"deployment {record.name}: box {record.head.node_name} did not open the pipeline in time",
            field="source",
            reason="ACTIVATION_TIMEOUT",
        )
        return broke(state, record, late, now)
    return record


def _activating(record: DeploymentRecord, deadline: float) -> DeploymentRecord:
    return replace(record, deadline=deadline)


def _moved(record: DeploymentRecord, trigger: Trigger) -> DeploymentRecord:
    """Every change of phase is a new revision, so that it reaches the disk."""
    return replace(record, phase=next_phase(record.phase, trigger), revision=record.revision + 1)


def _load_again(state: State, record: DeploymentRecord) -> DeploymentRecord:
    """The next epoch, at the addresses its boxes have now."""
    placed = tuple(replace(s, address=state.nodes[s.node_id].address) for s in record.placement.stages)
    again = replace(
        record,
        placement=replace(record.placement, stages=placed),
        epoch=Epoch(max(record.epoch + 1, state.first_epoch(record.name))),
        prepared=fresh_progress(record.placement),
        activated=Progress(),
        attachment=0,
    )
    return _moved(again, Trigger.NODES_BACK)


def broke(state: State, record: DeploymentRecord, failure: EdgeShardError, now: float) -> DeploymentRecord:
    """The current epoch cannot go on: FAILED when the deployment never was ready, otherwise WAITING to try again."""
    trigger = Trigger.BROKE_AFTER_READY if record.ever_ready else Trigger.BROKE_BEFORE_READY
    delay = 0.0
    if record.phase is not Phase.READY:
        first, limit = state.timings.retry_first_s, state.timings.retry_limit_s
        delay = min(limit, first * 2.0 ** min(record.failed_attempts, 16))
    ended = _ended(record, failure)
    broken = replace(
        ended,
        failure=failure,
        attachment=0,
        deadline=None,
        not_before=now + delay,
        failed_attempts=record.failed_attempts + 1,
    )
    return _moved(broken, trigger)


def deleted(record: DeploymentRecord) -> DeploymentRecord:
    """The disk has it as deleting: now it is. No new revision, since the disk has this one."""
    gone = UnavailableError(f"deployment {record.name} is being deleted", reason="DEPLOYMENT_DELETED")
    phase = next_phase(record.phase, Trigger.DELETE)
    return replace(_ended(record, gone), phase=phase, attachment=0, deadline=None, delete_revision=0)


def answered(
    state: State, record: DeploymentRecord, key: CommandKey, failure: EdgeShardError | None, now: float
) -> DeploymentRecord:
    """The record after a box answered a command of the current epoch."""
    kind, index = key.kind, key.stage
    if kind is CommandKind.RELEASE:
        # A release that failed is not repeated: the box refused it once and would again.
        return replace(record, released=_done(record.released, index))
    if kind is CommandKind.PREPARE and record.phase is Phase.LOADING:
        if failure is not None:
            return broke(state, record, failure, now)
        return replace(record, prepared=_done(record.prepared, index))
    if kind is CommandKind.ACTIVATE and record.phase is Phase.ACTIVATING:
        if failure is not None:
            return broke(state, record, failure, now)
        return replace(record, activated=replace(record.activated, done=True))
    return record


def sent(record: DeploymentRecord, key: CommandKey, connection: int) -> DeploymentRecord:
    """The record once a command is on its way over `connection`."""
    if key.kind is CommandKind.PREPARE:
        return replace(record, prepared=_sent(record.prepared, key.stage, connection))
    if key.kind is CommandKind.ACTIVATE:
        return replace(record, activated=replace(record.activated, sent_on=connection))
    return replace(record, released=_sent(record.released, key.stage, connection))


def _done(all_progress: tuple[Progress, ...], index: int) -> tuple[Progress, ...]:
    return tuple(replace(p, done=True) if i == index else p for i, p in enumerate(all_progress))


def _sent(all_progress: tuple[Progress, ...], index: int, connection: int) -> tuple[Progress, ...]:
    return tuple(replace(p, sent_on=connection) if i == index else p for i, p in enumerate(all_progress))


def _ended(record: DeploymentRecord, failure: EdgeShardError) -> DeploymentRecord:
    """Requests run only on a head that is attached; without one there is nothing to end."""
    if record.phase not in (Phase.READY, Phase.ACTIVATING):
        return record
    return replace(record, ended=EndedService(record.epoch, failure))


def _node_lost(record: DeploymentRecord, name: str) -> UnavailableError:
    doing = {Phase.LOADING: "was loading", Phase.ACTIVATING: "was activating"}.get(record.phase, "was running")
    return UnavailableError(
        f"box {name} went away while deployment {record.name} {doing}",
        field="node",
        reason="NODE_LOST",
        retry_after_s=1.0,
    )


def _head_lost(record: DeploymentRecord) -> UnavailableError:
    return UnavailableError(
        f"box {record.head.node_name}, the head of deployment {record.name}, went away",
        field="node",
        reason="HEAD_LOST",
        retry_after_s=1.0,
    )


def at_node(failure: EdgeShardError, name: NodeName) -> EdgeShardError:
    """What a box answered, saying which box it was."""
    return type(failure)(
        f"box {name}: {failure.message}",
        field=failure.field,
        reason=failure.reason,
        retry_after_s=failure.retry_after_s,
    )
