"""Registration, heartbeats, commands and their results: message <-> value. Used by the coordinator and by agents."""

from __future__ import annotations

import json
from typing import Any, assert_never

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
    Peer,
    PrepareStage,
    ProbeLinks,
    ProfileReport,
    Registration,
    ReleaseStage,
    TakeDump,
    Term,
    TraceSteps,
)
from edgeshard.domain.control.heartbeats import MOST_PACKED, check_stage_count
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import (
    Epoch,
    NodeId,
    NodeName,
    OperationId,
    check_digest,
    check_id,
    check_name,
    check_plain,
)
from edgeshard.domain.nodes.condition import Condition
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.domain.requests.link import LinkSuspected
from edgeshard.domain.requests.trace import check_seconds
from edgeshard.proto.v1 import common_pb2
from edgeshard.proto.v1 import coordinator_pb2 as pb
from edgeshard.wire.common import (
    condition_from_wire,
    condition_to_wire,
    dtype_from_wire,
    dtype_to_wire,
    facts_from_wire,
    facts_to_wire,
    huge_pages_from_wire,
    huge_pages_to_wire,
    layers_from_wire,
    layers_to_wire,
    message_of,
    quantisation_from_wire,
    quantisation_to_wire,
    stage_key_from_wire,
    stage_key_to_wire,
    stage_status_from_wire,
    stage_status_to_wire,
    value_of,
)
from edgeshard.wire.debug import dump_part_from_wire, dump_part_to_wire
from edgeshard.wire.deployment import placement_from_wire, placement_to_wire, spec_from_wire, spec_to_wire
from edgeshard.wire.identity import denials_from_wire, denials_to_wire
from edgeshard.wire.packed import packed_unit_from_wire, packed_unit_to_wire
from edgeshard.wire.profile import (
    compute_profile_from_wire,
    compute_profile_to_wire,
    link_from_wire,
    link_to_wire,
)
from edgeshard.wire.status import from_failure, to_failure
from edgeshard.wire.trace import trace_from_wire, trace_to_wire


def registration_to_wire(registration: Registration) -> pb.RegisterRequest:
    return message_of(registration, pb.RegisterRequest, facts=facts_to_wire(registration.facts))


def _told_facts(message: common_pb2.DeviceFacts) -> DeviceFacts:
    """Of a node, which may say anything. Raises InvalidArgumentError naming the field of a text that is not plain."""
    facts = facts_from_wire(message)
    for name in ("kind", "model", "software", "bits_fingerprint"):
        check_plain(getattr(facts, name), f"facts.{name}")
    return facts


def registration_from_wire(message: pb.RegisterRequest) -> Registration:
    """Raises InvalidArgumentError for a name or id that cannot be. The wire version is the caller's to check, first."""
    return Registration(
        node_id=NodeId(check_id(message.node_id, "node_id")),
        name=NodeName(check_name(message.name, "name")),
        address=check_id(message.address, "address"),
        wire_version=message.wire_version,
        facts=_told_facts(message.facts),
        incarnation=check_id(message.incarnation, "incarnation"),
        starting=message.starting,
    )


def heartbeat_to_wire(heartbeat: Heartbeat) -> pb.HeartbeatRequest:
    return message_of(
        heartbeat,
        pb.HeartbeatRequest,
        stages=[stage_status_to_wire(stage) for stage in heartbeat.stages],
        huge_pages=huge_pages_to_wire(heartbeat.huge_pages) if heartbeat.huge_pages is not None else None,
        packed=common_pb2.PackedIds(ids=heartbeat.packed) if heartbeat.packed else None,
    )


def heartbeat_from_wire(message: pb.HeartbeatRequest) -> Heartbeat:
    """Raises InvalidArgumentError naming `stages` for more than a node can hold, before any is looked at."""
    check_stage_count(len(message.stages))
    return value_of(
        message,
        Heartbeat,
        stages=tuple(stage_status_from_wire(stage) for stage in message.stages),
        huge_pages=huge_pages_from_wire(message.huge_pages) if message.HasField("huge_pages") else None,
        packed=tuple(message.packed.ids[:MOST_PACKED]),
    )


def heartbeat_change_to_wire(change: HeartbeatChange) -> pb.HeartbeatChange:
    return pb.HeartbeatChange(
        stages=[stage_status_to_wire(stage) for stage in change.stages],
        removed=[stage_key_to_wire(key) for key in change.removed],
        memory_available_bytes=change.memory_available_bytes,
        huge_pages=huge_pages_to_wire(change.huge_pages) if change.huge_pages is not None else None,
        others_share=change.others_share,
        urgent=change.urgent,
        packed=None if change.packed is None else common_pb2.PackedIds(ids=change.packed),
    )


def term_to_wire(term: Term) -> pb.RegisterResponse:
    return pb.RegisterResponse(site=term.site, term=term.number)


def term_from_wire(message: pb.RegisterResponse) -> Term:
    return Term(message.site, message.term)


def heartbeat_change_from_wire(message: pb.HeartbeatChange) -> HeartbeatChange:
    """Raises InvalidArgumentError naming `stages` for more than a node can hold, before any is looked at."""
    check_stage_count(max(len(message.stages), len(message.removed)))
    return HeartbeatChange(
        stages=tuple(stage_status_from_wire(stage) for stage in message.stages),
        removed=tuple(stage_key_from_wire(key) for key in message.removed),
        memory_available_bytes=message.memory_available_bytes if message.HasField("memory_available_bytes") else None,
        huge_pages=huge_pages_from_wire(message.huge_pages) if message.HasField("huge_pages") else None,
        others_share=message.others_share if message.HasField("others_share") else None,
        urgent=message.urgent,
        packed=tuple(message.packed.ids[:MOST_PACKED]) if message.HasField("packed") else None,
    )


def command_to_wire(operation_id: OperationId, command: ControlMessage) -> pb.ControlResponse:
    match command:
        case PrepareStage():
            prepare = message_of(
                command,
                pb.PrepareStage,
                spec=spec_to_wire(command.spec),
                placement=placement_to_wire(command.placement),
            )
            return pb.ControlResponse(operation_id=operation_id, prepare=prepare)
        case ActivateHead():
            return pb.ControlResponse(operation_id=operation_id, activate=message_of(command, pb.ActivateHead))
        case ReleaseStage():
            return pb.ControlResponse(operation_id=operation_id, release=message_of(command, pb.ReleaseStage))
        case KeepStandby():
            standby = pb.KeepStandby(
                spec=spec_to_wire(command.spec),
                epoch=command.epoch,
                manifest_digest=command.manifest_digest,
                node=command.node,
                layers=layers_to_wire(command.layers) if command.layers is not None else None,
            )
            return pb.ControlResponse(operation_id=operation_id, standby=standby)
        case MeasureCompute():
            measure = pb.MeasureCompute(
                config_json=json.dumps(dict(command.config)).encode(),
                dtype=dtype_to_wire(command.dtype),
                quick=command.quick,
                again=command.again,
                quantisation=quantisation_to_wire(command.quantisation),
            )
            return pb.ControlResponse(operation_id=operation_id, measure=measure)
        case ProbeLinks():
            peers = [message_of(peer, pb.Peer) for peer in command.peers]
            return pb.ControlResponse(operation_id=operation_id, probe=pb.ProbeLinks(peers=peers))
        case TraceSteps():
            return pb.ControlResponse(operation_id=operation_id, trace=message_of(command, pb.TraceSteps))
        case TakeDump():
            return pb.ControlResponse(operation_id=operation_id, dump=pb.TakeDump())
        case ListPacked():
            return pb.ControlResponse(operation_id=operation_id, list_packed=pb.ListPacked())
        case DropPacked():
            return pb.ControlResponse(operation_id=operation_id, drop_packed=pb.DropPacked(ids=command.ids))
        case Deny():
            return pb.ControlResponse(operation_id=operation_id, denials=denials_to_wire(command.denials))
        case _:
            assert_never(command)


def command_from_wire(message: pb.ControlResponse) -> tuple[OperationId, ControlMessage]:
    """The command and the id to answer with. Raises InvalidArgumentError for one that is unknown or malformed."""
    operation_id = OperationId(message.operation_id)
    match message.WhichOneof("command"):
        case "prepare":
            prepare = message.prepare
            if not prepare.stage < len(prepare.placement.stages):
                raise InvalidArgumentError(f"stage {prepare.stage} is not in the placement", field="stage")
            return operation_id, PrepareStage(
                spec=spec_from_wire(prepare.spec),
                placement=placement_from_wire(prepare.placement),
                stage=prepare.stage,
                epoch=Epoch(prepare.epoch),
                manifest_digest=check_digest(prepare.manifest_digest, "manifest_digest"),
            )
        case "activate":
            return operation_id, value_of(message.activate, ActivateHead)
        case "release":
            return operation_id, value_of(message.release, ReleaseStage)
        case "standby":
            standby = message.standby
            return operation_id, KeepStandby(
                spec=spec_from_wire(standby.spec),
                epoch=Epoch(standby.epoch),
                manifest_digest=check_digest(standby.manifest_digest, "manifest_digest"),
                node=NodeName(check_name(standby.node, "node")),
                layers=layers_from_wire(standby.layers) if standby.HasField("layers") else None,
            )
        case "measure":
            measure = message.measure
            return operation_id, MeasureCompute(
                _config_from_wire(measure.config_json),
                dtype_from_wire(measure.dtype),
                measure.quick,
                measure.again,
                quantisation_from_wire(measure.quantisation),
            )
        case "probe":
            return operation_id, ProbeLinks(tuple(_peer_from_wire(peer) for peer in message.probe.peers))
        case "trace":
            trace = message.trace
            return operation_id, value_of(trace, TraceSteps, seconds=check_seconds(trace.seconds))
        case "dump" | "list_packed" | "drop_packed":
            return operation_id, _question_from_wire(message)
        case "denials":
            return operation_id, Deny(denials_from_wire(message.denials))
        case _:
            raise InvalidArgumentError("the command is of a kind this version does not know", field="command")


def _question_from_wire(message: pb.ControlResponse) -> TakeDump | ListPacked | DropPacked:
    """A command that is not for the agent's state."""
    match message.WhichOneof("command"):
        case "list_packed":
            return ListPacked()
        case "drop_packed":
            return DropPacked(tuple(message.drop_packed.ids))
        case _:
            return TakeDump()


def _config_from_wire(text: bytes) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InvalidArgumentError("config_json is not a JSON object", field="config_json")
    return values


def _peer_from_wire(message: pb.Peer) -> Peer:
    return Peer(
        NodeId(check_id(message.node_id, "peers.node_id")),
        NodeName(check_name(message.name, "peers.name")),
        check_id(message.address, "peers.address"),
    )


def report_to_wire(report: ProfileReport) -> pb.ReportProfileRequest:
    return pb.ReportProfileRequest(
        node_id=report.node_id,
        facts=facts_to_wire(report.facts) if report.facts is not None else None,
        compute=[compute_profile_to_wire(profile) for profile in report.compute],
        links=[link_to_wire(link) for link in report.links],
    )


def report_from_wire(message: pb.ReportProfileRequest) -> ProfileReport:
    """Raises InvalidArgumentError for figures that cannot be, or a link that does not begin at the reporting node."""
    node_id = NodeId(check_id(message.node_id, "node_id"))
    links = tuple(link_from_wire(link) for link in message.links)
    if any(link.sender != node_id or link.receiver == node_id for link in links):
        raise InvalidArgumentError(
            "links: a node reports the ways from itself to others only", field="links", reason="FOREIGN_LINK"
        )
    return ProfileReport(
        node_id=node_id,
        facts=_told_facts(message.facts) if message.HasField("facts") else None,
        compute=tuple(compute_profile_from_wire(profile) for profile in message.compute),
        links=links,
    )


def agent_message_to_wire(message: AgentMessage) -> pb.ControlRequest:
    match message:
        case ControlHello():
            return pb.ControlRequest(hello=message_of(message, pb.ControlHello))
        case Heartbeat():
            return pb.ControlRequest(heartbeat=heartbeat_to_wire(message))
        case HeartbeatChange():
            return pb.ControlRequest(heartbeat_change=heartbeat_change_to_wire(message))
        case CommandResult():
            return pb.ControlRequest(result=_result_to_wire(message))
        case CommandProgress():
            return pb.ControlRequest(progress=message_of(message, pb.CommandProgress))
        case DumpPart():
            return pb.ControlRequest(dump=dump_part_to_wire(message))
        case LinkSuspected():
            return pb.ControlRequest(suspected=message_of(message, pb.LinkSuspected))
        case Condition():
            return pb.ControlRequest(condition=condition_to_wire(message))
        case _:
            assert_never(message)


def agent_message_from_wire(message: pb.ControlRequest) -> AgentMessage | None:
    """None for a message of a kind this version does not know. Raises InvalidArgumentError for one that cannot be."""
    match message.WhichOneof("message"):
        case "heartbeat_change":
            return heartbeat_change_from_wire(message.heartbeat_change)
        case "heartbeat":
            return heartbeat_from_wire(message.heartbeat)
        case "hello":
            return ControlHello(NodeId(message.hello.node_id), message.hello.incarnation)
        case "result":
            return _result_from_wire(message.result)
        case "progress":
            return value_of(message.progress, CommandProgress)
        case "dump":
            return dump_part_from_wire(message.dump)
        case "suspected":
            return value_of(message.suspected, LinkSuspected)
        case "condition":
            return condition_from_wire(message.condition)
        case _:
            return None


def is_heartbeat(message: pb.ControlRequest) -> bool:
    return message.WhichOneof("message") in ("heartbeat_change", "heartbeat")


def is_urgent(message: pb.ControlRequest) -> bool:
    """Whether a message with a heartbeat has news of a stage. Reads next to nothing of it."""
    if message.WhichOneof("message") == "heartbeat_change":
        return message.heartbeat_change.urgent
    return bool(message.heartbeat.stages)


def _result_to_wire(result: CommandResult) -> pb.CommandResult:
    return pb.CommandResult(
        operation_id=result.operation_id,
        failure=to_failure(result.failure) if result.failure is not None else None,
        stage=stage_status_to_wire(result.stage) if result.stage is not None else None,
        trace=trace_to_wire(result.trace) if result.trace is not None else None,
        packed=[packed_unit_to_wire(unit) for unit in result.packed],
    )


def _result_from_wire(message: pb.CommandResult) -> CommandResult:
    return CommandResult(
        operation_id=OperationId(message.operation_id),
        failure=from_failure(message.failure) if message.HasField("failure") else None,
        stage=stage_status_from_wire(message.stage) if message.HasField("stage") else None,
        trace=trace_from_wire(message.trace) if message.HasField("trace") else None,
        packed=tuple(packed_unit_from_wire(unit) for unit in message.packed),
    )
