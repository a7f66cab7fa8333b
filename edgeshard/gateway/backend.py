"""What the gateway needs of a site: what is served, and the tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from edgeshard.domain.control.site import ServedModel, StoredModel
from edgeshard.domain.requests.chat import ChatPrompt, Conversation
from edgeshard.domain.requests.generation import Generation, GenerationEvent
from edgeshard.gateway.words import Words


class Backend(Protocol):
    """A site that answers. Every method raises typed errors."""

    def models(self) -> tuple[ServedModel, ...]:
        """What answers now."""
        ...

    def find(self, model: str, only: frozenset[str] | None = None) -> ServedModel:
        """By a deployment's name, or a model's that one deployment serves; `only` those of these names are there for
        the caller. Raises NotFoundError, and what says that it does not answer at the moment."""
        ...

    def stored(self, model: str) -> StoredModel | None:
        """The model of a deployment as it lies in the store; None where nobody can tell."""
        ...

    def added_at(self, model: str) -> float:
        """When the model of a deployment came into the store, in seconds since 1970; 0 where nobody can tell."""
        ...

    def generate(self, model: str, generation: Generation, identity: str) -> AsyncGenerator[GenerationEvent, None]:
        """The events of one request; closing the generator cancels it on every node."""
        ...

    def check_place(self, identity: str, reading: int) -> None:
        """Raise ResourceExhaustedError where `identity` may have no request beside those that run or wait and
        `reading` ones whose bodies are on their way: asked before the body of one is read."""
        ...

    async def prompt(self, model: str, conversation: Conversation, identity: str) -> ChatPrompt:
        """The conversation as tokens, by the model's chat template."""
        ...

    async def count(self, model: str, conversation: Conversation, identity: str) -> ChatPrompt:
        """As `prompt`, for who wants no answer: its tokens are charged here."""
        ...

    async def tokenize(self, model: str, text: str, special: bool, identity: str) -> tuple[int, ...]:
        """The ids of a text, which are charged."""
        ...

    async def detokenize(self, model: str, tokens: Sequence[int], identity: str) -> str: ...

    def words(self, model: str) -> Words:
        """The vocabulary of a deployment's model."""
        ...
