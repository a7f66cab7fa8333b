"""The agent's state machine: commands in any order, each answered once, and the box ends up holding what is wanted."""

from __future__ import annotations

import random

import pytest
from edgeshard_agent.core.actions import Action, CloseStage, LoadStage, OpenHead, SendResults
from edgeshard_agent.core.events import (
    ActionStarted,
    CommandReceived,
    Event,
    HeadActivated,
    StageBroke,
    StageClosed,
    StageLoaded,
    StageLoadFailed,
)
from edgeshard_agent.core.state import AgentState, Phase, apply, reconcile

from edgeshard.commands import ActivateHead, Command, CommandResult, PrepareStage, ReleaseStage
from edgeshard.deployment import DeploymentSpec
from edgeshard.device import StagePhase, StageStatus
from edgeshard.errors import InternalError
from edgeshard.ids import DeploymentName, Digest, Epoch, NodeId, NodeName, OperationId
from edgeshard.model import LayerRange
from edgeshard.placement import PlacedStage, Placement

NAME = DeploymentName("tales")
STAGE = PlacedStage(0, NodeId("n"), NodeName("a"), "127.0.0.1:1", LayerRange(0, 4), 0, 0)


def prepare(epoch: int) -> PrepareStage:
    spec = DeploymentSpec(name=NAME, model="m", source="a")
    return PrepareStage(spec, Placement((STAGE,), 16, 4, 1, 1), 0, Epoch(epoch), Digest("0" * 64))


def status(epoch: int) -> StageStatus:
    return StageStatus(NAME, Epoch(epoch), 0, LayerRange(0, 4), StagePhase.READY)


class Box:
    """Runs the core; actions wait in `todo` until the test finishes them."""

    def __init__(self) -> None:
        self.state = AgentState()
        self.todo: list[Action] = []
        self.answers: list[CommandResult] = []

    def post(self, event: Event) -> None:
        self.state = apply(self.state, event)
        for action in reconcile(self.state):
            self.state = apply(self.state, ActionStarted(action))
            if isinstance(action, SendResults):
                self.answers += action.results
            else:
                self.todo.append(action)
        assert all(isinstance(a, SendResults) is False for a in reconcile(self.state)), "an action is named twice"
        assert not reconcile(self.state)

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
    box = Box()
    box.command("p", prepare(1))
    assert box.todo == [LoadStage(prepare(1))] and not box.answers
    box.finish()
    assert box.answers[-1] == CommandResult(OperationId("p"), None, status(1))
    box.command("a", ActivateHead(NAME, Epoch(1)))
    box.finish()
    assert box.state.slots[NAME].phase is Phase.ACTIVE
    box.command("r", ReleaseStage(NAME, Epoch(1)))
    box.finish()
    assert box.answered() == {"p": True, "a": True, "r": True} and not box.state.slots


def test_a_repeated_command_is_answered_and_not_repeated() -> None:
    box = Box()
    box.command("p", prepare(1))
    box.command("p", prepare(1))
    assert len(box.todo) == 1
    box.finish()
    box.command("p", prepare(1))
    assert not box.todo and [a.operation_id for a in box.answers] == ["p", "p"]


def test_a_failed_load_leaves_nothing() -> None:
    box = Box()
    box.command("p", prepare(1))
    box.finish(fail=True)
    assert box.answered() == {"p": False}
    assert box.todo == [CloseStage(NAME)]
    box.finish()
    assert not box.state.slots


def test_a_higher_epoch_takes_over_and_a_lower_one_is_refused() -> None:
    box = Box()
    box.command("p1", prepare(1))
    box.command("p2", prepare(2))
    assert box.todo == [LoadStage(prepare(1)), LoadStage(prepare(2))]
    box.finish()
    assert box.answered() == {"p1": False}, "the load of a superseded epoch is not the answer to the new one"
    box.finish()
    assert box.answered() == {"p1": False, "p2": True}
    box.command("old", prepare(1))
    box.command("old-release", ReleaseStage(NAME, Epoch(1)))
    assert [a.failure.reason for a in box.answers[-2:] if a.failure] == ["STALE_EPOCH", "STALE_EPOCH"]
    assert box.state.slots[NAME].phase is Phase.READY


def test_a_release_while_loading_closes_and_answers_the_prepare() -> None:
    box = Box()
    box.command("p", prepare(1))
    box.command("r", ReleaseStage(NAME, Epoch(1)))
    assert box.answered() == {"p": False} and box.todo == [LoadStage(prepare(1)), CloseStage(NAME)]
    box.finish()
    box.finish()
    assert box.answered() == {"p": False, "r": True} and not box.state.slots


def test_activating_what_is_not_prepared_is_refused() -> None:
    box = Box()
    box.command("a", ActivateHead(NAME, Epoch(1)))
    assert box.answers[-1].failure is not None and box.answers[-1].failure.reason == "NOT_PREPARED"


def test_a_broken_stage_waits_for_the_coordinator() -> None:
    box = Box()
    box.command("p", prepare(1))
    box.finish()
    box.post(StageBroke(NAME, Epoch(1)))
    assert not box.todo and box.state.slots[NAME].phase is Phase.BROKEN
    box.command("p2", prepare(2))
    box.finish()
    assert box.state.slots[NAME].phase is Phase.READY


@pytest.mark.parametrize("seed", range(40))
def test_any_order_settles_and_every_command_is_answered(seed: int) -> None:
    rng, box, asked = random.Random(seed), Box(), list[str]()
    for number in range(60):
        roll = rng.random()
        epoch = Epoch(rng.randint(1, 1 + number // 8))
        if roll < 0.5 and box.todo:
            box.finish(fail=rng.random() < 0.2)
        elif roll < 0.55:
            box.post(StageBroke(NAME, epoch))
        else:
            command: Command = rng.choice([prepare(epoch), ActivateHead(NAME, epoch), ReleaseStage(NAME, epoch)])
            asked.append(f"op{number}")
            box.command(asked[-1], command)
    while box.todo:
        box.finish()
    box.command("end", ReleaseStage(NAME, Epoch(1000)))
    while box.todo:
        box.finish()
    assert set(box.answered()) == {*asked, "end"} and not box.state.slots
