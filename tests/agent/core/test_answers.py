"""Commands that meet a stage in an unusual phase are answered all the same."""

from __future__ import annotations

import pytest
from edgeshard_agent.core.events import (
    ActionStarted,
    CommandReceived,
    Event,
    HeadActivated,
    StageBroke,
    StageLoaded,
)
from edgeshard_agent.core.node_actions import SendResults
from edgeshard_agent.core.node_state import AgentState, SlotPhase, apply, reconcile
from edgeshard_agent.measuring import facts as probe

from edgeshard.domain.control.commands import ActivateHead, Command, PrepareStage
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId, NodeName, OperationId
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StagePhase, StageStatus
from tests.agent.core.nodes import STARTED

NAME, EPOCH = DeploymentName("tales"), Epoch(1)
STAGE = PlacedStage(0, NodeId("n"), NodeName("a"), "127.0.0.1:1", LayerRange(0, 4), 0, 0)
PREPARE = PrepareStage(
    DeploymentSpec(name=NAME, model="m", source="a"),
    Placement((STAGE,), 16, 4, 1, 1),
    0,
    EPOCH,
    Digest("0" * 64),
)
LOADED = StageLoaded(NAME, EPOCH, StageStatus(NAME, EPOCH, 0, LayerRange(0, 4), StagePhase.READY))


def run(*events: Event) -> tuple[AgentState, dict[str, str | None]]:
    """The state after the events, and the reason of each answer's failure."""
    state, answers = STARTED, dict[str, str | None]()
    for event in events:
        state = apply(state, event)
        for action in reconcile(state):
            state = apply(state, ActionStarted(action))
            if isinstance(action, SendResults):
                answers |= {
                    r.operation_id: r.failure.reason if r.failure else None for r in action.results
                }
    return state, answers


def command(operation: str, what: Command) -> CommandReceived:
    return CommandReceived(OperationId(operation), what)


ACTIVATE = ActivateHead(NAME, EPOCH)
READY = (command("p", PREPARE), LOADED)


def test_a_stage_that_breaks_while_its_head_opens_answers_the_activate() -> None:
    state, answers = run(*READY, command("a", ACTIVATE), StageBroke(NAME, EPOCH))
    assert (
        answers == {"p": None, "a": "STAGE_FAILED"} and state.slots[NAME].phase is SlotPhase.BROKEN
    )


def test_a_head_that_opens_after_its_stage_broke_does_not_make_it_whole() -> None:
    state, _ = run(
        *READY, command("a", ACTIVATE), StageBroke(NAME, EPOCH), HeadActivated(NAME, EPOCH)
    )
    assert state.slots[NAME].phase is SlotPhase.BROKEN


def test_a_broken_stage_answers_what_comes_at_its_epoch() -> None:
    _, answers = run(
        *READY, StageBroke(NAME, EPOCH), command("a", ACTIVATE), command("again", PREPARE)
    )
    assert answers == {"p": None, "a": "STAGE_FAILED", "again": "STAGE_FAILED"}


def test_a_prepared_stage_answers_another_prepare_of_its_epoch() -> None:
    _, answers = run(*READY, command("again", PREPARE))
    assert answers == {"p": None, "again": None}


def test_an_accelerator_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", _no_such_device)
    with pytest.raises(InvalidArgumentError) as refusal:
        probe.read_facts("cuda:9", None)
    assert refusal.value.field == "device"


def _no_such_device(device: str) -> tuple[int, int]:
    raise RuntimeError("CUDA error: invalid device ordinal")
