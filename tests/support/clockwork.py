"""A gateway's backend without a site: every request gets tokens by the clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from edgeshard.domain.control.site import ServedModel, StoredModel
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.ids import DeploymentName, ModelName, RequestId
from edgeshard.domain.requests.conversation import ChatPrompt, Conversation
from edgeshard.domain.requests.generation import (
    Finished,
    FinishReason,
    Generation,
    GenerationEvent,
    Started,
    Token,
)
from edgeshard.gateway.access.auth import Caller, unending
from edgeshard.gateway.backend import Words

SERVED = ServedModel(DeploymentName("m"), ModelName("m"), 1 << 20, 1 << 20)
STEP_S = 0.01
"""Between two tokens of a stream, all streams in step, as a head has them."""


class Clockwork:
    """A backend whose every request gets a token at each step, and at most `most` of them."""

    def __init__(self, step_s: float = STEP_S, most: int = 1 << 20) -> None:
        self._step_s = step_s
        self._most = most
        self._step = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._ticking = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            step, self._step = self._step, asyncio.Event()
            step.set()

    def models(self) -> tuple[ServedModel, ...]:
        return (SERVED,)

    def find(self, model: str, only: frozenset[str] | None = None) -> ServedModel:
        return SERVED

    def stored(self, model: str) -> StoredModel | None:
        return None

    def added_at(self, model: str) -> float:
        return 0.0

    async def generate(
        self, model: str, generation: Generation, identity: str
    ) -> AsyncGenerator[GenerationEvent, None]:
        yield Started(RequestId("r"), SERVED.deployment, (1, 2, 3), Placement((), 16, 1, 1, 1))
        count = min(generation.max_new_tokens, self._most)
        for position in range(count):
            await self._step.wait()
            yield Token(3 + position, 17, " word", -0.5)
        yield Finished(FinishReason.LENGTH, "", 3, count)

    def check_place(self, identity: str, reading: int) -> None:
        pass

    async def prompt(self, model: str, conversation: Conversation, identity: str) -> ChatPrompt:
        return ChatPrompt((1, 2, 3), room=1 << 20)

    async def count(self, model: str, conversation: Conversation, identity: str) -> ChatPrompt:
        return await self.prompt(model, conversation, identity)

    async def tokenize(
        self, model: str, text: str, special: bool, identity: str
    ) -> tuple[int, ...]:
        return (1, 2, 3)

    async def detokenize(self, model: str, tokens: Sequence[int], identity: str) -> str:
        return "text"

    def words(self, model: str) -> Words:
        async def ask(tokens: Sequence[int]) -> Sequence[str]:
            return [" word"] * len(tokens)

        return Words(ask)


class Open:
    """Lets everybody in."""

    def enter(self, key: str | None, what: str, address: str) -> Caller:
        return Caller("", metrics=True, check=unending)
