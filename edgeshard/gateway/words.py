"""What single tokens of a model read, as far as answers needed them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

from edgeshard.domain.requests.generation import GenerationEvent, PromptLogprobs, Started, Token

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Words:
    """Asks for what it does not know yet, many at a time, and remembers it: at most the model's vocabulary."""

    def __init__(self, ask: Callable[[Sequence[int]], Awaitable[Sequence[str]]]) -> None:
        self._ask = ask
        self._texts: dict[int, str] = {}

    async def learn(self, event: GenerationEvent) -> None:
        """All that `text` will be asked of an event."""
        unknown = [token for token in dict.fromkeys(_tokens(event)) if token not in self._texts]
        if unknown:
            self._texts.update(zip(unknown, await self._ask(unknown), strict=True))

    def text(self, token: int) -> str:
        """Of a token within a text; a part of a character is U+FFFD."""
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
