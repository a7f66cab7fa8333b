"""Commands to measure, in the pure core: one at a time, never while a stage loads, answered once,
ended when in the way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from edgeshard_agent.core.events import (
    ActionStarted,
    CommandReceived,
    Event,
    StageClosed,
    StageLoaded,
)
from edgeshard_agent.core.measuring import (
    ControlLost,
    MeasuringCommand,
    MeasuringEnded,
    MeasuringStopped,
    MeasuringTask,
    StartMeasuring,
    StopMeasuring,
)
from edgeshard_agent.core.node_actions import Action, CloseStage, LoadStage, SendResults
from edgeshard_agent.core.node_state import apply, reconcile

from edgeshard.domain.control.commands import (
    Command,
    MeasureCompute,
    Peer,
    PrepareStage,
    ProbeLinks,
    ReleaseStage,
)
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.errors import UnavailableError
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId, NodeName, OperationId
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StagePhase, StageStatus
from edgeshard.domain.nodes.profile import Effort
from tests.agent.core.nodes import STARTED

NAME = DeploymentName("tales")
STAGE = PlacedStage(0, NodeId("n"), NodeName("a"), "127.0.0.1:1", LayerRange(0, 4), 0, 0)
PREPARE = PrepareStage(
    DeploymentSpec(name=NAME, model="m", source="a"),
    Placement((STAGE,), 16, 4, 1, 1),
    0,
    Epoch(1),
    Digest("0" * 64),
)
RELEASE = ReleaseStage(NAME, Epoch(1))
LOADED = StageLoaded(
    NAME, Epoch(1), StageStatus(NAME, Epoch(1), 0, LayerRange(0, 4), StagePhase.READY)
)
MEASURE = MeasureCompute({"model_type": "llama"}, DType.FLOAT32, effort=Effort.QUICK, again=False)
PROBE = ProbeLinks((Peer(NodeId("p"), NodeName("p"), "127.0.0.1:2"),))


class Node:
    """Runs the core: `started` are the actions it received, `answers` the reason of each answer's
    failure."""

    def __init__(self) -> None:
        self.state = STARTED
        self.started: list[Action] = []
        self.answers: dict[str, str | None] = {}
        self.answered: list[str] = []

    def post(self, event: Event) -> None:
        self.state = apply(self.state, event)
        for action in reconcile(self.state):
            self.state = apply(self.state, ActionStarted(action))
            if isinstance(action, SendResults):
                self.answers |= {
                    r.operation_id: r.failure.reason if r.failure else None for r in action.results
                }
                self.answered += [r.operation_id for r in action.results]
            else:
                self.started.append(action)
        assert not reconcile(self.state), "an action is named twice"

    def command(self, operation: str, command: Command) -> None:
        self.post(CommandReceived(OperationId(operation), command))

    def take(self) -> list[Action]:
        started, self.started = self.started, []
        return started


def task(operation: str, command: MeasuringCommand = MEASURE) -> MeasuringTask:
    return MeasuringTask(OperationId(operation), command)


@pytest.mark.parametrize("command", [MEASURE, PROBE])
@pytest.mark.parametrize("error", [None, UnavailableError("no")])
def test_a_measurement_is_started_once_and_its_end_is_the_answer(
    command: MeasuringCommand, error: UnavailableError | None
) -> None:
    node = Node()
    node.command("m", command)
    node.command("m", command)
    assert node.take() == [StartMeasuring(task("m", command))] and not node.answers
    node.post(MeasuringEnded(task("m", command), error))
    assert node.answers == {"m": error.reason if error else None}
    node.command("m", command)
    assert not node.take() and node.answered == ["m", "m"], (
        "a repeated command is answered and not repeated"
    )


def test_a_second_measurement_is_refused_while_one_runs() -> None:
    node = Node()
    node.command("one", PROBE)
    node.command("two", MEASURE)
    assert node.answers == {"two": "NODE_MEASURES"}
    node.post(MeasuringEnded(task("one", PROBE)))
    node.command("three", MEASURE)
    assert node.take() == [StartMeasuring(task("one", PROBE)), StartMeasuring(task("three"))]


def test_layers_are_measured_beside_a_stage_and_not_while_it_loads() -> None:
    node = Node()
    node.command("p", PREPARE)
    node.command("loading", MEASURE)
    assert node.answers == {"loading": "STAGE_CAME"}
    node.command("links", PROBE)
    assert node.take() == [LoadStage(PREPARE), StartMeasuring(task("links", PROBE))]
    node.post(MeasuringEnded(task("links", PROBE)))
    node.post(LOADED)
    node.command("ready", MEASURE)
    assert node.take() == [StartMeasuring(task("ready"))]
    node.command("r", RELEASE)
    assert node.take() == [CloseStage(NAME)], "it is no reason to end a measurement"
    node.post(StageClosed(NAME))
    node.post(MeasuringEnded(task("ready")))
    assert node.answers["ready"] is None


def test_the_next_epoch_of_a_stage_ends_a_measurement_beside_it() -> None:
    node = Node()
    node.command("p", PREPARE)
    node.post(LOADED)
    node.command("m", MEASURE)
    following = replace(PREPARE, epoch=Epoch(2))
    node.command("p2", following)
    assert node.answers["m"] == "STAGE_CAME"
    assert node.take() == [LoadStage(PREPARE), StartMeasuring(task("m")), StopMeasuring()]
    node.command("again", MEASURE)
    assert node.answers["again"] == "STAGE_CAME", "it is to be loaded"
    node.post(MeasuringStopped())
    assert node.take() == [LoadStage(following)]


def test_a_stage_ends_a_measurement_and_waits_for_its_memory() -> None:
    node = Node()
    node.command("m", MEASURE)
    node.command("p", PREPARE)
    assert node.answers == {"m": "STAGE_CAME"}
    assert node.take() == [StartMeasuring(task("m")), StopMeasuring()], (
        "the stage is loaded before the memory is free"
    )
    node.post(MeasuringStopped())
    assert node.take() == [LoadStage(PREPARE)]


def test_a_stage_does_not_end_a_probe() -> None:
    node = Node()
    node.command("links", PROBE)
    node.command("p", PREPARE)
    assert (
        node.take() == [StartMeasuring(task("links", PROBE)), LoadStage(PREPARE)]
        and not node.answers
    )


@pytest.mark.parametrize("command", [MEASURE, PROBE])
def test_a_lost_control_stream_ends_it_and_the_same_command_begins_anew(
    command: MeasuringCommand,
) -> None:
    node = Node()
    node.command("m", command)
    node.post(ControlLost())
    assert node.take() == [StartMeasuring(task("m", command)), StopMeasuring()] and not node.answers
    node.command("m", command)
    node.post(MeasuringEnded(task("m", command)))  # it had finished when it was ordered to stop
    assert not node.take() and not node.answers
    node.post(MeasuringStopped())
    assert node.take() == [StartMeasuring(task("m", command))]
    node.post(MeasuringEnded(task("m", command)))
    assert node.answers == {"m": None}


def test_a_lost_control_stream_is_nothing_to_a_node_that_measures_nothing() -> None:
    node = Node()
    node.post(ControlLost())
    node.command("p", PREPARE)
    assert node.take() == [LoadStage(PREPARE)]


class Executor:
    """Carries out actions when the test calls it, and checks that the core's actions are
    possible."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.running: MeasuringTask | None = None
        self.stopping = False
        self.todo: list[Action] = []

    def take(self) -> None:
        for action in self.node.take():
            match action:
                case StartMeasuring():
                    assert self.running is None and not self.stopping
                    # whose end a newer action would be
                    loads = self.todo and isinstance(self.todo[-1], LoadStage)
                    assert not loads or isinstance(action.task.command, ProbeLinks)
                    self.running = action.task
                case StopMeasuring():
                    assert self.running is not None and not self.stopping
                    self.stopping = True
                case LoadStage():
                    assert self.running is None or isinstance(self.running.command, ProbeLinks)
                    self.todo.append(action)
                case _:
                    self.todo.append(action)

    def end_measuring(self) -> None:
        if self.running is None:
            return
        ended = MeasuringStopped() if self.stopping else MeasuringEnded(self.running)
        self.running, self.stopping = None, False
        self.node.post(ended)

    def finish(self) -> None:
        if self.todo:
            self.node.post(LOADED if isinstance(self.todo.pop(0), LoadStage) else StageClosed(NAME))


@pytest.mark.parametrize("seed", range(30))
def test_in_any_order_nothing_runs_twice_or_while_a_stage_loads(seed: int) -> None:
    rng = random.Random(seed)
    node = Node()
    asked = list[str]()
    executor = Executor(node)
    commands: list[Command] = [MEASURE, PROBE, PREPARE, RELEASE]
    for number in range(80):
        executor.take()
        roll = rng.random()
        if roll < 0.2:
            executor.end_measuring()
        elif roll < 0.45:
            executor.finish()
        elif roll < 0.5:
            if (unanswered := node.state.measuring.pending_task) is not None:
                asked.remove(unanswered.operation_id)
            node.post(ControlLost())
        else:
            asked.append(f"op{number}")
            node.command(asked[-1], rng.choice(commands))
    assert len(node.answered) == len(set(node.answered)), "an operation was answered twice"
    wanted = node.state.measuring.pending_task
    pending = set[str]() if wanted is None else {wanted.operation_id}
    for slot in node.state.slots.values():
        pending |= {*slot.prepares, *slot.releases}
    assert set(asked) <= set(node.answered) | pending
