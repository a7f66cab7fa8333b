"""What the gateway needs of a site: who calls, what is served, and the tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from edgeshard.domain.chat import ChatPrompt, Conversation
from edgeshard.domain.errors import DeniedError
from edgeshard.domain.generation import Generation, GenerationEvent
from edgeshard.domain.site import ServedModel
from edgeshard.gateway.words import Words


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the identity that quotas and logs know, and the models it may use (None: all)."""

    identity: str
    models: frozenset[str] | None = None

    def may_use(self, served: ServedModel) -> bool:
        return self.models is None or not self.models.isdisjoint((served.deployment, served.model))

    def check(self, served: ServedModel) -> None:
        """Raise DeniedError for a model that the key is not for."""
        if not self.may_use(served):
            raise DeniedError(
                f"this API key is not for model {served.deployment}: ask the operator for one that is",
                field="model",
                reason="KEY_SCOPE",
            )


class Doors(Protocol):
    """Who may come in."""

    def enter(self, key: str | None, what: str, address: str) -> Caller:
        """The caller that shows `key`, None without one; `what` is asked for, from `address` (host:port).

        Raises UnauthenticatedError.
        """
        ...


class Backend(Protocol):
    """A site that answers. Every method raises typed errors."""

    def models(self) -> tuple[ServedModel, ...]:
        """What answers now."""
        ...

    def find(self, model: str) -> ServedModel:
        """By a deployment's name, or a model's that one deployment serves. Raises NotFoundError, and what says that it
        does not answer at the moment."""
        ...

    def generate(self, model: str, generation: Generation, identity: str) -> AsyncGenerator[GenerationEvent, None]:
        """The events of one request; closing the generator cancels it on every box."""
        ...

    async def prompt(self, model: str, conversation: Conversation) -> ChatPrompt:
        """The conversation as tokens, by the model's chat template."""
        ...

    async def tokenize(self, model: str, text: str, special: bool) -> tuple[int, ...]: ...

    async def detokenize(self, model: str, tokens: Sequence[int]) -> str: ...

    def words(self, model: str) -> Words:
        """The vocabulary of a deployment's model."""
        ...
