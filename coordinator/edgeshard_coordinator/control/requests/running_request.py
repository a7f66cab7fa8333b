"""A request in the coordinator: its journal, its unread events, and the stream of the head that
runs it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import InitVar, dataclass, field, replace

from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId, NodeName, RequestId
from edgeshard.domain.requests.generation import (
    Finished,
    FinishReason,
    Generation,
    GenerationEvent,
    PromptLogprobs,
    Started,
)
from edgeshard.domain.requests.head import CancelRequest, HeadCommand, StartRequest
from edgeshard_coordinator.control.requests.request_meter import RequestTimes
from edgeshard_coordinator.control.requests.resumptions import Claim, Standing, digest_of

MESSAGE_CHARACTERS = 1 << 20
"""Characters of text in one message, with the events of several requests or of one, since gRPC
bounds the bytes. A token has a few characters; a token that completes many others may have any
number."""


@dataclass(slots=True, eq=False)
class Attachment:
    """One head's Attach stream, and the requests that it runs. `stages` counts its pipeline's
    stages.

    `outgoing` ends with None, or with the error that ends the stream; admission bounds it.
    """

    deployment: DeploymentName
    epoch: Epoch
    node_id: NodeId
    node_name: NodeName
    number: int
    stages: int = 1
    outgoing: asyncio.Queue[HeadCommand | EdgeShardError | None] = field(
        default_factory=asyncio.Queue
    )
    requests: dict[RequestId, RunningRequest] = field(default_factory=dict)

    def close(self) -> None:
        self.outgoing.put_nowait(None)

    def fail(self, error: EdgeShardError) -> None:
        """End the stream; the head gets the error as its status."""
        self.outgoing.put_nowait(error)


@dataclass(eq=False)
class RunningRequest:
    """A request that runs or waits, with its journal: the prompt and the tokens that its client has
    or will have.

    Without an `attachment` it is parked: its deployment has no head, and the next one continues it.
    A client that resumes brings the tokens that it `had`; None if the request is new. `deadline` is
    when its client will have left, in seconds of the coordinator's clock.
    """

    request_id: RequestId
    deployment: DeploymentName
    generation: Generation
    client: str = ""
    had: InitVar[tuple[int, ...] | None] = None
    deadline: float | None = None
    scored: int = 1
    """The position after the last one whose prompt log-probability the client has or will have."""
    attachment: Attachment | None = None
    prompt_tokens: tuple[int, ...] | None = None
    read: int = 0
    """Positions that its head reports as read, before the first token."""
    emitted: list[int] = field(init=False)
    """No client gets other tokens than these, whatever node computes them."""
    resumed: bool = field(init=False)
    """Whether its client claims that it had a start before."""
    digest: bytes = field(init=False)
    standing: Standing = Standing.NEW
    is_charged: bool = False
    """Whether its prompt was counted, here or by a former run of the coordinator."""
    is_back: bool = False
    """True once this client's resumption was accepted; it is accepted at most once."""
    characters: int = 0
    """Characters of the text of its tokens, as heads reported it."""
    times: RequestTimes = field(default_factory=RequestTimes.untold)
    parked_at: float = 0.0
    failed_heads: int = 0
    """Heads in a row that were lost before the request had a token of them."""
    cancel_wanted: bool = False
    unread_by_choice: bool = False
    """Its events are not read any more: the client left, or was given up."""
    on_news: Callable[[], None] = lambda: None
    """Called when there is something to `take`."""
    _had_at_start: int = -1
    _unread: deque[GenerationEvent] = field(default_factory=deque)
    _error: EdgeShardError | None = None

    def __post_init__(self, had: tuple[int, ...] | None) -> None:
        self.emitted = list(had or ())
        self.resumed = had is not None
        self.digest = digest_of(self.generation)

    @property
    def next_position(self) -> int | None:
        """The position of the next token; None before a head accepted the request."""
        return None if self.prompt_tokens is None else len(self.prompt_tokens) + len(self.emitted)

    @property
    def claim(self) -> Claim:
        return Claim(self.deployment, self.client, self.digest, len(self.emitted), self.scored)

    def goes_on_as(self, other: RunningRequest) -> bool:
        """Whether the other is this very request, with no token that this one has not."""
        begins_so = self.emitted[: len(other.emitted)] == other.emitted
        return other.resumed and self.claim.covers(other.claim) and begins_so

    @property
    def backlog(self) -> int:
        return len(self._unread)

    def start(self, instance: str) -> StartRequest:
        """The command by which a head begins the request, or continues it."""
        had = self.scored + len(self.emitted)
        self.failed_heads = self.failed_heads + 1 if had == self._had_at_start else 0
        # Once a head has it, no other refuses it. A client's own claim is not enough to resume.
        resumed = self._had_at_start >= 0 or self.standing in (Standing.BELIEVED, Standing.REPLAYED)
        self._had_at_start = had
        generation = self.generation
        if self.prompt_tokens is not None:
            generation = replace(generation, prompt=self.prompt_tokens)
        emitted = tuple(self.emitted)
        return StartRequest(
            self.request_id,
            generation,
            emitted,
            self.client,
            resumed,
            instance,
            self.scored,
            self.digest,
        )

    def cancel(self) -> None:
        """Tell the head, now or when there is one, to stop it; once is enough."""
        if not self.cancel_wanted:
            self.cancel_wanted = True
            if self.attachment is not None:
                self.attachment.outgoing.put_nowait(CancelRequest(self.request_id))

    def finish(self, reason: FinishReason, text: str, now: float) -> None:
        """Give the client its last event, with `text` after the last token; `now` as in its
        `times`."""
        self.times.finished(reason, now)
        self.deliver(Finished(reason, text, len(self.prompt_tokens or ()), len(self.emitted)))

    def deliver(self, event: GenerationEvent) -> None:
        if self._error is not None:
            return  # The client has received another end.
        self._unread.append(event)
        self.on_news()

    def fail(self, error: EdgeShardError, *, drop_unread: bool = False) -> None:
        """End the client's stream with `error`, after its unread events unless these are
        dropped."""
        if drop_unread:
            self._unread.clear()
        self._error = self._error or error
        self.on_news()

    def take(
        self, most: int, most_characters: int = MESSAGE_CHARACTERS
    ) -> tuple[list[GenerationEvent], EdgeShardError | None]:
        """At most `most` events of `most_characters`, and the error that the request ended with,
        which follows the last event. Finished counts as no event: it arrives with the token before
        it."""
        unread, events = self._unread, list[GenerationEvent]()
        while unread and (len(events) < most or isinstance(unread[0], Finished)):
            most_characters -= characters_of(unread[0])
            if most_characters < 0:
                break
            events.append(unread.popleft())
        return events, None if unread else self._error

    @property
    def next_characters(self) -> int:
        """The characters of the first event that was not taken; 0 if there is none."""
        return characters_of(self._unread[0]) if self._unread else 0

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """The client's events, ending after Finished; raises the error that the request ended
        with."""
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
        async with aclosing(self.events()) as events:
            return await anext(events)


def characters_of(event: GenerationEvent) -> int:
    """The characters of an event's text, up to those that an empty message holds: a longer one is
    sent in its own message."""
    return (
        0
        if isinstance(event, Started | PromptLogprobs)
        else min(len(event.text), MESSAGE_CHARACTERS)
    )
