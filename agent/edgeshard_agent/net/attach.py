"""The head's own stream to the coordinator: requests and cancels down, tokens up; never on the control stream."""

from __future__ import annotations

import asyncio
from collections import deque

import grpc
import structlog

from edgeshard.domain.errors import EdgeShardError, InternalError, StaleEpochError
from edgeshard.domain.head import (
    HeadAccepted,
    HeadFailed,
    HeadFinished,
    HeadHello,
    HeadMessage,
    HeadToken,
    HeadTokens,
    StartRequest,
)
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId
from edgeshard.proto.v1 import head_pb2 as pb
from edgeshard.proto.v1.head_pb2_grpc import HeadServiceStub
from edgeshard.rpc.channel import is_sendable
from edgeshard.wire.head import head_command_from_wire, head_message_to_wire, request_of_command
from edgeshard.wire.status import from_rpc_error
from edgeshard_agent.engine.head import Head, HeadOutput, RequestAccepted, RequestRefused
from edgeshard_agent.net.task_group import until_one_ends
from edgeshard_agent.scheduler.scheduler import RequestEnd, TokenOut

log = structlog.get_logger()

# A coordinator that stops reading must not fill this box's memory; losing it ends its requests anyway.
MAX_UNSENT = 65536
RETRY_S = 0.2
# Tokens of one message, and characters of their text, which then stays far below gRPC's limit, with logprobs too.
MAX_TOKENS = 512
MAX_CHARACTERS = 1 << 20

Attach = grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse]


class HeadStream:
    """Keeps `HeadService.Attach` open while the epoch lasts. Requests of a lost stream are cancelled."""

    def __init__(self, channel: grpc.aio.Channel, node_id: NodeId, deployment: DeploymentName, epoch: Epoch) -> None:
        self._channel = channel
        self._node_id = node_id
        self._deployment = deployment
        self._epoch = epoch
        self._unsent: deque[HeadOutput] = deque()
        self._wake = asyncio.Event()
        self._overflow = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._head: Head | None = None
        self.attached = asyncio.Event()

    def start(self, head: Head) -> None:
        self._head = head
        self._task = asyncio.create_task(self._run(head), name=f"attach-{self._deployment}")

    async def stop(self) -> None:
        tasks = [task for task in (self._task, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def emit(self, output: HeadOutput) -> None:
        """Queue an output for the coordinator; never blocks."""
        if len(self._unsent) >= MAX_UNSENT:
            self._overflow.set()
            return
        self._unsent.append(output)
        self._wake.set()

    def _message(self, output: HeadOutput) -> HeadMessage:
        match output:
            case TokenOut():
                return HeadToken(output.request_id, self._epoch, output.token)
            case RequestAccepted():
                return HeadAccepted(output.request_id, self._epoch, tuple(output.prompt_tokens))
            case RequestRefused():
                return HeadFailed(output.request_id, self._epoch, output.error)
            case RequestEnd():
                return HeadFinished(output.request_id, self._epoch, output.reason, output.text)

    async def _run(self, head: Head) -> None:
        stub = HeadServiceStub(self._channel)
        while True:
            call: Attach = stub.Attach()
            try:
                await self._serve(call, head)
            except grpc.aio.AioRpcError as error:
                typed = from_rpc_error(error)
                log.info("head_stream_lost", deployment=self._deployment, why=typed.message)
                if typed.reason == StaleEpochError.default_reason:
                    head.cancel_all()
                    return  # the coordinator goes on with another epoch
            except EdgeShardError as error:
                log.warning("head_stream_refused", deployment=self._deployment, why=error.message)
            except asyncio.InvalidStateError:
                log.info("head_stream_lost", deployment=self._deployment, why="it ended while a token was written")
            except Exception:
                # No one awaits this task: if it died, the deployment would wait for its head forever.
                log.exception("head_stream_crashed", deployment=self._deployment)
            finally:
                self.attached.clear()
                call.cancel()
            head.cancel_all()
            self._unsent.clear()
            self._overflow.clear()
            await asyncio.sleep(RETRY_S)

    async def _serve(self, call: Attach, head: Head) -> None:
        hello = HeadHello(self._node_id, self._deployment, self._epoch)
        await call.write(head_message_to_wire(hello))
        await call.initial_metadata()  # the coordinator sends it once it has taken the hello
        self.attached.set()
        log.info("head_attached", deployment=self._deployment, epoch=self._epoch)
        await until_one_ends(self._write(call), self._read(call, head), self._overflow.wait())

    async def _write(self, call: Attach) -> None:
        while True:
            while self._unsent:
                await call.write(self._sendable(self._take()))
            self._wake.clear()
            await self._wake.wait()

    def _take(self) -> HeadMessage:
        """The next message; a step's tokens are all there together and go as one."""
        first = self._message(self._unsent.popleft())
        if not isinstance(first, HeadToken):
            return first
        tokens, characters = [first], len(first.token.text)
        while self._unsent and len(tokens) < MAX_TOKENS and isinstance(output := self._unsent[0], TokenOut):
            characters += len(output.token.text)
            if characters > MAX_CHARACTERS:
                break
            self._unsent.popleft()
            tokens.append(HeadToken(output.request_id, self._epoch, output.token))
        return HeadTokens(tuple(tokens)) if len(tokens) > 1 else first

    def _sendable(self, message: HeadMessage) -> pb.AttachRequest:
        """The message; for one that gRPC would refuse, and end every request's stream, the failure of its request."""
        request = head_message_to_wire(message)
        if is_sendable(request) or isinstance(message, HeadHello | HeadTokens):
            return request
        size, request_id = request.ByteSize(), message.request_id
        log.error("message_not_sent", request=request_id, kind=type(message).__name__, size=size)
        assert self._head is not None
        # What this makes the head say of the request comes behind its failure, and is ignored.
        self._head.cancel(request_id)
        why = InternalError(
            f"the head's answer has {size} bytes, more than a message holds; ask for less in one request",
            reason="ANSWER_TOO_LARGE",
        )
        return head_message_to_wire(HeadFailed(request_id, self._epoch, why))

    async def _read(self, call: Attach, head: Head) -> None:
        while isinstance(message := await call.read(), pb.AttachResponse):
            try:
                command = head_command_from_wire(message)
            except EdgeShardError as error:
                # Of this request alone: the others on this stream go on.
                log.warning("command_refused", deployment=self._deployment, reason=error.reason)
                self.emit(RequestRefused(request_of_command(message), error))
                continue
            if isinstance(command, StartRequest):
                task = asyncio.create_task(head.start_request(command))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                head.cancel(command.request_id)
        code = await call.code()
        details = await call.details()
        raise grpc.aio.AioRpcError(code, await call.initial_metadata(), await call.trailing_metadata(), details)
