"""The texts of single tokens of a model, as far as answers needed them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

from edgeshard.domain.requests.generation import GenerationEvent, PromptLogprobs, Started, Token

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
