"""Registration, heartbeats, commands and their results: message <-> value. Used by the coordinator
and by agents."""

from __future__ import annotations

from collections.abc import Callable

from edgeshard.domain.control.commands import (
    ActivateHead,
    AgentMessage,
    CommandProgress,
    CommandResult,
    ControlHello,
    ControlMessage,
    Deny,
    DropPacked,
    DumpPart,
    Heartbeat,
    HeartbeatChange,
    KeepStandby,
    ListPacked,
    MeasureCompute,
    PrepareStage,
    ProbeLinks,
    ProfileReport,
    Registration,
    ReleaseStage,
    TakeDump,
    Term,
    TraceSteps,
)
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import OperationId
from edgeshard.domain.nodes.device import Condition
from edgeshard.domain.requests.link import LinkSuspected
from edgeshard.proto.v1 import coordinator_pb2 as pb
from edgeshard.wire.codec import choice, pair

registration_to_wire, registration_from_wire = pair(Registration, pb.RegisterRequest)
term_to_wire, term_from_wire = pair(Term, pb.RegisterResponse)
heartbeat_to_wire, heartbeat_from_wire = pair(Heartbeat, pb.HeartbeatRequest)
report_to_wire, report_from_wire = pair(ProfileReport, pb.ReportProfileRequest)

_control_to_wire: Callable[[ControlMessage], pb.ControlResponse]
_control_from_wire: Callable[[pb.ControlResponse], ControlMessage | None]
_control_to_wire, _control_from_wire = choice(
    pb.ControlResponse,
    prepare=PrepareStage,
    activate=ActivateHead,
    release=ReleaseStage,
    standby=KeepStandby,
    measure=MeasureCompute,
    probe=ProbeLinks,
    trace=TraceSteps,
    dump=TakeDump,
    list_packed=ListPacked,
    drop_packed=DropPacked,
    denials=Deny,
)

agent_message_to_wire: Callable[[AgentMessage], pb.ControlRequest]
agent_message_from_wire: Callable[[pb.ControlRequest], AgentMessage | None]
agent_message_to_wire, agent_message_from_wire = choice(
    pb.ControlRequest,
    hello=ControlHello,
    result=CommandResult,
    progress=CommandProgress,
    dump=DumpPart,
    suspected=LinkSuspected,
    heartbeat=Heartbeat,
    heartbeat_change=HeartbeatChange,
    condition=Condition,
)


def command_to_wire(operation_id: OperationId, command: ControlMessage) -> pb.ControlResponse:
    message = _control_to_wire(command)
    message.operation_id = operation_id
    return message


def command_from_wire(message: pb.ControlResponse) -> tuple[OperationId, ControlMessage]:
    """The command and the id to answer with. Raises InvalidArgumentError for one that is unknown or
    malformed."""
    command = _control_from_wire(message)
    if command is None:
        raise InvalidArgumentError(
            "the command is of a kind this version does not know", field="command"
        )
    return OperationId(message.operation_id), command


def is_heartbeat(message: pb.ControlRequest) -> bool:
    return message.WhichOneof("message") in ("heartbeat_change", "heartbeat")


def is_urgent(message: pb.ControlRequest) -> bool:
    """Whether a message with a heartbeat has news of a stage. Reads next to nothing of it."""
    if message.WhichOneof("message") == "heartbeat_change":
        return message.heartbeat_change.urgent
    return bool(message.heartbeat.stages)
