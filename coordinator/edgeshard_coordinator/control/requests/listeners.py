"""Clients' listeners: the tokens of all requests of a client that are there together go in one
message.

Nothing waits to be joined. Messages that arrive during a write are gathered. A request's tokens
beyond those that its client has read (`UNREAD_TOKENS`) stay with the request, whose own limit then
counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from edgeshard.domain.errors import AlreadyExistsError, EdgeShardError, UnavailableError
from edgeshard.domain.requests.generation import UNREAD_TOKENS, Finished, Heard, Listener, Token
from edgeshard_coordinator.control.requests.running_request import (
    MESSAGE_CHARACTERS,
    RunningRequest,
    characters_of,
)

MOST_TOKENS = 512
"""Tokens of one message, which then stays far below gRPC's limit, with logprobs too."""


@dataclass(slots=True, eq=False)
class Followed:
    """A request whose tokens go to a listener; `sent_more` counts those sent and not read yet."""

    number: int
    request: RunningRequest
    sent_more: int = 0
    has_end: bool = False
    """Whether its end was sent."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class ListenerFeed:
    """One client's Listen stream: `follow` a request, and write what `heard` yields."""

    def __init__(self) -> None:
        self._followed: dict[int, Followed] = {}
        self._news: dict[int, Followed] = {}
        self._wake = asyncio.Event()
        self._closed = False
        self._finishing = False

    def follow(self, number: int, request: RunningRequest) -> Followed:
        """Send the request's events from now on. Raises AlreadyExistsError for a number that is in
        use."""
        if number in self._followed:
            raise AlreadyExistsError(
                f"listener.number {number} has a request running", field="listener.number"
            )
        followed = self._followed[number] = Followed(number, request)
        request.on_news = lambda: self._has_news(followed)
        self._has_news(followed)
        return followed

    def leave(self, followed: Followed) -> None:
        """The request's call is over: nothing more of it is sent."""
        if self._followed.get(followed.number) is followed:
            del self._followed[followed.number]
        self._news.pop(followed.number, None)

    def read(self, number: int, count: int) -> None:
        """The client has read `count` more tokens. A number that is not in use is a request that
        has ended."""
        followed = self._followed.get(number)
        if followed is not None:
            followed.sent_more = max(0, followed.sent_more - count)
            self._has_news(followed)

    def close(self) -> None:
        """The stream is over: so are the calls of its requests."""
        self._closed = True
        self._wake.set()
        for followed in self._followed.values():
            followed.ended.set()

    def finish(self) -> None:
        """End the stream once everything is sent."""
        self._finishing = True
        self._wake.set()

    async def heard(self) -> AsyncIterator[Heard]:
        """The messages to send, until the stream is closed."""
        while not self._closed:
            if not self._news:
                if self._finishing:
                    return
                self._wake.clear()
                await self._wake.wait()
            message = self._take()
            if message.tokens or message.ends:
                yield message

    def _has_news(self, followed: Followed) -> None:
        if not followed.has_end and self._followed.get(followed.number) is followed:
            self._news[followed.number] = followed
            self._wake.set()

    def _take(self) -> Heard:
        tokens: list[tuple[int, Token]] = []
        ends: list[tuple[int, Finished | EdgeShardError]] = []
        room, is_full = MESSAGE_CHARACTERS, False
        while self._news and not is_full:
            number, followed = next(iter(self._news.items()))
            most = min(UNREAD_TOKENS - followed.sent_more, MOST_TOKENS - len(tokens))
            events, ended = followed.request.take(most, room)
            end: Finished | EdgeShardError | None = ended
            for event in events:
                room -= characters_of(event)
                if isinstance(event, Token):
                    tokens.append((number, event))
                    followed.sent_more += 1
                elif isinstance(event, Finished):
                    end = event
            if end is not None:
                ends.append((number, end))
                followed.has_end = True
                followed.ended.set()
            # The rest waits for the client to read or, if this message is full, for the next one.
            is_full = len(tokens) >= MOST_TOKENS or followed.request.next_characters > room
            if not is_full or not followed.request.backlog:
                del self._news[number]
        return Heard(tuple(tokens), tuple(ends))


class Listeners:
    """The open Listen streams, each by whose it is and the id that it was given.

    A request finds only listeners of its own client (in plaintext, of its own connection), so no
    client can have another's tokens sent anywhere.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], ListenerFeed] = {}

    def open(self, owner: str, listener_id: str) -> ListenerFeed:
        """Raises AlreadyExistsError if the client has a listener of this id."""
        if (owner, listener_id) in self._streams:
            raise AlreadyExistsError("listener: you have a listener of this id", field="listener")
        stream = self._streams[owner, listener_id] = ListenerFeed()
        return stream

    def close(self, owner: str, listener_id: str) -> None:
        stream = self._streams.pop((owner, listener_id), None)
        if stream is not None:
            stream.close()

    def finish(self) -> None:
        for stream in self._streams.values():
            stream.finish()

    def find(self, owner: str, listener: Listener | None) -> ListenerFeed | None:
        return None if listener is None else self._streams.get((owner, listener.id))


def listener_lost() -> UnavailableError:
    return UnavailableError(
        "the listener of this request ended before it; send it again",
        reason="LISTENER_LOST",
        retry_after_s=0.1,
    )
