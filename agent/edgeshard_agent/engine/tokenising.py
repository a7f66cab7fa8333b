"""A request's way through the tokenizer: its prompt to token ids, and its tokens to text.

Prompts go beside the event loop, few at a time, in a fair order, and only texts that could fit.

A text takes time and memory with its length: seconds, and a hundred bytes for each of its own. Threads without a bound
would let the prompts of one client, even of one that left, take the box from all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from edgeshard.domain.errors import (
    CancelledRequestError,
    FailedPreconditionError,
    InvalidArgumentError,
)
from edgeshard.domain.generation import Generation, check_prompt_size, text_bytes
from edgeshard.domain.head import StartRequest
from edgeshard_agent.scheduler.fairness import ServedTokens

AT_ONCE = 2
LONG_BYTES = 64 << 10
"""One text that is longer at a time, so that a short one waits for short ones only: for a tenth of a second each."""
SHRINKING = 4
"""Bytes of a text for one of its normalised form: NFKC makes a letter of 1 byte of a mathematical one of 4. No other
mapping of characters shortens more: composed by NFC, three letters of Hangul become one of a third of their bytes."""


class AnyTokenizer(Protocol):
    """`edgeshard_agent.engine.tokenizer.Tokenizer`"""

    @property
    def longest_token_bytes(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(slots=True, eq=False)
class _Text:
    """A prompt on its way. `client`, `priority` and `arrival` decide whose turn it is."""

    text: str
    size: int
    client: str
    priority: int
    arrival: int
    has_left: Callable[[], bool]
    tokens: asyncio.Future[list[int]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def is_long(self) -> bool:
        return self.size > LONG_BYTES


class Tokenising:
    """Takes the prompts of one head, whose requests have `max_context` positions. All but `encode` is on the loop.

    By priority, then clients get equal shares of the bytes, then in the order they came. A text that runs cannot be
    stopped and keeps its place until it is done, whoever waits for it.
    """

    def __init__(self, tokenizer: AnyTokenizer | None, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._served_bytes = ServedTokens()
        self._waiting: list[_Text] = []
        self._running: list[_Text] = []
        self._arrivals = 0

    async def prompt_tokens(self, start: StartRequest, has_left: Callable[[], bool]) -> list[int]:
        """The prompt's token ids. `has_left` says whether its client wants them no more.

        Raises InvalidArgumentError for a text that is too long, FailedPreconditionError where there is no tokenizer,
        CancelledRequestError when the client had left before its turn, and what the tokenizer raises.
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
        text = _Text(prompt, size, start.client, start.generation.priority, self._arrivals, has_left)
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

    def _check_fits(self, tokenizer: AnyTokenizer, size: int, new_tokens: int) -> None:
        """Refuse a text that the context cannot hold, before it costs anything.

        A token stands for no more of the normalised text than the longest entry of the vocabulary, and normalising
        character by character leaves at least one byte of `SHRINKING`: beyond that it is certain. Tokenizers may also
        drop or join any amount of text (white space at the ends, accents, words that they do not know), which nobody
        can tell short of tokenising it; a text so long is refused all the same.
        """
        room = self._max_context - new_tokens
        if room <= 0:
            raise InvalidArgumentError(
                f"max_new_tokens: {new_tokens} new tokens leave no room for a prompt in the deployment's context of "
                f"{self._max_context}; ask for fewer",
                field="max_new_tokens",
                reason="CONTEXT_EXCEEDED",
            )
        most = SHRINKING * room * tokenizer.longest_token_bytes
        if size > most:
            raise InvalidArgumentError(
                f"prompt: a text of {size} bytes does not fit the deployment's context of {self._max_context} tokens, "
                f"{new_tokens} of which are for the answer; shorten it",
                field="prompt",
                reason="CONTEXT_EXCEEDED",
            )

    def _begin(self, tokenizer: AnyTokenizer) -> None:
        """Begin what may begin now. Those whose clients have left go first: they need no turn."""
        for text in [text for text in self._waiting if text.has_left()]:
            self._waiting.remove(text)
            if not text.tokens.done():
                text.tokens.set_exception(CancelledRequestError("the request was cancelled before it was tokenised"))
        while len(self._running) < AT_ONCE:
            one_is_long = any(text.is_long for text in self._running)
            following = self._served_bytes.first(text for text in self._waiting if not (one_is_long and text.is_long))
            if following is None:
                return
            self._waiting.remove(following)
            self._running.append(following)
            self._served_bytes.charge(following.client, following.size)
            work = asyncio.ensure_future(asyncio.to_thread(tokenizer.encode, following.text))
            work.add_done_callback(partial(self._ended, tokenizer, following))

    def _ended(self, tokenizer: AnyTokenizer, text: _Text, work: asyncio.Future[list[int]]) -> None:
        self._running.remove(text)
        error = None if work.cancelled() else work.exception()
        if not text.tokens.done():  # otherwise nobody waits any more
            if work.cancelled():
                text.tokens.cancel()
            elif error is not None:
                text.tokens.set_exception(error)
            else:
                text.tokens.set_result(work.result())
        self._begin(tokenizer)


def _least_new_tokens(generation: Generation) -> int:
    """So many must have room beside the prompt."""
    return min(1, generation.max_new_tokens) if generation.clip_new_tokens else generation.max_new_tokens


class Decoding:
    """The text of one request's tokens. When the tokenizer fails on them, `failed` is told and there is no more.

    A fault must not come out of it: the scheduler would lose the tokens of other requests that came with this one's.
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
