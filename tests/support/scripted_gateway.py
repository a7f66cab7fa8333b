"""A gateway in this process before a backend that gives the answers that a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.errors import UnauthenticatedError
from edgeshard.domain.ids import RequestId
from edgeshard.domain.requests.conversation import (
    AnswerFormat,
    ChatPrompt,
    Conversation,
    GenerationDefaults,
)
from edgeshard.domain.requests.generation import (
    Finished,
    FinishReason,
    Generation,
    GenerationEvent,
    Started,
    Token,
)
from edgeshard.gateway.access.auth import Caller, unending
from edgeshard.gateway.app import make_app
from edgeshard.gateway.connections.listen import HttpListen
from edgeshard.gateway.connections.server import GatewayServer
from tests.support.clockwork import SERVED, Clockwork
from tests.support.http import Http

KEY = "secret"


class Keyed:
    """One key opens."""

    def enter(self, key: str | None, what: str, address: str) -> Caller:
        if key != KEY:
            raise UnauthenticatedError("no", reason="INVALID_API_KEY")
        return Caller("key/me", check=unending)


class Said(Clockwork):
    """Sends `texts`, and then ends, or fails with `error`; records its requests."""

    def __init__(self) -> None:
        super().__init__(0.001, 4)
        self.texts: list[str] = []
        self.error: Exception | None = None
        self.format = AnswerFormat()
        self.defaults = GenerationDefaults()
        self.asked: list[Generation] = []
        self.conversations: list[Conversation] = []
        self.running = 0
        self.idle = asyncio.Event()

    async def generate(
        self, model: str, generation: Generation, identity: str
    ) -> AsyncGenerator[GenerationEvent, None]:
        self.asked.append(generation)
        self.running += 1
        self.idle.clear()
        try:
            yield Started(RequestId("r"), SERVED.deployment, (1, 2, 3), Placement((), 16, 1, 1, 1))
            for position, text in enumerate(self.texts):
                yield Token(3 + position, 100 + position, text)
                await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
            yield Finished(FinishReason.STOP, "", 3, len(self.texts))
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()

    async def prompt(self, model: str, conversation: Conversation, identity: str) -> ChatPrompt:
        self.conversations.append(conversation)
        return ChatPrompt((1, 2, 3), self.format, self.defaults, 50)


@asynccontextmanager
async def serving(said: Said, **options: Any) -> AsyncIterator[Http]:
    """Requests with the key, to a gateway before `said`; `options` are the options of
    `make_app`."""
    server = GatewayServer(make_app(said, Keyed(), **options), HttpListen("127.0.0.1:0"))
    await server.start()
    try:
        yield Http(server.url, KEY)
    finally:
        await server.stop()
