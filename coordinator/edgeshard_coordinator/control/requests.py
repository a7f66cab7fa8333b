"""The way in for requests: from a client's call to the head that serves it, and the tokens back.

Nothing here waits and nothing passes through the state loop. A journal for every request (prompt and emitted tokens)
decides which tokens count: only those of the epoch it runs in, at the position that comes next.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from edgeshard.domain.deployment import DeploymentPhase
from edgeshard.domain.errors import (
    AlreadyExistsError,
    EdgeShardError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.generation import Finished, FinishReason, Generation, GenerationEvent, Started, Token
from edgeshard.domain.head import CancelRequest, HeadCommand, StartRequest
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId, NodeName, RequestId
from edgeshard.domain.placement import Placement
from edgeshard_coordinator.control.traffic import TrafficBook
from edgeshard_coordinator.core.state import DeploymentRecord, State

QUEUED_PER_SLOT = 4
"""Requests that may wait at a head for each one that may run; more are refused at once."""
BACKLOG_LIMIT = 4096
"""Events a client may fall behind before its request is given up."""
MESSAGE_CHARACTERS = 1 << 20
"""Of text in one message, with the events of several requests or of one: gRPC bounds the bytes. A token has a few
characters; one that completes what many began may have any number."""


@dataclass(slots=True, eq=False)
class Attachment:
    """One head's Attach stream. `outgoing` ends with None; admission bounds it."""

    deployment: DeploymentName
    epoch: Epoch
    node_id: NodeId
    node_name: NodeName
    number: int
    outgoing: asyncio.Queue[HeadCommand | None] = field(default_factory=asyncio.Queue)
    requests: dict[RequestId, RunningRequest] = field(default_factory=dict)

    def close(self) -> None:
        self.outgoing.put_nowait(None)


class RunningRequest:
    """One request: its journal, and the events its client has not read yet."""

    def __init__(
        self, request_id: RequestId, generation: Generation, attachment: Attachment, placement: Placement
    ) -> None:
        self.request_id = request_id
        self.generation = generation
        self.attachment = attachment
        self.placement = placement
        self.prompt_tokens: tuple[int, ...] | None = None
        self.emitted: list[int] = []
        self.cancel_sent = False
        self.unread_by_choice = False
        """Its events are not read any more: the client left, or was given up."""
        self.on_news: Callable[[], None] = self._nobody_waits
        """Called when there is something to `take`."""
        self._unread: deque[GenerationEvent] = deque()
        self._error: EdgeShardError | None = None

    @property
    def next_position(self) -> int | None:
        """Where the next token goes; None before the head accepted the request."""
        return None if self.prompt_tokens is None else len(self.prompt_tokens) + len(self.emitted)

    @property
    def backlog(self) -> int:
        return len(self._unread)

    def deliver(self, event: GenerationEvent) -> None:
        if self._error is not None:
            return  # The client has been told another end.
        self._unread.append(event)
        self.on_news()

    def fail(self, error: EdgeShardError, *, drop_unread: bool = False) -> None:
        """End the client's stream with `error`, after its unread events unless these are dropped."""
        if drop_unread:
            self._unread.clear()
        self._error = self._error or error
        self.on_news()

    def take(self, most: int, most_characters: int) -> tuple[list[GenerationEvent], EdgeShardError | None]:
        """At most so many events of so much text, and behind the last one the error that the request ended with.
        Finished counts as no event: it comes with the token before it."""
        unread, taken = self._unread, list[GenerationEvent]()
        while unread and (len(taken) < most or isinstance(unread[0], Finished)):
            most_characters -= characters_of(unread[0])
            if most_characters < 0:
                break
            taken.append(unread.popleft())
        return taken, None if unread else self._error

    @property
    def next_characters(self) -> int:
        """Of the first event that nobody took; 0 where there is none."""
        return characters_of(self._unread[0]) if self._unread else 0

    async def events(self) -> AsyncIterator[GenerationEvent]:
        """What the client gets, ending after Finished; raises the error the request ended with."""
        wake = asyncio.Event()
        self.on_news = wake.set
        while True:
            while self._unread:
                event = self._unread.popleft()
                yield event
                if isinstance(event, Finished):
                    return
            if self._error is not None:
                raise self._error
            wake.clear()
            await wake.wait()

    async def first(self) -> GenerationEvent:
        """The first event. Raises the error of a request that never started."""
        wake = asyncio.Event()
        self.on_news = wake.set
        while not self._unread:
            if self._error is not None:
                raise self._error
            wake.clear()
            await wake.wait()
        return self._unread.popleft()

    def _nobody_waits(self) -> None:
        """Before anyone reads its events."""


def characters_of(event: GenerationEvent) -> int:
    """The text of an event, as far as an empty message has room for: what is longer goes alone."""
    return 0 if isinstance(event, Started) else min(len(event.text), MESSAGE_CHARACTERS)


class RequestFront:
    """`state` gives the newest state. Every method returns at once."""

    def __init__(self, state: Callable[[], State], traffic: TrafficBook, backlog_limit: int = BACKLOG_LIMIT) -> None:
        self._state = state
        self.traffic = traffic
        self._backlog_limit = backlog_limit
        self._attachments: dict[DeploymentName, Attachment] = {}
        self._requests: dict[RequestId, RunningRequest] = {}
        self._last_number = 0
        self._closed: EdgeShardError | None = None
        self.dropped_messages = 0
        """Tokens and other messages of heads that came too late, twice or out of order."""

    # Heads

    def attach(self, deployment: DeploymentName, epoch: Epoch, node_id: NodeId, node_name: NodeName) -> Attachment:
        """Take a head's new stream; an older one of the deployment ends, with its requests."""
        older = self._attachments.get(deployment)
        if older is not None:
            self.detach(older)
        self._last_number += 1
        attachment = Attachment(deployment, epoch, node_id, node_name, self._last_number)
        self._attachments[deployment] = attachment
        return attachment

    def detach(self, attachment: Attachment, failure: EdgeShardError | None = None) -> None:
        """The stream is over: every request on it fails. Detaching twice changes nothing."""
        if self._attachments.get(attachment.deployment) is attachment:
            del self._attachments[attachment.deployment]
        failure = failure or UnavailableError(
            f"box {attachment.node_name}, the head of deployment {attachment.deployment}, went away",
            field="node",
            reason="HEAD_LOST",
            retry_after_s=1.0,
        )
        for request in list(attachment.requests.values()):
            request.fail(failure)
            self._remove(request)
        attachment.close()

    def end_service(self, deployment: DeploymentName, epoch: Epoch, failure: EdgeShardError) -> None:
        attachment = self._attachments.get(deployment)
        if attachment is not None and attachment.epoch <= epoch:
            self.detach(attachment, failure)

    def close(self, failure: EdgeShardError) -> None:
        """Refuse new requests and end the running ones."""
        self._closed = failure
        for attachment in list(self._attachments.values()):
            self.detach(attachment, failure)

    def on_accepted(
        self, attachment: Attachment, request_id: RequestId, epoch: Epoch, prompt_tokens: tuple[int, ...]
    ) -> None:
        request = self._current(attachment, request_id, epoch)
        if request is None or request.prompt_tokens is not None:
            self.dropped_messages += 1
            return
        request.prompt_tokens = prompt_tokens
        request.deliver(Started(request_id, attachment.deployment, prompt_tokens, request.placement))

    def on_token(self, attachment: Attachment, request_id: RequestId, epoch: Epoch, token: Token) -> None:
        """A token counts once: in the request's epoch, at the position behind its journal."""
        request = self._current(attachment, request_id, epoch)
        if request is None or token.position != request.next_position:
            self.dropped_messages += 1
            return
        request.emitted.append(token.token)
        if request.unread_by_choice:
            return
        if request.backlog >= self._backlog_limit:
            slow = ResourceExhaustedError(
                f"the client is {request.backlog} tokens behind; read the stream faster or ask for fewer tokens",
                reason="SLOW_READER",
            )
            request.fail(slow, drop_unread=True)
            request.unread_by_choice = True
            self._send_cancel(request)
            return
        request.deliver(token)

    def on_finished(
        self, attachment: Attachment, request_id: RequestId, epoch: Epoch, reason: FinishReason, text: str
    ) -> None:
        request = self._current(attachment, request_id, epoch)
        if request is None:
            self.dropped_messages += 1
            return
        at_once = len(attachment.requests)
        self._remove(request)
        prompt_tokens, new_tokens = len(request.prompt_tokens or ()), len(request.emitted)
        if (record := self._state().deployments.get(attachment.deployment)) is not None:
            self.traffic.count(record.name, record.model, prompt_tokens, new_tokens, at_once)
        request.deliver(Finished(reason, text, prompt_tokens, new_tokens))

    def on_failed(self, attachment: Attachment, request_id: RequestId, epoch: Epoch, failure: EdgeShardError) -> None:
        request = self._current(attachment, request_id, epoch)
        if request is None:
            self.dropped_messages += 1
            return
        self._remove(request)
        request.fail(failure)

    # Clients

    def start(self, model: str, generation: Generation, request_id: RequestId, client: str = "") -> RunningRequest:
        """Hand a request of `client` to the head of the deployment that serves `model`.

        Raises NotFoundError, UnavailableError or FailedPreconditionError naming `model`, AlreadyExistsError naming
        `request_id`, InvalidArgumentError for a generation that cannot be, ResourceExhaustedError when too many wait.
        """
        if self._closed is not None:
            raise self._closed
        generation.validate()
        record = self._find(model)
        attachment = self._attachment_of(record)
        if generation.max_new_tokens > record.spec.max_new_tokens:
            raise InvalidArgumentError(
                f"max_new_tokens {generation.max_new_tokens} is beyond the {record.spec.max_new_tokens} that "
                f"deployment {record.name} allows",
                field="max_new_tokens",
                reason="TOO_MANY_NEW_TOKENS",
            )
        if request_id in self._requests:
            raise AlreadyExistsError(
                "request_id: a request with this id is running; choose another or leave it empty", field="request_id"
            )
        limit = record.spec.concurrency * (1 + QUEUED_PER_SLOT)
        if len(attachment.requests) >= limit:
            raise ResourceExhaustedError(
                f"deployment {record.name} has {limit} requests running or waiting, its limit; try again",
                reason="OVERLOADED",
                retry_after_s=1.0,
            )
        request = RunningRequest(request_id, generation, attachment, record.placement)
        self._requests[request_id] = attachment.requests[request_id] = request
        attachment.outgoing.put_nowait(StartRequest(request_id, generation, client=client))
        return request

    def abandon(self, request: RunningRequest) -> None:
        """The client's call is over, however it ended: stop the request if it still runs.

        It keeps its place until the head says that its memory is free.
        """
        request.unread_by_choice = True
        if self._requests.get(request.request_id) is request:
            self._send_cancel(request)

    def cancel(self, request_id: RequestId) -> bool:
        """Stop a request; its client gets Finished with reason CANCELLED. False when there is none."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._send_cancel(request)
        return True

    def active_requests(self, deployment: DeploymentName) -> int:
        attachment = self._attachments.get(deployment)
        return 0 if attachment is None else len(attachment.requests)

    def all_active_requests(self) -> int:
        return len(self._requests)

    def _find(self, model: str) -> DeploymentRecord:
        records = [r for r in self._state().deployments.values() if r.phase is not DeploymentPhase.DELETING]
        by_name = next((record for record in records if record.name == model), None)
        if by_name is not None:
            return by_name
        serving = [record for record in records if record.model == model]
        if len(serving) == 1:
            return serving[0]
        if serving:
            names = ", ".join(record.name for record in serving)
            raise InvalidArgumentError(
                f"model {model} is served by several deployments; name one of {names}", field="model"
            )
        served = ", ".join(sorted(record.name for record in records)) or "nothing"
        raise NotFoundError(
            f"model {model[:80]!r} is not served here; served: {served}", field="model", reason="MODEL_NOT_SERVED"
        )

    def _attachment_of(self, record: DeploymentRecord) -> Attachment:
        attachment = self._attachments.get(record.name)
        if record.phase is DeploymentPhase.READY and attachment is not None and attachment.epoch == record.epoch:
            return attachment
        if record.phase is DeploymentPhase.FAILED:
            why = record.failure.message if record.failure else "unknown"
            raise FailedPreconditionError(
                f"deployment {record.name} failed: {why}; delete it and deploy it again",
                field="model",
                reason="DEPLOYMENT_FAILED",
            )
        raise UnavailableError(
            f"deployment {record.name} is {record.phase}, not ready; try again",
            field="model",
            reason="DEPLOYMENT_NOT_READY",
            retry_after_s=1.0,
        )

    def _current(self, attachment: Attachment, request_id: RequestId, epoch: Epoch) -> RunningRequest | None:
        return attachment.requests.get(request_id) if epoch == attachment.epoch else None

    def _send_cancel(self, request: RunningRequest) -> None:
        if not request.cancel_sent:
            request.cancel_sent = True
            request.attachment.outgoing.put_nowait(CancelRequest(request.request_id))

    def _remove(self, request: RunningRequest) -> None:
        request.attachment.requests.pop(request.request_id, None)
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]
