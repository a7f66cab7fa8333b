"""Commands to trace, in the pure core: of a stage that runs, the newest of each, answered once and not remembered."""

from __future__ import annotations

import pytest
from edgeshard_agent.core.actions import Action, SendResults
from edgeshard_agent.core.events import ActionStarted, CommandReceived, Event, StageBroke, StageLoaded
from edgeshard_agent.core.state import AgentState, apply, reconcile
from edgeshard_agent.core.survey import ControlLost
from edgeshard_agent.core.tracing import StartTrace, TraceEnded

from edgeshard.commands import Command, CommandResult, PrepareStage, TraceSteps
from edgeshard.deployment import DeploymentSpec
from edgeshard.device import StagePhase, StageStatus
from edgeshard.ids import DeploymentName, Digest, Epoch, NodeId, NodeName, OperationId
from edgeshard.model import LayerRange
from edgeshard.placement import PlacedStage, Placement
from edgeshard.trace import StageTrace

NAME = DeploymentName("tales")
STAGE = PlacedStage(0, NodeId("n"), NodeName("a"), "127.0.0.1:1", LayerRange(0, 4), 0, 0)
PREPARE = PrepareStage(
    DeploymentSpec(name=NAME, model="m", source="a"), Placement((STAGE,), 16, 4, 1, 1), 0, Epoch(2), Digest("0" * 64)
)
LOADED = StageLoaded(NAME, Epoch(2), StageStatus(NAME, Epoch(2), 0, LayerRange(0, 4), StagePhase.READY))
TRACE = TraceSteps(NAME, Epoch(2), 5.0)
FOUND = StageTrace(0, "a", LayerRange(0, 4), ())


class Box:
    """Runs the core: `started` are the traces it was told to take, `answers` what it said to each command."""

    def __init__(self) -> None:
        self.state = AgentState()
        self.started: list[Action] = []
        self.answers: list[CommandResult] = []

    def post(self, event: Event) -> None:
        self.state = apply(self.state, event)
        for action in reconcile(self.state):
            self.state = apply(self.state, ActionStarted(action))
            if isinstance(action, SendResults):
                self.answers += action.results
            elif isinstance(action, StartTrace):
                self.started.append(action)
        assert not reconcile(self.state), "an action is named twice"

    def command(self, operation: str, command: Command) -> None:
        self.post(CommandReceived(OperationId(operation), command))

    def ended(self, operation: str) -> None:
        self.post(TraceEnded(OperationId(operation), NAME, FOUND))

    def take_answers(self) -> list[tuple[str, str]]:
        """The operations answered since, each with its failure's reason or "" when a trace came."""
        answers, self.answers = self.answers, []
        for answer in answers:
            assert (answer.failure is None) == (answer.trace is not None)
        return [(answer.operation_id, answer.failure.reason if answer.failure else "") for answer in answers]


@pytest.fixture
def box() -> Box:
    """A box with a stage at epoch 2."""
    box = Box()
    box.command("prepare", PREPARE)
    box.post(LOADED)
    box.answers.clear()
    return box


def test_a_trace_is_taken_and_answered(box: Box) -> None:
    box.command("t", TRACE)
    assert box.started == [StartTrace(OperationId("t"), TRACE)] and not box.answers
    box.ended("t")
    assert box.answers == [CommandResult(OperationId("t"), trace=FOUND)]
    assert not box.state.traces and "t" not in box.state.results


@pytest.mark.parametrize("command", [TraceSteps(NAME, Epoch(1), 5.0), TraceSteps(DeploymentName("x"), Epoch(2), 5.0)])
def test_no_such_stage_is_said_at_once(box: Box, command: TraceSteps) -> None:
    box.command("t", command)
    assert not box.started and box.take_answers() == [("t", "NO_STAGE")]


def test_a_stage_that_broke_has_no_steps_to_trace(box: Box) -> None:
    box.post(StageBroke(NAME, Epoch(2)))
    box.command("t", TRACE)
    assert not box.started and box.take_answers() == [("t", "NO_STAGE")]


def test_a_repeated_command_starts_nothing_more(box: Box) -> None:
    box.command("t", TRACE)
    box.command("t", TRACE)
    assert len(box.started) == 1
    box.ended("t")
    assert box.take_answers() == [("t", "")]


def test_a_newer_trace_takes_the_place_of_an_older(box: Box) -> None:
    box.command("t1", TRACE)
    box.command("t2", TRACE)
    assert box.take_answers() == [("t1", "TRACE_REPLACED")] and len(box.started) == 2
    box.ended("t1")
    assert not box.answers, "it was answered before"
    box.ended("t2")
    assert box.take_answers() == [("t2", "")]


def test_when_nobody_listens_any_more_nothing_is_said(box: Box) -> None:
    box.command("t", TRACE)
    box.post(ControlLost())
    box.ended("t")
    assert not box.answers and not box.state.traces
    box.command("u", TRACE)
    assert len(box.started) == 2
