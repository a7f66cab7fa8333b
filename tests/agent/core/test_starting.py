"""Commands that wait while a node starts or its layers are measured, and commands that do not: in
the pure core."""

from __future__ import annotations

from dataclasses import replace

import pytest
from edgeshard_agent.core.events import (
    ActionStarted,
    CommandReceived,
    Event,
    HeadActivated,
    StageBroke,
    StageLoaded,
    Started,
)
from edgeshard_agent.core.measuring import MeasuringEnded, MeasuringTask, StartMeasuring
from edgeshard_agent.core.node_actions import Action, CloseStage, SendResults
from edgeshard_agent.core.node_state import AgentState, apply, reconcile
from edgeshard_agent.core.standby import SetStandby

from edgeshard.domain.control.commands import (
    ActivateHead,
    Command,
    KeepStandby,
    MeasureCompute,
    PrepareStage,
    ProbeLinks,
    ReleaseStage,
)
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId, NodeName, OperationId
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StagePhase, StageStatus
from edgeshard.domain.nodes.profile import Effort
from tests.agent.core.nodes import FACTS, STARTED

NAME = DeploymentName("tales")
SPEC = DeploymentSpec(name=NAME, model="m", source="a")
STAGE = PlacedStage(0, NodeId("n"), NodeName("a"), "127.0.0.1:1", LayerRange(0, 4), 0, 0)
PREPARE = PrepareStage(SPEC, Placement((STAGE,), 16, 4, 1, 1), 0, Epoch(1), Digest("0" * 64))
KEEP = KeepStandby(SPEC, Epoch(1), Digest("0" * 64), NodeName("a"), LayerRange(0, 2))
NO_MORE = replace(KEEP, layers=None)
MEASURE = MeasureCompute({"model_type": "llama"}, DType.FLOAT32, effort=Effort.QUICK, again=False)


def post(state: AgentState, *events: Event) -> tuple[AgentState, list[Action]]:
    """The state after the events, and the actions that they caused, without answers."""
    started: list[Action] = []
    for event in events:
        state = apply(state, event)
        for action in reconcile(state):
            state = apply(state, ActionStarted(action))
            if not isinstance(action, SendResults):
                started.append(action)
    return state, started


def received(operation: str, command: Command) -> CommandReceived:
    return CommandReceived(OperationId(operation), command)


def test_a_stage_that_goes_before_it_could_load_is_closed_at_once() -> None:
    _, actions = post(
        AgentState(), received("p", PREPARE), received("r", ReleaseStage(NAME, Epoch(1)))
    )
    assert actions == [CloseStage(NAME)]


def test_a_standby_waits_for_the_start_and_its_end_does_not() -> None:
    state, actions = post(AgentState(), received("k", KEEP))
    assert not actions
    assert post(state, received("e", NO_MORE))[1] == [SetStandby(NO_MORE)]
    assert SetStandby(KEEP) in post(state, Started(FACTS))[1]


def test_a_standby_waits_for_the_memory_that_a_measurement_has() -> None:
    task = MeasuringTask(OperationId("m"), MEASURE)
    state, actions = post(STARTED, received("m", MEASURE), received("k", KEEP))
    assert actions == [StartMeasuring(task)]
    assert post(state, MeasuringEnded(task))[1] == [SetStandby(KEEP)]


def test_a_measurement_waits_for_the_start() -> None:
    state, actions = post(AgentState(), received("m", ProbeLinks(())))
    assert not actions
    assert (
        StartMeasuring(MeasuringTask(OperationId("m"), ProbeLinks(())))
        in post(state, Started(FACTS))[1]
    )


@pytest.mark.parametrize("broke", [False, True])
def test_the_former_stage_answers_for_no_later_epoch(broke: bool) -> None:
    loaded = StageLoaded(
        NAME, Epoch(1), StageStatus(NAME, Epoch(1), 0, LayerRange(0, 4), StagePhase.READY)
    )
    active = (received("p", PREPARE), loaded, received("a", ActivateHead(NAME, Epoch(1))))
    state, _ = post(
        STARTED, *active, HeadActivated(NAME, Epoch(1)), *(StageBroke(NAME, Epoch(1)),) * broke
    )
    again = replace(PREPARE, epoch=Epoch(2))
    for command in (
        received("p2", again),
        received("p3", again),
        received("a2", ActivateHead(NAME, Epoch(2))),
    ):
        state = apply(state, command)  # before the executor has begun to load
    assert not state.unsent
