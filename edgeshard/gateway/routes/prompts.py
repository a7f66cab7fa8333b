"""The way from a request to its answers: a conversation becomes requests to the engine, and these a
response."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from edgeshard.chat.parsing import AnswerParser
from edgeshard.domain.control.site import ServedModel
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.conversation import AnswerDelta, Conversation
from edgeshard.domain.requests.generation import Generation, GenerationEvent
from edgeshard.gateway.access.auth import Caller, caller_of
from edgeshard.gateway.answers.answers import unless_left
from edgeshard.gateway.answers.response_writer import ResponseWriter, respond
from edgeshard.gateway.backend import Backend
from edgeshard.gateway.request_metrics import HttpMetrics
from edgeshard.gateway.routes.body_fields import GuidedFields
from edgeshard.gateway.routes.tools import (
    PLAIN,
    ForcedCall,
    ToolChoice,
    forced_call,
    name_ignored,
    offer_of,
)


def conversation_of(
    messages: Any, tools: Any, variables: Any, generation_prompt: bool | None = None
) -> Conversation:
    """The conversation in fields of a request, which are JSON. The prompt ends where an answer
    begins, by default.

    Raises InvalidArgumentError naming a field with a number that JSON has no word for.
    """
    return Conversation(
        _text(messages, "messages"),
        _text(tools, "tools") if tools else "",
        _text(variables, "variables") if variables else "",
        generation_prompt is not False,
    )


def _text(value: Any, field: str) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        raise InvalidArgumentError(
            f"{field}: has a number that is too large", field=field
        ) from None


class Parser(Protocol):
    """A reader of an answer, such as `AnswerParser`."""

    calls: int

    def feed(self, text: str, token: int | None = None) -> list[AnswerDelta]: ...

    def finish(self) -> list[AnswerDelta]: ...


class ChatRequestModel(GuidedFields):
    """The part of a request that decides how its answers are generated."""

    def choices(self) -> int:
        """The number of answers."""
        return 1

    def scores(self) -> tuple[bool, int]:
        """Whether tokens' log-probabilities are requested, and for how many other tokens at each
        position."""
        return False, 0

    @abstractmethod
    def new_tokens(self) -> int | None:
        """The most tokens of one answer; None if the request sets none."""

    def within_context(self, prompt_tokens: int, new_tokens: int) -> int:
        """The most tokens of an answer to such a prompt, if the request itself bounds the
        context."""
        return new_tokens


@dataclass(frozen=True, slots=True)
class ChatAnswers:
    """The requests to the engine, one for each answer, and the reader of an answer."""

    generations: tuple[Generation, ...]
    parser: Callable[[], Parser]


class AnswerRoutes:
    """Routes whose answers `backend` generates."""

    def __init__(self, backend: Backend, metrics: HttpMetrics) -> None:
        self._backend = backend
        self._metrics = metrics

    async def _chat_answers(
        self,
        request: Request,
        served: ServedModel,
        body: ChatRequestModel,
        conversation: Callable[[Sequence[Any]], Conversation],
        tools: Sequence[Any] | None,
        choice: ToolChoice | None,
    ) -> ChatAnswers:
        """The answers to a conversation, which gets the tools that are offered.

        Raises as `Backend.prompt` does, CancelledRequestError for a client that leaves, and
        InvalidArgumentError for fields that contradict each other.
        """
        offer, guide = offer_of(tools, choice), body.guide()
        name_ignored(request, offer)
        forced = forced_call(offer, body.open_objects)
        if forced is not None and guide is not None:
            raise InvalidArgumentError(
                "tool_choice: another field already sets the answer's format; leave one of them "
                "out",
                field="tool_choice",
            )
        making = self._backend.prompt(
            served.deployment, conversation(offer.tools), caller_of(request).identity
        )
        prompt = await unless_left(request.receive, making)
        new_tokens = body.within_context(
            len(prompt.tokens), body.new_tokens() or max(1, prompt.room)
        )
        first = body.generation(prompt.tokens, new_tokens, guide=forced or guide)
        logprobs, top_logprobs = body.scores()
        samplings = body.samplings(
            body.choices(), prompt.defaults, logprobs=logprobs, top_logprobs=top_logprobs
        )
        generations = tuple(replace(first, sampling=sampling) for sampling in samplings)
        generations[0].validate()
        answer_format = PLAIN if guide is not None else prompt.format
        return ChatAnswers(
            generations, ForcedCall if forced else partial(AnswerParser, answer_format, offer.tools)
        )

    async def _respond(
        self,
        request: Request,
        served: ServedModel,
        generations: Sequence[Generation],
        run: ResponseWriter,
        stream: bool,
    ) -> Response:
        """The response that `run` writes of these answers. Raises EdgeShardError."""
        caller = caller_of(request)
        opened = [partial(self._begin, caller, served.deployment, item) for item in generations]
        return await respond(request, opened, run, self._metrics, stream=stream)

    def _begin(
        self, caller: Caller, deployment: str, generation: Generation
    ) -> AsyncGenerator[GenerationEvent, None]:
        """The events of one answer, which begins at once. Raises as `Caller.check` does."""
        caller.check()
        return self._backend.generate(deployment, generation, caller.identity)
