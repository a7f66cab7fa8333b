"""Commands to trace, in the pure core: of a stage that runs, the newest of each, answered once and
not remembered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from edgeshard_agent.core.events import (
    ActionStarted,
    CommandReceived,
    Event,
    StageBroke,
    StageLoaded,
)
from edgeshard_agent.core.measuring import ControlLost
from edgeshard_agent.core.node_actions import Action, SendResults
from edgeshard_agent.core.node_state import AgentState, apply, machine, reconcile, worth_keeping
from edgeshard_agent.core.tracing import StartTrace, TraceEnded

from edgeshard.debugging.ring import EventRing
from edgeshard.domain.control.commands import Command, CommandResult, PrepareStage, TraceSteps
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId, NodeName, OperationId
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StagePhase, StageStatus
from edgeshard.domain.requests.trace import StageTrace, StepRecord
from tests.agent.core.nodes import STARTED

NAME = DeploymentName("tales")
STAGE = PlacedStage(0, NodeId("n"), NodeName("a"), "127.0.0.1:1", LayerRange(0, 4), 0, 0)
PREPARE = PrepareStage(
    DeploymentSpec(name=NAME, model="m", source="a"),
    Placement((STAGE,), 16, 4, 1, 1),
    0,
    Epoch(2),
    Digest("0" * 64),
)
LOADED = StageLoaded(
    NAME, Epoch(2), StageStatus(NAME, Epoch(2), 0, LayerRange(0, 4), StagePhase.READY)
)
TRACE = TraceSteps(NAME, Epoch(2), 5.0)
FOUND = StageTrace(0, "a", LayerRange(0, 4), ())


class Node:
    """Runs the core: `started` are the traces it was ordered to take, `answers` its answers to each
    command."""

    def __init__(self) -> None:
        self.state = STARTED
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
        return [
            (answer.operation_id, answer.failure.reason if answer.failure else "")
            for answer in answers
        ]


@pytest.fixture
def node() -> Node:
    """A node with a stage at epoch 2."""
    node = Node()
    node.command("prepare", PREPARE)
    node.post(LOADED)
    node.answers.clear()
    return node


def test_a_trace_is_taken_and_answered(node: Node) -> None:
    node.command("t", TRACE)
    assert node.started == [StartTrace(OperationId("t"), TRACE)] and not node.answers
    node.ended("t")
    assert node.answers == [CommandResult(OperationId("t"), trace=FOUND)]
    assert not node.state.traces and "t" not in node.state.results


def test_the_ring_keeps_no_steps_and_replays_without_them() -> None:
    node, ring = Node(), EventRing[AgentState, Event]()
    node.command("prepare", PREPARE)
    node.post(LOADED)
    node.command("t", TRACE)
    record = StepRecord(1, 1, 0, 1.0, 1.0, 2.0, 2.0)
    ended = TraceEnded(OperationId("t"), NAME, replace(FOUND, records=(record,) * 5))
    before = node.state
    node.post(ended)
    state = apply(before, ended)
    ring.record(before, worth_keeping(ended), 0.0)
    (action,) = reconcile(state)
    ring.record(state, worth_keeping(ActionStarted(action)), 0.0)
    assert len(node.answers[-1].trace.records) == 5 if node.answers[-1].trace else False
    document = machine().document(node.state, ring.view(node.state))
    assert document["ring"]["entries"][0]["event"]["trace"]["records"] == []
    assert document["ring"]["entries"][1]["event"]["action"]["results"][0]["trace"]["records"] == []
    assert not machine().replay(document).differs


@pytest.mark.parametrize(
    "command", [TraceSteps(NAME, Epoch(1), 5.0), TraceSteps(DeploymentName("x"), Epoch(2), 5.0)]
)
def test_no_such_stage_is_said_at_once(node: Node, command: TraceSteps) -> None:
    node.command("t", command)
    assert not node.started and node.take_answers() == [("t", "NO_STAGE")]


def test_a_stage_that_broke_has_no_steps_to_trace(node: Node) -> None:
    node.post(StageBroke(NAME, Epoch(2)))
    node.command("t", TRACE)
    assert not node.started and node.take_answers() == [("t", "NO_STAGE")]


def test_a_repeated_command_starts_nothing_more(node: Node) -> None:
    node.command("t", TRACE)
    node.command("t", TRACE)
    assert len(node.started) == 1
    node.ended("t")
    assert node.take_answers() == [("t", "")]


def test_a_newer_trace_takes_the_place_of_an_older(node: Node) -> None:
    node.command("t1", TRACE)
    node.command("t2", TRACE)
    assert node.take_answers() == [("t1", "TRACE_REPLACED")] and len(node.started) == 2
    node.ended("t1")
    assert not node.answers, "it was answered before"
    node.ended("t2")
    assert node.take_answers() == [("t2", "")]


def test_when_nobody_listens_any_more_nothing_is_said(node: Node) -> None:
    node.command("t", TRACE)
    node.post(ControlLost())
    node.ended("t")
    assert not node.answers and not node.state.traces
    node.command("u", TRACE)
    assert len(node.started) == 2
