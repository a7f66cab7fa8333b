"""The node's side of the control plane: register, keep the control stream open, send heartbeats."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import grpc
import structlog

from edgeshard.domain.control import commands
from edgeshard.domain.errors import Code, EdgeShardError, InternalError, UnavailableError
from edgeshard.domain.ids import OperationId
from edgeshard.domain.nodes.device import Condition, DeviceFacts, HugePages, StageStatus
from edgeshard.domain.requests.link import LinkSuspected
from edgeshard.proto.v1 import coordinator_pb2 as pb
from edgeshard.proto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from edgeshard.rpc.channel import is_sendable
from edgeshard.rpc.clocks import explained
from edgeshard.wire import control as wire
from edgeshard.wire.debug import parts_of
from edgeshard.wire.status import from_rpc_error
from edgeshard_agent.net.streams import Reconnecting, status_of, until_one_ends

log = structlog.get_logger()

# Stage phases change in bursts; one heartbeat for a burst is enough.
PROMPT_HEARTBEAT_S = 0.05
REPORT_TIMEOUT_S = 10.0
CONDITION_INTERVAL_S = 30.0
"""Time between two reports on the node's machine. No caller waits for them."""
# The coordinator understood and refused: trying again would get the same answer.
_FATAL = frozenset(
    {
        Code.INVALID_ARGUMENT,
        Code.ALREADY_EXISTS,
        Code.PERMISSION_DENIED,
        Code.UNAUTHENTICATED,
        Code.FAILED_PRECONDITION,
    }
)

_EXPELLED = frozenset({"REMOVED", "REVOKED"})
"""An operator took the node out of the site."""

Control = grpc.aio.StreamStreamCall[pb.ControlRequest, pb.ControlResponse]


def drawn(delay_s: float) -> float:
    """A random wait from half of it up: the nodes of a coordinator that restarted must not come all
    at once."""
    return delay_s * random.uniform(0.5, 1.0)


@dataclass(eq=False)
class ControlClient:
    """Keeps this node known to the coordinator.

    `run` ends only by a typed error that a retry would not change (another wire version, a refused
    certificate, a node that was taken out of the site). `joined` is set once the coordinator counts
    the node among the connected ones, `placeable` once it may place layers on it as well: after
    `started`.
    """

    channel: grpc.aio.Channel
    target: str
    """The coordinator's address, for messages."""
    registration: commands.Registration
    on_command: Callable[[OperationId, commands.ControlMessage], None]
    statuses: Callable[[], tuple[StageStatus, ...]]
    available_bytes: Callable[[], int]
    huge_pages: Callable[[tuple[StageStatus, ...]], Awaitable[HugePages | None]]
    on_lost: Callable[[], None] = lambda: None
    """Called whenever a control stream ends."""
    others_share: Callable[[], float] = lambda: 0.0
    condition: Callable[[], Condition] | None = None
    packed: Callable[[], tuple[int, ...]] = tuple
    """Ids of the node's packed files."""
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._stub = CoordinatorServiceStub(self.channel)
        self._outgoing: asyncio.Queue[commands.AgentMessage] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()
        self._told_started = False
        self._reconnecting = Reconnecting()
        self._terms: dict[str, int] = {}
        """The newest term of each site that was followed since the agent began."""
        self.joined = asyncio.Event()
        self.placeable = asyncio.Event()

    def started(self, facts: DeviceFacts) -> None:
        """The node can compute now, and these are its facts. The coordinator receives them at once,
        and whenever it requests them.
        """
        self.registration = replace(self.registration, facts=facts, starting=False)
        self._changed.set()

    def send_results(self, results: tuple[commands.CommandResult, ...]) -> None:
        for result in results:
            self._outgoing.put_nowait(result)

    def send(self, news: commands.CommandProgress | LinkSuspected) -> None:
        self._outgoing.put_nowait(news)

    def send_dump(self, operation_id: OperationId, text: bytes) -> None:
        for part in parts_of(operation_id, text):
            self._outgoing.put_nowait(part)

    async def report(self, report: commands.ProfileReport) -> None:
        """Report measurements; later registrations carry the new facts too. Raises the
        coordinator's refusal."""
        if report.facts is not None:
            self.registration = replace(self.registration, facts=report.facts)
        try:
            await self._stub.ReportProfile(wire.report_to_wire(report), timeout=REPORT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise await self._error_of(error) from None

    def changed(self) -> None:
        """Ask for an early heartbeat."""
        self._changed.set()

    async def run(self) -> None:
        while True:
            try:
                await self._register()
                await self._serve()
            except grpc.aio.AioRpcError as error:
                typed = await self._error_of(error)
                if typed.reason in _EXPELLED or (not self.joined.is_set() and typed.code in _FATAL):
                    raise typed from None
                pause_s = self._lost(typed.reason, typed.message)
            except UnavailableError as error:
                pause_s = self._lost(error.reason, error.message)
            except asyncio.InvalidStateError:
                pause_s = self._lost("UNAVAILABLE", "the stream ended while a result was written")
            await asyncio.sleep(drawn(pause_s))

    async def _error_of(self, error: grpc.aio.AioRpcError) -> EdgeShardError:
        """The typed error; of a wrong clock if that is why TLS refused the coordinator."""
        return await explained(
            from_rpc_error(error, f"the coordinator at {self.target}"), self.target
        )

    def _lost(self, reason: str, why: str) -> float:
        """Log a failure if it is news. Return the seconds before the next try."""
        now = self.now()
        pause_s = self._reconnecting.failed(now)
        if self._reconnecting.is_news(reason, why, now):
            log.info("coordinator_lost", reason=reason, why=why, failures=self._reconnecting.told())
        return pause_s

    async def _register(self) -> None:
        registration = self.registration
        answer = await self._stub.Register(wire.registration_to_wire(registration), timeout=5)
        self._follow(wire.term_from_wire(answer))
        is_first = self._told_started == registration.starting
        self._told_started = not registration.starting
        if self._reconnecting.came_back(self.now()) or is_first:
            log.info("registered", coordinator=self.target, starting=registration.starting)
        self._check_placeable()

    def _follow(self, term: commands.Term) -> None:
        """Raises UnavailableError for a term below one that this node has followed."""
        newest = self._terms.get(term.site, 0)
        if term.number < newest:
            raise UnavailableError(
                f"the coordinator at {self.target} has term {term.number}, but this node has "
                "followed term "
                f"{newest} of the same site: another coordinator took over, or an old copy of the "
                "state was "
                "restored; stop the wrong coordinator, or restart this agent to follow the old "
                "state",
                field="coordinator",
                reason="STALE_COORDINATOR",
            )
        self._terms[term.site] = term.number

    def _check_placeable(self) -> None:
        if self.joined.is_set() and self._told_started and not self.placeable.is_set():
            self.placeable.set()
            log.info("placement_enabled")

    async def _serve(self) -> None:
        """One control stream with its heartbeats, to its end."""
        call: Control = self._stub.Control()
        hello = commands.ControlHello(self.registration.node_id, self.registration.incarnation)
        await call.write(wire.agent_message_to_wire(hello))
        try:
            await until_one_ends(
                self._read(call),
                self._write(call),
                self._send_heartbeats(call),
                self._send_conditions(call),
            )
        finally:
            call.cancel()
            self._drop_dumps()
            self.on_lost()

    async def _read(self, call: Control) -> None:
        # Sent once the coordinator counts this node among the connected ones: before that a
        # deployment would be refused.
        await call.initial_metadata()
        if not call.done():
            if not self.joined.is_set():
                self.joined.set()
                log.info("joined")
            self._check_placeable()
        while isinstance(message := await call.read(), pb.ControlResponse):
            try:
                operation_id, command = wire.command_from_wire(message)
            except EdgeShardError as error:
                self.send_results(
                    (commands.CommandResult(OperationId(message.operation_id), error),)
                )
            else:
                self.on_command(operation_id, command)
        if await call.code() is not grpc.StatusCode.OK:
            raise await status_of(call)
        raise UnavailableError("the coordinator closed the control stream")

    async def _write(self, call: Control) -> None:
        while True:
            request = _sendable(await self._outgoing.get())
            if request is None:
                continue
            async with self._writing:
                await call.write(request)

    def _drop_dumps(self) -> None:
        """Drop the remaining parts of dumps: no caller waits for them once the stream has ended."""
        queued_messages = [self._outgoing.get_nowait() for _ in range(self._outgoing.qsize())]
        for message in queued_messages:
            if not isinstance(message, commands.DumpPart):
                self._outgoing.put_nowait(message)

    async def _send_heartbeats(self, call: Control) -> None:
        """The first of the stream whole, then what changed. Each is made when it can be written,
        and so is never old. After the answer to a stage's release, no heartbeat names the stage."""
        last_heartbeat: commands.Heartbeat | None = None
        while True:
            if not (self._told_started or self.registration.starting):
                await self._register()
            huge_pages = await self.huge_pages(self.statuses())
            async with self._writing:
                now = self._heartbeat(huge_pages)
                message: commands.Heartbeat | commands.HeartbeatChange = now
                if last_heartbeat is None:
                    last_heartbeat = now
                else:
                    message = commands.change_between(last_heartbeat, now)
                    last_heartbeat = commands.with_change(last_heartbeat, message)
                await call.write(wire.agent_message_to_wire(message))
            try:
                longest_s = commands.HOLDING_INTERVAL_S if now.stages else commands.IDLE_INTERVAL_S
                await asyncio.wait_for(self._changed.wait(), longest_s)
                if self._told_started:
                    await asyncio.sleep(PROMPT_HEARTBEAT_S)
            except TimeoutError:
                pass
            self._changed.clear()

    async def _send_conditions(self, call: Control) -> None:
        while True:
            if self.condition is not None:
                async with self._writing:  # read now, so that its time equals the message's
                    await call.write(wire.agent_message_to_wire(self.condition()))
            await asyncio.sleep(CONDITION_INTERVAL_S)

    def _heartbeat(self, huge_pages: HugePages | None) -> commands.Heartbeat:
        node = self.registration
        now = (self.statuses(), self.available_bytes(), huge_pages, self.others_share())
        return commands.Heartbeat(
            node.node_id, node.incarnation, *now, self.packed()[: commands.MOST_PACKED]
        )


def _sendable(message: commands.AgentMessage) -> pb.ControlRequest | None:
    """The message. One that cannot be sent must not end the stream: a result goes as a failure,
    others not at all."""
    try:
        request = wire.agent_message_to_wire(message)
        if is_sendable(request):
            return request
        log.error("message_not_sent", kind=type(message).__name__, size=request.ByteSize())
    except (TypeError, ValueError) as error:  # a value that no message holds
        log.exception("message_not_sent", kind=type(message).__name__, error=type(error).__name__)
    if not isinstance(message, commands.CommandResult):
        return None
    failure = InternalError("the node's answer could not be sent; see its log")
    return wire.agent_message_to_wire(commands.CommandResult(message.operation_id, failure))
