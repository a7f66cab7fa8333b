"""The head's own stream to the coordinator: requests and cancels down, tokens up; never on the
control stream.

While the head has requests, the coordinator sends keepalives, and each is answered unless tokens
were sent since the last one. So the coordinator notices a stalled head, and the head a stalled
coordinator.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import grpc
import structlog

from edgeshard.domain.errors import EdgeShardError, InternalError, StaleEpochError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId
from edgeshard.domain.requests import head as messages
from edgeshard.domain.requests.generation import Token
from edgeshard.proto.v1 import head_pb2 as pb
from edgeshard.proto.v1.head_pb2_grpc import HeadServiceStub
from edgeshard.rpc.channel import is_sendable
from edgeshard.rpc.link_watch import ALIVE, BEACON_S, LinkWatch, next_tick
from edgeshard.wire.head_stream import (
    head_command_from_wire,
    head_message_to_wire,
    request_of_command,
)
from edgeshard.wire.status import from_rpc_error
from edgeshard_agent.engine.pipeline_head import Head
from edgeshard_agent.net.streams import Reconnecting, end, status_of, until_one_ends

log = structlog.get_logger()

# A coordinator that stops reading must not fill this node's memory. The journal has the unsent
# outputs.
MAX_UNSENT = 65536
RETRY_S = 0.2
STALE_RETRY_S = 2.0
"""After a refusal of the epoch. The epoch is over, and a command will soon report it. Or that
coordinator lacks part of its disk, and the next one continues the epoch."""
# Tokens of one message, and characters of their text, which then stays far below gRPC's limit, with
# logprobs too.
MAX_TOKENS = 512
MAX_CHARACTERS = 1 << 20

Attach = grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse]


class HeadStream:
    """Keeps `HeadService.Attach` open while the epoch lasts. Requests continue while it is lost,
    and the coordinator gets the missed outputs on the next stream. `dial` gives a channel to the
    coordinator, of a connection of its own.

    A coordinator that is silent although keepalives are due may be stalled; its stream then
    continues when it does. Only if it stays silent is the stream given up for one over a new
    connection, since a dead connection may be all that is wrong.
    """

    def __init__(
        self,
        dial: Callable[[], grpc.aio.Channel],
        node_id: NodeId,
        deployment: DeploymentName,
        epoch: Epoch,
    ) -> None:
        self._dial = dial
        self._node_id = node_id
        self._deployment = deployment
        self._epoch = epoch
        self._unsent: deque[messages.HeadEvent] = deque()
        self._wake = asyncio.Event()
        self._overflow = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._watch = LinkWatch(0.0)
        self._owed = asyncio.Event()
        """Set while the coordinator owes keepalives."""
        self._answer_due = False
        self._said_at = float("-inf")
        """The time at which the coordinator was last sent something that shows that the head is
        there."""
        self._reconnecting = Reconnecting(RETRY_S, RETRY_S)
        self.attached = asyncio.Event()
        self.suspicions = 0
        """How often a coordinator that owed keepalives fell silent."""

    def start(self, head: Head) -> None:
        self._channel = self._dial()
        self._task = asyncio.create_task(self._run(head), name=f"attach-{self._deployment}")

    async def stop(self) -> None:
        await end(self._task, self._channel)

    def emit(self, head_event: messages.HeadEvent) -> None:
        """Queue an event for the coordinator; never blocks."""
        if len(self._unsent) >= MAX_UNSENT:
            self._overflow.set()
            return
        self._unsent.append(head_event)
        self._wake.set()

    async def _run(self, head: Head) -> None:
        while True:
            channel = self._channel
            least_pause_s = 0.0
            loss: tuple[str, str] | None = None
            call: Attach = HeadServiceStub(channel).Attach()
            try:
                await until_one_ends(self._serve(call, head), self._until_given_up())
            except grpc.aio.AioRpcError as error:
                typed = from_rpc_error(error)
                loss = typed.reason, typed.message
                if typed.reason == StaleEpochError.default_reason:
                    least_pause_s = STALE_RETRY_S
            except EdgeShardError as error:
                log.warning("head_stream_refused", deployment=self._deployment, why=error.message)
            except asyncio.InvalidStateError:
                loss = "UNAVAILABLE", "it ended while a token was written"
            except Exception:
                # No one awaits this task: if it died, the deployment would wait for its head
                # forever.
                log.exception("head_stream_crashed", deployment=self._deployment)
            finally:
                self.attached.clear()
                call.cancel()
                head.stream_lost()
                self._unsent.clear()
                self._overflow.clear()
                self._answer_due = False
                self._said_at = float("-inf")
                if self._channel is channel:
                    self._owed.clear()
            if channel is not None and self._channel is not channel:
                await channel.close()
            await asyncio.sleep(max(least_pause_s, self._lost(loss)))

    def _lost(self, why: tuple[str, str] | None) -> float:
        """Log the reason and the message of an end if they are news. Return the seconds before the
        next try."""
        now = asyncio.get_running_loop().time()
        pause_s = self._reconnecting.failed(now)
        if why is not None and self._reconnecting.is_news(*why, now):
            failures = self._reconnecting.told()
            log.info("head_stream_lost", deployment=self._deployment, why=why[1], failures=failures)
        return pause_s

    async def _until_given_up(self) -> None:
        """Wait until the coordinator's keepalives are overdue for the time after which it is
        dialled again."""
        loop = asyncio.get_running_loop()
        while True:
            await self._owed.wait()
            await next_tick()
            fault = self._watch.tick(loop.time()) if self._owed.is_set() else None
            if fault is None:
                continue
            if not fault.is_new:
                log.info("coordinator_redialled", deployment=self._deployment, why=fault.why)
                self._channel = self._dial()
                return
            self.suspicions += 1
            log.warning("coordinator_suspected", deployment=self._deployment, why=fault.why)
            self._watch.welcomed(0, loop.time())  # the stream stays

    def _heard(self, beacon: messages.HeadBeacon | None) -> None:
        """Note that the coordinator is there: any message shows it."""
        now = asyncio.get_running_loop().time()
        if self._watch.beacon(ALIVE, now):
            log.info("coordinator_recovered", deployment=self._deployment)
        if beacon is None:
            return
        if not beacon.follows:
            self._owed.clear()
            return
        if not self._owed.is_set():
            self._watch.welcomed(0, now)
            self._owed.set()
        if now - self._said_at > BEACON_S:
            self._answer_due = True
            self._wake.set()

    async def _serve(self, call: Attach, head: Head) -> None:
        requests = head.held()[: messages.MAX_HELD]
        hello = messages.HeadHello(
            self._node_id,
            self._deployment,
            self._epoch,
            requests,
            beacons=True,
            head_for_s=head.head_for_s,
        )
        await call.write(head_message_to_wire(hello))
        await call.initial_metadata()  # the coordinator sends it once it has taken the hello
        self.attached.set()
        self._reconnecting.came_back(asyncio.get_running_loop().time())
        self._owed.clear()  # on this stream nothing is, yet
        log.info("head_attached", deployment=self._deployment, epoch=self._epoch)
        await until_one_ends(self._write(call), self._read(call, head), self._overflow.wait())

    async def _write(self, call: Attach) -> None:
        while True:
            while self._unsent or self._answer_due:
                if self._answer_due:
                    self._answer_due = False
                    await call.write(head_message_to_wire(messages.HeadBeacon()))
                else:
                    await call.write(self._sendable(self._take()))
                    self._said_at = asyncio.get_running_loop().time()
            self._wake.clear()
            await self._wake.wait()

    def _take(self) -> messages.HeadEvents:
        """The next message; a step's tokens are all there together and go as one."""
        first = self._unsent.popleft()
        if not isinstance(first.event, Token):
            return messages.HeadEvents(self._epoch, (first,))
        events, characters = [first], len(first.event.text)
        while self._unsent and len(events) < MAX_TOKENS:
            last, next_event = events[-1], self._unsent[0]
            match last.event, next_event.event:
                case _, Token() as token:
                    characters += len(token.text)
                    if characters > MAX_CHARACTERS:
                        break
                    events.append(next_event)
                case Token() as token, messages.RequestEnd() as ending if (
                    next_event.request_id == last.request_id
                ):
                    characters += len(ending.text)
                    events[-1] = messages.HeadEvent(
                        next_event.request_id, messages.LastToken(token, ending)
                    )
                case _:
                    break
            self._unsent.popleft()
        return messages.HeadEvents(self._epoch, tuple(events))

    def _sendable(self, message: messages.HeadEvents) -> pb.AttachRequest:
        """The message; for one that gRPC would refuse, and end every request's stream, the failure
        of its request."""
        request = head_message_to_wire(message)
        if is_sendable(request) or len(message.events) > 1:
            return request
        size, (head_event,) = request.ByteSize(), message.events
        request_id = head_event.request_id
        log.error(
            "message_not_sent", request=request_id, kind=type(head_event.event).__name__, size=size
        )
        # The coordinator orders the head to forget it, and ignores the head's outputs for it until
        # then.
        why = InternalError(
            f"the head's answer has {size} bytes, more than a message holds; request less at once",
            reason="ANSWER_TOO_LARGE",
        )
        failed = messages.HeadEvent(request_id, why)
        return head_message_to_wire(messages.HeadEvents(self._epoch, (failed,)))

    async def _read(self, call: Attach, head: Head) -> None:
        while isinstance(message := await call.read(), pb.AttachResponse):
            try:
                command = head_command_from_wire(message)
            except EdgeShardError as error:
                # Only this request is refused: the others on this stream continue.
                log.warning("command_refused", deployment=self._deployment, reason=error.reason)
                self.emit(messages.HeadEvent(request_of_command(message), error))
                continue
            self._heard(command if isinstance(command, messages.HeadBeacon) else None)
            match command:
                case messages.StartRequest() as start:
                    head.start(start)
                case messages.CancelRequest(request_id):
                    head.cancel(request_id)
                case messages.ForgetRequest(request_id):
                    head.forget(request_id)
        raise await status_of(call)
