"""What heads dial: requests and cancels down, tokens up. Tokens go straight to the request front."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog

from edgeshard.deployment import DeploymentPhase
from edgeshard.errors import InvalidArgumentError, StaleEpochError
from edgeshard.generation import Token
from edgeshard.ids import DeploymentName, Epoch, NodeId, RequestId
from edgeshard.proto.v1 import head_pb2 as pb
from edgeshard.proto.v1 import head_pb2_grpc
from edgeshard.wire.generation import generation_to_wire, reason_from_wire, timings_from_wire, top_from_wire
from edgeshard.wire.status import from_failure
from edgeshard_coordinator.control.loop import StateLoop
from edgeshard_coordinator.control.requests import Attachment, Cancel, RequestFront, Start
from edgeshard_coordinator.core.events import HeadAttached, HeadDetached

log = structlog.get_logger()


class HeadServicer(head_pb2_grpc.HeadServiceServicer):
    def __init__(self, loop: StateLoop, front: RequestFront) -> None:
        self._loop = loop
        self._front = front

    async def Attach(
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: Any
    ) -> AsyncIterator[pb.AttachResponse]:
        """Raises StaleEpochError when the deployment is not awaiting this head at this epoch (any more)."""
        attachment = self._open(await _hello(request_iterator))
        reader: asyncio.Task[None] | None = None

        def ended(_: object = None) -> None:
            if reader is not None:
                reader.cancel()
            self._front.detach(attachment)
            self._loop.post(HeadDetached(attachment.deployment, attachment.number, self._loop.now()))

        context.add_done_callback(ended)
        await self._loop.ask(
            HeadAttached(
                attachment.node_id, attachment.deployment, attachment.epoch, attachment.number, self._loop.now()
            )
        )
        log.info("head_attached", deployment=attachment.deployment, epoch=attachment.epoch, node=attachment.node_name)
        # The head's sign that it is attached: it answers its activate command only then.
        await context.send_initial_metadata(())
        reader = asyncio.create_task(self._read(attachment, request_iterator))
        while (item := await attachment.outgoing.get()) is not None:
            yield _to_wire(item)

    def _open(self, hello: pb.HeadHello) -> Attachment:
        deployment, epoch, node_id = DeploymentName(hello.deployment), Epoch(hello.epoch), NodeId(hello.node_id)
        record = self._loop.state.deployments.get(deployment)
        if (
            record is None
            or record.epoch != epoch
            or record.head.node_id != node_id
            or record.phase not in (DeploymentPhase.ACTIVATING, DeploymentPhase.READY)
        ):
            raise StaleEpochError(
                f"deployment {hello.deployment} does not await this head at epoch {epoch}; wait for the next activate",
                field="epoch",
            )
        return self._front.attach(deployment, epoch, node_id, record.head.node_name)

    async def _read(self, attachment: Attachment, messages: AsyncIterator[pb.AttachRequest]) -> None:
        try:
            async for message in messages:
                self._deliver(attachment, message)
        except grpc.aio.UsageError:
            pass  # The call ended while this was reading.
        except Exception as error:
            # Not its text: it could quote a message.
            log.warning("attach_stream_broke", deployment=attachment.deployment, error=type(error).__name__)
        finally:
            attachment.close()

    def _deliver(self, attachment: Attachment, message: pb.AttachRequest) -> None:
        front = self._front
        match message.WhichOneof("message"):
            case "token":
                self._deliver_token(attachment, message.token)
            case "tokens":
                for token in message.tokens.tokens:
                    self._deliver_token(attachment, token)
            case "accepted":
                accepted = message.accepted
                tokens = tuple(accepted.prompt_tokens)
                front.on_accepted(attachment, RequestId(accepted.request_id), Epoch(accepted.epoch), tokens)
            case "finished":
                finished = message.finished
                reason, epoch = reason_from_wire(finished.reason), Epoch(finished.epoch)
                front.on_finished(attachment, RequestId(finished.request_id), epoch, reason, finished.text)
            case "failed":
                failed = message.failed
                failure, epoch = from_failure(failed.failure), Epoch(failed.epoch)
                front.on_failed(attachment, RequestId(failed.request_id), epoch, failure)
            case _:
                pass  # A second hello, or a message of a later version: nothing to do.

    def _deliver_token(self, attachment: Attachment, token: pb.HeadToken) -> None:
        self._front.on_token(attachment, RequestId(token.request_id), Epoch(token.epoch), _token(token))


def _token(message: pb.HeadToken) -> Token:
    return Token(
        position=message.position,
        token=message.token,
        text=message.text,
        logprob=message.logprob,
        top=top_from_wire(message.top),
        timings=timings_from_wire(message.timings),
    )


def _to_wire(item: Start | Cancel) -> pb.AttachResponse:
    if isinstance(item, Cancel):
        return pb.AttachResponse(cancel=pb.CancelRequest(request_id=item.request_id))
    return pb.AttachResponse(
        start=pb.StartRequest(
            request_id=item.request_id,
            generation=generation_to_wire(item.generation),
            emitted_tokens=item.emitted,
            client=item.client,
        )
    )


async def _hello(messages: AsyncIterator[pb.AttachRequest]) -> pb.HeadHello:
    async for message in messages:
        if message.WhichOneof("message") == "hello":
            return message.hello
        break
    raise InvalidArgumentError("hello: an attach stream begins with a hello", field="hello")
