"""One request's answers becoming text for its client: as parts of a stream, or gathered."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from edgeshard.domain.errors import CancelledRequestError, EdgeShardError
from edgeshard.domain.requests.generation import FinishReason, GenerationEvent
from edgeshard.gateway.answers.answers import Answers, Opened, answers, unless_left
from edgeshard.gateway.answers.keepalive import StreamedResponse, StreamForm
from edgeshard.gateway.backend import Words
from edgeshard.gateway.errors import body_of, json_response
from edgeshard.gateway.json_text import json_text
from edgeshard.gateway.request_metrics import HttpMetrics, TokenUsage

EVENT_STREAM = "text/event-stream"
LINES = "application/x-ndjson"
"""The media types of streams: OpenAI's and Ollama's."""
DONE = "data: [DONE]\n\n"
"""The last event of OpenAI's streams of chunks."""
AT_ONCE = 16
"""The answers of one request that run at the same time; the others of a batch wait for them."""


class ResponseWriter(ABC):
    """A writer of one request's answers. It takes their events in turn: either by `part` or by
    `gather`."""

    def __init__(self, usage: TokenUsage, words: Words | None = None) -> None:
        self.usage = usage
        self.words = words
        """The texts of single tokens, if they are requested."""

    async def learn(self, event: GenerationEvent) -> None:
        """Ask for the texts of single tokens that this event needs, before `part` or `gather` takes
        it."""
        if self.words is not None:
            await self.words.learn(event)

    @abstractmethod
    def part(self, answer: int, event: GenerationEvent) -> str:
        """The text that an event adds to the stream, "" for nothing."""

    @abstractmethod
    def last_part(self) -> str:
        """The text after the last event's."""

    @abstractmethod
    def gather(self, answer: int, event: GenerationEvent) -> None:
        """Keep an event for `record`."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """The whole response."""

    def failed(self, error: EdgeShardError) -> str:
        """The text of an error in the midst of the stream."""
        return sse(body_of(error))

    def done(self) -> str:
        """The text at the very end of the stream, also after an error."""
        return ""


class ChunkWriter(ResponseWriter):
    """A writer of chunks, each of which begins with the same head and has one choice."""

    def __init__(
        self,
        usage: TokenUsage,
        words: Words | None,
        prefix: str,
        kind: str,
        model: str,
        with_usage: bool,
    ) -> None:
        super().__init__(usage, words)
        self.head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._with_usage = with_usage
        self._begin = f'data: {json_text(self.head)[:-1]},"choices":[{{"index":'
        self._end = '],"usage":null}\n\n' if with_usage else "]}\n\n"

    def chunk(self, answer: int, member: str, scores: str, reason: str) -> str:
        """The chunk with a choice; `member` is a JSON key and its value."""
        choice = f'{answer},{member},"logprobs":{scores},"finish_reason":{reason}}}'
        return f"{self._begin}{choice}{self._end}"

    def last_part(self) -> str:
        return (
            sse({**self.head, "choices": [], "usage": self.usage.record()})
            if self._with_usage
            else ""
        )

    def done(self) -> str:
        return DONE


def chunk_stream() -> StreamForm:
    """The form of a stream of chunks."""
    return StreamForm(EVENT_STREAM, lambda error: sse(body_of(error)) + DONE)


def sse(record: dict[str, Any]) -> str:
    """One event of a stream."""
    return f"data: {json_text(record)}\n\n"


def finish_reason(reason: FinishReason) -> str:
    """The reason in OpenAI's words. Raises CancelledRequestError for a request that an operator
    ended."""
    if reason is FinishReason.CANCELLED:
        raise CancelledRequestError("another caller cancelled the request", reason="CANCELLED")
    return reason.value


async def respond(
    request: Request,
    opened: Sequence[Opened],
    run: ResponseWriter,
    metrics: HttpMetrics,
    *,
    stream: bool,
) -> Response:
    """The response to a request, as a stream or whole.

    A stream begins with the first event, so that an error until then is refused by a status; its
    form is `request.state.stream_form`. Raises EdgeShardError.
    """
    events = answers(opened, min(AT_ONCE, len(opened)))
    if not stream:
        await unless_left(request.receive, _gathered(events, run))
        metrics.tokens_used(run.usage)
        return json_response(run.record())
    try:
        first = await unless_left(request.receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return StreamedResponse(_parts(first, events, run, metrics), request.state.stream_form)


async def _gathered(events: Answers, run: ResponseWriter) -> None:
    async with aclosing(events):
        async for answer, event in events:
            await run.learn(event)
            run.gather(answer, event)


async def _parts(
    first: tuple[int, GenerationEvent], events: Answers, run: ResponseWriter, metrics: HttpMetrics
) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(events):
            await run.learn(first[1])
            if text := run.part(*first):
                yield text.encode()
            async for answer, event in events:
                await run.learn(event)
                if text := run.part(answer, event):
                    yield text.encode()
        if text := run.last_part():
            yield text.encode()
    except EdgeShardError as error:
        yield run.failed(error).encode()
    finally:
        metrics.tokens_used(run.usage)
    yield run.done().encode()
