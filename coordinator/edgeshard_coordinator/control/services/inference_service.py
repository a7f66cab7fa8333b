"""The service that applications call."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.identity import Principal, Role, shown_identity
from edgeshard.domain.ids import RequestId, check_id
from edgeshard.domain.requests.generation import Finished, ListenerHello, Started, TokensRead
from edgeshard.proto.v1 import inference_pb2 as pb
from edgeshard.proto.v1 import inference_pb2_grpc
from edgeshard.rpc.access import call_from, caller
from edgeshard.rpc.hello import first_message
from edgeshard.wire.generation import (
    chat_prompt_to_wire,
    conversation_from_wire,
    event_to_wire,
    generate_request_from_wire,
    tokenize_request_from_wire,
)
from edgeshard.wire.listening import heard_to_wire, listener_message_from_wire
from edgeshard.wire.site import served_model_to_wire
from edgeshard_coordinator.control.requests.chats import Chats
from edgeshard_coordinator.control.requests.listeners import ListenerFeed, Listeners, listener_lost
from edgeshard_coordinator.control.requests.request_front import RequestFront
from edgeshard_coordinator.control.requests.site_models import Models, served_model
from edgeshard_coordinator.control.runtime.loop import StateLoop
from edgeshard_coordinator.control.services.auditing import CallAudit


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(
        self, loop: StateLoop, front: RequestFront, models: Models, audit: CallAudit, chats: Chats
    ) -> None:
        self._loop = loop
        self._front = front
        self._models = models
        self._audit = audit
        self._chats = chats
        self._listeners = Listeners()

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        generate_request = generate_request_from_wire(request)
        request_id = RequestId(
            check_id(generate_request.request_id or uuid.uuid4().hex, "request_id")
        )
        left_s = context.time_remaining()
        running = self._front.start(
            generate_request.model,
            generate_request.generation,
            request_id,
            client_of(context),
            deadline=None if left_s is None else self._loop.now() + left_s,
            emitted=generate_request.emitted,
            scored=generate_request.scored,
        )
        # Disconnect, deadline and cancel alike end the call; so does its ordinary end, which
        # changes nothing more.
        context.add_done_callback(lambda _: self._front.abandon(running))
        first = await running.first()
        # Not before the head's answer: the listener's stream was opened at the same moment, and may
        # arrive later.
        listens = isinstance(first, Started) and not generate_request.generation.prompt_logprobs
        stream = (
            self._listeners.find(_owner(context), generate_request.listener) if listens else None
        )
        if stream is None or generate_request.listener is None or not isinstance(first, Started):
            yield event_to_wire(first)
            if not isinstance(first, Finished):  # cancelled before it started
                async for event in running.events():
                    yield event_to_wire(event)
            return
        yield event_to_wire(replace(first, listened=True))
        followed = stream.follow(generate_request.listener.number, running)
        try:
            await followed.ended.wait()
        finally:
            stream.leave(followed)
        if not followed.has_end:
            raise listener_lost()

    async def Listen(
        self, request_iterator: AsyncIterator[pb.ListenRequest], context: Any
    ) -> AsyncIterator[pb.ListenResponse]:
        """Raises InvalidArgumentError if the first message names no listener."""
        owner, listener_id = _owner(context), await _listener_id(request_iterator)
        stream = self._listeners.open(owner, listener_id)
        reader = asyncio.create_task(_take_reads(stream, request_iterator))

        def ended(_: object) -> None:
            self._listeners.close(owner, listener_id)
            reader.cancel()

        context.add_done_callback(ended)
        await context.send_initial_metadata(())  # the sign that requests can name it
        async for message in stream.heard():
            yield heard_to_wire(message)

    def end_listeners(self) -> None:
        """End the listeners once all is sent, since the coordinator goes down."""
        self._listeners.finish()

    async def Cancel(
        self, request: pb.InferenceServiceCancelRequest, context: Any
    ) -> pb.InferenceServiceCancelResponse:
        principal = caller(context)
        everyones = principal is None or principal.role is Role.OPERATOR
        request_id = RequestId(check_id(request.request_id, "request_id"))
        owner, client = self._front.owner_of(request_id), client_of(context)
        cancelled = self._front.cancel(request_id, None if everyones else client)
        if cancelled and owner != client:
            self._audit.note(
                call_from(context), "Cancel", f"{request_id} of {shown_identity(owner)}"
            )
        return pb.InferenceServiceCancelResponse(cancelled=cancelled)

    async def ListModels(
        self, request: pb.InferenceServiceListModelsRequest, context: Any
    ) -> pb.InferenceServiceListModelsResponse:
        served = [served_model(record, self._models) for record in self._front.served.ready()]
        return pb.InferenceServiceListModelsResponse(
            models=[served_model_to_wire(model) for model in served]
        )

    async def RenderChat(
        self, request: pb.RenderChatRequest, context: Any
    ) -> pb.RenderChatResponse:
        prompt = await self._chats.prompt(
            request.model, conversation_from_wire(request.conversation), client_of(context)
        )
        return pb.RenderChatResponse(prompt=chat_prompt_to_wire(prompt))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        tokenize_request = tokenize_request_from_wire(request)
        client = client_of(context)
        self._front.quotas.check_debt(client)
        tokens = await self._chats.tokenize(
            tokenize_request.model, tokenize_request.text, tokenize_request.special, client
        )
        self._front.quotas.charge(client, len(tokens))
        return pb.TokenizeResponse(tokens=tokens)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Any
    ) -> pb.DetokenizeResponse:
        text = await self._chats.detokenize(request.model, request.tokens, client_of(context))
        return pb.DetokenizeResponse(text=text)


async def _listener_id(messages: AsyncIterator[pb.ListenRequest]) -> str:
    message = await first_message(messages, "listener", "a Listen stream")
    hello = listener_message_from_wire(message) if message is not None else None
    if not isinstance(hello, ListenerHello):
        raise InvalidArgumentError(
            "listener: a Listen stream begins with the listener's id", field="listener"
        )
    return check_id(hello.id, "listener")


async def _take_reads(stream: ListenerFeed, messages: AsyncIterator[pb.ListenRequest]) -> None:
    try:
        async for message in messages:
            read = listener_message_from_wire(message)
            if isinstance(read, TokensRead):
                stream.read(read.number, read.count)
    except grpc.aio.UsageError:
        pass  # The call ended while this was reading.
    finally:
        stream.close()


def _owner(context: Any) -> str:
    """The owner of a listener: the client by its certificate, also over another connection; else
    the connection."""
    return client_of(context) or context.peer()


def client_of(context: Any) -> str:
    """The caller, by the name in its certificate; '' in plaintext, where callers cannot be
    distinguished."""
    principal = caller(context)
    return "" if principal is None else client_name(principal)


def client_name(principal: Principal) -> str:
    """The name of a client in its requests."""
    return f"{principal.role}/{principal.id}"
