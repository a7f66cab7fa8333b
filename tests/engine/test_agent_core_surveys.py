"""Commands to measure, in the pure core: one at a time, never beside a stage, answered once, ended when in the way."""

from __future__ import annotations

import random

import pytest
from edgeshard_agent.core.actions import Action, LoadStage, SendResults
from edgeshard_agent.core.events import ActionStarted, CommandReceived, Event, StageClosed, StageLoaded
from edgeshard_agent.core.state import AgentState, apply, reconcile
from edgeshard_agent.core.survey import (
    ControlLost,
    Inquiry,
    StartSurvey,
    StopSurvey,
    SurveyCommand,
    SurveyEnded,
    SurveyStopped,
)

from edgeshard.commands import Command, MeasureCompute, Peer, PrepareStage, ProbeLinks, ReleaseStage
from edgeshard.deployment import DeploymentSpec
from edgeshard.device import StagePhase, StageStatus
from edgeshard.dtypes import DType
from edgeshard.errors import UnavailableError
from edgeshard.ids import DeploymentName, Digest, Epoch, NodeId, NodeName, OperationId
from edgeshard.model import LayerRange
from edgeshard.placement import PlacedStage, Placement

NAME = DeploymentName("tales")
STAGE = PlacedStage(0, NodeId("n"), NodeName("a"), "127.0.0.1:1", LayerRange(0, 4), 0, 0)
PREPARE = PrepareStage(
    DeploymentSpec(name=NAME, model="m", source="a"), Placement((STAGE,), 16, 4, 1, 1), 0, Epoch(1), Digest("0" * 64)
)
RELEASE = ReleaseStage(NAME, Epoch(1))
LOADED = StageLoaded(NAME, Epoch(1), StageStatus(NAME, Epoch(1), 0, LayerRange(0, 4), StagePhase.READY))
MEASURE = MeasureCompute({"model_type": "llama"}, DType.FLOAT32, quick=True, again=False)
PROBE = ProbeLinks((Peer(NodeId("p"), NodeName("p"), "127.0.0.1:2"),))


class Box:
    """Runs the core: `started` are the actions it was told, `answers` the reason of each answer's failure."""

    def __init__(self) -> None:
        self.state = AgentState()
        self.started: list[Action] = []
        self.answers: dict[str, str | None] = {}
        self.answered: list[str] = []

    def post(self, event: Event) -> None:
        self.state = apply(self.state, event)
        for action in reconcile(self.state):
            self.state = apply(self.state, ActionStarted(action))
            if isinstance(action, SendResults):
                self.answers |= {r.operation_id: r.failure.reason if r.failure else None for r in action.results}
                self.answered += [r.operation_id for r in action.results]
            else:
                self.started.append(action)
        assert not reconcile(self.state), "an action is named twice"

    def command(self, operation: str, command: Command) -> None:
        self.post(CommandReceived(OperationId(operation), command))

    def take(self) -> list[Action]:
        started, self.started = self.started, []
        return started


def inquiry(operation: str, command: SurveyCommand = MEASURE) -> Inquiry:
    return Inquiry(OperationId(operation), command)


@pytest.mark.parametrize("command", [MEASURE, PROBE])
@pytest.mark.parametrize("error", [None, UnavailableError("no")])
def test_a_measurement_is_started_once_and_its_end_is_the_answer(
    command: SurveyCommand, error: UnavailableError | None
) -> None:
    box = Box()
    box.command("m", command)
    box.command("m", command)
    assert box.take() == [StartSurvey(inquiry("m", command))] and not box.answers
    box.post(SurveyEnded(inquiry("m", command), error))
    assert box.answers == {"m": error.reason if error else None}
    box.command("m", command)
    assert not box.take() and box.answered == ["m", "m"], "a repeated command is answered and not repeated"


def test_a_second_measurement_is_refused_while_one_runs() -> None:
    box = Box()
    box.command("one", PROBE)
    box.command("two", MEASURE)
    assert box.answers == {"two": "BOX_MEASURES"}
    box.post(SurveyEnded(inquiry("one", PROBE)))
    box.command("three", MEASURE)
    assert box.take() == [StartSurvey(inquiry("one", PROBE)), StartSurvey(inquiry("three"))]


def test_layers_are_not_measured_beside_a_stage_and_links_are() -> None:
    box = Box()
    box.command("p", PREPARE)
    box.command("loading", MEASURE)
    box.post(LOADED)
    box.command("ready", MEASURE)
    assert (box.answers["loading"], box.answers["ready"]) == ("STAGE_HELD", "STAGE_HELD")
    box.command("links", PROBE)
    assert box.take() == [LoadStage(PREPARE), StartSurvey(inquiry("links", PROBE))]
    box.command("r", RELEASE)
    box.post(StageClosed(NAME))
    box.post(SurveyEnded(inquiry("links", PROBE)))
    box.command("later", MEASURE)
    assert box.take()[-1] == StartSurvey(inquiry("later"))


def test_a_stage_ends_a_measurement_and_waits_for_its_memory() -> None:
    box = Box()
    box.command("m", MEASURE)
    box.command("p", PREPARE)
    assert box.answers == {"m": "STAGE_CAME"}
    assert box.take() == [StartSurvey(inquiry("m")), StopSurvey()], "the stage is loaded before the memory is free"
    box.post(SurveyStopped())
    assert box.take() == [LoadStage(PREPARE)]


def test_a_stage_does_not_end_a_probe() -> None:
    box = Box()
    box.command("links", PROBE)
    box.command("p", PREPARE)
    assert box.take() == [StartSurvey(inquiry("links", PROBE)), LoadStage(PREPARE)] and not box.answers


@pytest.mark.parametrize("command", [MEASURE, PROBE])
def test_a_lost_control_stream_ends_it_and_the_same_command_begins_anew(command: SurveyCommand) -> None:
    box = Box()
    box.command("m", command)
    box.post(ControlLost())
    assert box.take() == [StartSurvey(inquiry("m", command)), StopSurvey()] and not box.answers
    box.command("m", command)
    box.post(SurveyEnded(inquiry("m", command)))  # it had come to its end when it was told to stop
    assert not box.take() and not box.answers
    box.post(SurveyStopped())
    assert box.take() == [StartSurvey(inquiry("m", command))]
    box.post(SurveyEnded(inquiry("m", command)))
    assert box.answers == {"m": None}


def test_a_lost_control_stream_is_nothing_to_a_box_that_measures_nothing() -> None:
    box = Box()
    box.post(ControlLost())
    box.command("p", PREPARE)
    assert box.take() == [LoadStage(PREPARE)]


class Executor:
    """Carries actions out when the test says so, and holds the core to its word."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.running: Inquiry | None = None
        self.stopping = False
        self.todo: list[Action] = []

    def take(self) -> None:
        for action in self.box.take():
            match action:
                case StartSurvey():
                    assert self.running is None and not self.stopping
                    self.running = action.inquiry
                case StopSurvey():
                    assert self.running is not None and not self.stopping
                    self.stopping = True
                case LoadStage():
                    assert self.running is None or isinstance(self.running.command, ProbeLinks)
                    self.todo.append(action)
                case _:
                    self.todo.append(action)

    def end_survey(self) -> None:
        if self.running is None:
            return
        ended = SurveyStopped() if self.stopping else SurveyEnded(self.running)
        self.running, self.stopping = None, False
        self.box.post(ended)

    def finish(self) -> None:
        if self.todo:
            self.box.post(LOADED if isinstance(self.todo.pop(0), LoadStage) else StageClosed(NAME))


@pytest.mark.parametrize("seed", range(30))
def test_in_any_order_nothing_runs_twice_or_beside_a_stage(seed: int) -> None:
    rng, box, asked = random.Random(seed), Box(), list[str]()
    executor = Executor(box)
    for number in range(80):
        executor.take()
        roll = rng.random()
        if roll < 0.2:
            executor.end_survey()
        elif roll < 0.45:
            executor.finish()
        elif roll < 0.5:
            if (unanswered := box.state.survey.wanted) is not None:
                asked.remove(unanswered.operation_id)
            box.post(ControlLost())
        else:
            asked.append(f"op{number}")
            box.command(asked[-1], rng.choice([MEASURE, PROBE, PREPARE, RELEASE]))
    assert len(box.answered) == len(set(box.answered)), "an operation was answered twice"
    wanted = box.state.survey.wanted
    pending = set[str]() if wanted is None else {wanted.operation_id}
    for slot in box.state.slots.values():
        pending |= {*slot.prepares, *slot.releases}
    assert set(asked) <= set(box.answered) | pending
