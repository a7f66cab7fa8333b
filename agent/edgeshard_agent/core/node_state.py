"""The agent's state machine: it compares the coordinator's commands with the node's stages.

`apply` folds an event into the state. `reconcile` returns the actions that remove the difference.
The executor reports back with events. There is one slot per deployment, since a node holds at most
one stage of each, and one measurement at a time (`edgeshard_agent.core.measuring`). `machine`
returns the state machine as a dump has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from typing import assert_never

from edgeshard.debugging.codec import Codec
from edgeshard.debugging.dump import StateMachine
from edgeshard.domain.control import commands
from edgeshard.domain.control.commands import CommandResult
from edgeshard.domain.errors import (
    EdgeShardError,
    FailedPreconditionError,
    StaleEpochError,
    UnavailableError,
)
from edgeshard.domain.ids import DeploymentName, Epoch, OperationId
from edgeshard.domain.nodes.device import DeviceFacts, StageStatus
from edgeshard_agent.core import events, standby
from edgeshard_agent.core.events import ActionStarted, Event
from edgeshard_agent.core.measuring import (
    ControlLost,
    Measuring,
    MeasuringEnded,
    MeasuringEvent,
    MeasuringStopped,
    MeasuringTask,
    StartMeasuring,
    StopMeasuring,
    stage_came,
)
from edgeshard_agent.core.node_actions import (
    Action,
    CloseStage,
    LoadStage,
    OpenHead,
    ReportStarted,
    SendResults,
)
from edgeshard_agent.core.standby import SetStandby, Standby, StandbySet
from edgeshard_agent.core.tracing import StartTrace, TraceEnded, WantedTrace, no_stage, replaced

REMEMBERED_RESULTS = 256
NO_EPOCH = Epoch(0)
"""Below every real epoch; those begin at 1."""


class SlotPhase(StrEnum):
    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"
    ACTIVATING = "activating"
    ACTIVE = "active"
    BROKEN = "broken"
    """Loaded once and failed while running; waits for a release or a higher epoch."""
    CLOSING = "closing"


@dataclass(frozen=True, slots=True)
class Slot:
    """One deployment on this node: `command` is the newest prepare, None once released; `epoch` is
    the held stage's."""

    command: commands.PrepareStage | None = None
    activate: bool = False
    phase: SlotPhase = SlotPhase.EMPTY
    epoch: Epoch = NO_EPOCH
    prepares: tuple[OperationId, ...] = ()
    activates: tuple[OperationId, ...] = ()
    releases: tuple[OperationId, ...] = ()

    @property
    def loads(self) -> bool:
        """Whether a stage is to be loaded, or loads."""
        comes = (SlotPhase.EMPTY, SlotPhase.LOADING, SlotPhase.CLOSING)
        return self.command is not None and (self.phase in comes or self.command.epoch > self.epoch)


@dataclass(frozen=True, slots=True)
class AgentState:
    """`facts` are None while the node starts: it answers commands, but loads and measures nothing
    before."""

    facts: DeviceFacts | None = None
    reported: bool = False
    """Whether the coordinator has received the report that the node started."""
    slots: dict[DeploymentName, Slot] = field(default_factory=dict)
    results: dict[OperationId, commands.CommandResult] = field(default_factory=dict)
    """The newest results, so that a repeated command is answered and not repeated."""
    unsent: tuple[commands.CommandResult, ...] = ()
    measuring: Measuring = field(default_factory=Measuring)
    traces: dict[DeploymentName, WantedTrace] = field(default_factory=dict)
    standbys: dict[DeploymentName, Standby] = field(default_factory=dict)


def apply(state: AgentState, event: events.Event) -> AgentState:
    """Fold one event into the state."""
    match event:
        case events.Started():
            return replace(state, facts=event.facts)
        case events.CommandReceived():
            return _command(state, event)
        case events.ActionStarted():
            return _started(state, event.action)
        case events.StageClosed():
            return _closed(state, event.deployment)
        case MeasuringEnded() | MeasuringStopped() | ControlLost():
            return _measuring_event(state, event)
        case TraceEnded():
            return _traced(state, event)
        case StandbySet():
            return _with_standbys(state, *standby.ended(state.standbys, event))
        case (
            events.StageLoaded()
            | events.StageLoadFailed()
            | events.HeadActivated()
            | events.StageBroke()
        ):
            slot = state.slots.get(event.deployment)
            if slot is None or slot.epoch != event.epoch:
                return state  # of an epoch that was superseded while the action ran
            return _progressed(state, slot, event)
        case _:
            assert_never(event)


def reconcile(state: AgentState) -> list[Action]:
    """The actions to start now. Each is answered by an event, and not named again once
    `ActionStarted` was applied."""
    actions: list[Action] = []
    if state.facts is not None and not state.reported:
        actions.append(ReportStarted(state.facts))
    # A measurement of layers has the memory that a stage will need.
    may_load = state.facts is not None and not state.measuring.measures_layers
    for deployment, slot in state.slots.items():
        action = _slot_action(deployment, slot)
        if action is not None and (may_load or not isinstance(action, LoadStage)):
            actions.append(action)
    actions += [
        action
        for action in standby.due(state.standbys)
        if may_load or action.command.layers is None
    ]
    if state.measuring.superfluous:
        actions.append(StopMeasuring())
    if state.facts is not None and state.measuring.startable is not None:
        actions.append(StartMeasuring(state.measuring.startable))
    actions += [
        StartTrace(t.operation_id, t.command) for t in state.traces.values() if not t.started
    ]
    if state.unsent:
        actions.append(SendResults(state.unsent))
    return actions


def _slot_action(deployment: DeploymentName, slot: Slot) -> Action | None:
    if slot.phase is SlotPhase.CLOSING:
        return None
    if slot.command is None:
        return CloseStage(deployment)
    if slot.phase is SlotPhase.EMPTY or slot.command.epoch > slot.epoch:
        return LoadStage(slot.command)
    if slot.activate and slot.phase is SlotPhase.READY:
        return OpenHead(deployment, slot.epoch)
    return None


def _command(state: AgentState, event: events.CommandReceived) -> AgentState:
    result = state.results.get(event.operation_id)
    if result is not None:
        return replace(state, unsent=(*state.unsent, result))
    match event.command:
        case commands.MeasureCompute() | commands.ProbeLinks():
            return _measure(state, MeasuringTask(event.operation_id, event.command))
        case commands.TraceSteps():
            return _trace(state, WantedTrace(event.operation_id, event.command))
        case commands.KeepStandby():
            return _with_standbys(
                state, *standby.asked(state.standbys, event.operation_id, event.command)
            )
        case _:
            return _stage_command(state, event.operation_id, event.command)


def _measure(state: AgentState, task: MeasuringTask) -> AgentState:
    pending_task = state.measuring.pending_task
    if pending_task is not None and pending_task.operation_id == task.operation_id:
        return state  # being worked on; answered when done
    refused = state.measuring.refusal(task, any(slot.loads for slot in state.slots.values()))
    if refused is not None:
        return _answer(state, task.operation_id, error=refused)
    return replace(state, measuring=replace(state.measuring, pending_task=task))


def _trace(state: AgentState, trace_request: WantedTrace) -> AgentState:
    command = trace_request.command
    slot, former = state.slots.get(command.deployment), state.traces.get(command.deployment)
    if former is not None and former.operation_id == trace_request.operation_id:
        return state  # being worked on; answered when done
    has_stage = slot is not None and slot.phase in (
        SlotPhase.READY,
        SlotPhase.ACTIVATING,
        SlotPhase.ACTIVE,
    )
    if slot is None or not has_stage or slot.epoch != command.epoch:
        return _answer(
            state, trace_request.operation_id, error=no_stage(command.deployment, command.epoch)
        )
    if former is not None:
        state = _answer(state, former.operation_id, error=replaced(command.deployment))
    return replace(state, traces={**state.traces, command.deployment: trace_request})


def _stage_command(
    state: AgentState, operation_id: OperationId, command: commands.StageCommand
) -> AgentState:
    if isinstance(command, commands.ReleaseStage):
        state = _with_standbys(
            state, *standby.released(state.standbys, command.deployment, command.epoch)
        )
    slot = state.slots.get(command.deployment, Slot())
    if operation_id in (*slot.prepares, *slot.activates, *slot.releases):
        return state  # being worked on; answered when done
    newest = max(slot.epoch, slot.command.epoch if slot.command else NO_EPOCH)
    if command.epoch < newest:
        low = StaleEpochError(f"epoch {command.epoch} is below {newest}", field="epoch")
        return _answer(state, operation_id, error=low)
    match command:
        case commands.PrepareStage():
            return _prepare(state, slot, operation_id, command)
        case commands.ActivateHead():
            return _activate(state, slot, operation_id, command)
        case commands.ReleaseStage():
            if slot.phase is SlotPhase.EMPTY and slot.command is None:
                return _answer(state, operation_id)
            state = _answer(state, *slot.prepares, *slot.activates, error=_superseded())
            released = Slot(
                phase=slot.phase, epoch=slot.epoch, releases=(*slot.releases, operation_id)
            )
            return _with_slot(state, command.deployment, released)
        case _:
            assert_never(command)


def _prepare(
    state: AgentState, slot: Slot, operation_id: OperationId, command: commands.PrepareStage
) -> AgentState:
    if slot.command is not None and slot.command.epoch == command.epoch:
        if slot.epoch == command.epoch and slot.phase in (
            SlotPhase.READY,
            SlotPhase.ACTIVATING,
            SlotPhase.ACTIVE,
        ):
            return _answer(state, operation_id)
        if slot.epoch == command.epoch and slot.phase is SlotPhase.BROKEN:
            return _answer(state, operation_id, error=_broken())
        slot = replace(slot, prepares=(*slot.prepares, operation_id))
        return _with_slot(state, command.deployment, slot)
    state = _answer(state, *slot.prepares, *slot.activates, error=_superseded())
    pending_task = state.measuring.pending_task
    if pending_task is not None and isinstance(pending_task.command, commands.MeasureCompute):
        state = _answer(state, pending_task.operation_id, error=stage_came())
        state = replace(state, measuring=replace(state.measuring, pending_task=None))
    slot = replace(slot, command=command, activate=False, prepares=(operation_id,), activates=())
    return _with_slot(state, command.deployment, slot)


def _activate(
    state: AgentState, slot: Slot, operation_id: OperationId, command: commands.ActivateHead
) -> AgentState:
    if slot.command is None or slot.command.epoch != command.epoch or slot.command.stage != 0:
        error = FailedPreconditionError(
            f"no first stage of {command.deployment} is prepared at epoch {command.epoch}",
            reason="NOT_PREPARED",
        )
        return _answer(state, operation_id, error=error)
    if slot.phase is SlotPhase.ACTIVE and slot.epoch == command.epoch:
        return _answer(state, operation_id)
    if slot.phase is SlotPhase.BROKEN and slot.epoch == command.epoch:
        return _answer(state, operation_id, error=_broken())
    slot = replace(slot, activate=True, activates=(*slot.activates, operation_id))
    return _with_slot(state, command.deployment, slot)


def _started(state: AgentState, action: Action) -> AgentState:
    match action:
        case ReportStarted():
            return replace(state, reported=True)
        case SendResults():
            return replace(state, unsent=state.unsent[len(action.results) :])
        case LoadStage():
            slot = state.slots[action.prepare.deployment]
            loading = replace(slot, phase=SlotPhase.LOADING, epoch=action.prepare.epoch)
            return _with_slot(state, action.prepare.deployment, loading)
        case OpenHead() | CloseStage():
            phase = SlotPhase.ACTIVATING if isinstance(action, OpenHead) else SlotPhase.CLOSING
            return _with_slot(
                state, action.deployment, replace(state.slots[action.deployment], phase=phase)
            )
        case SetStandby():
            return replace(state, standbys=standby.begun(state.standbys, action))
        case StartMeasuring():
            return replace(state, measuring=replace(state.measuring, running=action.task))
        case StopMeasuring():
            return replace(state, measuring=replace(state.measuring, stopping=True))
        case StartTrace():
            deployment = action.command.deployment
            started = replace(state.traces[deployment], started=True)
            return replace(state, traces={**state.traces, deployment: started})
        case _:
            assert_never(action)


def _measuring_event(state: AgentState, event: MeasuringEvent) -> AgentState:
    match event:
        case MeasuringEnded():
            after, unanswered = state.measuring.ended(event.task)
            state = replace(state, measuring=after)
            return (
                _answer(state, event.task.operation_id, error=event.error) if unanswered else state
            )
        case MeasuringStopped():
            return replace(state, measuring=Measuring(state.measuring.pending_task))  # which begins
        case ControlLost():
            # No caller waits for an answer any more; a running trace ends by itself.
            return replace(state, measuring=replace(state.measuring, pending_task=None), traces={})
        case _:
            assert_never(event)


def _traced(state: AgentState, event: TraceEnded) -> AgentState:
    trace_request = state.traces.get(event.deployment)
    if trace_request is None or trace_request.operation_id != event.operation_id:
        return state  # replaced, or wanted no more
    others = {name: other for name, other in state.traces.items() if name != event.deployment}
    # Not kept among the results: it is large, and used once.
    result = commands.CommandResult(event.operation_id, event.error, trace=event.trace)
    return replace(state, traces=others, unsent=(*state.unsent, result))


def _progressed(state: AgentState, slot: Slot, event: events.StageEvent) -> AgentState:
    if slot.phase is SlotPhase.CLOSING:
        return state
    match event:
        case events.StageLoaded():
            state = _answer(state, *slot.prepares, status=event.status)
            return _with_slot(
                state, event.deployment, replace(slot, phase=SlotPhase.READY, prepares=())
            )
        case events.StageLoadFailed():
            # The node holds no stage and has no order: the coordinator decides the next step.
            state = _answer(state, *slot.prepares, *slot.activates, error=event.error)
            return _with_slot(
                state, event.deployment, Slot(phase=SlotPhase.BROKEN, epoch=slot.epoch)
            )
        case events.HeadActivated():
            if slot.phase is not SlotPhase.ACTIVATING:
                return state  # the stage broke meanwhile, which was the answer
            state = _answer(state, *slot.activates, error=event.error)
            phase = SlotPhase.ACTIVE if event.error is None else SlotPhase.READY
            slot = replace(slot, phase=phase, activate=event.error is None, activates=())
            return _with_slot(state, event.deployment, slot)
        case events.StageBroke():
            state = _answer(state, *slot.activates, error=_broken())
            broken = replace(slot, phase=SlotPhase.BROKEN, activate=False, activates=())
            return _with_slot(state, event.deployment, broken)
        case _:
            assert_never(event)


def _closed(state: AgentState, deployment: DeploymentName) -> AgentState:
    slot = state.slots.get(deployment)
    if slot is None:
        return state
    state = _answer(state, *slot.releases)
    if slot.command is None:
        return replace(
            state, slots={name: other for name, other in state.slots.items() if name != deployment}
        )
    return _with_slot(state, deployment, replace(slot, phase=SlotPhase.EMPTY, releases=()))


def _superseded() -> EdgeShardError:
    return StaleEpochError(
        "a newer command for this deployment took its place", reason="SUPERSEDED"
    )


def _broken() -> EdgeShardError:
    return UnavailableError(
        "the stage failed at this epoch; see the node's log", reason="STAGE_FAILED"
    )


def _with_slot(state: AgentState, deployment: DeploymentName, slot: Slot) -> AgentState:
    return replace(state, slots={**state.slots, deployment: slot})


def _with_standbys(
    state: AgentState, standbys: dict[DeploymentName, Standby], answers: standby.Answers
) -> AgentState:
    state = replace(state, standbys=standbys)
    for operation_id, error in answers:
        state = _answer(state, operation_id, error=error)
    return state


def _answer(
    state: AgentState,
    *operations: OperationId,
    error: EdgeShardError | None = None,
    status: StageStatus | None = None,
) -> AgentState:
    """The state with the same answer to each of some operations."""
    for operation_id in operations:
        result = commands.CommandResult(operation_id, error, status)
        retained_results = dict(list(state.results.items())[-(REMEMBERED_RESULTS - 1) :])
        state = replace(
            state,
            results={**retained_results, operation_id: result},
            unsent=(*state.unsent, result),
        )
    return state


@cache
def machine() -> StateMachine[AgentState, Event]:
    """Made at the first dump; nothing else needs it."""
    return StateMachine(Codec(AgentState), Codec(Event), apply)


def worth_keeping(event: Event) -> Event:
    """The event without large parts that do not change the state: the steps of a trace, which are
    sent at once."""
    if isinstance(event, TraceEnded) and event.trace is not None:
        return replace(event, trace=replace(event.trace, records=()))
    if isinstance(event, ActionStarted) and isinstance(event.action, SendResults):
        return ActionStarted(
            SendResults(tuple(_without_steps(result) for result in event.action.results))
        )
    return event


def _without_steps(result: CommandResult) -> CommandResult:
    return (
        result if result.trace is None else replace(result, trace=replace(result.trace, records=()))
    )
