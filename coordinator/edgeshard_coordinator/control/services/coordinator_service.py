"""The service that agents call: register, the control stream with its heartbeats, profiles."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from edgeshard import WIRE_VERSION, __version__
from edgeshard.domain import errors
from edgeshard.domain.control import commands
from edgeshard.domain.ids import DeploymentName, NodeId, OperationId
from edgeshard.domain.nodes.device import Condition
from edgeshard.domain.requests.link import LinkSuspected
from edgeshard.proto.v1 import coordinator_pb2 as pb
from edgeshard.proto.v1 import coordinator_pb2_grpc
from edgeshard.rpc.access import call_from, check_acts_for_itself, peer_address
from edgeshard.rpc.channel import is_sendable
from edgeshard.rpc.denials import Denials
from edgeshard.rpc.hello import first_message
from edgeshard.rpc.tls import split_address
from edgeshard.wire import control as wire
from edgeshard_coordinator.control.runtime.conditions import Conditions
from edgeshard_coordinator.control.runtime.hub import ControlHub, ControlStream
from edgeshard_coordinator.control.runtime.loop import StateLoop
from edgeshard_coordinator.control.runtime.node_reports import (
    HeartbeatBatches,
    ProfileChecks,
    Registrations,
)
from edgeshard_coordinator.control.services.auditing import CallAudit
from edgeshard_coordinator.control.services.questions import Questions
from edgeshard_coordinator.core.nodes.node_events import check_is_alone
from edgeshard_coordinator.core.values import events
from edgeshard_coordinator.core.values.state import KnownNode

log = structlog.get_logger()


DENIALS = OperationId("denials")
"""Nodes do not answer them."""


@dataclass(eq=False)
class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """An answer to a command goes to `questions` if it belongs to one of them, else to the
    state."""

    _loop: StateLoop
    _hub: ControlHub
    _questions: Questions
    _denials: Denials
    _audit: CallAudit
    _conditions: Conditions

    def __post_init__(self) -> None:
        self.batches = HeartbeatBatches(self._loop)
        self._profile_checks = ProfileChecks()
        self._registrations = Registrations()
        self.closing = False
        self.suspicions: Counter[DeploymentName] = Counter()

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        # First: in another version the other fields may have another meaning.
        check_wire_version(request.wire_version)
        registration = wire.registration_from_wire(request)
        check_acts_for_itself(context, registration.name, "name")
        node = self._owned(context, registration.node_id)  # an id that another node has
        self._check_is_alone(context, registration)
        self._registrations.take(registration.name, self._loop.now())
        split_address(registration.address)
        await self._loop.ask(events.NodeRegistered(registration, self._loop.now()))
        if node is None or (node.name, node.address) != (registration.name, registration.address):
            self._audit.note(call_from(context), "Register", registration.name)
        log.info("node_registered", node_id=registration.node_id, node=registration.name)
        answer = wire.term_to_wire(self._loop.state.term)
        answer.wire_version = WIRE_VERSION
        return answer

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        """A heartbeat of older agents, which do not send heartbeats on the control stream."""
        heartbeat = wire.heartbeat_from_wire(request)
        node = self._owned(context, heartbeat.node_id)
        if node is None or node.incarnation != heartbeat.incarnation:
            return pb.HeartbeatResponse(known=False)
        await self._loop.ask(events.HeartbeatsReceived((heartbeat,), self._loop.now()))
        return pb.HeartbeatResponse(known=True)

    async def ReportProfile(
        self, request: pb.ReportProfileRequest, context: Any
    ) -> pb.ReportProfileResponse:
        report = wire.report_from_wire(request)
        self._owned(context, report.node_id)
        if report.compute:
            await self._profile_checks.run(report)
            self._owned(context, report.node_id)  # it may have left meanwhile
        await self._loop.ask(events.ProfileReported(report, self._loop.now()))
        log.info(
            "node_measured",
            node_id=report.node_id,
            profiles=len(report.compute),
            links=len(report.links),
        )
        return pb.ReportProfileResponse()

    async def Control(
        self, request_iterator: AsyncIterator[pb.ControlRequest], context: Any
    ) -> AsyncIterator[pb.ControlResponse]:
        hello = await _hello(request_iterator)
        if self.closing:
            raise errors.UnavailableError(
                "the coordinator is shutting down", reason="SHUTTING_DOWN", retry_after_s=1.0
            )
        node_id = hello.node_id
        node = self._owned(context, node_id)
        if node is None or node.incarnation != hello.incarnation:
            # Before its stream can replace the real node's.
            raise errors.NotFoundError(
                "node_id: this node is not registered; register, then connect again",
                field="node_id",
            )
        connection = self._hub.open(node_id, hello.incarnation)
        reader: asyncio.Task[None] | None = None

        def ended(_: object = None) -> None:
            # However the call ends; a generator's own `finally` may run late when the peer vanishes
            # during a write.
            if reader is not None:
                reader.cancel()
            self._hub.discard(connection)
            self._conditions.left(node_id, connection.number)
            self._loop.post(events.NodeDisconnected(node_id, connection.number, self._loop.now()))

        context.add_done_callback(ended)
        await self._loop.ask(
            events.NodeConnected(node_id, hello.incarnation, connection.number, self._loop.now())
        )
        # The agent reports that it is ready when it has these, since layers can be placed on it
        # from then on.
        await context.send_initial_metadata(())
        log.info("node_connected", node_id=node_id)
        if denials := self._denials.list():
            connection.send(DENIALS, commands.Deny(denials))
        reader = asyncio.create_task(self._read(connection, request_iterator))
        while (item := await connection.outgoing.get()) is not None:
            if isinstance(item, errors.EdgeShardError):
                log.warning(
                    "control_stream_refused",
                    node_id=node_id,
                    reason=item.reason,
                    error=item.message,
                )
                raise item
            if (message := self._message(connection, *item)) is not None:
                yield message

    def _check_is_alone(self, context: Any, registration: commands.Registration) -> None:
        """Raise UnavailableError for a second process with the identity of a node that is alive,
        and show it."""
        node = self._loop.state.nodes.get(registration.node_id)
        if node is None:
            return
        try:
            check_is_alone(node, registration, self._loop.now())
        except errors.UnavailableError:
            address = peer_address(context)
            if self._conditions.twin_came(registration.node_id, address):
                log.warning(
                    "identity_in_use",
                    node=node.name,
                    node_id=node.node_id,
                    connected=node.address,
                    refused=address,
                )
            raise

    def _owned(self, context: Any, node_id: NodeId) -> KnownNode | None:
        """The node, None if it is unknown. Raises DeniedError naming `node_id` if another node
        calls."""
        node = self._loop.state.nodes.get(node_id)
        if node is not None:
            check_acts_for_itself(context, node.name, "node_id")
        return node

    def _message(
        self, connection: ControlStream, operation_id: OperationId, command: commands.ControlMessage
    ) -> pb.ControlResponse | None:
        """The message of a command; None if it cannot be sent. That counts as refused, since a
        message too large ends the stream."""
        try:
            message = wire.command_to_wire(operation_id, command)
            if is_sendable(message):
                return message
            why = f"has {message.ByteSize()} bytes, more than a message holds"
        except (TypeError, ValueError) as error:
            why = f"holds what no message can: {type(error).__name__}"
        failure = errors.InternalError(
            f"{type(command).__name__} for this node {why}", reason="COMMAND_NOT_SENT"
        )
        self._answered(connection.node_id, commands.CommandResult(operation_id, failure))
        return None

    async def _read(
        self, connection: ControlStream, messages: AsyncIterator[pb.ControlRequest]
    ) -> None:
        try:
            async for message in messages:
                if wire.is_heartbeat(message):
                    self.batches.heard(connection, message)
                    continue
                try:
                    self._take(connection, message)
                except errors.InvalidArgumentError as error:
                    log.warning(
                        "message_refused",
                        node_id=connection.node_id,
                        reason=error.reason,
                        error=error.message,
                    )
        except (grpc.aio.UsageError, grpc.aio.AbortError):
            pass  # The call ended while this was reading, or was ended with an error.
        except Exception as error:
            log.warning(
                "control_stream_broke", node_id=connection.node_id, error=type(error).__name__
            )
        finally:
            connection.close()

    def _take(self, connection: ControlStream, message: pb.ControlRequest) -> None:
        match wire.agent_message_from_wire(message):
            case commands.CommandResult() as result:
                self.batches.flush_of(connection)
                self._answered(connection.node_id, result)
            case commands.CommandProgress() as progress:
                self._progressed(connection.node_id, progress)
            case commands.DumpPart() as part:
                self._questions.dumps.came(connection.node_id, part)
            case LinkSuspected() as link:
                self._suspected(connection.node_id, link)
            case Condition() as condition:
                self._conditions.came(connection.node_id, connection.number, condition)

    def _suspected(self, node_id: NodeId, link: LinkSuspected) -> None:
        if not link.recovered and link.deployment in self._loop.state.deployments:
            self.suspicions[link.deployment] += 1
        log_method = log.info if link.recovered else log.warning
        hop = f"{link.from_stage}->{link.to_stage}"
        log_method(
            "link_reported",
            node_id=node_id,
            deployment=link.deployment,
            hop=hop,
            recovered=link.recovered,
            why=link.why,
        )
        self._loop.post(events.LinkReported(node_id, link, self._loop.now()))

    def _progressed(self, node_id: NodeId, progress: commands.CommandProgress) -> None:
        try:
            self._questions.calls.progress(node_id, progress)
        except errors.InvalidArgumentError as error:
            log.warning(
                "progress_refused", node_id=node_id, reason=error.reason, error=error.message
            )

    def _answered(self, node_id: NodeId, result: commands.CommandResult) -> None:
        if result.failure is not None:
            log.warning(
                "command_failed",
                node_id=node_id,
                reason=result.failure.reason,
                error=result.failure.message,
            )
        if not self._questions.answered(node_id, result):
            self._loop.post(events.CommandAnswered(node_id, result, self._loop.now()))


def check_wire_version(version: int) -> None:
    """Raise WireVersionError naming both versions and what to upgrade, unless they are equal."""
    if version != WIRE_VERSION:
        older = "agent" if version < WIRE_VERSION else "coordinator"
        raise errors.WireVersionError(
            f"wire_version: the agent speaks version {version} and the coordinator {WIRE_VERSION} "
            "(edgeshard "
            f"{__version__}); upgrade the {older} so that both run the same edgeshard",
            field="wire_version",
        )


async def _hello(messages: AsyncIterator[pb.ControlRequest]) -> commands.ControlHello:
    message = await first_message(messages, "hello", "a control stream")
    hello = wire.agent_message_from_wire(message) if message is not None else None
    if not isinstance(hello, commands.ControlHello):
        raise errors.InvalidArgumentError(
            "hello: a control stream begins with a hello", field="hello"
        )
    return hello
