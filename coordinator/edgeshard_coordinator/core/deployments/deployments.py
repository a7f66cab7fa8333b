"""One deployment's life: the changes by answers, and the transitions that follow from the state of
its nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgeshard.domain import errors
from edgeshard.domain.control.commands import CommandKey, CommandKind
from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.ids import Epoch, NodeName
from edgeshard.domain.nodes.device import StagePhase
from edgeshard_coordinator.core.deployments.transitions import Trigger, next_phase
from edgeshard_coordinator.core.values import authority
from edgeshard_coordinator.core.values.events import Replanned
from edgeshard_coordinator.core.values.state import (
    DeploymentRecord,
    EndedService,
    KnownNode,
    Move,
    Progress,
    State,
    fresh_progress,
    lost_nodes,
    missing_nodes,
)

NODE_LOST = "NODE_LOST"
LINK_STALLED = "LINK_STALLED"
SEARCH_PAUSE_S = 0.5
"""Time after a search during which nodes changed, before the next one of the deployment: nodes that
change all the time must not keep a processor busy."""
IN_VAIN = -2
"""No version of a state: the nodes that are there are the only ones that can."""


def new_record(state: State, record: DeploymentRecord) -> DeploymentRecord:
    """`record` at the start of its life, at an epoch that no node has seen for its name."""
    fresh, epoch = fresh_progress(record.placement), state.first_epoch(record.name)
    return replace(record, epoch=epoch, phase=Phase.LOADING, prepared=fresh, released=fresh)


def restored_record(record: DeploymentRecord) -> DeploymentRecord:
    """A record from disk after a restart: all that was under way is forgotten, and its nodes are
    awaited."""
    fresh = fresh_progress(record.placement)
    return DeploymentRecord(
        uid=record.uid,
        spec=record.spec,
        manifest_digest=record.manifest_digest,
        placement=record.placement,
        epoch=record.epoch,
        phase=record.phase if record.phase in (Phase.FAILED, Phase.DELETING) else Phase.WAITING,
        adoptable=record.phase in (Phase.LOADING, Phase.ACTIVATING, Phase.READY),
        was_ready=record.phase is Phase.READY,
        # It may have served since, even if the disk has not recorded that; then a lost node must
        # not end it for good.
        ever_ready=record.ever_ready or record.phase in (Phase.LOADING, Phase.ACTIVATING),
        failure=record.failure,
        prepared=fresh,
        released=fresh,
        saving=1,
        saved=1,
        saved_epoch=record.epoch,
    )


def settle(state: State, now: float) -> State:
    """Follow transitions until none applies. Each epoch is entered at most once for a given state
    of the nodes."""
    settled = {name: _settle_one(state, record, now) for name, record in state.deployments.items()}
    return replace(state, deployments=settled)


def _settle_one(state: State, record: DeploymentRecord, now: float) -> DeploymentRecord:
    for _ in range(len(Phase)):
        following = _step(state, record, now)
        if following is record:
            return record
        record = following
    raise errors.InternalError(f"deployment {record.name} does not settle", reason="INVARIANT")


def _step(state: State, record: DeploymentRecord, now: float) -> DeploymentRecord:
    """The next transition, or the very same record when none applies."""
    if record.phase not in (Phase.LOADING, Phase.ACTIVATING, Phase.READY, Phase.WAITING):
        return record
    if record.phase is Phase.WAITING:
        return _step_waiting(state, record, now)
    if lost_names := lost_nodes(state, record):
        return broke(state, record, _node_lost(record, lost_names[0]), now)
    if record.phase is Phase.LOADING:
        return _step_loading(state, record, now)
    if record.phase is Phase.ACTIVATING:
        return _step_activating(state, record, now)
    if record.phase is Phase.READY and record.attachment == 0:
        return _activating(
            _moved(record, Trigger.HEAD_DETACHED), now + state.timings.reattach_timeout_s
        )
    return record


def _step_waiting(state: State, record: DeploymentRecord, now: float) -> DeploymentRecord:
    if missing_nodes(state, record):
        return record
    if record.adoptable:
        nodes = [state.nodes[placed.node_id] for placed in record.placement.stages]
        if all(_holds(node, record, index) for index, node in enumerate(nodes)):
            return _adopted(record, now + state.timings.activate_timeout_s)
        return replace(record, adoptable=False) if all(node.reported for node in nodes) else record
    # If a search for other nodes failed, the same nodes try again, over the same links.
    elsewhere = wants_replan(state, record) and record.planned_for != IN_VAIN
    if now < record.not_before or elsewhere:
        return record
    return _load_again(state, record, now)


def _holds(node: KnownNode, record: DeploymentRecord, index: int) -> bool:
    working = (StagePhase.READY, StagePhase.ACTIVE)
    own = (
        stage for stage in node.stages if authority.speaks_for_stage(record, node.node_id, stage)
    )
    return any(stage.stage == index and stage.phase in working for stage in own)


def _adopted(record: DeploymentRecord, deadline: float) -> DeploymentRecord:
    """Go on with the epoch that the nodes hold: nothing is prepared again, and the head, which may
    be at work, is activated once more. So it may have served already."""
    prepared = tuple(replace(progress, done=True) for progress in record.prepared)
    adopted = replace(record, adoptable=False, prepared=prepared, ever_ready=True)
    return _activating(_moved(adopted, Trigger.ADOPTED), deadline)


def _step_loading(state: State, record: DeploymentRecord, now: float) -> DeploymentRecord:
    if all(progress.done for progress in record.prepared):
        return _activating(
            _moved(record, Trigger.ALL_PREPARED), now + state.timings.activate_timeout_s
        )
    loaded = _loaded_bytes(state, record)
    if record.deadline is None or loaded != record.loaded_bytes:
        return replace(record, loaded_bytes=loaded, deadline=now + state.timings.load_timeout_s)
    if now < record.deadline:
        return record
    pairs = zip(record.placement.stages, record.prepared, strict=True)
    late = [placed for placed, progress in pairs if not progress.done]
    names = ", ".join(placed.node_name for placed in late)
    failure = errors.DeadlineError(
        f"node {names} made no progress with loading deployment {record.name} for "
        f"{state.timings.load_timeout_s:g} s",
        field="node",
        reason="LOADING_TIMEOUT",
    )
    avoided = record.avoided | {placed.node_id for placed in late}
    return broke(state, replace(record, avoided=avoided), failure, now)


def _loaded_bytes(state: State, record: DeploymentRecord) -> int:
    """The bytes that nodes report as fetched and filled, and one for each prepared stage: another
    number with any progress."""
    own = [
        stage
        for node_id in dict.fromkeys(placed.node_id for placed in record.placement.stages)
        for stage in state.nodes[node_id].stages
        if authority.speaks_for_stage(record, node_id, stage)
    ]
    filled = sum(stage.filling.done_bytes for stage in own if stage.filling is not None)
    return (
        sum(stage.fetched_bytes for stage in own)
        + filled
        + sum(progress.done for progress in record.prepared)
    )


def wants_replan(state: State, record: DeploymentRecord) -> bool:
    """Whether a waiting deployment is to continue without the nodes that are lost or failed it."""
    if any(stage.node_id in state.awaited for stage in record.placement.stages):
        return False
    # One that could not move goes back.
    wrong = missing_nodes(state, record) or record.avoided or crosses_bad_link(state, record)
    return bool(wrong) or record.former is not None


def crosses_bad_link(state: State, record: DeploymentRecord) -> bool:
    """Whether activations or tokens would go over a stalled link."""
    ids = [stage.node_id for stage in record.placement.stages]
    return any(pair in state.bad_links for pair in zip(ids, (*ids[1:], ids[0]), strict=True))


def replanned(state: State, record: DeploymentRecord, event: Replanned) -> DeploymentRecord:
    """The record once the search for another placement is over. A late answer changes nothing."""
    if record.uid != event.uid:
        return record
    record = replace(record, searching=False)
    if record.phase is not Phase.WAITING or record.planned_for < 0:
        return record  # It broke again since, or does not wait any more.
    if isinstance(event.found, Placement):
        if not state.holds_still(record.spec, event.found, event.version):
            return replace(
                record, planned_for=-1, search_after=next_search(state, event.version, event.now)
            )
        moved_record = replace(record, placement=event.found, former=None)
        return _load(state, moved_record, Trigger.REPLANNED, event.now)
    failure = record.failure
    if not missing_nodes(state, record):
        return replace(record, avoided=frozenset(), planned_for=IN_VAIN)
    cause = (
        failure.message.split("; it cannot continue", 1)[0]
        if failure is not None
        else "a node disconnected"
    )
    why = errors.UnavailableError(
        f"{cause}; it cannot continue without: {event.found.message}",
        field="node",
        reason="NO_PLACEMENT",
        retry_after_s=5.0,
    )
    later = next_search(state, event.version, event.now)
    return replace(
        record, failure=why, avoided=frozenset(), planned_for=event.version, search_after=later
    )


def next_search(state: State, version: int, now: float) -> float:
    """Earliest time of the search after one in the state of `version`, which ended at `now`."""
    return now if version == state.version else now + SEARCH_PAUSE_S


def _step_activating(state: State, record: DeploymentRecord, now: float) -> DeploymentRecord:
    if record.activated.done and record.attachment:
        well = replace(
            record, failure=None, failed_attempts=0, deadline=None, avoided=frozenset(), former=None
        )
        return _moved(replace(well, ever_ready=True, ready_at=now), Trigger.HEAD_READY)
    # While nodes are awaited their heads are away like them.
    if record.deadline is not None and now >= max(record.deadline, state.frozen_until):
        late = errors.DeadlineError(
            f"deployment {record.name}: node {record.head.node_name} did not open the pipeline in "
            "time",
            field="source",
            reason="ACTIVATION_TIMEOUT",
        )
        return broke(state, record, late, now)
    return record


def _activating(record: DeploymentRecord, deadline: float) -> DeploymentRecord:
    return replace(record, deadline=deadline)


def _moved(record: DeploymentRecord, trigger: Trigger) -> DeploymentRecord:
    """Every change of phase is a new revision, so that it reaches the disk. A move that is not
    there yet is off."""
    return replace(
        record, phase=next_phase(record.phase, trigger), revision=record.revision + 1, move=None
    )


def _load_again(state: State, record: DeploymentRecord, now: float) -> DeploymentRecord:
    """The next epoch, at the addresses its nodes have now."""
    placed = tuple(
        replace(s, address=state.nodes[s.node_id].address) for s in record.placement.stages
    )
    here = replace(record, placement=replace(record.placement, stages=placed))
    return _load(state, here, Trigger.NODES_BACK, now)


def _load(state: State, record: DeploymentRecord, trigger: Trigger, now: float) -> DeploymentRecord:
    """The next epoch of the record's placement."""
    return _moved(_begun(state, record, next_epoch(state, record), now), trigger)


def next_epoch(state: State, record: DeploymentRecord) -> Epoch:
    return state.epoch_after(record.name, record.epoch)


def _begun(state: State, record: DeploymentRecord, epoch: Epoch, now: float) -> DeploymentRecord:
    """The record's placement at `epoch`, with everything still to do."""
    fresh = fresh_progress(record.placement)
    return replace(
        record,
        epoch=epoch,
        prepared=fresh,
        released=fresh,
        activated=Progress(),
        attachment=0,
        adoptable=False,
        planned_for=-1,
        standby_for=-1,
        loaded_bytes=0,
        deadline=now + state.timings.load_timeout_s,
    )


def broke(
    state: State, record: DeploymentRecord, failure: errors.EdgeShardError, now: float
) -> DeploymentRecord:
    """The current epoch cannot continue: FAILED if the deployment never was ready, otherwise
    WAITING to try again."""
    trigger = Trigger.BROKE_AFTER_READY if record.ever_ready else Trigger.BROKE_BEFORE_READY
    times = state.timings
    delay = 0.0
    short_lives = record.short_lives
    # Another lost node is no reason to wait: its consequence is tried for the first time.
    if failure.reason not in (NODE_LOST, LINK_STALLED):
        attempts = record.failed_attempts
        if record.phase is Phase.READY:
            attempts = short_lives - 1 if now - record.ready_at < times.steady_s else -1
            short_lives = attempts + 2
        if attempts >= 0:
            delay = min(times.retry_limit_s, times.retry_first_s * 2.0 ** min(attempts, 16))
    ended = _ended(record, failure)
    broken = replace(
        ended,
        failure=failure,
        attachment=0,
        deadline=None,
        planned_for=-1,
        not_before=now + delay,
        failed_attempts=record.failed_attempts + 1,
        short_lives=short_lives,
    )
    return _moved(broken, trigger)


def deleted(record: DeploymentRecord) -> DeploymentRecord:
    """The disk has it as deleting: now it is. No new revision, since the disk has this one."""
    failure = errors.UnavailableError(
        f"deployment {record.name} is being deleted", reason="DEPLOYMENT_DELETED"
    )
    # One that was ready may have requests that wait for its next epoch.
    ended = (
        replace(record, ended=EndedService(record.epoch, failure))
        if record.ever_ready
        else _ended(record, failure)
    )
    phase = next_phase(record.phase, Trigger.DELETE)
    return replace(
        ended, phase=phase, attachment=0, deadline=None, delete_revision=0, move=None, former=None
    )


def check_movable(record: DeploymentRecord) -> None:
    """Raise FailedPreconditionError for a deployment that can never move, UnavailableError for one
    that cannot now."""
    name = record.name
    if record.spec.layers:
        raise errors.FailedPreconditionError(
            f"layers: deployment {name} was placed by hand, with --layers, and stays there; delete "
            "it and deploy it "
            "again without --layers to have it planned",
            field="layers",
            reason="PLACED_BY_HAND",
        )
    if record.phase in (Phase.FAILED, Phase.DELETING) or record.delete_revision:
        phase = Phase.DELETING if record.delete_revision else record.phase
        raise errors.FailedPreconditionError(
            f"name: deployment {name} is {phase}; only one that is ready can move",
            field="name",
            reason="NOT_READY",
        )
    if record.phase is not Phase.READY or record.move is not None:
        doing = record.phase if record.move is None else "about to move"
        raise errors.UnavailableError(
            f"name: deployment {name} is {doing}; try again when it is ready",
            field="name",
            reason="DEPLOYMENT_NOT_READY",
            retry_after_s=1.0,
        )


def asked_to_move(state: State, record: DeploymentRecord, placement: Placement) -> DeploymentRecord:
    """The record with a move that waits for the disk. It stays as it is until then, so that a disk
    that refuses changes nothing."""
    revision = record.revision + 1
    return replace(
        record, move=Move(placement, next_epoch(state, record), revision), revision=revision
    )


def moved(state: State, record: DeploymentRecord, now: float) -> DeploymentRecord:
    """The disk has the move: its epoch begins. No new revision, since the disk has this one."""
    move = record.move
    assert move is not None
    why = errors.UnavailableError(
        f"deployment {record.name} moves to other nodes",
        field="model",
        reason="MOVED",
        retry_after_s=1.0,
    )
    going = replace(
        _ended(record, why), placement=move.placement, former=record.placement, move=None
    )
    return replace(
        _begun(state, going, move.epoch, now), phase=next_phase(record.phase, Trigger.MOVE)
    )


def answered(
    state: State,
    record: DeploymentRecord,
    key: CommandKey,
    failure: errors.EdgeShardError | None,
    now: float,
) -> DeploymentRecord:
    """The record after a node answered a command of the current epoch."""
    kind, index = key.kind, key.stage
    if kind is CommandKind.RELEASE:
        # A release that failed is not repeated: the node refused it once and would again.
        return replace(record, released=_with(record.released, index, done=True))
    if kind is CommandKind.PREPARE and record.phase is Phase.LOADING:
        if failure is not None:
            avoided = record.avoided | {record.placement.stages[index].node_id}
            return broke(state, replace(record, avoided=avoided), failure, now)
        return replace(record, prepared=_with(record.prepared, index, done=True))
    if kind is CommandKind.ACTIVATE and record.phase is Phase.ACTIVATING:
        if failure is not None:
            return broke(state, record, failure, now)
        return replace(record, activated=replace(record.activated, done=True))
    return record


def sent(record: DeploymentRecord, key: CommandKey, connection: int) -> DeploymentRecord:
    """The record once a command was sent over `connection`."""
    if key.kind is CommandKind.PREPARE:
        return replace(record, prepared=_with(record.prepared, key.stage, sent_on=connection))
    if key.kind is CommandKind.ACTIVATE:
        return replace(record, activated=replace(record.activated, sent_on=connection))
    return replace(record, released=_with(record.released, key.stage, sent_on=connection))


def _with(all_progress: tuple[Progress, ...], index: int, **changes: Any) -> tuple[Progress, ...]:
    """The progress of all stages, with one's changed."""
    return tuple(replace(p, **changes) if i == index else p for i, p in enumerate(all_progress))


def _ended(record: DeploymentRecord, failure: errors.EdgeShardError) -> DeploymentRecord:
    """Requests run only on a head that is attached; without one there is nothing to end."""
    if record.phase not in (Phase.READY, Phase.ACTIVATING):
        return record
    return replace(record, ended=EndedService(record.epoch, failure))


def _node_lost(record: DeploymentRecord, name: str) -> errors.UnavailableError:
    doing = {Phase.LOADING: "was loading", Phase.ACTIVATING: "was activating"}.get(
        record.phase, "was running"
    )
    return errors.UnavailableError(
        f"node {name} disconnected while deployment {record.name} {doing}",
        field="node",
        reason=NODE_LOST,
        retry_after_s=1.0,
    )


def at_node(failure: errors.EdgeShardError, name: NodeName) -> errors.EdgeShardError:
    """A node's error, with the name of the node."""
    return type(failure)(
        f"node {name}: {failure.message}",
        field=failure.field,
        reason=failure.reason,
        retry_after_s=failure.retry_after_s,
    )
