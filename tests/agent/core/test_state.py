"""The agent's state machine: commands in any order are each answered once, and the node ends with
the ordered stages.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace

import pytest
from edgeshard_agent.core.events import (
    ActionStarted,
    CommandReceived,
    Event,
    HeadActivated,
    StageBroke,
    StageClosed,
    StageLoaded,
    StageLoadFailed,
    Started,
)
from edgeshard_agent.core.node_actions import (
    Action,
    CloseStage,
    LoadStage,
    OpenHead,
    ReportStarted,
    SendResults,
)
from edgeshard_agent.core.node_state import (
    AgentState,
    SlotPhase,
    apply,
    machine,
    reconcile,
    worth_keeping,
)

from edgeshard.debugging.ring import EventRing
from edgeshard.domain.control.commands import (
    ActivateHead,
    Command,
    CommandResult,
    PrepareStage,
    ReleaseStage,
)
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.errors import InternalError
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId, NodeName, OperationId
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StagePhase, StageStatus
from tests.agent.core.nodes import FACTS, STARTED

NAME = DeploymentName("tales")
STAGE = PlacedStage(0, NodeId("n"), NodeName("a"), "127.0.0.1:1", LayerRange(0, 4), 0, 0)
LATER_STAGE = frozenset({5, 9})
"""Epochs at which the node has not the first stage."""


def prepare(epoch: int) -> PrepareStage:
    spec = DeploymentSpec(name=NAME, model="m", source="a")
    stages = (
        (replace(STAGE, node_id=NodeId("other")), replace(STAGE, index=1))
        if epoch in LATER_STAGE
        else (STAGE,)
    )
    return PrepareStage(
        spec, Placement(stages, 16, 4, 1, 1), len(stages) - 1, Epoch(epoch), Digest("0" * 64)
    )


def status(epoch: int) -> StageStatus:
    return StageStatus(NAME, Epoch(epoch), 0, LayerRange(0, 4), StagePhase.READY)


class Node:
    """Runs the core; actions wait in `todo` until the test finishes them."""

    def __init__(self) -> None:
        self.state = STARTED
        self.ring: EventRing[AgentState, Event] = EventRing()
        self.todo: list[Action] = []
        self.answers: list[CommandResult] = []

    def post(self, event: Event) -> None:
        self.apply(event)
        for action in reconcile(self.state):
            self.apply(ActionStarted(action))
            if isinstance(action, SendResults):
                self.answers += action.results
            else:
                self.todo.append(action)
        assert all(isinstance(a, SendResults) is False for a in reconcile(self.state)), (
            "an action is named twice"
        )
        assert not reconcile(self.state)

    def apply(self, event: Event) -> None:
        before, self.state = self.state, apply(self.state, event)
        self.ring.record(before, worth_keeping(event), 0.0)

    def check_replays(self) -> None:
        """A dump taken now, as text, leads to the state there is."""
        document = json.loads(
            json.dumps(machine().document(self.state, self.ring.view(self.state)))
        )
        assert machine().state.decode(document["state"]) == self.state
        assert not machine().replay(document).differs

    def command(self, operation: str, command: Command) -> None:
        self.post(CommandReceived(OperationId(operation), command))

    def finish(self, fail: bool = False) -> None:
        action = self.todo.pop(0)
        match action:
            case LoadStage():
                epoch = action.prepare.epoch
                failed = StageLoadFailed(NAME, epoch, InternalError("no"))
                self.post(failed if fail else StageLoaded(NAME, epoch, status(epoch)))
            case OpenHead():
                self.post(HeadActivated(NAME, action.epoch, InternalError("no") if fail else None))
            case CloseStage():
                self.post(StageClosed(NAME))

    def answered(self) -> dict[str, bool]:
        return {answer.operation_id: answer.failure is None for answer in self.answers}


def test_prepare_activate_release() -> None:
    node = Node()
    node.command("p", prepare(1))
    assert node.todo == [LoadStage(prepare(1))] and not node.answers
    node.finish()
    assert node.answers[-1] == CommandResult(OperationId("p"), None, status(1))
    node.command("a", ActivateHead(NAME, Epoch(1)))
    node.finish()
    assert node.state.slots[NAME].phase is SlotPhase.ACTIVE
    node.command("r", ReleaseStage(NAME, Epoch(1)))
    node.finish()
    assert node.answered() == {"p": True, "a": True, "r": True} and not node.state.slots


def test_a_repeated_command_is_answered_and_not_repeated() -> None:
    node = Node()
    node.command("p", prepare(1))
    node.command("p", prepare(1))
    assert len(node.todo) == 1
    node.finish()
    node.command("p", prepare(1))
    assert not node.todo and [a.operation_id for a in node.answers] == ["p", "p"]


def test_a_failed_load_leaves_nothing() -> None:
    node = Node()
    node.command("p", prepare(1))
    node.finish(fail=True)
    assert node.answered() == {"p": False}
    assert node.todo == [CloseStage(NAME)]
    node.finish()
    assert not node.state.slots


def test_a_higher_epoch_takes_over_and_a_lower_one_is_refused() -> None:
    node = Node()
    node.command("p1", prepare(1))
    node.command("p2", prepare(2))
    assert node.todo == [LoadStage(prepare(1)), LoadStage(prepare(2))]
    node.finish()
    assert node.answered() == {"p1": False}, (
        "the load of a superseded epoch is not the answer to the new one"
    )
    node.finish()
    assert node.answered() == {"p1": False, "p2": True}
    node.command("old", prepare(1))
    node.command("old-release", ReleaseStage(NAME, Epoch(1)))
    assert [a.failure.reason for a in node.answers[-2:] if a.failure] == [
        "STALE_EPOCH",
        "STALE_EPOCH",
    ]
    assert node.state.slots[NAME].phase is SlotPhase.READY


def test_a_release_while_loading_closes_and_answers_the_prepare() -> None:
    node = Node()
    node.command("p", prepare(1))
    node.command("r", ReleaseStage(NAME, Epoch(1)))
    assert node.answered() == {"p": False} and node.todo == [
        LoadStage(prepare(1)),
        CloseStage(NAME),
    ]
    node.finish()
    node.finish()
    assert node.answered() == {"p": False, "r": True} and not node.state.slots


def test_activating_what_is_not_prepared_is_refused() -> None:
    node = Node()
    node.command("a", ActivateHead(NAME, Epoch(1)))
    assert (
        node.answers[-1].failure is not None and node.answers[-1].failure.reason == "NOT_PREPARED"
    )


def test_a_broken_stage_waits_for_the_coordinator() -> None:
    node = Node()
    node.command("p", prepare(1))
    node.finish()
    node.post(StageBroke(NAME, Epoch(1)))
    assert not node.todo and node.state.slots[NAME].phase is SlotPhase.BROKEN
    node.command("p2", prepare(2))
    node.finish()
    assert node.state.slots[NAME].phase is SlotPhase.READY


@pytest.mark.parametrize("seed", range(40))
def test_any_order_settles_and_every_command_is_answered(seed: int) -> None:
    rng = random.Random(seed)
    node = Node()
    asked = list[str]()
    for number in range(60):
        roll = rng.random()
        epoch = Epoch(rng.randint(1, 1 + number // 8))
        if roll < 0.5 and node.todo:
            node.finish(fail=rng.random() < 0.2)
        elif roll < 0.55:
            node.post(StageBroke(NAME, epoch))
        else:
            commands: list[Command] = [
                prepare(epoch),
                ActivateHead(NAME, epoch),
                ReleaseStage(NAME, epoch),
            ]
            asked.append(f"op{number}")
            node.command(asked[-1], rng.choice(commands))
    node.check_replays()
    while node.todo:
        node.finish()
    node.command("end", ReleaseStage(NAME, Epoch(1000)))
    while node.todo:
        node.finish()
    assert set(node.answered()) == {*asked, "end"} and not node.state.slots
    node.check_replays()


@dataclass
class Expected:
    """The outstanding duties of a node, computed from epochs only: the answers each event must
    bring at once, and the stages that it holds at the end.
    """

    started: int = 0
    """Epoch of the newest load that was begun, 0 for none."""
    wanted: int = 0
    loaded: int = 0
    broken: int = 0
    head: str = "closed"
    closing: bool = False
    prepares: list[str] = field(default_factory=list)
    activates: list[str] = field(default_factory=list)
    releases: list[str] = field(default_factory=list)

    def command(self, operation: str, command: Command) -> dict[str, str]:
        assert isinstance(command, PrepareStage | ActivateHead | ReleaseStage)
        epoch = command.epoch
        if epoch < max(self.started, self.wanted):
            return {operation: "STALE_EPOCH"}
        match command:
            case PrepareStage():
                if self.wanted != epoch:
                    answers = self._end(self.prepares, self.activates, reason="SUPERSEDED")
                    self.wanted = epoch
                    self.loaded = 0
                    self.broken = 0
                    self.head = "closed"
                    self.prepares.append(operation)
                    self._begin()
                    return answers
                if self.loaded == epoch or self.broken == epoch:
                    return {operation: "OK" if self.loaded else "STAGE_FAILED"}
                self.prepares.append(operation)
            case ActivateHead():
                if self.wanted != epoch or epoch in LATER_STAGE:
                    return {operation: "NOT_PREPARED"}
                if self.head == "open" or self.broken == epoch:
                    return {operation: "STAGE_FAILED" if self.broken else "OK"}
                self.activates.append(operation)
            case ReleaseStage():
                if not (self.started or self.wanted):
                    return {operation: "OK"}
                answers = self._end(self.prepares, self.activates, reason="SUPERSEDED")
                self.wanted = 0
                self.loaded = 0
                self.broken = 0
                self.head = "closed"
                self.closing = True
                self.releases.append(operation)
                return answers
        return {}

    def finished(self, action: Action, fail: bool) -> dict[str, str]:
        match action:
            case LoadStage() if action.prepare.epoch == self.started and not self.closing:
                if fail:
                    self.wanted, self.closing = 0, True
                    return self._end(self.prepares, self.activates, reason="INTERNAL")
                self.loaded = self.started
                return self._end(self.prepares, reason="OK")
            case OpenHead() if action.epoch == self.loaded:
                self.head = "closed" if fail else "open"
                return self._end(self.activates, reason="INTERNAL" if fail else "OK")
            case CloseStage():
                self.closing, self.started = False, 0
                self._begin()
                return self._end(self.releases, reason="OK")
        return {}

    def broke(self, epoch: int) -> dict[str, str]:
        if not epoch or epoch != self.loaded:
            return {}
        self.loaded = 0
        self.broken = epoch
        self.head = "closed"
        return self._end(self.activates, reason="STAGE_FAILED")

    def _begin(self) -> None:
        if self.wanted and not self.closing:
            self.started = self.wanted

    @staticmethod
    def _end(*operations: list[str], reason: str) -> dict[str, str]:
        answers = {operation: reason for each in operations for operation in each}
        for each in operations:
            each.clear()
        return answers


@pytest.mark.parametrize("seed", range(60))
def test_each_event_brings_the_answers_it_must_and_no_others(seed: int) -> None:
    """Commands of any epochs, several of one epoch under way at once, loads and heads that fail,
    stages that break."""
    rng = random.Random(seed)
    node = Node()
    expected = Expected()
    epoch, was_loaded = 1, [0]
    for number in range(400):
        before = len(node.answers)
        roll = rng.random()
        answers = dict[str, str]()
        if node.todo and roll < 0.4:
            action, fail = node.todo[0], rng.random() < 0.15
            answers = expected.finished(action, fail)
            node.finish(fail)
            was_loaded.append(expected.loaded)
        elif roll < 0.45:
            # A report of the running stage, or a late one of a superseded stage. No epoch is begun
            # twice beyond its release.
            past = [epoch for epoch in was_loaded if epoch != expected.started]
            broken = rng.choice([expected.loaded, *past])
            answers = expected.broke(broken)
            node.post(StageBroke(NAME, Epoch(broken)))
        else:
            epoch += rng.random() < 0.15
            of = Epoch(max(1, epoch - rng.choice([0, 0, 0, 0, 1, 2])))
            kinds: list[Command] = [prepare(of), ActivateHead(NAME, of), ReleaseStage(NAME, of)]
            (command,) = rng.choices(kinds, [5, 4, 2])
            answers = expected.command(f"op{number}", command)
            node.command(f"op{number}", command)
        said = {
            a.operation_id: a.failure.reason if a.failure else "OK" for a in node.answers[before:]
        }
        assert said == answers, f"event {number}"
        opening = [
            action
            for action in node.todo
            if isinstance(action, OpenHead) and action.epoch == expected.loaded
        ]
        assert bool(opening) == bool(expected.loaded and expected.activates), (
            "a head is opened when somebody asked"
        )
        closing = sum(isinstance(action, CloseStage) for action in node.todo)
        assert closing == expected.closing, "closed once, and only what is wanted no more"
    while node.todo:
        expected.finished(node.todo[0], False)
        node.finish()
    slot = node.state.slots.get(NAME)
    assert (slot is None) == (not expected.wanted and not expected.broken)
    if slot is not None:
        assert slot.epoch == expected.wanted
        phases = {
            "open": SlotPhase.ACTIVE,
            "closed": SlotPhase.READY if expected.loaded else SlotPhase.BROKEN,
        }
        assert slot.phase is phases[expected.head]


def test_a_node_that_starts_answers_but_loads_nothing_before_it_has_said_what_it_is() -> None:
    node = Node()
    node.state = AgentState()
    node.post(CommandReceived(OperationId("p"), prepare(1)))
    assert not node.todo and not node.answers
    node.post(Started(FACTS))
    report, load = node.todo
    assert report == ReportStarted(FACTS) and isinstance(load, LoadStage)
    assert node.state.reported and ReportStarted(FACTS) not in reconcile(node.state)


def test_a_deployment_that_goes_while_the_node_starts_leaves_nothing() -> None:
    node = Node()
    node.state = AgentState()
    node.post(CommandReceived(OperationId("p"), prepare(1)))
    node.post(CommandReceived(OperationId("r"), ReleaseStage(NAME, Epoch(1))))
    node.post(Started(FACTS))
    assert not any(isinstance(action, LoadStage) for action in node.todo)
