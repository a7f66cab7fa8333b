"""OpenAI's text completions: one or several prompts, as text or token ids."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.generation import Finished, FinishReason, Generation, Started, Token
from edgeshard.gateway.answers import Answers, Streamed, answers, unless_left
from edgeshard.gateway.backend import Backend
from edgeshard.gateway.entrance import caller_of
from edgeshard.gateway.errors import Refused, body_of, json_response, renamed
from edgeshard.gateway.fields import MOST_CHOICES, MOST_PROMPTS, SamplingFields, StreamOptions, never, read_body
from edgeshard.gateway.metrics import HttpMetrics
from edgeshard.gateway.usage import Usage

DEFAULT_NEW_TOKENS = 16
"""As OpenAI's."""
AT_ONCE = 16
"""Answers of one request that run at the same time; the others of a batch wait for them."""
NAMES = {"max_new_tokens": "max_tokens", "stop_strings": "stop", "stop_tokens": "stop_token_ids"}
"""Fields of the engine by their names here."""

_TokenId = Annotated[int, Field(ge=0, lt=2**32)]
_Tokens = Annotated[list[_TokenId], Field(min_length=1)]
_Prompts = Annotated[list[str] | list[_Tokens], Field(min_length=1, max_length=MOST_PROMPTS)]


class CompletionRequest(SamplingFields):
    model: str
    prompt: str | _Prompts | _Tokens
    max_tokens: int | None = Field(default=None, ge=0, le=2**31)
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    best_of: int | None = Field(default=None, description="as many as n")
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    suffix: never(str) = None  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise Refused("best_of is not supported here: leave it out")
        if self.stream_options is not None and not self.stream:
            raise Refused("stream_options is for streams: set stream, or leave it out", "INVALID_VALUE")
        if self.max_tokens == 0 and not self.echo:
            raise Refused("max_tokens must be 1 or more without echo", "INVALID_VALUE")
        return self

    def prompts(self) -> Sequence[str | tuple[int, ...]]:
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if isinstance(self.prompt[0], int):
            return (tuple(self.prompt),)  # type: ignore[arg-type]
        return [item if isinstance(item, str) else tuple(item) for item in self.prompt]  # type: ignore[arg-type]

    def generations(self) -> list[Generation]:
        """One for each answer: those of the first prompt first."""
        seed = self.first_seed()
        return [
            Generation(
                prompt,
                DEFAULT_NEW_TOKENS if self.max_tokens is None else self.max_tokens,
                self.sampling(choice, seed, logprobs=self.logprobs is not None, top_logprobs=self.logprobs or 0),
                tuple(self.stop_token_ids or ()),
                self.stop_strings(),
                bool(self.ignore_eos),
                self.priority or 0,
            )
            for prompt in self.prompts()
            for choice in range(self.n or 1)
        ]


@dataclass(slots=True)
class _Choice:
    """An answer as it gathers."""

    parts: list[str] = field(default_factory=list)
    finish_reason: str = ""


class Completions:
    """The route. `backend` generates."""

    def __init__(self, backend: Backend, metrics: HttpMetrics) -> None:
        self._backend = backend
        self._metrics = metrics

    async def answer(self, request: Request) -> Response | ASGIApp:
        asked = await read_body(request, CompletionRequest)
        served, caller = self._backend.find(asked.model), caller_of(request)
        caller.check(served)
        run = _Run(asked, served.deployment, f"cmpl-{uuid.uuid4().hex}", int(time.time()))
        opened = [
            partial(self._backend.generate, served.deployment, generation, caller.identity)
            for generation in asked.generations()
        ]
        events = answers(opened, AT_ONCE)
        try:
            if asked.stream:
                first = await unless_left(request, anext(events))
                return Streamed(self._counted(run, run.parts(first, events)), "text/event-stream")
            return await unless_left(request, self._whole(run, events))
        except EdgeShardError as error:
            raise renamed(error, NAMES) from None

    async def _whole(self, run: _Run, events: Answers) -> Response:
        async with aclosing(events):
            async for index, event in events:
                run.take(index, event)
        self._metrics.tokens_used(run.usage.prompt_tokens, run.usage.new_tokens)
        return json_response(run.record())
