"""OpenAI's chat completions: a conversation by the model's own template, and its answer taken
apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from edgeshard.chat.parsing import Gathered
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.requests.conversation import (
    AnswerDelta,
    ContentDelta,
    Conversation,
    ReasoningDelta,
    ToolCall,
)
from edgeshard.domain.requests.generation import Finished, GenerationEvent, Started, Token
from edgeshard.gateway.access.auth import caller_of
from edgeshard.gateway.access.bodies import read_body
from edgeshard.gateway.answers.response_writer import ChunkWriter, chunk_stream
from edgeshard.gateway.backend import Words
from edgeshard.gateway.errors import Refused, renamed
from edgeshard.gateway.json_text import json_text
from edgeshard.gateway.request_metrics import TokenUsage
from edgeshard.gateway.routes.body_fields import (
    MOST_CHOICES,
    FirstFault,
    FormedFields,
    Items,
    StreamOptions,
    Taken,
    Tools,
    Treatment,
    bounded,
    check_stream_options,
    ignored,
    never,
    only,
)
from edgeshard.gateway.routes.prompts import (
    AnswerRoutes,
    ChatAnswers,
    ChatRequestModel,
    conversation_of,
)
from edgeshard.gateway.routes.reading import AnswerReader
from edgeshard.gateway.routes.tools import ToolChoice

NAMES = {
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop",
    "stop_tokens": "stop_token_ids",
    "prompt": "messages",
    "variables": "chat_template_kwargs",
}


class ChatRequest(ChatRequestModel, FormedFields):
    model: str
    messages: Items = Field(min_length=1)
    max_tokens: Annotated[int | None, Treatment.CLAMPED] = bounded("max_new_tokens", low=1)
    max_completion_tokens: Annotated[int | None, Treatment.CLAMPED] = bounded(
        "max_new_tokens", low=1
    )
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    logprobs: bool | None = None
    top_logprobs: int | None = bounded("top_logprobs")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="variables of the chat template"
    )
    add_generation_prompt: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        default=None, description="a variable of the chat template"
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(
        default=None, description="a variable of the chat template"
    )
    functions: never("the older form of tools") = None  # type: ignore[valid-type]
    function_call: only(  # type: ignore[valid-type]
        Any, "none", "auto", meaning="the older form of tool_choice"
    ) = None
    audio: never("spoken answers") = None  # type: ignore[valid-type]
    modalities: only(Annotated[list[str], FirstFault], ["text"]) = None  # type: ignore[valid-type]
    web_search_options: Annotated[dict[str, Any] | None, Treatment.IGNORED] = Field(
        default=None, description="the server searches nowhere; a header of the answer states that"
    )
    prediction: ignored("it would only save time") = None  # type: ignore[valid-type]
    service_tier: ignored("there is one tier") = None  # type: ignore[valid-type]
    store: ignored("nothing is stored") = None  # type: ignore[valid-type]
    safety_identifier: Taken = None
    prompt_cache_key: Taken = None
    prompt_cache_retention: Taken = None

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        check_stream_options(self.stream, self.stream_options)
        if self.top_logprobs and not self.logprobs:
            raise Refused("needs logprobs", "INVALID_VALUE", "top_logprobs")
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise Refused(
                "contradicts max_tokens: give one", "INVALID_VALUE", "max_completion_tokens"
            )
        return self

    def conversation(self, tools: Sequence[Any]) -> Conversation:
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if self.verbosity is not None:
            variables["verbosity"] = self.verbosity
        return conversation_of(self.messages, tools, variables, self.add_generation_prompt)

    def all_tools(self) -> list[dict[str, Any]]:
        """The tools, with one for web_search_options."""
        search = [] if self.web_search_options is None else [{"type": "web_search"}]
        return [*(self.tools or ()), *search]

    def choices(self) -> int:
        return self.n or 1

    def scores(self) -> tuple[bool, int]:
        return bool(self.logprobs), self.top_logprobs or 0

    def new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def names(self) -> dict[str, str]:
        """The names here of fields of the engine."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {**NAMES, "max_new_tokens": limit, "guide": self.guide_field()}


class ChatCompletions(AnswerRoutes):
    """The route of chat completions."""

    async def answer(self, request: Request) -> Response:
        body = await read_body(request, ChatRequest, self._backend.check_place)
        if body.stream:
            request.state.stream_form = chunk_stream()
        served = caller_of(request).find(self._backend, body.model)
        try:
            tools, choice = body.all_tools(), body.tool_choice
            answers = await self._chat_answers(
                request, served, body, body.conversation, tools, choice
            )
            words = self._backend.words(served.deployment) if body.logprobs else None
            run = ChatRun(body, served.deployment, words, answers)
            return await self._respond(request, served, answers.generations, run, bool(body.stream))
        except EdgeShardError as error:
            raise renamed(error, body.names, served.max_context) from None


@dataclass(slots=True)
class _Choice:
    """An answer as it gathers; `scores` are the log-probabilities of tokens that were not written
    yet."""

    reading: AnswerReader
    gathered: Gathered = field(default_factory=Gathered)
    scores: list[dict[str, Any]] = field(default_factory=list)


class ChatRun(ChunkWriter):
    """The answers to one request, whole or in parts."""

    def __init__(
        self, body: ChatRequest, model: str, words: Words | None, answers: ChatAnswers
    ) -> None:
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        super().__init__(
            TokenUsage(body.n or 1), words, "chatcmpl", "chat.completion.chunk", model, with_usage
        )
        one_call = body.parallel_tool_calls is False
        self._choices = [
            _Choice(AnswerReader(answers.parser(), one_call=one_call)) for _ in answers.generations
        ]

    def part(self, answer: int, event: GenerationEvent) -> str:
        if isinstance(event, Started):
            self.usage.started(answer, event)
            return self._part(answer, '{"role":"assistant","content":""}')
        choice = self._choices[answer]
        texts = [self._part(answer, _delta(delta), choice) for delta in self._take(choice, event)]
        if isinstance(event, Finished):
            texts.append(self._part(answer, "{}", choice, f'"{choice.reading.finish_reason}"'))
        elif not texts and choice.scores:
            texts.append(self._part(answer, "{}", choice))
        return "".join(texts)

    def _part(
        self, answer: int, delta: str, choice: _Choice | None = None, reason: str = "null"
    ) -> str:
        scores = "null"
        if choice is not None and choice.scores:
            scores = json_text({"content": choice.scores, "refusal": None})
            choice.scores = []
        return self.chunk(answer, f'"delta":{delta}', scores, reason)

    def gather(self, answer: int, event: GenerationEvent) -> None:
        choice = self._choices[answer]
        if isinstance(event, Started):
            self.usage.started(answer, event)
        else:
            choice.gathered.add(*self._take(choice, event))

    def record(self) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": _message(choice.gathered),
                "logprobs": None
                if self.words is None
                else {"content": choice.scores, "refusal": None},
                "finish_reason": choice.reading.finish_reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        return {
            **self.head,
            "object": "chat.completion",
            "choices": choices,
            "usage": self.usage.record(),
        }

    def _take(self, choice: _Choice, event: GenerationEvent) -> Sequence[AnswerDelta]:
        if isinstance(event, Finished):
            self.usage.finished(event)
        elif self.words is not None and isinstance(event, Token):
            choice.scores.append(_score(self.words, event))
        return choice.reading.take(event)


def _delta(delta: AnswerDelta) -> str:
    match delta:
        case ContentDelta():
            return f'{{"content":{json.dumps(delta.text)}}}'
        case ReasoningDelta():
            return f'{{"reasoning_content":{json.dumps(delta.text)}}}'
        case ToolCall():
            return json_text({"tool_calls": [{"index": delta.index, **_call(delta)}]})


def _message(answer: Gathered) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if answer.calls and not answer.content else answer.content,
        "refusal": None,
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_call(call) for call in answer.calls]
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _score(words: Words, event: Token) -> dict[str, Any]:
    top = [_one(words, item.token, item.logprob) for item in event.top]
    return {**_one(words, event.token, event.logprob), "top_logprobs": top}


def _one(words: Words, token: int, logprob: float) -> dict[str, Any]:
    text = words.text(token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
