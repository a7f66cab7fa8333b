"""The site as the gateway needs it: its models, and tokens from them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from edgeshard.domain.control.site import ServedModel, StoredModel
from edgeshard.domain.requests.conversation import ChatPrompt, Conversation
from edgeshard.domain.requests.generation import Generation, GenerationEvent
from edgeshard.gateway.words import Words


class Backend(Protocol):
    """A site that answers. Every method raises typed errors."""

    def models(self) -> tuple[ServedModel, ...]:
        """The models that answer now."""

    def find(self, model: str, only: frozenset[str] | None = None) -> ServedModel:
        """The deployment of this name, or the only one of the model of this name; `only` bounds the names for a caller.

        Raises NotFoundError, or another error of a deployment that does not answer at the moment.
        """

    def stored(self, model: str) -> StoredModel | None:
        """The stored model of a deployment; None if it is unknown."""

    def added_at(self, model: str) -> float:
        """The seconds since 1970 at which the model of a deployment was added to the store; 0 if
        they are unknown."""

    def generate(self, model: str, generation: Generation, identity: str) -> AsyncGenerator[GenerationEvent, None]:
        """The events of one request; closing the generator cancels it on every node."""

    def check_place(self, identity: str, reading: int) -> None:
        """Raise ResourceExhaustedError if `identity` may have no further request.

        It has those that run or wait, and `reading` others whose bodies are on their way. Called before a body is read.
        """

    async def prompt(self, model: str, conversation: Conversation, identity: str) -> ChatPrompt:
        """The conversation as tokens, by the model's chat template."""

    async def count(self, model: str, conversation: Conversation, identity: str) -> ChatPrompt:
        """The tokens as of `prompt`, for a caller that requests no answer: they are charged here."""

    async def tokenize(self, model: str, text: str, special: bool, identity: str) -> tuple[int, ...]:
        """The ids of a text, which are charged."""

    async def detokenize(self, model: str, tokens: Sequence[int], identity: str) -> str:
        """The text of ids."""

    def words(self, model: str) -> Words:
        """The vocabulary of a deployment's model."""
