"""The service that heads dial: requests and cancels down, tokens up. Tokens go straight to the
request front."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog

from edgeshard.domain import errors
from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.requests import head
from edgeshard.proto.v1 import head_pb2 as pb
from edgeshard.proto.v1 import head_pb2_grpc
from edgeshard.rpc.access import check_acts_for_itself
from edgeshard.rpc.channel import is_sendable
from edgeshard.rpc.hello import first_message
from edgeshard.wire.head_stream import head_command_to_wire, head_message_from_wire
from edgeshard_coordinator.control.requests.request_front import RequestFront
from edgeshard_coordinator.control.requests.running_request import Attachment
from edgeshard_coordinator.control.runtime.head_watch import HeadWatch, WatchedHead
from edgeshard_coordinator.control.runtime.loop import StateLoop
from edgeshard_coordinator.core.values.events import HeadAttached, HeadDetached

log = structlog.get_logger()

BULK_BYTES = 64 << 10
"""No keepalive passes a larger message before all of it has arrived, so the head does not wait for
one."""


class HeadServicer(head_pb2_grpc.HeadServiceServicer):
    def __init__(self, loop: StateLoop, front: RequestFront, watch: HeadWatch) -> None:
        self._loop = loop
        self._front = front
        self._watch = watch

    async def Attach(
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: Any
    ) -> AsyncIterator[pb.AttachResponse]:
        """Raises StaleEpochError when the deployment is not awaiting this head at this epoch (any
        more)."""
        hello = await _hello(request_iterator)
        record = self._loop.state.deployments.get(hello.deployment)
        if record is not None:
            check_acts_for_itself(context, record.head.node_name, "node_id")
        attachment = self._open(hello)
        watched = self._watch.open(attachment) if hello.beacons else None
        reader: asyncio.Task[None] | None = None

        def ended(_: object = None) -> None:
            if reader is not None:
                reader.cancel()
            if watched is not None:
                self._watch.close(watched)
            self._front.detach(attachment)
            self._loop.post(
                HeadDetached(attachment.deployment, attachment.number, self._loop.now())
            )

        context.add_done_callback(ended)
        await self._loop.ask(
            HeadAttached(
                attachment.node_id,
                attachment.deployment,
                attachment.epoch,
                attachment.number,
                self._loop.now(),
            )
        )
        log.info(
            "head_attached",
            deployment=attachment.deployment,
            epoch=attachment.epoch,
            node=attachment.node_name,
        )
        # The head's sign that it is attached: it answers its activate command only then.
        await context.send_initial_metadata(())
        reader = asyncio.create_task(self._read(attachment, watched, request_iterator))
        while (item := await attachment.outgoing.get()) is not None:
            if isinstance(item, errors.EdgeShardError):
                raise item
            if (message := self._message(attachment, item)) is None:
                continue
            if watched is not None and message.ByteSize() > BULK_BYTES:
                yield head_command_to_wire(head.HeadBeacon())
            yield message

    def _message(
        self, attachment: Attachment, command: head.HeadCommand
    ) -> pb.AttachResponse | None:
        """The message of a command; None if it cannot be sent. Then only this request fails, since
        a refused message would end the stream."""
        if isinstance(command, head.HeadBeacon):
            return head_command_to_wire(command)
        try:
            message = head_command_to_wire(command)
            too_large = not is_sendable(message)
        except (TypeError, ValueError) as error:  # a value that no message holds
            log.error("request_not_sent", request=command.request_id, error=type(error).__name__)
            failure: errors.EdgeShardError = errors.InternalError(
                "the request could not be sent to its head; see the coordinator's log"
            )
        else:
            if not too_large:
                return message
            failure = errors.InvalidArgumentError(
                f"prompt: the request has {message.ByteSize()} bytes, more than a message to the "
                "head holds: "
                "shorten it",
                field="prompt",
                reason="REQUEST_TOO_LARGE",
            )
        failed = head.HeadEvent(command.request_id, failure)
        self._front.reports.take(attachment, head.HeadEvents(attachment.epoch, (failed,)))
        return None

    def _open(self, hello: head.HeadHello) -> Attachment:
        deployment = hello.deployment
        epoch = hello.epoch
        node_id = hello.node_id
        record = self._loop.state.deployments.get(deployment)
        if (
            record is not None
            and (record.epoch, record.head.node_id) == (epoch, node_id)
            and record.adoptable
        ):
            raise errors.UnavailableError(
                f"the other nodes of deployment {deployment} have not confirmed epoch {epoch} yet; "
                "try again",
                reason="NOT_YET",
                retry_after_s=0.2,
            )
        if (
            record is None
            or record.epoch != epoch
            or record.head.node_id != node_id
            or record.phase not in (DeploymentPhase.ACTIVATING, DeploymentPhase.READY)
        ):
            raise errors.StaleEpochError(
                f"deployment {hello.deployment} does not await this head at epoch {epoch}; wait "
                "for the next activate",
                field="epoch",
            )
        node_name = record.head.node_name
        return self._front.attach(
            deployment, epoch, node_id, node_name, hello.held, hello.head_for_s
        )

    async def _read(
        self,
        attachment: Attachment,
        watched: WatchedHead | None,
        messages: AsyncIterator[pb.AttachRequest],
    ) -> None:
        try:
            async for message in messages:
                if watched is not None:
                    self._watch.heard(watched)
                head_message = head_message_from_wire(message)
                if isinstance(head_message, head.HeadEvents):
                    self._front.reports.take(attachment, head_message)
        except grpc.aio.UsageError:
            pass  # The call ended while this was reading.
        except errors.InvalidArgumentError as error:
            deployment, node_id = attachment.deployment, attachment.node_id
            log.warning(
                "head_refused",
                deployment=deployment,
                node_id=node_id,
                reason=error.reason,
                error=error.message,
            )
            attachment.fail(error)
        except Exception as error:
            # Not its text: it could quote a message.
            log.warning(
                "attach_stream_broke", deployment=attachment.deployment, error=type(error).__name__
            )
        finally:
            attachment.close()


async def _hello(messages: AsyncIterator[pb.AttachRequest]) -> head.HeadHello:
    message = await first_message(messages, "hello", "an attach stream")
    hello = head_message_from_wire(message) if message is not None else None
    if not isinstance(hello, head.HeadHello):
        raise errors.InvalidArgumentError(
            "hello: an attach stream begins with a hello", field="hello"
        )
    return hello
