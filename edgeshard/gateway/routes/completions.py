"""OpenAI's text completions: one or several prompts, as text or token ids."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.requests.generation import (
    Finished,
    Generation,
    GenerationEvent,
    PromptLogprobs,
    Started,
    Token,
    TokenLogprob,
)
from edgeshard.gateway.access.auth import caller_of
from edgeshard.gateway.access.bodies import read_body
from edgeshard.gateway.answers.response_writer import ChunkWriter, chunk_stream, finish_reason
from edgeshard.gateway.backend import Words
from edgeshard.gateway.errors import Refused, renamed
from edgeshard.gateway.json_text import json_text
from edgeshard.gateway.request_metrics import TokenUsage
from edgeshard.gateway.routes.body_fields import (
    MOST_ANSWERS,
    MOST_CHOICES,
    MOST_PROMPTS,
    FirstFault,
    FormedFields,
    StreamOptions,
    TokenId,
    Treatment,
    bounded,
    check_stream_options,
    never,
)
from edgeshard.gateway.routes.prompts import AnswerRoutes

DEFAULT_NEW_TOKENS = 16
"""As OpenAI's."""
NAMES = {"max_new_tokens": "max_tokens", "stop_strings": "stop", "stop_tokens": "stop_token_ids"}
"""The names here of fields of the engine."""
_SCORES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
"""The lists of OpenAI's `logprobs`, in the order of `_Choice.scored`."""

_Tokens = Annotated[list[TokenId], Field(min_length=1), FirstFault]
_Prompts = Annotated[
    Annotated[list[str], FirstFault] | Annotated[list[_Tokens], FirstFault],
    Field(min_length=1, max_length=MOST_PROMPTS),
]


class CompletionRequest(FormedFields):
    model: str
    prompt: str | _Prompts | _Tokens
    max_tokens: Annotated[int | None, Treatment.CLAMPED] = bounded("max_new_tokens")
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    best_of: int | None = Field(default=None, description="only the value of n")
    echo: bool | None = None
    logprobs: int | None = bounded("top_logprobs")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    suffix: never("text after the answer") = None  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise Refused("is not supported here unless it is n: leave it out", field="best_of")
        check_stream_options(self.stream, self.stream_options)
        if self.max_tokens == 0 and not (self.echo and self.logprobs is not None):
            raise Refused(
                "must be 1 or more without echo and logprobs", "INVALID_VALUE", "max_tokens"
            )
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        answers = (self.n or 1) * (1 if is_one else len(self.prompt))
        if answers > MOST_ANSWERS:
            rule = (
                f"times the number of prompts is {answers}; at most {MOST_ANSWERS} answers are "
                "given"
            )
            raise Refused(rule, "INVALID_VALUE", "n")
        return self

    def prompts(self) -> Sequence[str | tuple[int, ...]]:
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if isinstance(self.prompt[0], int):
            return (tuple(self.prompt),)
        return [item if isinstance(item, str) else tuple(item) for item in self.prompt]

    def generations(self) -> list[Generation]:
        """One request to the engine for each answer, beginning with the first prompt's."""
        guide = self.guide()
        has_logprobs = self.logprobs is not None
        samplings = self.samplings(
            self.n or 1, logprobs=has_logprobs, top_logprobs=self.logprobs or 0
        )
        return [
            self.generation(
                prompt,
                DEFAULT_NEW_TOKENS if self.max_tokens is None else self.max_tokens,
                sampling=sampling,
                prompt_logprobs=bool(self.echo) and has_logprobs,
                guide=guide,
            )
            for prompt in self.prompts()
            for sampling in samplings
        ]


class Completions(AnswerRoutes):
    """The route of text completions."""

    async def answer(self, request: Request) -> Response:
        body = await read_body(request, CompletionRequest, self._backend.check_place)
        if body.stream:
            request.state.stream_form = chunk_stream()
        caller = caller_of(request)
        served = caller.find(self._backend, body.model)
        try:
            generations = body.generations()
            for generation in generations:
                generation.validate()
            words = None if body.logprobs is None else self._backend.words(served.deployment)
            echoes = await self._echoes(body, served.deployment, caller.identity)
            run = CompletionRun(body, served.deployment, words, echoes)
            return await self._respond(request, served, generations, run, bool(body.stream))
        except EdgeShardError as error:
            raise renamed(
                error, {**NAMES, "guide": body.guide_field()}, served.max_context
            ) from None

    async def _echoes(self, body: CompletionRequest, model: str, identity: str) -> tuple[str, ...]:
        """The text of each prompt, if answers begin with it."""
        prompts = body.prompts() if body.echo else ()
        read = self._backend.detokenize
        return tuple(
            [
                item if isinstance(item, str) else await read(model, item, identity)
                for item in prompts
            ]
        )


@dataclass(slots=True)
class _Choice:
    """An answer as it gathers: its text, and the log-probabilities of tokens that were not written
    yet."""

    parts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    offset: int = 0
    prompt: tuple[int, ...] = ()
    scored: list[tuple[str, float | None, dict[str, float] | None, int]] = field(
        default_factory=list
    )

    def score(self, text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        """Add a token; its log-probability is None if it is the first."""
        self.scored.append((text, logprob, top, self.offset))
        self.offset += len(text)

    def scores(self) -> dict[str, Any]:
        """The tokens since the last call, as OpenAI's `logprobs`."""
        scored, self.scored = self.scored, []
        return {name: [item[place] for item in scored] for place, name in enumerate(_SCORES)}


class CompletionRun(ChunkWriter):
    """The answers to one request, whole or in parts; `echoes` are the texts that they begin with,
    for each prompt."""

    def __init__(
        self, body: CompletionRequest, model: str, words: Words | None, echoes: tuple[str, ...]
    ) -> None:
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        super().__init__(
            TokenUsage(body.n or 1), words, "cmpl", "text_completion", model, with_usage
        )
        self._asked = body
        self._echoes = echoes
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)

    def part(self, answer: int, event: GenerationEvent) -> str:
        choice, text = self._take(answer, event)
        is_last = choice.finish_reason is not None
        if not text and not is_last and not choice.scored:
            return ""
        scores = "null" if self._asked.logprobs is None else json_text(choice.scores())
        reason = f'"{choice.finish_reason}"' if is_last else "null"
        return self.chunk(answer, f'"text":{json.dumps(text)}', scores, reason)

    def gather(self, answer: int, event: GenerationEvent) -> None:
        choice, text = self._take(answer, event)
        choice.parts.append(text)

    def record(self) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "text": "".join(choice.parts),
                "logprobs": None if self._asked.logprobs is None else choice.scores(),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in sorted(self._choices.items())
        ]
        return {**self.head, "choices": choices, "usage": self.usage.record()}

    def _take(self, answer: int, event: GenerationEvent) -> tuple[_Choice, str]:
        choice = self._choices[answer]
        match event:
            case Token():
                if self.words is not None:
                    choice.score(self.words.text(event.token), event.logprob, self._top(event.top))
                return choice, event.text
            case Started():
                self.usage.started(answer, event)
                return choice, self._echo(answer, choice, event)
            case PromptLogprobs():
                scored = choice.prompt[event.position : event.end]
                for token, logprob, top in zip(scored, event.logprobs, event.top, strict=True):
                    choice.score(self._text(token), logprob, self._top(top))
                return choice, ""
            case Finished():
                self.usage.finished(event)
                choice.finish_reason = finish_reason(event.reason)
                return choice, event.text

    def _echo(self, answer: int, choice: _Choice, event: Started) -> str:
        if not self._echoes:
            return ""
        choice.prompt = event.prompt_tokens
        if self.words is not None:
            choice.score(self._text(event.prompt_tokens[0]), None, None)
        return self._echoes[answer // (self._asked.n or 1)]

    def _text(self, token: int) -> str:
        return "" if self.words is None else self.words.text(token)

    def _top(self, top: tuple[TokenLogprob, ...]) -> dict[str, float] | None:
        """The log-probabilities by the tokens' texts; of several with the same text, the likeliest
        one's."""
        return (
            {self._text(item.token): item.logprob for item in reversed(top)}
            if self._asked.logprobs
            else None
        )
