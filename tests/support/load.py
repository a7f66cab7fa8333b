"""The load of tests, chaos, attacks, simulator and benchmarks: requests as their client sees
them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self, Unpack

from edgeshard import Client
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.requests.generation import Finished, GenerateOptions, GenerationEvent, Token
from tests.support.checker import Reference, reference_of


@dataclass(slots=True)
class Stream:
    """The view of one request's client, with times in seconds of a steady clock."""

    deployment: str
    prompt: str | Sequence[int]
    options: GenerateOptions
    events: list[GenerationEvent] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When it was asked, and when each token came."""
    error: EdgeShardError | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token.token for token in self.tokens)

    @property
    def waits_s(self) -> list[float]:
        """Seconds until the first token, and between each token and the next."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between each token and the next."""
        return self.waits_s[1:]

    @property
    def over(self) -> bool:
        return self.error is not None or (
            bool(self.events) and isinstance(self.events[-1], Finished)
        )

    async def follow(self, client: Client) -> AsyncGenerator[GenerationEvent, None]:
        """Each event, after it is recorded. An error is recorded, too, and is the end."""
        self.times.append(time.monotonic())
        try:
            async with aclosing(
                client.generate(self.deployment, self.prompt, **self.options)
            ) as events:
                async for event in events:
                    self.events.append(event)
                    if isinstance(event, Token):
                        self.times.append(time.monotonic())
                        self.tokens.append(event)
                    self.news.set()
                    yield event
        except EdgeShardError as error:
            self.error = error
        self.news.set()

    async def run(self, client: Client) -> Self:
        """To its end, or to the error that ended it."""
        async for _ in self.follow(client):
            pass
        return self

    async def has(self, tokens: int) -> None:
        """Wait for `tokens` tokens, or the end."""
        while len(self.tokens) < tokens and not self.over:
            self.news.clear()
            await self.news.wait()

    def raise_error(self) -> None:
        """Raise the error that ended it, if there is one."""
        if self.error is not None:
            raise self.error


async def answered(
    client: Client, deployment: str, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
) -> Stream:
    """A request at its end. Raises the error that ended it."""
    stream = await Stream(deployment, prompt, options).run(client)
    stream.raise_error()
    return stream


async def all_answered(client: Client, streams: Sequence[Stream]) -> None:
    """Run them at once, each to its end. Raises the first error that ended one."""
    await asyncio.gather(*(stream.run(client) for stream in streams))
    for stream in streams:
        stream.raise_error()


async def whole_answer(client: Client, stream: Stream) -> Reference:
    """Run a request to its end. Raises its error, and ValueError for an answer that is not
    whole."""
    (await stream.run(client)).raise_error()
    return reference_of(stream.events)
