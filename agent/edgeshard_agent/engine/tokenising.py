"""A request's way through the tokenizer: its prompt to token ids, and its tokens to text.

Prompts are tokenized outside the event loop, a few at a time, in a fair order, and only if they
could fit.

A text takes time and memory in proportion to its length in the tokenizer: seconds, and 130 bytes
for each byte in which tokens are searched. Unbounded threads would let the prompts of one client,
even one that left, occupy the node. So texts that may become long go to a process with limits, one
at a time; short ones go to threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from edgeshard.domain.errors import (
    CancelledRequestError,
    FailedPreconditionError,
    InvalidArgumentError,
)
from edgeshard.domain.requests.generation import Generation, check_prompt_size, text_bytes
from edgeshard.domain.requests.head import StartRequest
from edgeshard_agent.scheduler.fairness import ServedTokens

AT_ONCE = 2
LONG_BYTES = 256 << 10
"""Limit of a text's bytes times the tokenizer's growth. A thread takes 34 MB and a tenth of a
second for a text of this size. Most prompts stay below: 128 KB of them with GPT-2's steps, 43 with
Qwen's, 21 with Llama 2's. So most heads never have the process."""
SHRINKING = 4
"""Bytes of a text for one of its normalised form: NFKC makes a letter of 1 byte of a mathematical
one of 4. No other mapping of characters shortens more: composed by NFC, three letters of Hangul
become one of a third of their bytes."""


class AnyTokenizer(Protocol):
    """`edgeshard_agent.engine.tokenizer.Tokenizer`"""

    growth: float
    longest_token_bytes: int

    @property
    def special_tokens(self) -> Mapping[str, int]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class AnyLongTexts(Protocol):
    """`edgeshard_agent.engine.long_texts.LongTexts`"""

    async def encode(self, text: str) -> list[int]: ...

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Text:
    """A prompt that waits for or is in the tokenizer. `client`, `priority` and `arrival` decide
    whose turn it is."""

    text: str
    size: int
    is_long: bool
    client: str
    priority: int
    arrival: int
    has_left: Callable[[], bool]
    tokens: asyncio.Future[list[int]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Tokenising:
    """Takes the prompts of one head, whose requests have `max_context` positions. All but `encode`
    is on the loop. Without `long_texts` all go to threads.

    By priority, then clients get equal shares of the bytes, then in the order they came. A running
    text keeps its place until it is done, even if others wait: a short one cannot be stopped, and a
    long one ends by its limits.
    """

    def __init__(
        self,
        tokenizer: AnyTokenizer | None,
        max_context: int,
        long_texts: AnyLongTexts | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._long_texts = long_texts
        self._max_context = max_context
        self._served_bytes = ServedTokens()
        self._waiting: list[_Text] = []
        self._running: list[_Text] = []
        self._arrivals = 0

    async def prompt_tokens(self, start: StartRequest, has_left: Callable[[], bool]) -> list[int]:
        """The prompt's token ids. `has_left` returns whether its client has left.

        Raises InvalidArgumentError if the text is too long or costs too much,
        FailedPreconditionError if there is no tokenizer, and CancelledRequestError if the client
        left before its turn. Errors of the tokenizer pass through.
        """
        prompt = start.generation.prompt
        if not isinstance(prompt, str):
            return list(prompt)
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise FailedPreconditionError(
                "prompt: the model was added without a tokenizer.json; send token ids",
                field="prompt",
                reason="NO_TOKENIZER",
            )
        size = text_bytes(prompt)
        self._check_fits(tokenizer, size, _least_new_tokens(start.generation))
        self._arrivals += 1
        is_long = size * tokenizer.growth > LONG_BYTES
        text = _Text(
            prompt, size, is_long, start.client, start.generation.priority, self._arrivals, has_left
        )
        self._served_bytes.open(text.client)
        self._waiting.append(text)
        try:
            self._begin(tokenizer)
            tokens = await text.tokens
        finally:
            if text in self._waiting:  # the task was cancelled
                self._waiting.remove(text)
            self._served_bytes.close(text.client)
        check_prompt_size(tokens)
        return tokens

    async def close(self) -> None:
        """End the process of long texts; texts that wait for it fail."""
        if self._long_texts is not None:
            await self._long_texts.close()

    def _check_fits(self, tokenizer: AnyTokenizer, size: int, new_tokens: int) -> None:
        """Refuse a text that the context cannot hold, before it costs anything.

        A token stands for no more of the normalised text than the longest entry of the vocabulary.
        Normalising character by character leaves at least one byte of `SHRINKING`. A text beyond
        that certainly does not fit. Tokenizers may also drop or join any amount of text: white
        space at the ends, accents, unknown words. Only tokenising shows how much; a text of that
        length is refused all the same.
        """
        room = self._max_context - new_tokens
        if room <= 0:
            raise InvalidArgumentError(
                f"max_new_tokens: {new_tokens} new tokens leave no room for a prompt in the "
                "deployment's "
                f"context of {self._max_context}; request fewer",
                field="max_new_tokens",
                reason="CONTEXT_EXCEEDED",
            )
        most = SHRINKING * room * tokenizer.longest_token_bytes
        if size > most:
            raise InvalidArgumentError(
                f"prompt: a text of {size} bytes does not fit the deployment's context of "
                f"{self._max_context} tokens, "
                f"{new_tokens} of which are for the answer; shorten it",
                field="prompt",
                reason="CONTEXT_EXCEEDED",
            )

    def _begin(self, tokenizer: AnyTokenizer) -> None:
        """Begin the texts that may begin now. Texts whose clients have left go first: they need no
        turn."""
        for text in [text for text in self._waiting if text.has_left()]:
            self._waiting.remove(text)
            if not text.tokens.done():
                text.tokens.set_exception(
                    CancelledRequestError("the request was cancelled before it was tokenised")
                )
        while len(self._running) < AT_ONCE:
            one_is_long = any(text.is_long for text in self._running)
            following = self._served_bytes.first(
                text for text in self._waiting if not (one_is_long and text.is_long)
            )
            if following is None:
                return
            self._waiting.remove(following)
            self._running.append(following)
            self._served_bytes.charge(following.client, following.size)
            work = asyncio.ensure_future(self._encode(tokenizer, following))
            work.add_done_callback(partial(self._ended, tokenizer, following))

    async def _encode(self, tokenizer: AnyTokenizer, text: _Text) -> list[int]:
        if text.is_long and self._long_texts is not None:
            return await self._long_texts.encode(text.text)
        return await asyncio.to_thread(tokenizer.encode, text.text)

    def _ended(self, tokenizer: AnyTokenizer, text: _Text, work: asyncio.Future[list[int]]) -> None:
        self._running.remove(text)
        error = None if work.cancelled() else work.exception()
        if not text.tokens.done():  # otherwise its caller has left
            if work.cancelled():
                text.tokens.cancel()
            elif error is not None:
                text.tokens.set_exception(error)
            else:
                text.tokens.set_result(work.result())
        self._begin(tokenizer)


def _least_new_tokens(generation: Generation) -> int:
    """The number of new tokens that must fit after the prompt."""
    return (
        min(1, generation.max_new_tokens)
        if generation.clip_new_tokens
        else generation.max_new_tokens
    )


class Decoding:
    """The text of one request's tokens. If the tokenizer fails on them, `failed` is called and no
    more text follows.

    A fault must not come out of it: the scheduler would lose the tokens of other requests that came
    with this one's.
    """

    def __init__(self, tokenizer: AnyTokenizer | None, failed: Callable[[Exception], None]) -> None:
        self._tokenizer = tokenizer
        self._failed = failed

    def __call__(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        try:
            return self._tokenizer.decode(ids)
        except Exception as error:
            self._tokenizer = None
            self._failed(error)
            return ""
