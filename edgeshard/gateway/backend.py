"""The site as the gateway needs it: its models, tokens from them, and the texts of single
tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from edgeshard.domain.control.site import ServedModel, StoredModel
from edgeshard.domain.requests.conversation import ChatPrompt, Conversation
from edgeshard.domain.requests.generation import (
    Generation,
    GenerationEvent,
    PromptLogprobs,
    Started,
    Token,
)

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Words:
    """The texts of a model's tokens. Unknown ones are requested, many at a time, and kept: at most
    the vocabulary."""

    def __init__(self, ask: Callable[[Sequence[int]], Awaitable[Sequence[str]]]) -> None:
        self._ask = ask
        self._texts: dict[int, str] = {}

    async def learn(self, event: GenerationEvent) -> None:
        """Ask for the texts of all tokens of an event that are not known yet."""
        unknown = [token for token in dict.fromkeys(_tokens(event)) if token not in self._texts]
        if unknown:
            self._texts.update(zip(unknown, await self._ask(unknown), strict=True))

    def text(self, token: int) -> str:
        """The text of a token within a text; a part of a character is U+FFFD."""
        return self._texts.get(token, UNKNOWN)


def _tokens(event: GenerationEvent) -> Iterable[int]:
    match event:
        case Started():
            yield from event.prompt_tokens
        case Token():
            yield event.token
            yield from (item.token for item in event.top)
        case PromptLogprobs():
            yield from (item.token for top in event.top for item in top)


class Backend(Protocol):
    """A site that answers. Every method raises typed errors."""

    def models(self) -> tuple[ServedModel, ...]:
        """The models that answer now."""

    def find(self, model: str, only: frozenset[str] | None = None) -> ServedModel:
        """The deployment of this name, or the only one of the model of this name; `only` bounds the
        names for a caller.

        Raises NotFoundError, or another error of a deployment that does not answer at the moment.
        """

    def stored(self, model: str) -> StoredModel | None:
        """The stored model of a deployment; None if it is unknown."""

    def added_at(self, model: str) -> float:
        """The seconds since 1970 at which the model of a deployment was added to the store; 0 if
        they are unknown."""

    def generate(
        self, model: str, generation: Generation, identity: str
    ) -> AsyncGenerator[GenerationEvent, None]:
        """The events of one request; closing the generator cancels it on every node."""

    def check_place(self, identity: str, reading: int) -> None:
        """Raise ResourceExhaustedError if `identity` may have no further request.

        It has those that run or wait, and `reading` others whose bodies are on their way. Called
        before a body is read.
        """

    async def prompt(self, model: str, conversation: Conversation, identity: str) -> ChatPrompt:
        """The conversation as tokens, by the model's chat template."""

    async def count(self, model: str, conversation: Conversation, identity: str) -> ChatPrompt:
        """The tokens as of `prompt`, for a caller that requests no answer: they are charged
        here."""

    async def tokenize(
        self, model: str, text: str, special: bool, identity: str
    ) -> tuple[int, ...]:
        """The ids of a text, which are charged."""

    async def detokenize(self, model: str, tokens: Sequence[int], identity: str) -> str:
        """The text of ids."""

    def words(self, model: str) -> Words:
        """The vocabulary of a deployment's model."""
