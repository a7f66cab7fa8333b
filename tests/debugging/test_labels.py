"""The text of a log line about an event."""

from __future__ import annotations

import pytest
from edgeshard_agent.core.events import CommandReceived
from edgeshard_coordinator.core.values.actions import EndService, SendCommand
from edgeshard_coordinator.core.values.events import CommandAnswered, NodeRegistered, Ticked

from edgeshard.debugging.labels import labels
from edgeshard.domain.control.commands import (
    ActivateHead,
    CommandKey,
    CommandResult,
    PrepareStage,
    Registration,
)
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.errors import UnavailableError
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId, NodeName, OperationId
from edgeshard.domain.nodes.device import DeviceFacts

TALE, A = DeploymentName("tale"), NodeId("id-a")
SPEC = DeploymentSpec(name="tale", model="m", source="a")
FACTS = DeviceFacts("cpu", "Test CPU", 4, 1, 1, False, "Linux")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Ticked(1.0, 3), {"kind": "Ticked", "active_requests": 3}),
        (
            SendCommand(A, 4, CommandKey.parse("u/2/activate/0"), ActivateHead(TALE, Epoch(2))),
            {
                "kind": "SendCommand", "node_id": A, "connection": 4,
                "operation_id": "u/2/activate/0", "command": "ActivateHead", "deployment": "tale",
                "epoch": 2,
            },
        ),
        (
            CommandAnswered(
                A,
                CommandResult(OperationId("o"), UnavailableError("gone", reason="NODE_LOST")),
                1.0,
            ),
            {"kind": "CommandAnswered", "node_id": A, "operation_id": "o", "reason": "NODE_LOST"},
        ),
        (
            EndService(TALE, Epoch(1), UnavailableError("node a is gone"), final=False),
            {"kind": "EndService", "deployment": "tale", "epoch": 1, "reason": "UNAVAILABLE"},
        ),
        (
            CommandReceived(
                OperationId("o"),
                PrepareStage(SPEC, Placement((), 1, 1, 1, 1), 0, Epoch(3), Digest("d")),
            ),
            {
                "kind": "CommandReceived", "operation_id": "o", "command": "PrepareStage",
                "deployment": "tale", "epoch": 3, "stage": 0,
            },
        ),
        (
            NodeRegistered(Registration(A, NodeName("a"), "127.0.0.1:1", 1, FACTS, "i"), 1.0),
            {"kind": "NodeRegistered", "node_id": A, "node": "a", "incarnation": "i"},
        ),
    ],
)  # fmt: skip
def test_a_line_says_what_an_event_is_about(value: object, expected: dict[str, object]) -> None:
    assert labels(value) == expected
